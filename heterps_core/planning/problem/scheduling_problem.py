"""The planning problem: layers, device types and the floor, as the `problem.json` contract fixes them.

Every search, bound and explanation reads this noun and nothing else, so it is checked once, completely,
when it is made: what a scheduler receives can be planned, or is proven not to be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from heterps_core.errors import ConfigurationError, MalformedProblemError
from heterps_core.planning.problem.extra_costs import (
    NO_EXTRA_COSTS,
    ExtraCosts,
    InstanceSize,
    check_instances,
)
from heterps_core.planning.problem.field_checks import (
    LARGEST_NUMBER,
    as_object,
    check_count,
    check_flag,
    check_fraction,
    check_not_negative,
    check_positive,
    check_text,
    member,
    object_without_duplicates,
    shown,
)

SCHEMA_VERSION = 1

MAX_LAYERS = 1_000
"""Longest chain that is planned; the tables of all stages grow with its square."""

MAX_CANDIDATE_STAGES = 8_000_000
"""Most pairs of a run of layers and a device type; the tables of all stages take 0.7 kB for each, seen with 1,000
layers x 16 types."""

MAX_DEVICE_TYPES = 64
"""Most device types in one problem; a guard against files that are no problem files."""

MAX_UNITS = 1_000_000
"""Largest cap on the units of a type that is accepted."""

MAX_UNITS_IN_INSTANCES = 100_000
"""Largest cap for types with `instances`: the prices of all counts up to it stand in a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """What one layer costs on each device type, measured on one unit for one profiling batch."""

    name: str
    kind: str
    """For instance "embedding" or "fully_connected"; policies may learn from it, the cost model does not."""

    is_sharded: bool
    """State is divided among the replicas of the stage (embedding tables); otherwise each holds all of it."""

    state_bytes: float
    """Parameters and optimizer state."""

    output_bytes_per_sample: float
    """Activations that cross to the next layer; their gradients cross back with the same size."""

    compute_seconds: Mapping[str, float]
    """Device type -> forward, backward and update of `profile_batch_size` samples on one unit."""

    communication_seconds: Mapping[str, float]
    """Device type -> in-stage communication for `profile_batch_size` samples (pull, push, all-reduce)."""

    compute_relative_spread: Mapping[str, float] = field(default_factory=dict)
    """Device type -> how far `compute_seconds` may be off, as a share of it (from the profile's repetitions, or
    the error of an estimate). Plans do not depend on it; the range of their cost does. Missing: 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitType:
    """A device type as the planner sees it; all numbers are for one unit."""

    price_usd_per_hour: float
    """Of one unit at its cheapest: where `instances` are given, of the size with the least price per unit."""

    max_units: int
    """Most units of this type in the whole plan."""

    memory_bytes: float
    bandwidth_bytes_per_s: float
    """Across stage boundaries."""

    compute_parallel_fraction: float
    """alpha: share of the computation that shrinks with more replicas, in [0, 1]."""

    communication_parallel_fraction: float
    """beta: the same for communication, in [0, 1]."""

    instances: tuple[InstanceSize, ...] = ()
    """What is sold. A stage is charged for the cheapest set of instances that carries its replicas; without
    sizes, for `price_usd_per_hour` times its replicas."""

    zone: str = ""
    """Where the units stand, for instance "us-east-1a"; types in other zones are reached at a price."""

    interruptions_per_hour: float = 0.0
    """Expected interruptions of one unit: above 0 on spot. They stop the whole plan."""

    reserved_bytes: float = 0.0
    """Of `memory_bytes`, what a worker takes before any table or weight (`worker_memory.py`)."""

    @property
    def usable_bytes(self) -> float:
        """What state may fill; below 0 where not even the worker fits."""
        return self.memory_bytes - self.reserved_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingProblem:
    """A chain of layers to place on device types at least cost above a throughput floor.

    Raises:
        MalformedProblemError: A value breaks its rule; carries the path of the field.
    """

    model: str
    batch_size: int
    """B, samples per training step."""

    profile_batch_size: int
    """B_o, samples in one profiling batch."""

    num_samples: float
    """M, samples per epoch."""

    num_epochs: float
    """E."""

    throughput_floor_samples_per_s: float
    """0 for no floor."""

    layers: tuple[LayerCosts, ...]
    device_types: Mapping[str, UnitType]
    extra_costs: ExtraCosts = NO_EXTRA_COSTS
    """What is charged besides the units' time; nothing by default, which is the plain contract."""

    single_replica_communicates: bool = True
    """Whether a stage of one replica takes its layers' `communication_seconds` too, as the papers' model has it.
    False where they are exchange and all-reduce among replicas: one replica then only moves what crosses the
    stage's boundaries, and more than one pay as ever."""

    def __post_init__(self) -> None:
        check_text("model", self.model)
        check_count("batch_size", self.batch_size, at_most=int(LARGEST_NUMBER))
        check_count("profile_batch_size", self.profile_batch_size, at_most=int(LARGEST_NUMBER))
        check_positive("num_samples", self.num_samples)
        check_positive("num_epochs", self.num_epochs)
        check_not_negative("throughput_floor_samples_per_s", self.throughput_floor_samples_per_s)
        check_flag("single_replica_communicates", self.single_replica_communicates)
        _check_device_types(self.device_types)
        _check_layers(self.layers, tuple(self.device_types))
        _check_size(len(self.layers), len(self.device_types))

    @property
    def device_type_names(self) -> tuple[str, ...]:
        """Names of the device types, in the order of their indices everywhere in the planner."""
        return tuple(self.device_types)

    @property
    def num_layers(self) -> int:
        """Length of the chain."""
        return len(self.layers)

    @property
    def num_steps(self) -> float:
        """Training steps over all epochs: E * M / B."""
        return self.num_epochs * self.num_samples / self.batch_size

    @property
    def stage_seconds_limit(self) -> float:
        """tau = B / floor: longest time of a stage for one batch; infinite without a floor."""
        if self.throughput_floor_samples_per_s == 0:
            return math.inf
        return self.batch_size / self.throughput_floor_samples_per_s

    def to_json(self) -> dict[str, Any]:
        """Return the `problem.json` form."""
        return {
            "schema_version": SCHEMA_VERSION,
            **{name: getattr(self, name) for name in _SCALAR_FIELDS},
            "layers": [
                {
                    **{name: getattr(layer, name) for name in _LAYER_FIELDS},
                    "compute_seconds": dict(layer.compute_seconds),
                    "communication_seconds": dict(layer.communication_seconds),
                    **(
                        {"compute_relative_spread": dict(layer.compute_relative_spread)}
                        if layer.compute_relative_spread
                        else {}
                    ),
                }
                for layer in self.layers
            ],
            "device_types": {name: _unit_type_to_json(unit) for name, unit in self.device_types.items()},
            **({"extra_costs": asdict(self.extra_costs)} if self.extra_costs != NO_EXTRA_COSTS else {}),
            **({} if self.single_replica_communicates else {"single_replica_communicates": False}),
        }

    @classmethod
    def from_json(cls, document: object) -> SchedulingProblem:
        """Read the `problem.json` form; fields that are not known are ignored.

        Raises:
            MalformedProblemError: A field is missing or breaks its rule; carries its path.
        """
        fields = as_object("problem", document)
        version = member(fields, "", "schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise MalformedProblemError("schema_version", f"must be {SCHEMA_VERSION}, got {shown(version)}")
        scalars = {name: member(fields, "", name) for name in _SCALAR_FIELDS}
        layers = member(fields, "", "layers")
        if not isinstance(layers, list):
            raise MalformedProblemError("layers", f"must be a list of layers, got {shown(layers)}")
        device_types = as_object("device_types", member(fields, "", "device_types"))
        return cls(
            **scalars,
            layers=tuple(_layer_from_json(f"layers[{index}]", layer) for index, layer in enumerate(layers)),
            device_types={
                name: _unit_type_from_json(f"device_types.{name}", unit)
                for name, unit in device_types.items()
            },
            extra_costs=ExtraCosts.from_json("extra_costs", fields.get("extra_costs", {})),
            single_replica_communicates=fields.get("single_replica_communicates", True),
        )

    @classmethod
    def load(cls, path: Path) -> SchedulingProblem:
        """Read a `problem.json` file.

        Raises:
            ConfigurationError: The file cannot be read.
            MalformedProblemError: It is no JSON, or a field breaks its rule.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot read the problem file {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise MalformedProblemError(str(path), f"must be UTF-8 text: {error}") from error
        try:
            document = json.loads(text, object_pairs_hook=object_without_duplicates)
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}"
            raise MalformedProblemError(str(path), f"is not valid JSON: {error.msg} at {place}") from error
        except RecursionError as error:
            raise MalformedProblemError(str(path), "is nested too deeply for a problem") from error
        except ValueError as error:
            # json hands over integers of thousands of digits, which int() refuses.
            raise MalformedProblemError(str(path), f"holds a number that cannot be read: {error}") from error
        return cls.from_json(document)


_SCALAR_FIELDS = (
    "model",
    "batch_size",
    "profile_batch_size",
    "num_samples",
    "num_epochs",
    "throughput_floor_samples_per_s",
)
_OPTIONAL_UNIT_FIELDS = ("instances", "zone", "interruptions_per_hour", "reserved_bytes")
_LAYER_FIELDS = ("name", "kind", "is_sharded", "state_bytes", "output_bytes_per_sample")


def _layer_from_json(path: str, document: object) -> LayerCosts:
    fields = as_object(path, document)
    return LayerCosts(
        **{name: member(fields, path, name) for name in _LAYER_FIELDS},
        compute_seconds=as_object(f"{path}.compute_seconds", member(fields, path, "compute_seconds")),
        communication_seconds=as_object(
            f"{path}.communication_seconds", member(fields, path, "communication_seconds")
        ),
        compute_relative_spread=as_object(
            f"{path}.compute_relative_spread", fields.get("compute_relative_spread", {})
        ),
    )


def _unit_type_from_json(path: str, document: object) -> UnitType:
    fields = as_object(path, document)
    optional = {name: fields[name] for name in _OPTIONAL_UNIT_FIELDS if name in fields}
    if "instances" in optional:
        optional["instances"] = InstanceSize.list_from_json(f"{path}.instances", optional["instances"])
    required = UnitType.__dataclass_fields__.keys() - _OPTIONAL_UNIT_FIELDS
    return UnitType(**{name: member(fields, path, name) for name in required}, **optional)


def _unit_type_to_json(unit: UnitType) -> dict[str, Any]:
    document = asdict(unit)
    for name in _OPTIONAL_UNIT_FIELDS:
        if document[name] == UnitType.__dataclass_fields__[name].default:
            del document[name]
    return document


def _check_device_types(device_types: Mapping[str, UnitType]) -> None:
    if not 1 <= len(device_types) <= MAX_DEVICE_TYPES:
        raise MalformedProblemError(
            "device_types", f"must hold 1 to {MAX_DEVICE_TYPES} device types, got {len(device_types)}"
        )
    for name, unit in device_types.items():
        path = f"device_types.{name}"
        check_text("device_types", name)
        check_positive(f"{path}.price_usd_per_hour", unit.price_usd_per_hour)
        check_count(f"{path}.max_units", unit.max_units, at_most=MAX_UNITS)
        check_positive(f"{path}.memory_bytes", unit.memory_bytes)
        check_positive(f"{path}.bandwidth_bytes_per_s", unit.bandwidth_bytes_per_s)
        check_fraction(f"{path}.compute_parallel_fraction", unit.compute_parallel_fraction)
        check_fraction(f"{path}.communication_parallel_fraction", unit.communication_parallel_fraction)
        check_not_negative(f"{path}.interruptions_per_hour", unit.interruptions_per_hour)
        check_not_negative(f"{path}.reserved_bytes", unit.reserved_bytes)
        if not isinstance(unit.zone, str):
            raise MalformedProblemError(f"{path}.zone", f"must be a text, got {shown(unit.zone)}")
        if unit.instances:
            check_instances(f"{path}.instances", unit.instances)
            _check_unit_price(path, unit)


def _check_unit_price(path: str, unit: UnitType) -> None:
    check_count(f"{path}.max_units", unit.max_units, at_most=MAX_UNITS_IN_INSTANCES)
    cheapest = min(unit.instances, key=lambda size: size.price_usd_per_hour / size.units)
    unit_price = cheapest.price_usd_per_hour / cheapest.units
    if not math.isclose(unit.price_usd_per_hour, unit_price, rel_tol=1e-6):
        raise MalformedProblemError(
            f"{path}.price_usd_per_hour",
            f"must be the least price of one unit among the instances, {unit_price:.9g} ({cheapest.name}), "
            f"got {shown(unit.price_usd_per_hour)}",
        )


def _check_layers(layers: Sequence[LayerCosts], device_types: Sequence[str]) -> None:
    if not 1 <= len(layers) <= MAX_LAYERS:
        raise MalformedProblemError(
            "layers", f"must hold 1 to {MAX_LAYERS} layers, got {len(layers)}; join neighbouring layers"
        )
    for index, layer in enumerate(layers):
        path = f"layers[{index}]"
        check_text(f"{path}.name", layer.name)
        check_text(f"{path}.kind", layer.kind)
        check_flag(f"{path}.is_sharded", layer.is_sharded)
        check_not_negative(f"{path}.state_bytes", layer.state_bytes)
        check_not_negative(f"{path}.output_bytes_per_sample", layer.output_bytes_per_sample)
        _check_seconds(f"{path}.compute_seconds", layer.compute_seconds, device_types)
        _check_seconds(f"{path}.communication_seconds", layer.communication_seconds, device_types)
        _check_known_types(f"{path}.compute_relative_spread", layer.compute_relative_spread, device_types)
        for name, spread in layer.compute_relative_spread.items():
            check_not_negative(f"{path}.compute_relative_spread.{name}", spread)
    # Without this a plan could take no time at all, and its throughput would be no number.
    if not any(min(layer.compute_seconds.values()) > 0 for layer in layers):
        raise MalformedProblemError(
            "layers", "at least one layer must have positive compute_seconds on every device type"
        )


def _check_size(num_layers: int, num_types: int) -> None:
    num_stages = num_layers * (num_layers + 1) // 2 * num_types
    if num_stages > MAX_CANDIDATE_STAGES:
        raise MalformedProblemError(
            "layers",
            f"{num_layers} layers on {num_types} device types make {num_stages:,} candidate stages, more than "
            f"{MAX_CANDIDATE_STAGES:,}; join neighbouring layers or leave device types out",
        )


def _check_known_types(path: str, values: Mapping[str, float], device_types: Sequence[str]) -> None:
    for name in values:
        if name not in device_types:
            known = ", ".join(device_types)
            raise MalformedProblemError(
                f"{path}.{name}", f"{name!r} is not a device type of this problem; known are: {known}"
            )


def _check_seconds(path: str, seconds: Mapping[str, float], device_types: Sequence[str]) -> None:
    _check_known_types(path, seconds, device_types)
    for name in device_types:
        if name not in seconds:
            raise MalformedProblemError(f"{path}.{name}", "is missing")
        check_not_negative(f"{path}.{name}", seconds[name])


def is_cpu(device_type: str) -> bool:
    """Return whether a device type counts as CPU: whether its name contains "cpu", in any case.

    The planning contract gives a device type no kind; every other one counts as an accelerator.

    Example:
        >>> is_cpu("cpu_avx512"), is_cpu("gpu_a")
        (True, False)
    """
    return "cpu" in device_type.lower()
