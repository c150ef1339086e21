"""What is measured: a chain of blocks, the devices of this machine, and a plan that places one on the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from heterps_core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredModel:
    """A chain of blocks that every process can build for itself."""

    builder: str
    """Import path "package.module:function" of what returns an `nn.Sequential` of blocks, each of them an
    `nn.Sequential` of layers; the last block ends with one logit [B, 1]."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the builder, plain JSON values."""

    input_shape: tuple[int, ...]
    """Of one sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A share of this machine that counts as a device; its processes see nothing else of it."""

    cores: tuple[int, ...]
    """Cores to which its processes are pinned, all of them together."""

    num_threads: int = 1
    """Of torch, in each process."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of its processes, for instance a limit on the instruction set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedStage:
    """A run of blocks on devices that are named one by one; a `Stage` names only their type."""

    first_block: int
    last_block: int
    """Inclusive."""

    devices: tuple[str, ...]
    """One per replica."""

    row_shares: tuple[float, ...] | None = None
    """Part of a batch's rows for each replica; None for equal parts. Only where the stage is the whole plan:
    boundaries cut rows equally."""

    def to_json(self) -> dict[str, Any]:
        """Return the stage as plain JSON values."""
        return asdict(self)


def stages_of_assignment(assignment: Sequence[int], device_names: Sequence[str]) -> tuple[PlacedStage, ...]:
    """Return the stages of a plan that gives each block the index of a device; equal neighbours share a stage.

    Example:
        >>> [stage.devices for stage in stages_of_assignment([0, 0, 1, 0], ["fast", "slow"])]
        [('fast',), ('slow',), ('fast',)]
    """
    firsts = [
        block for block in range(len(assignment)) if block == 0 or assignment[block] != assignment[block - 1]
    ]
    lasts = [*(first - 1 for first in firsts[1:]), len(assignment) - 1]
    return tuple(
        PlacedStage(first_block=first, last_block=last, devices=(device_names[assignment[first]],))
        for first, last in zip(firsts, lasts, strict=True)
    )


def check_stages(stages: Sequence[PlacedStage], devices: Mapping[str, Device]) -> None:
    """Check that stages follow each other from block 0 and name known devices.

    Raises:
        ConfigurationError: They do not, or the shares of a stage do not fit it.
    """
    next_block = 0
    for stage in stages:
        if stage.first_block != next_block or stage.last_block < stage.first_block:
            raise ConfigurationError(
                f"stages must follow each other from block 0, but blocks {stage.first_block}.."
                f"{stage.last_block} stand where block {next_block} is due"
            )
        next_block = stage.last_block + 1
        unknown = [name for name in stage.devices if name not in devices]
        if unknown or not stage.devices:
            raise ConfigurationError(
                f"a stage must name at least one of the devices {', '.join(devices)}, got {list(stage.devices)}"
            )
        if stage.row_shares is not None and (
            len(stages) > 1
            or len(stage.row_shares) != len(stage.devices)
            or min(stage.row_shares) <= 0
            or abs(sum(stage.row_shares) - 1) > 1e-6
        ):
            raise ConfigurationError(
                f"row shares must be positive, one per replica, and add up to 1 in a plan of one stage, got "
                f"{stage.row_shares} for {len(stage.devices)} replicas in a plan of {len(stages)} stages"
            )
