"""Sailor's timing files as a chain with a measured profile for each GPU type.

A folder holds one JSON file for each GPU, named after it: {micro-batch: {tensor parallelism: {layer: [forward,
backward, update]}}} in seconds. A second file holds the sizes: {model: {tensor parallelism: {layer: {params_bytes,
act_output_bytes, ...}}}} for one sample. The format is that of Sailor (Strati et al., SOSP 2025),
https://github.com/eth-easl/sailor. With tensor parallelism n, a unit is n GPUs of one host.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterps_core.device_types import DEVICE_TYPES
from heterps_core.errors import ConfigurationError, DataError, UnknownNameError
from heterps_core.models.model_graph import Layer, LayerKind, ModelGraph
from heterps_core.profiling.imported.imported_model import OPTIMIZER_VALUES_PER_PARAMETER, ImportedModel
from heterps_core.profiling.profiles.layer_profile import LayerProfile, LayerTiming, Link, MachineSpeed
from heterps_core.profiling.timing import Timing
from heterps_core.units import MS_PER_S

FILE_OF_DEVICE_TYPE: Mapping[str, str] = {"gpu-v100": "V100-16", "gpu-a100": "A100-40"}
"""Device types of this project -> Sailor's name; any other GPU goes by Sailor's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSeconds:
    """Times of one layer for one micro-batch."""

    forward: float
    backward: float
    update: float
    """Of the whole slice of the model that was profiled; see `read_sailor`."""


