"""One profile of a model for each device type: this machine's measured or from the cache, the others' estimated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from heterps_core.device_types import get_device_type
from heterps_core.errors import UnknownNameError
from heterps_core.models.model_graph import ModelGraph
from heterps_core.profiling.machine import this_machine
from heterps_core.profiling.measuring_process import (
    ProfileRequest,
    WorkerCosts,
    measure_in_fresh_process,
    measure_worker_costs,
)
from heterps_core.profiling.profiles.analytic_profile import estimate_profile
from heterps_core.profiling.profiles.layer_profile import LOCAL_DEVICE_TYPE, LayerProfile
from heterps_core.profiling.profiles.profile_cache import ProfileCache, ProfileKey
from heterps_core.training.job import TrainingJob

WORKERS_NAME = "local-workers"
"""Begins what stands in place of a device type for what the workers of a plan cost this machine."""


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
    try:
        hardware = [get_device_type(name) for name in wanted]
    except UnknownNameError as error:
        raise UnknownNameError("device type", error.name, [LOCAL_DEVICE_TYPE, *error.known]) from None
    key = ProfileKey.of(request, graph, this_machine(), device_type=LOCAL_DEVICE_TYPE)
    measured = ProfileCache(cache_directory, LayerProfile).get_or_measure(
        key, lambda: measure_in_fresh_process(request)
    )
    estimates = {each.name: estimate_profile(graph, measured, each) for each in hardware}
    return {LOCAL_DEVICE_TYPE: measured, **estimates}


def worker_costs_of(
    job: TrainingJob, request: ProfileRequest, graph: ModelGraph, *, cache_directory: Path | None
) -> WorkerCosts:
    """Return what the workers of a job cost on this machine, measured or from the cache.

    Raises:
        HeterpsError: The measurement failed.
    """
    config = job.config
    cuts = "-".join(f"{stage.last_layer}x{stage.num_replicas}" for stage in job.stages)
    key = ProfileKey.of(
        replace(
            request,
            batch_size=config.batch_size,
            num_threads=config.num_threads,
            dense_optimizer=config.dense_optimizer,
            embedding_optimizer=config.embedding_optimizer,
            precision=config.precision,
        ),
        graph,
        this_machine(),
        device_type=f"{WORKERS_NAME}-{cuts}-m{config.num_microbatches}",
    )
    return ProfileCache(cache_directory, WorkerCosts).get_or_measure(key, lambda: measure_worker_costs(job))
