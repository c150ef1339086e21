"""How a simulated pipeline is run, and what goes wrong in it: stragglers, late nodes, jitter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from heterps_core.errors import ConfigurationError
from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.training.pipeline.pipeline_schedule import WARMUP_PER_STAGE

Worker = tuple[int, int]
"""Stage and replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationOptions:
    """How a pipeline is run, and what goes wrong in it.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    num_steps: int
    flushes_each_step: bool = True
    """As the trainer does: a stage ends a step with the all-reduce, then begins the next. Otherwise steps follow
    one another without a gap, the all-reduce travels in slices beside the micro-batches, and gradients are
    applied late."""

    warmup_per_stage: int = WARMUP_PER_STAGE
    """Forward passes that a stage runs ahead of the stage behind it, by default as many as the trainer's. 1 is
    plain 1F1B; more hide the time of messages, at the price of memory for activations."""

    slow_factors: Mapping[Worker, float] = field(default_factory=dict)
    """Stragglers: their passes take this many times as long. Others have 1."""

    startup_seconds: Mapping[Worker, float] = field(default_factory=dict)
    """When a worker is ready, for instance once its node has started. Others are at 0."""

    jitter: float = 0.0
    """Standard deviation of the time of a pass over its mean; drawn again for each pass from a log-normal
    distribution."""

    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "warmup_per_stage"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.jitter < np.inf:
            raise ConfigurationError(f"jitter must be 0 or a positive number, got {self.jitter}")
        for worker, factor in self.slow_factors.items():
            if not 0 < factor < np.inf:
                raise ConfigurationError(f"slow factors must be positive, got {factor} for worker {worker}")
        for worker, seconds in self.startup_seconds.items():
            if not 0 <= seconds < np.inf:
                raise ConfigurationError(
                    f"start-up takes 0 seconds or more, got {seconds} for worker {worker}"
                )


def per_replica(
    values: Mapping[Worker, float], replicas_per_stage: Sequence[int], *, otherwise: float
) -> list[Floats]:
    """Return the values as one array per stage.

    Raises:
        ConfigurationError: A worker is named that the pipeline has not.
    """
    filled = [np.full(num_replicas, otherwise) for num_replicas in replicas_per_stage]
    for (stage, replica), value in values.items():
        if not (0 <= stage < len(filled) and 0 <= replica < replicas_per_stage[stage]):
            shape = " + ".join(map(str, replicas_per_stage))
            raise ConfigurationError(
                f"a worker must be (stage, replica) of the pipeline, which has {shape} replicas, "
                f"got {(stage, replica)}"
            )
        filled[stage][replica] = value
    return filled
