"""Profiles of a model for each device type: this machine's measured or from the cache, the others' estimated.

A file's name is a hash of all values that its profile depends on. A file that cannot be read counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from heterps_core.device_types import get_device_type
from heterps_core.errors import ConfigurationError
from heterps_core.hardware import DeviceType, moment_of
from heterps_core.json_codec import JsonDocument
from heterps_core.json_file import replace_json
from heterps_core.machine import num_cores, software_versions, this_machine
from heterps_core.models.model_graph import ModelGraph
from heterps_core.profiling import LOCAL_VALID_FOR
from heterps_core.profiling.analytic_profile import estimate_profile
from heterps_core.profiling.layer_profile import LOCAL_DEVICE_TYPE, SCHEMA_VERSION, LayerProfile
from heterps_core.profiling.measuring_process import (
    ProfileRequest,
    measure_in_fresh_process,
    measure_replica_path,
)
from heterps_core.profiling.replica_path import MOST_RELATIVE_ERROR, ReplicaPath

logger = logging.getLogger(__name__)

_Kept = TypeVar("_Kept", bound=JsonDocument)


def _profile_name(
    request: ProfileRequest,
    graph: ModelGraph,
    *,
    device_type: str,
    hardware_fingerprint: str,
    software: Mapping[str, str],
) -> str:
    """Return the name of a profile's file, a hash of all values that the profile depends on."""
    values: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "graph_fingerprint": graph.fingerprint(),
        "hardware_fingerprint": hardware_fingerprint,
        "device_type": device_type,
        "software": dict(software),
        "batch_size": request.batch_size,
        "num_threads": request.num_threads,
        "ids_source": request.ids_source,
        "optimizers": (request.dense_optimizer, request.embedding_optimizer),
    }
    if request.precision != "float32":
        # Earlier versions had no choice; their rented measurements are found again.
        values["precision"] = request.precision
    if device_type == LOCAL_DEVICE_TYPE:
        # Earlier versions measured steps without the thread that reads, no worker beside and no sums.
        values["measured"] = "steps while a thread reads, alone and beside another worker, and sums"
    text = json.dumps(values, sort_keys=True)
    return f"{device_type}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def device_profile_name(
    request: ProfileRequest, graph: ModelGraph, *, device_type: str, software: Mapping[str, str]
) -> str:
    """Return the name for any machine of a device type, and tables of any size.

    Tables grow every night, and a look-up takes as long. Builds of the same version for other hardware ("2.13.0+cpu")
    run the same code.
    """
    return _profile_name(
        request,
        graph.without_table_sizes(),
        device_type=device_type,
        hardware_fingerprint=device_type,
        software={name: software[name].partition("+")[0] for name in ("heterps", "torch")},
    )


def kept_profile(path: Path, kind: type[_Kept]) -> _Kept | None:
    """Return the profile in a file, or None where there is none that can be read."""
    try:
        return kind.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigurationError) as error:
        logger.warning("the cached profile %s counts as missing, because it cannot be used: %s", path, error)
        return None


def keep_profile(path: Path, profile: JsonDocument) -> None:
    """Replace an earlier profile; a failure is logged, and the run continues."""
    try:
        replace_json(path, profile.to_json())
    except OSError as error:
        logger.warning("the profile is not kept in %s: %s", path, error)


def local_profiles(
    requests: Sequence[ProfileRequest],
    graph: ModelGraph,
    *,
    cache_directory: Path | None,
    has_replica_path: bool = True,
) -> list[LayerProfile]:
    """Return this machine's profile for each request, kept or measured; the requests differ in batch size alone.

    The cost of an exchange of rows belongs to the machine and stands in a file of its own; its measurement takes 21
    s of processor time, and is left out where nothing asks for it. The graph is that of
    `layer_profiler.trace_model`; without a cache directory nothing is kept.

    Raises:
        HeterpsError: The measurement failed.
    """
    machine, software, now = this_machine().fingerprint(), software_versions(), datetime.now(UTC)
    names = {
        request: _profile_name(
            request,
            graph,
            device_type=LOCAL_DEVICE_TYPE,
            hardware_fingerprint=machine,
            software=software,
        )
        for request in requests
    }
    found: dict[ProfileRequest, LayerProfile] = {}
    for request, name in names.items():
        kept = None if cache_directory is None else kept_profile(cache_directory / name, LayerProfile)
        if kept is not None and _counts_still(kept, now):
            found[request] = kept
    missing = [request for request in names if request not in found]
    if missing:
        measured = measure_in_fresh_process(*missing)
        found |= zip(missing, measured, strict=True)
        if cache_directory is not None:
            for request, profile in zip(missing, measured, strict=True):
                keep_profile(cache_directory / names[request], profile)
    if not has_replica_path:
        return [found[request] for request in requests]
    path = _local_replica_path(machine, software, now, cache_directory)
    return [replace(found[request], measured_replica_path=path) for request in requests]


def replica_path_name(hardware_fingerprint: str, software: Mapping[str, str]) -> str:
    """Return the name of the file of a machine's replica path."""
    values = {"hardware_fingerprint": hardware_fingerprint, "software": dict(software)}
    text = json.dumps(values, sort_keys=True)
    return f"row-exchange-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _local_replica_path(
    machine: str, software: Mapping[str, str], now: datetime, cache_directory: Path | None
) -> ReplicaPath:
    """Return the cost of the exchange of rows on this machine, kept or measured.

    A kept law is measured again where it is old, or where it missed a busy machine's times and the machine is idle.
    """
    if cache_directory is None:
        return measure_replica_path()
    file = cache_directory / replica_path_name(machine, software)
    kept = kept_profile(file, ReplicaPath)
    is_fresh = kept is not None and now < moment_of(kept.measured_at) + LOCAL_VALID_FOR
    if kept is not None and is_fresh and (kept.relative_error <= MOST_RELATIVE_ERROR or _is_busy()):
        return kept
    measured = measure_replica_path()
    keep_profile(file, measured)
    return measured


def _counts_still(kept: LayerProfile, now: datetime) -> bool:
    """Tell whether a kept profile is recent, and not one of a busy machine that is idle now."""
    if now >= moment_of(kept.measured_at) + LOCAL_VALID_FOR:
        return False
    return not kept.was_busy or _is_busy()


def _is_busy() -> bool:
    return os.getloadavg()[0] >= num_cores()


def with_estimates(
    graph: ModelGraph, measured: LayerProfile, device_types: Iterable[str]
) -> dict[str, LayerProfile]:
    """Return a profile for each device type, this machine's own first.

    Raises:
        UnknownNameError: A device type is not known.
    """
    estimates = {each.name: estimate_profile(graph, measured, each) for each in _others(device_types)}
    return {LOCAL_DEVICE_TYPE: measured, **estimates}


def _others(device_types: Iterable[str]) -> list[DeviceType]:
    """Return the device types that are not this machine."""
    return [get_device_type(name) for name in dict.fromkeys(device_types) if name != LOCAL_DEVICE_TYPE]


def profile_model(
    request: ProfileRequest, graph: ModelGraph, device_types: Iterable[str], *, cache_directory: Path | None
) -> dict[str, LayerProfile]:
    """Return what `with_estimates` does of the profile that `local_profiles` returns; raises as these."""
    _others(device_types)  # an unknown one is refused before a measurement
    (measured,) = local_profiles([request], graph, cache_directory=cache_directory)
    return with_estimates(graph, measured, device_types)
