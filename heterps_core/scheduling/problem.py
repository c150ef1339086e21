"""The planning problem: layers, device types and the floor, as the `problem.json` contract fixes them.

Every search, bound and explanation reads this noun and nothing else, so it is checked once, completely,
when it is made: what a scheduler receives can be planned, or is proven not to be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heterps_core.errors import ConfigurationError, MalformedProblemError

SCHEMA_VERSION = 1

MAX_LAYERS = 1_000
"""Longest chain that is planned; the tables of all stages grow with its square."""

MAX_DEVICE_TYPES = 64
"""Most device types in one problem; a guard against files that are no problem files."""

MAX_UNITS = 1_000_000
"""Largest cap on the units of a type that is accepted."""

SMALLEST_POSITIVE = 1e-18
LARGEST_NUMBER = 1e18
"""Numbers outside these limits would overflow products of five of them; no real quantity comes near."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitType:
    """A device type as the planner sees it; all numbers are for one unit."""

    price_usd_per_hour: float
    max_units: int
    """Most units of this type in the whole plan."""

    memory_bytes: float
    bandwidth_bytes_per_s: float
    """Across stage boundaries."""

    compute_parallel_fraction: float
    """alpha: share of the computation that shrinks with more replicas, in [0, 1]."""

    communication_parallel_fraction: float
    """beta: the same for communication, in [0, 1]."""


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

    def __post_init__(self) -> None:
        _check_text("model", self.model)
        _check_count("batch_size", self.batch_size, at_most=int(LARGEST_NUMBER))
        _check_count("profile_batch_size", self.profile_batch_size, at_most=int(LARGEST_NUMBER))
        _check_positive("num_samples", self.num_samples)
        _check_positive("num_epochs", self.num_epochs)
        _check_not_negative("throughput_floor_samples_per_s", self.throughput_floor_samples_per_s)
        _check_device_types(self.device_types)
        _check_layers(self.layers, tuple(self.device_types))

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
                }
                for layer in self.layers
            ],
            "device_types": {name: asdict(unit) for name, unit in self.device_types.items()},
        }

    @classmethod
    def from_json(cls, document: object) -> SchedulingProblem:
        """Read the `problem.json` form; fields that are not known are ignored.

        Raises:
            MalformedProblemError: A field is missing or breaks its rule; carries its path.
        """
        fields = _as_object("problem", document)
        version = _member(fields, "", "schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise MalformedProblemError("schema_version", f"must be {SCHEMA_VERSION}, got {_shown(version)}")
        scalars = {name: _member(fields, "", name) for name in _SCALAR_FIELDS}
        layers = _member(fields, "", "layers")
        if not isinstance(layers, list):
            raise MalformedProblemError("layers", f"must be a list of layers, got {_shown(layers)}")
        device_types = _as_object("device_types", _member(fields, "", "device_types"))
        return cls(
            **scalars,
            layers=tuple(_layer_from_json(f"layers[{index}]", layer) for index, layer in enumerate(layers)),
            device_types={
                name: _unit_type_from_json(f"device_types.{name}", unit)
                for name, unit in device_types.items()
            },
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
            document = json.loads(text, object_pairs_hook=_object_without_duplicates)
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
_LAYER_FIELDS = ("name", "kind", "is_sharded", "state_bytes", "output_bytes_per_sample")


def _layer_from_json(path: str, document: object) -> LayerCosts:
    fields = _as_object(path, document)
    return LayerCosts(
        **{name: _member(fields, path, name) for name in _LAYER_FIELDS},
        compute_seconds=_as_object(f"{path}.compute_seconds", _member(fields, path, "compute_seconds")),
        communication_seconds=_as_object(
            f"{path}.communication_seconds", _member(fields, path, "communication_seconds")
        ),
    )


def _unit_type_from_json(path: str, document: object) -> UnitType:
    fields = _as_object(path, document)
    return UnitType(**{name: _member(fields, path, name) for name in UnitType.__dataclass_fields__})


def _object_without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise MalformedProblemError(twice[0], "stands twice in the same object")
    return members


def _as_object(path: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedProblemError(path, f"must be a JSON object, got {_shown(value)}")
    return value


def _member(fields: Mapping[str, Any], path: str, name: str) -> Any:
    if name not in fields:
        raise MalformedProblemError(f"{path}.{name}" if path else name, "is missing")
    return fields[name]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_text(path: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise MalformedProblemError(path, f"must be a text that is not empty, got {_shown(value)}")


def _check_number(path: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedProblemError(path, f"must be a number, got {_shown(value)}")
    # Compared before any conversion: an integer may be too large for a float.
    if isinstance(value, float) and not math.isfinite(value):
        raise MalformedProblemError(path, f"must be a finite number, got {value}")
    if abs(value) > LARGEST_NUMBER:
        raise MalformedProblemError(path, f"must be at most {LARGEST_NUMBER:g}, got {_shown(value)}")
    return float(value)


def _check_not_negative(path: str, value: object) -> None:
    number = _check_number(path, value)
    if number < 0:
        raise MalformedProblemError(path, f"must not be negative, got {_shown(value)}")
    if 0 < number < SMALLEST_POSITIVE:
        raise MalformedProblemError(path, f"must be 0 or at least {SMALLEST_POSITIVE:g}, got {_shown(value)}")


def _check_positive(path: str, value: object) -> None:
    _check_not_negative(path, value)
    if value == 0:
        raise MalformedProblemError(path, "must be positive, got 0")


def _check_fraction(path: str, value: object) -> None:
    number = _check_number(path, value)
    if not 0 <= number <= 1:
        raise MalformedProblemError(path, f"must lie in [0, 1], got {_shown(value)}")


def _check_count(path: str, value: object, *, at_most: int) -> None:
    number = _check_number(path, value)
    if number != int(number):
        raise MalformedProblemError(path, f"must be a whole number, got {_shown(value)}")
    if not 1 <= number <= at_most:
        raise MalformedProblemError(path, f"must lie in 1..{at_most}, got {_shown(value)}")


def _check_device_types(device_types: Mapping[str, UnitType]) -> None:
    if not 1 <= len(device_types) <= MAX_DEVICE_TYPES:
        raise MalformedProblemError(
            "device_types", f"must hold 1 to {MAX_DEVICE_TYPES} device types, got {len(device_types)}"
        )
    for name, unit in device_types.items():
        path = f"device_types.{name}"
        _check_text("device_types", name)
        _check_positive(f"{path}.price_usd_per_hour", unit.price_usd_per_hour)
        _check_count(f"{path}.max_units", unit.max_units, at_most=MAX_UNITS)
        _check_positive(f"{path}.memory_bytes", unit.memory_bytes)
        _check_positive(f"{path}.bandwidth_bytes_per_s", unit.bandwidth_bytes_per_s)
        _check_fraction(f"{path}.compute_parallel_fraction", unit.compute_parallel_fraction)
        _check_fraction(f"{path}.communication_parallel_fraction", unit.communication_parallel_fraction)


def _check_layers(layers: Sequence[LayerCosts], device_types: Sequence[str]) -> None:
    if not 1 <= len(layers) <= MAX_LAYERS:
        raise MalformedProblemError(
            "layers", f"must hold 1 to {MAX_LAYERS} layers, got {len(layers)}; join neighbouring layers"
        )
    for index, layer in enumerate(layers):
        path = f"layers[{index}]"
        _check_text(f"{path}.name", layer.name)
        _check_text(f"{path}.kind", layer.kind)
        if not isinstance(layer.is_sharded, bool):
            raise MalformedProblemError(
                f"{path}.is_sharded", f"must be true or false, got {_shown(layer.is_sharded)}"
            )
        _check_not_negative(f"{path}.state_bytes", layer.state_bytes)
        _check_not_negative(f"{path}.output_bytes_per_sample", layer.output_bytes_per_sample)
        _check_seconds(f"{path}.compute_seconds", layer.compute_seconds, device_types)
        _check_seconds(f"{path}.communication_seconds", layer.communication_seconds, device_types)
    # Without this a plan could take no time at all, and its throughput would be no number.
    if not any(min(layer.compute_seconds.values()) > 0 for layer in layers):
        raise MalformedProblemError(
            "layers", "at least one layer must have positive compute_seconds on every device type"
        )


def _check_seconds(path: str, seconds: Mapping[str, float], device_types: Sequence[str]) -> None:
    for name in seconds:
        if name not in device_types:
            known = ", ".join(device_types)
            raise MalformedProblemError(
                f"{path}.{name}", f"{name!r} is not a device type of this problem; known are: {known}"
            )
    for name in device_types:
        if name not in seconds:
            raise MalformedProblemError(f"{path}.{name}", "is missing")
        _check_not_negative(f"{path}.{name}", seconds[name])
