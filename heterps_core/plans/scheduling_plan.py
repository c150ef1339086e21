"""Layers on device types, with their replicas: the noun that searches produce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from heterps_core.errors import ConfigurationError
from heterps_core.field_rules import Count, Positive, Text
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.units import SAMPLES_PER_MILLION, SECONDS_PER_HOUR


@dataclass(frozen=True, slots=True)
class Stage(JsonDocument):
    """A run of consecutive layers on one device type, or on two that share each batch."""

    json_form = JsonForm(what="stage", omits_defaults=True)

    first_layer: int
    """Index of the first layer, counted from 0."""

    last_layer: int
    """Index of the last layer, inclusive."""

    device_type: str
    """Name of the device type; one replica occupies one unit of it."""

    num_replicas: int
    """Workers that share each batch of this stage, at least 1."""

    second_device_type: str = ""
    """Another device type, of the last `second_replicas` of these workers; empty for none."""

    second_replicas: int = 0

    shares: tuple[Count, ...] = ()
    """Parts of each batch that the replicas take, one whole number each, in any unit; empty for equal ones."""

    def __post_init__(self) -> None:
        if not 0 <= self.first_layer <= self.last_layer:
            raise ConfigurationError(
                f"a stage must have 0 <= first_layer <= last_layer, "
                f"got {self.first_layer} and {self.last_layer}"
            )
        if self.num_replicas < 1:
            raise ConfigurationError(
                f"a stage needs at least 1 replica, got {self.num_replicas} "
                f"for layers {self.first_layer}..{self.last_layer}"
            )
        has_second = bool(self.second_device_type)
        if self.second_device_type == self.device_type or not has_second <= self.second_replicas < (
            self.num_replicas if has_second else 1
        ):
            raise ConfigurationError(
                f"a stage of two device types must have a replica on each, got {self.second_replicas} of "
                f"{self.num_replicas} on {self.second_device_type!r} beside {self.device_type!r} for layers "
                f"{self.first_layer}..{self.last_layer}"
            )
        if self.shares and (len(self.shares) != self.num_replicas or min(self.shares) < 1):
            raise ConfigurationError(
                f"shares must be a whole number of at least 1 for each of its {self.num_replicas} replicas, got "
                f"{self.shares} for layers {self.first_layer}..{self.last_layer}; leave them out for equal ones"
            )

    @property
    def replicas_by_type(self) -> dict[str, int]:
        """Device type -> its replicas, in the order of their ranks."""
        second = {self.second_device_type: self.second_replicas} if self.second_device_type else {}
        return {self.device_type: self.num_replicas - self.second_replicas, **second}

    @property
    def parts(self) -> tuple[Stage, ...]:
        """The replicas of each device type as a stage of their own."""
        return tuple(self.on({name: number}) for name, number in self.replicas_by_type.items())

    def on(self, replicas_by_type: Mapping[str, int]) -> Stage:
        """Return the stage on one or two device types with so many replicas each.

        Each takes the share of the first one on its type before; equal ones where they had none, or one type is left.

        Example:
            >>> Stage(0, 0, "gpu-t4", 1).on({"gpu-t4": 2, "cpu-c7i": 12}).units
            '2 x gpu-t4 + 12 x cpu-c7i'
        """
        (first, _), *second = ((name, number) for name, number in replicas_by_type.items() if number)
        total = sum(replicas_by_type.values())
        shares: tuple[int, ...] = ()
        if self.shares and second and replicas_by_type.keys() == self.replicas_by_type.keys():
            of_types = zip(replicas_by_type.values(), (self.shares[0], self.shares[-1]), strict=True)
            shares = tuple(share for number, share in of_types for _ in range(number))
        name, number = second[0] if second else ("", 0)
        return Stage(self.first_layer, self.last_layer, first, total, name, number, shares)

    @property
    def device_types(self) -> str:
        """Both device types for people, such as "gpu-t4 + cpu-c7i"."""
        return " + ".join(self.replicas_by_type)

    @property
    def replicas(self) -> str:
        """Replicas on each of both device types for people, such as "2 + 12"."""
        return " + ".join(map(str, self.replicas_by_type.values()))

    @property
    def units(self) -> str:
        """Units of both device types for people, such as "2 x gpu-t4 + 12 x cpu-c7i"."""
        return " + ".join(f"{count} x {name}" for name, count in self.replicas_by_type.items())

    @property
    def replica_shares(self) -> tuple[int, ...]:
        """The share of each replica, equal ones too."""
        return self.shares or (1,) * self.num_replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingPlan(JsonDocument):
    """A complete plan with what it promises and how good it is proven to be.

    The JSON form is the `plan.json` contract.
    """

    json_form = JsonForm(what="plan", version=1)

    scheduler: Text
    """Name of the method that found the plan."""

    seed: int
    stages: tuple[Stage, ...]
    throughput_samples_per_s: Positive
    """Predicted by the cost model."""

    price_usd_per_hour: float
    """Price of all units of the plan together."""

    cost_usd: float
    """Predicted for all epochs."""

    cost_lower_bound_usd: float
    """Proven: no plan for this problem is cheaper."""

    optimality_gap: float
    """cost_usd / cost_lower_bound_usd - 1; 0 where the plan is proven optimal."""

    num_evaluations: int
    """Plans that the search rated."""

    search_seconds: float

    def __post_init__(self) -> None:
        check_stages_cover_chain(self.stages)

    @property
    def usd_per_million_samples(self) -> float:
        """Price of its machines while they train, without start-up and what else a run is charged."""
        return (
            self.price_usd_per_hour / SECONDS_PER_HOUR / self.throughput_samples_per_s * SAMPLES_PER_MILLION
        )


def check_stages_cover_chain(stages: Sequence[Stage], num_layers: int | None = None) -> None:
    """Check that stages cover layers 0..num_layers-1 once, in order.

    Raises:
        ConfigurationError: There is no stage, a gap or overlap, or the last layer is another one.
    """
    if not stages:
        raise ConfigurationError("a plan needs at least one stage")
    expected = 0
    for stage in stages:
        if stage.first_layer != expected:
            raise ConfigurationError(
                f"stages must follow one another without gap: expected a stage that starts at layer "
                f"{expected}, got {stage.first_layer}"
            )
        expected = stage.last_layer + 1
    if num_layers is not None and expected != num_layers:
        raise ConfigurationError(f"stages must cover layers 0..{num_layers - 1}, but end at {expected - 1}")


def dry_run_stages(stages: Sequence[Stage], *, num_cores: int) -> tuple[Stage, ...]:
    """Return the same stages with replicas in the proportions of a plan, as many as this machine can run at once.

    Every stage keeps at least one replica, also where there are more stages than cores. The cores left over go one
    by one to the stage that is furthest below its share: the one with the largest num_replicas / (replicas in the
    dry run + 1), the first of equals; no stage gets more than it has in the plan. A stage of two device types has one
    on each as soon as it has two.

    Example:
        >>> planned = [Stage(0, 0, "cpu-c7i", 40), Stage(1, 1, "cpu-r6in", 10), Stage(2, 3, "gpu-t4", 2)]
        >>> [stage.num_replicas for stage in dry_run_stages(planned, num_cores=8)]
        [6, 1, 1]
    """
    replicas = [1] * len(stages)
    for _ in range(min(num_cores, sum(stage.num_replicas for stage in stages)) - len(stages)):
        shares = [
            stage.num_replicas / (given + 1) if given < stage.num_replicas else 0.0
            for stage, given in zip(stages, replicas, strict=True)
        ]
        replicas[shares.index(max(shares))] += 1
    return tuple(_with_replicas(stage, count) for stage, count in zip(stages, replicas, strict=True))


def _with_replicas(stage: Stage, num_replicas: int) -> Stage:
    """Return a stage with fewer replicas: of two device types about in proportion, at least one on the first."""
    second = -(-num_replicas * stage.second_replicas // stage.num_replicas)
    second = min(second, num_replicas - 1)
    # Two processes of one machine are as fast.
    equal = replace(stage, shares=())
    return equal.on({stage.device_type: num_replicas - second, stage.second_device_type: second})