def read_sailor(
    folder: Path,
    sizes_path: Path,
    *,
    network_bytes_per_s: Mapping[str, float],
    tensor_parallel: int,
    batch_size: int | None,
) -> ImportedModel:
    """Read the timings of a model on several GPU types.

    Every layer of a file has the same update time. Over five GPUs it is what Adam takes for an embedding, one
    transformer layer and a head together, 37 to 55 bytes a parameter at full memory speed, and they are all that was
    profiled before layers were repeated; so it is shared out by parameters over layers of different size. Files with
    update times of 0 hold none.

    Args:
        folder: Named after the model, with one file for each GPU.
        sizes_path: JSON of layer sizes, may be gzipped.
        network_bytes_per_s: Device types to read -> bandwidth of one unit between stages and replicas.
        tensor_parallel: GPUs of a unit.
        batch_size: Micro-batch, B_o, of which half was measured too; None for the largest that all types have.

    Raises:
        DataError: A file cannot be read or breaks the format.
        UnknownNameError: There is no file for a device type.
        ConfigurationError: A tensor parallelism or micro-batch was not measured on all device types.
    """
    folder = folder.resolve()
    if not gpu_names(folder):
        raise DataError(
            folder, "must be a folder with a JSON file for each GPU, named after it; there is none"
        )
    sizes = _read_sizes(sizes_path, folder.name)
    timings = {name: _read_timings(folder, name, tensor_parallel) for name in network_bytes_per_s}
    chosen = _choose_batch_size(timings, batch_size, tensor_parallel)
    graph = _graph(folder.name, sizes, sizes_path)
    profiles = {}
    for name, by_batch_size in timings.items():
        for size in (chosen, chosen // 2):
            if len(by_batch_size[size]) != len(sizes):
                raise DataError(
                    _path(folder, name),
                    f"must hold the {len(sizes)} layers of {sizes_path.name}, got {len(by_batch_size[size])}",
                )
        profiles[name] = _profile(
            graph,
            name,
            by_batch_size,
            batch_size=chosen,
            network_bytes_per_s=network_bytes_per_s[name],
            source=f"{folder.name}/{_path(folder, name).name} (Sailor timings), tensor parallel {tensor_parallel}",
        )
    provenance = (
        f"{folder.name} (Sailor timings, sizes of {sizes_path.name}), tensor parallel {tensor_parallel}"
    )
    return ImportedModel(graph=graph, profiles=profiles, provenance=provenance)


def gpu_names(folder: Path) -> list[str]:
    """Return the device types that a folder has files for."""
    device_types = {file: name for name, file in FILE_OF_DEVICE_TYPE.items()}
    return sorted(device_types.get(path.stem, path.stem) for path in folder.glob("*.json"))


def _path(folder: Path, device_type: str) -> Path:
    return folder / f"{FILE_OF_DEVICE_TYPE.get(device_type, device_type)}.json"


def _read_timings(
    folder: Path, device_type: str, tensor_parallel: int
) -> dict[int, tuple[LayerSeconds, ...]]:
    """Return micro-batch -> layers, of one tensor parallelism."""
    path = _path(folder, device_type)
    if not path.is_file():
        raise UnknownNameError(f"device type of {folder}", device_type, gpu_names(folder))
    document = _as_object(path, "the file", _read_json(path))
    degrees = sorted({degree for value in document.values() for degree in _as_object(path, "a size", value)})
    if str(tensor_parallel) not in degrees:
        raise ConfigurationError(
            f"{path}: --tensor-parallel must be one that was measured, {', '.join(degrees)}, got {tensor_parallel}"
        )
    return {
        _whole_number(path, batch_size): tuple(
            _layer_seconds(path, f"{batch_size}/{tensor_parallel}/{index}", value)
            for index, value in _in_order(path, by_degree[str(tensor_parallel)])
        )
        for batch_size, by_degree in document.items()
        if str(tensor_parallel) in by_degree
    }


def _layer_seconds(path: Path, place: str, value: object) -> LayerSeconds:
    if not (isinstance(value, list) and len(value) == 3 and all(map(_is_quantity, value))):
        raise DataError(
            path, f"{place} must be three finite numbers that are not negative, got {str(value)[:60]}"
        )
    return LayerSeconds(forward=value[0], backward=value[1], update=value[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerSizes:
    parameter_bytes: int
    input_bytes: int
    output_bytes: int


def _read_sizes(path: Path, model: str) -> list[_LayerSizes]:
    """Return the sizes of whole layers, that is those without tensor parallelism."""
    document = _as_object(path, "the file", _read_json(path))
    if model not in document:
        raise UnknownNameError(f"model of {path}", model, document)
    by_degree = _as_object(path, model, document[model])
    if "1" not in by_degree:
        raise DataError(path, f"{model} must have sizes for tensor parallelism 1")
    sizes = []
    for index, layer in _in_order(path, by_degree["1"]):
        fields = _as_object(path, f"{model}/1/{index}", layer)
        names = ("params_bytes", "act_input_bytes", "act_output_bytes")
        for name in names:
            if not _is_quantity(fields.get(name)):
                raise DataError(
                    path,
                    f"{model}/1/{index}/{name} must be a number that is not negative, got {fields.get(name)}",
                )
        parameter_bytes, input_bytes, output_bytes = (round(fields[name]) for name in names)
        sizes.append(
            _LayerSizes(parameter_bytes=parameter_bytes, input_bytes=input_bytes, output_bytes=output_bytes)
        )
    return sizes


def _choose_batch_size(
    timings: Mapping[str, Mapping[int, Sequence[LayerSeconds]]], wanted: int | None, tensor_parallel: int
) -> int:
    with_half = {
        name: {size for size in sizes if size % 2 == 0 and size // 2 in sizes}
        for name, sizes in timings.items()
    }
    common = set.intersection(*with_half.values())
    if common and wanted is None:
        return max(common)
    if wanted is None or wanted not in common:
        found = "; ".join(
            f"{name} {', '.join(map(str, sorted(sizes))) or 'none'}" for name, sizes in with_half.items()
        )
        raise ConfigurationError(
            f"the micro-batch must have been measured, and half of it, on all device types with tensor "
            f"parallelism {tensor_parallel}; there are: {found}; got {wanted or 'no common one'}"
        )
    return wanted


def _graph(model: str, sizes: Sequence[_LayerSizes], path: Path) -> ModelGraph:
    if not sizes:
        raise DataError(path, f"{model} must have at least one layer")
    return ModelGraph(
        name=model,
        layers=tuple(
            Layer(
                name=f"layer_{index}",
                kind=LayerKind.OTHER,
                is_sharded=False,
                parameter_bytes=layer.parameter_bytes,
                optimizer_state_bytes=OPTIMIZER_VALUES_PER_PARAMETER * layer.parameter_bytes,
                input_bytes_per_sample=layer.input_bytes,
                output_bytes_per_sample=layer.output_bytes,
                # The files do not say; nothing is estimated from these profiles.
                forward_flops_per_sample=0.0,
                looked_up_bytes_per_sample=0,
            )
            for index, layer in enumerate(sizes)
        ),
    )


def _profile(
    graph: ModelGraph,
    device_type: str,
    by_batch_size: Mapping[int, Sequence[LayerSeconds]],
    *,
    batch_size: int,
    network_bytes_per_s: float,
    source: str,
) -> LayerProfile:
    network = Link(latency_seconds=0.0, bandwidth_bytes_per_s=network_bytes_per_s)
    known = DEVICE_TYPES.get(device_type)
    half_batch_size = batch_size // 2
    return LayerProfile(
        model=graph.name,
        graph_fingerprint=graph.fingerprint(),
        device_type=device_type,
        hardware=source,
        hardware_fingerprint="",
        software={},
        batch_size=batch_size,
        half_batch_size=half_batch_size,
        num_threads=1,
        ids_source=source,
        timings=_timings(graph, by_batch_size[batch_size], source),
        half_batch_timings=_timings(graph, by_batch_size[half_batch_size], source),
        exchange_link=network,
        all_reduce_link=network,
        boundary_link=network,
        busy_message_seconds=0.0,
        machine_speed=None if known is None else MachineSpeed.published(known),
        sum_over_step=None,
        measured_at="",
    )


def _timings(graph: ModelGraph, seconds: Sequence[LayerSeconds], source: str) -> tuple[LayerTiming, ...]:
    # A layer that repeats has the size of the one that was profiled for it.
    profiled_bytes = sum({layer.parameter_bytes for layer in graph.layers}) or 1
    return tuple(
        LayerTiming(
            layer=layer.name,
            kind=layer.kind.value,
            is_sharded=layer.is_sharded,
            forward=Timing.from_repeats([MS_PER_S * measured.forward]),
            backward=Timing.from_repeats([MS_PER_S * measured.backward]),
            update=Timing.from_repeats([MS_PER_S * measured.update * layer.parameter_bytes / profiled_bytes]),
            exchanged_bytes=0.0,
            all_reduced_bytes=float(layer.parameter_bytes),
            is_estimated=False,
            source=source,
        )
        for layer, measured in zip(graph.layers, seconds, strict=True)
    )


def _read_json(path: Path) -> object:
    try:
        content = path.read_bytes()
        text = gzip.decompress(content) if path.suffix == ".gz" else content
        document: object = json.loads(text)
    except (EOFError, zlib.error, ValueError, RecursionError) as error:
        raise DataError(path, f"must be JSON, but cannot be read: {error}; is it cut off?") from error
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror or error}") from error
    return document


def _as_object(path: Path, place: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not value:
        raise DataError(path, f"{place} must be a JSON object that is not empty, got {str(value)[:60]}")
    return value


def _in_order(path: Path, layers: object) -> list[tuple[int, Any]]:
    by_index = {
        _whole_number(path, index): value for index, value in _as_object(path, "layers", layers).items()
    }
    if sorted(by_index) != list(range(len(by_index))):
        raise DataError(path, f"layers must be numbered 0..{len(by_index) - 1}, got {sorted(by_index)[:8]}")
    return sorted(by_index.items())


def _whole_number(path: Path, text: str) -> int:
    if not text.isdecimal():
        raise DataError(path, f"keys must be whole numbers, got {text[:60]!r}")
    return int(text)


def _is_quantity(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]
