"""The planning problem: layers, device types and the floor, as the `problem.json` contract fixes them.

Every search, bound and explanation reads this noun and nothing else, so it is checked once, completely,
when it is made: what a scheduler receives can be planned, or is proven not to be.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any

from heterps_core.errors import MalformedDocumentError
from heterps_core.field_rules import Count, Fraction, NotNegative, Positive, Text, count, shown, sized
from heterps_core.hardware import MAX_UNITS_PER_INSTANCE
from heterps_core.json_codec import JsonDocument, JsonForm, check_fields
from heterps_core.planning.problem.extra_costs import (
    MAX_INSTANCE_SIZES,
    NO_EXTRA_COSTS,
    ExtraCosts,
    InstanceSize,
    Reserved,
)

MAX_LAYERS = 1_000
"""Longest chain that is planned; the tables of all stages grow with its square."""

MAX_CANDIDATE_STAGES = 8_000_000
"""Most pairs of a run of layers and a device type; the tables of all stages take 0.7 kB for each, seen with 1,000
layers x 16 types."""

MAX_DEVICE_TYPES = 512
"""Most device types in one problem; a guard against files that are no problem files."""

MAX_UNITS = 1_000_000

MAX_UNITS_IN_INSTANCES = 100_000
"""Largest cap for types with `instances`: the prices of all counts up to it stand in a table."""


MAX_HOT_SHARES = 16


class StepModel(StrEnum):
    """How the time of a step follows from the layers' times; see `cost_model/step_model.py`."""

    PAPERS = "papers"
    TRAINER = "trainer"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts(JsonDocument):
    """What one layer costs on each device type, measured on one unit for one profiling batch."""

    json_form = JsonForm(omits_defaults=True)

    name: Text
    kind: Text
    """For instance "embedding" or "fully_connected"; policies may learn from it, the cost model does not."""

    is_sharded: bool
    """State is divided among the replicas of the stage (embedding tables); otherwise each holds all of it."""

    state_bytes: NotNegative
    """Parameters and optimizer state."""

    output_bytes_per_sample: NotNegative
    """Activations that cross to the next layer; their gradients cross back with the same size."""

    compute_seconds: Mapping[str, NotNegative]
    """Device type -> forward, backward and update of `profile_batch_size` samples on one unit."""

    communication_seconds: Mapping[str, NotNegative]
    """Device type -> in-stage communication for `profile_batch_size` samples (pull, push, all-reduce)."""

    compute_relative_spread: Mapping[str, NotNegative] = field(default_factory=dict)
    """Device type -> how far `compute_seconds` may be off, as a share of it (from the profile's repetitions, or
    the error of an estimate). Shown with a plan. Missing: 0."""

    cold_bytes_per_sample: tuple[NotNegative, ...] = ()
    """For a sharded layer whose rows may lie on disk, bytes of rows, with their optimizer state, that a sample looks
    up and that are not among the most used ones, for each of the problem's `hot_shares`. Empty: all stays in memory.
    """

    exchanged_bytes: NotNegative = 0.0
    """Indices, rows and gradients of the distinct rows of a sharded layer that `profile_batch_size` samples look up:
    each byte costs a replica `exchange_seconds_per_byte`, also of rows that are its own. Dense gradients of others,
    which replicas sum once a training batch."""

    reading_seconds: Mapping[str, NotNegative] = field(default_factory=dict)
    """Device type -> reading the rows of `profile_batch_size` samples on a core that does not compute: a card's host.
    By the trainer's step alone. Missing: 0, as on CPUs: their `compute_seconds` include it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitType(JsonDocument):
    """A device type as the planner sees it; all numbers are for one unit."""

    json_form = JsonForm(omits_defaults=True)

    price_usd_per_hour: NotNegative
    """Least price of one unit: where `instances` are given, of the size with the least price per unit; 0 for
    machines that are owned or reserved."""

    max_units: Annotated[int, count(MAX_UNITS)]
    """In the whole plan."""

    machine_units: Annotated[int, count(MAX_UNITS_PER_INSTANCE)] = 1
    """Units of a machine where machines are counted: each stage takes whole machines of its own from `max_units`."""

    memory_bytes: Positive
    bandwidth_bytes_per_s: Positive
    """Across stage boundaries."""

    compute_parallel_fraction: Fraction
    """alpha: share of the computation that shrinks with more replicas, in [0, 1]."""

    communication_parallel_fraction: Fraction
    """beta: the same for communication, in [0, 1]."""

    instances: Annotated[tuple[InstanceSize, ...], sized(0, MAX_INSTANCE_SIZES, "instances")] = ()
    """What is sold. A stage is charged for the cheapest set of instances that carries its replicas; without
    sizes, for `price_usd_per_hour` times its replicas."""

    on_demand_instances: (
        Annotated[tuple[InstanceSize, ...], sized(0, MAX_INSTANCE_SIZES, "on-demand instances")] | None
    ) = None
    """For units on spot, the sizes in which one machine may be bought on-demand, as a plan needs one that the cloud
    does not take back. None: the units are on-demand themselves."""

    reserved: Reserved | None = None
    """Instances that stages take before they buy others."""

    communication_relative_spread: NotNegative = 0.0
    """How far the time of communication, in stages and across boundaries, may be off, as a share of it."""

    times_from: str = ""
    """Where the compute times come from, for people."""

    interruptions_per_hour: NotNegative = 0.0
    """Expected interruptions of one unit: above 0 on spot. They stop the whole plan."""

    startup_seconds: NotNegative = 0.0
    """By how much later than the first ones its workers are up. Charged, as the two below, where the problem's
    `startup_seconds` are; see `cost_model/start_terms.py`."""

    load_seconds_per_byte: NotNegative = 0.0
    """Time for each byte of its share of tables, loaded before the first step and stored after the last one."""

    disk_load_seconds_per_byte: NotNegative = 0.0
    """The same where rows lie on its disk; no less."""

    disk_bytes: NotNegative = 0.0
    """Where rows of tables that memory does not hold may lie; 0 for no disk."""

    disk_bytes_per_s: NotNegative = 0.0
    """Read or written in order."""

    disk_usd_per_hour: NotNegative = 0.0
    """Price of this speed where the unit keeps rows on the disk; 0 for a disk that is part of its machine."""

    disk_usd_per_gb_hour: NotNegative = 0.0
    """Price of room for 1e9 bytes of rows; 0 likewise."""

    disk_name: str = ""
    """Kind of this disk, for people."""

    sweep_seconds_per_byte: NotNegative = 0.0
    """What a worker computes for each byte of rows that it looks up from disk."""

    reserved_bytes: NotNegative = 0.0
    """The part of `memory_bytes` that a worker takes before any table or weight (`reserved_bytes`)."""

    exchange_seconds: NotNegative = 0.0
    """Processor time of a replica for a message in which rows of sharded layers are exchanged, whatever the number of
    replicas. By the trainer's step alone, as are the three below; one replica exchanges nothing."""

    exchange_seconds_per_peer: NotNegative = 0.0
    """The same for each other replica."""

    exchange_seconds_per_table: NotNegative = 0.0
    """The same for each sharded layer of a stage, whatever the number of messages."""

    exchange_seconds_per_byte: NotNegative = 0.0
    """The same for each of the `exchanged_bytes`."""

    sum_seconds_per_peer: NotNegative = 0.0
    """Processor time of a replica for the sum of a batch's dense gradients, for each other replica. By the trainer's
    step alone, as are the three below."""

    sum_seconds_per_byte: NotNegative = 0.0
    """The same for each byte of gradients that it sends."""

    boundary_seconds: NotNegative = 0.0
    """Processor time of a replica for a boundary of its stage, for each micro-batch."""

    boundary_seconds_per_byte: NotNegative = 0.0
    """The same for each byte that the replica sends or receives there."""

    later_reading_seconds: NotNegative = 0.0
    """Processor time of a replica of a later stage than the first for finding its rows of a training batch, whatever
    their number: for the ids of its tables, or the labels in the last stage. By the trainer's step alone."""

    later_reading_seconds_per_sample: NotNegative = 0.0
    """The same for each row of the replica."""

    @property
    def usable_bytes(self) -> float:
        """What state may fill; below 0 where not even the worker fits."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def is_all_on_spot(self) -> bool:
        """No machine of the type can be one that the cloud does not take back."""
        return self.on_demand_instances == () and self.reserved is None


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingProblem(JsonDocument):
    """A chain of layers to place on device types at least cost above a throughput floor.

    Raises:
        MalformedDocumentError: A value breaks its rule; carries the path of the field.
    """

    json_form = JsonForm(what="problem", version=1, omits_defaults=True)

    model: Text
    batch_size: Count
    """B, samples per training step."""

    profile_batch_size: Count
    """B_o, samples in one profiling batch."""

    num_samples: Positive
    """M, samples per epoch."""

    num_epochs: Positive
    """E."""

    throughput_floor_samples_per_s: NotNegative
    """0 for no floor."""

    layers: Annotated[tuple[LayerCosts, ...], sized(1, MAX_LAYERS, "layers", "; join neighbouring layers")]
    device_types: Annotated[Mapping[Text, UnitType], sized(1, MAX_DEVICE_TYPES, "device types")]
    extra_costs: ExtraCosts = NO_EXTRA_COSTS
    """What is charged besides the units' time; nothing by default, which is the plain contract."""

    single_replica_communicates: bool = True
    """Whether a stage of one replica takes its layers' `communication_seconds` too, as the papers' model has it.
    False where they are exchange and all-reduce among replicas: one replica then only moves what crosses the
    stage's boundaries, and more than one pay as ever."""

    step_model: StepModel = StepModel.PAPERS

    drains: bool = False
    """By the trainer's step: updates are not delayed, so a pipeline fills and drains in each step."""

    mixes_device_types: bool = False
    """Whether a stage may have replicas on two device types, both CPUs or both cards; by the trainer's step with
    delayed updates alone."""

    pause_share: NotNegative = 0.0
    """What checkpoints and the evaluation after the last step add to the time of all steps, as a share of it."""

    hot_shares: Annotated[tuple[Fraction, ...], sized(0, MAX_HOT_SHARES, "hot shares")] = ()
    """Shares of a table's rows that a stage may keep in memory where it does not hold them all; see
    `cost_model/disk_sweep.py`."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, unit in self.device_types.items():
            if unit.instances:
                _check_unit_price(f"device_types.{name}", unit)
            for field_name in ("on_demand_instances", "reserved"):
                if getattr(unit, field_name) is not None and not unit.instances:
                    raise MalformedDocumentError(
                        f"device_types.{name}.{field_name}",
                        "is of units that are sold in instances; give these, or leave it out",
                    )
            if unit.disk_bytes > 0 and unit.disk_bytes_per_s == 0:
                raise MalformedDocumentError(
                    f"device_types.{name}.disk_bytes_per_s",
                    "must be positive where there are disk_bytes, got 0",
                )
        for index, layer in enumerate(self.layers):
            _check_cold_bytes(f"layers[{index}]", layer, self.hot_shares)
            _check_seconds(f"layers[{index}].compute_seconds", layer.compute_seconds, self.device_types)
            _check_seconds(
                f"layers[{index}].communication_seconds", layer.communication_seconds, self.device_types
            )
            _check_known_types(
                f"layers[{index}].compute_relative_spread", layer.compute_relative_spread, self.device_types
            )
            _check_known_types(f"layers[{index}].reading_seconds", layer.reading_seconds, self.device_types)
        # Without this a plan could take no time at all, and its throughput would be no number.
        if not any(min(layer.compute_seconds.values()) > 0 for layer in self.layers):
            raise MalformedDocumentError(
                "layers", "at least one layer must have positive compute_seconds on every device type"
            )
        _check_size(len(self.layers), len(self.device_types))
        if self.mixes_device_types and (self.drains or self.step_model is not StepModel.TRAINER):
            raise MalformedDocumentError(
                "mixes_device_types",
                "needs step_model trainer without drains; leave it out, or delay updates",
            )
        if all(unit.is_all_on_spot for unit in self.device_types.values()):
            raise MalformedDocumentError(
                "device_types",
                "one machine of a plan must be on-demand, but all are on spot and none has on_demand_instances",
            )

    @property
    def device_type_names(self) -> tuple[str, ...]:
        """Names of the device types, in the order of their indices everywhere in the planner."""
        return tuple(self.device_types)

    @property
    def num_layers(self) -> int:
        """Length of the chain."""
        return len(self.layers)

    @property
    def neighbours_differ(self) -> bool:
        """Whether neighbouring stages must be of different device types, as the papers' contract has it."""
        return self.step_model is StepModel.PAPERS

    @property
    def num_steps(self) -> float:
        """Training steps over all epochs: E * M / B."""
        return self.num_epochs * self.num_samples / self.batch_size

    def of_types(self, names: Collection[str]) -> SchedulingProblem:
        """Return the problem with some of its device types alone.

        Raises:
            MalformedDocumentError: None of them is left.
        """

        def kept(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name in names}

        layers = (
            replace(
                layer,
                compute_seconds=kept(layer.compute_seconds),
                communication_seconds=kept(layer.communication_seconds),
                compute_relative_spread=kept(layer.compute_relative_spread),
                reading_seconds=kept(layer.reading_seconds),
            )
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers), device_types=kept(self.device_types))

    def run_seconds(self, step_seconds: float) -> float:
        """Return the time of all steps, with checkpoints and evaluation."""
        return self.num_steps * step_seconds * (1 + self.pause_share)

    @property
    def stage_seconds_limit(self) -> float:
        """tau = B / floor: longest time of a stage for one batch; infinite without a floor."""
        if self.throughput_floor_samples_per_s == 0:
            return math.inf
        return self.batch_size / self.throughput_floor_samples_per_s


