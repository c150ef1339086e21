"""One profile of a model for each device type: this machine's measured or from the cache, the others' estimated."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from heterps_core.errors import UnknownNameError
from heterps_core.graph.model_graph import ModelGraph
from heterps_core.hardware import DEVICE_TYPES
from heterps_core.profiling.analytic_profile import estimate_profile
from heterps_core.profiling.layer_profile import LOCAL_DEVICE_TYPE, LayerProfile
from heterps_core.profiling.machine import this_machine
from heterps_core.profiling.measuring_process import ProfileRequest, measure_in_fresh_process
from heterps_core.profiling.profile_cache import ProfileCache, ProfileKey


def profile_model(
    request: ProfileRequest,
    graph: ModelGraph,
    device_types: Iterable[str],
    *,
    cache_directory: Path | None,
) -> dict[str, LayerProfile]:
    """Return a profile for each device type, `LOCAL_DEVICE_TYPE` always among them and first.

    Args:
        request: What to measure.
        graph: Of the same model, as `layer_profiler.trace_model` gives it.
        device_types: Names from `DEVICE_TYPES`, or `LOCAL_DEVICE_TYPE`.
        cache_directory: Where measured profiles are kept; None to measure anyway and keep nothing.

    Raises:
        UnknownNameError: A device type is not known.
        HeterpsError: The measurement failed.
    """
    wanted = [name for name in dict.fromkeys(device_types) if name != LOCAL_DEVICE_TYPE]
    for name in wanted:
        if name not in DEVICE_TYPES:
            raise UnknownNameError("device type", name, [LOCAL_DEVICE_TYPE, *DEVICE_TYPES])
    measured = _measured(request, graph, cache_directory)
    estimates = {name: estimate_profile(graph, measured, DEVICE_TYPES[name]) for name in wanted}
    return {LOCAL_DEVICE_TYPE: measured, **estimates}


def _measured(request: ProfileRequest, graph: ModelGraph, cache_directory: Path | None) -> LayerProfile:
    if cache_directory is None:
        return measure_in_fresh_process(request)
    key = ProfileKey.of(request, graph, this_machine(), device_type=LOCAL_DEVICE_TYPE)
    return ProfileCache(cache_directory).get_or_measure(key, lambda: measure_in_fresh_process(request))