def _check_unit_price(path: str, unit: UnitType) -> None:
    count(MAX_UNITS_IN_INSTANCES)(f"{path}.max_units", unit.max_units)
    cheapest = min(unit.instances, key=lambda size: size.price_usd_per_hour / size.units)
    unit_price = cheapest.price_usd_per_hour / cheapest.units
    if not math.isclose(unit.price_usd_per_hour, unit_price, rel_tol=1e-6):
        raise MalformedDocumentError(
            f"{path}.price_usd_per_hour",
            f"must be the least price of one unit among the instances, {unit_price:.9g} ({cheapest.name}), "
            f"got {shown(unit.price_usd_per_hour)}",
        )


def _check_cold_bytes(path: str, layer: LayerCosts, hot_shares: tuple[float, ...]) -> None:
    cold_bytes = layer.cold_bytes_per_sample
    if not cold_bytes:
        return
    if not layer.is_sharded:
        raise MalformedDocumentError(
            f"{path}.cold_bytes_per_sample", "is of sharded layers alone; leave it out, or set is_sharded"
        )
    if len(cold_bytes) != len(hot_shares):
        raise MalformedDocumentError(
            f"{path}.cold_bytes_per_sample",
            f"must have a value for each of the {len(hot_shares)} hot_shares, got {len(cold_bytes)}",
        )


def _check_size(num_layers: int, num_types: int) -> None:
    num_stages = num_layers * (num_layers + 1) // 2 * num_types
    if num_stages > MAX_CANDIDATE_STAGES:
        raise MalformedDocumentError(
            "layers",
            f"{num_layers} layers on {num_types} device types make {num_stages:,} candidate stages, more than "
            f"{MAX_CANDIDATE_STAGES:,}; join neighbouring layers or leave device types out",
        )


def _check_known_types(path: str, values: Mapping[str, float], device_types: Iterable[str]) -> None:
    for name in values:
        if name not in device_types:
            known = ", ".join(device_types)
            raise MalformedDocumentError(
                f"{path}.{name}", f"{name!r} is not a device type of this problem; known are: {known}"
            )


def _check_seconds(path: str, seconds: Mapping[str, float], device_types: Iterable[str]) -> None:
    _check_known_types(path, seconds, device_types)
    for name in device_types:
        if name not in seconds:
            raise MalformedDocumentError(f"{path}.{name}", "is missing")


def is_cpu(device_type: str) -> bool:
    """Return whether a device type counts as CPU: whether its name contains "cpu", in any case.

    The planning contract gives a device type no kind; every other one counts as an accelerator.

    Example:
        >>> is_cpu("cpu_avx512"), is_cpu("gpu_a")
        (True, False)
    """
    return "cpu" in device_type.lower()
