"""Times of a model's layers on each device type: measured on such a machine, else estimated from this one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import MIN_SLOT_ROWS, FeatureSpec
from heterps_core.data.schema import DataSchema
from heterps_core.device_types import OWN_DEVICE_TYPES, get_device_type, hardware_of
from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.hardware import DeviceKind
from heterps_core.models import CTR_MODELS
from heterps_core.models.model_graph import ModelGraph
from heterps_core.planning.calibration import Calibration
from heterps_core.planning.problem.problem_builder import profiles_for_larger_tables
from heterps_core.profiling.device_profile import DeviceProfile, DeviceProfileCache, without_dataset
from heterps_core.profiling.layer_profile import LayerProfile
from heterps_core.profiling.measuring_process import ProfileRequest, measure_in_fresh_process
from heterps_core.profiling.profile_cache import local_profiles, with_estimates
from heterps_core.profiling.replica_path import ReplicaPath
from heterps_core.training.job import PRODUCTION_ROWS_PER_SLOT, default_batch_size, default_microbatches
from infra.workspace import Workspace
from tasks.data import PreparedClicks
from tasks.records.past_runs import readable_past
from tasks.running.progress import log_step
from tasks.steps import step

_MOST_NAMES = 6
"""Device types that a line names one by one."""

_MOST_RUNS = 90
"""Past runs to learn from: about a season of nights, of any model and machines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """The job that a plan is made for.

    It has the rows of the data, unless a dry run stands for a job that this machine could not hold: the samples of a
    larger night, and tables of the size of production.
    """

    num_samples: int
    """Rows of one epoch."""

    features: FeatureSpec
    """Columns and table sizes."""

    batch_size: int

    evaluated_share: float
    """Rows that are held out, over those of an epoch."""

    decoded_share: float = 0.0
    """Share of the rows of an epoch whose row groups are not in memory."""

    starts_from_model: bool = False
    """Its tables come from the bucket; otherwise they are drawn."""


def planned_job(
    dataset: PreparedDataset,
    *,
    is_dry_run: bool,
    batch_size: int | None,
    planned_samples: int | None,
    planned_rows_per_slot: int | None,
    max_samples: int | None = None,
) -> PlannedJob:
    """Return the job that a plan is made for; `None` stands for what the data has, or for a larger night's tables."""
    all_samples = planned_samples if is_dry_run and planned_samples else dataset.num_train_rows
    num_samples = min(all_samples, max_samples or all_samples)
    features = dataset.features
    if planned_rows_per_slot is None and planned_samples is not None:
        planned_rows_per_slot = PRODUCTION_ROWS_PER_SLOT
    if is_dry_run and planned_rows_per_slot:
        features = dataset.manifest.schema.features((planned_rows_per_slot,) * features.num_slots)
    batch_size = batch_size or default_batch_size(num_samples)
    return PlannedJob(
        num_samples=num_samples,
        features=features,
        batch_size=batch_size,
        decoded_share=dataset.decoded_share(num_samples, batch_size=batch_size),
        evaluated_share=dataset.num_eval_rows / dataset.num_train_rows * all_samples / num_samples,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledModel:
    """A model's graph with a profile for each device type, at the size of the data and of the planned job."""

    graph: ModelGraph
    """With the tables of the data at hand."""

    local_profile: LayerProfile
    """Profile of this machine, measured at the rows that a dry run trains at once; see `dry_run_request`."""

    planned_graph: ModelGraph
    """With the tables of the planned job."""

    profiles: Mapping[str, LayerProfile]
    """For the planned graph, at the micro-batches of the planned job."""

    planned_request: ProfileRequest
    """The request of `profiles`, with the tables of the data at hand."""

    measured: Mapping[str, DeviceProfile] = field(default_factory=dict)
    """Device types of `profiles` that such a machine was rented for, which still counts."""

    @property
    def estimated_device_types(self) -> tuple[str, ...]:
        """Device types whose times are a roofline and not a measurement."""
        return tuple(name for name, profile in self.profiles.items() if profile.is_estimated)

    @property
    def summary(self) -> str:
        """One line on the measured and the estimated device types."""
        measured = "".join(f"; {name} {kept}" for name, kept in self.measured.items())
        estimated = ", ".join(self.estimated_device_types) or "none"
        if len(self.estimated_device_types) > _MOST_NAMES:
            estimated = f"{len(self.estimated_device_types)} device types"
        busy = self.local_profile.busy_text
        return (
            f"{len(self.graph.layers)} layers of {self.graph.name} measured on {self.local_profile.hardware}"
            f"{measured}; estimated for {estimated}{self._general_path}{f'; {busy}' if busy else ''}"
        )

    @property
    def _general_path(self) -> str:
        """Layers that the trainer does not fuse, with their share of the time."""
        profile = self.local_profile
        if not profile.general_layers:
            return ""
        return f"; not fused: {', '.join(profile.general_layers)}, {profile.general_share:.0%} of the time"

    def profiling_usd(self, run_id: str) -> float:
        """Return the cost of the measurements that no other run has paid.

        The first run on rented machines that plans with a measurement bears all of its cost, so that the costs of
        runs add up to what was spent; a dry run shows what that run would bear.
        """
        kept = {profile.device_type: profile for profile in self.measured.values()}
        return sum(profile.cost_usd for profile in kept.values() if profile.charged_to in (None, run_id))


def check_model_name(model: str) -> None:
    """Check that a model is registered or an import path whose package is there, without loading torch.

    Raises:
        UnknownNameError: It is neither registered nor an import path.
        ConfigurationError: Its package is not there.
    """
    if model in CTR_MODELS:
        return
    module_name, _, function_name = model.partition(":")
    package = module_name.partition(".")[0]
    if not (package and function_name):
        raise UnknownNameError("model", model, [*CTR_MODELS, "package.module:function"])
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ConfigurationError(
            f"the model {model!r} must name a function as package.module:function, but there is no {package!r}; "
            "is its folder on PYTHONPATH?"
        )


def check_model(model: str, schema: DataSchema) -> None:
    """Check that a model can be built for the columns of the data, with small tables; loads torch.

    Raises:
        UnknownNameError, ConfigurationError: It cannot; see `heterps_core.models.chain.build_chain`.
    """
    from heterps_core.models.chain import build_chain

    chain = build_chain(model, schema.features([MIN_SLOT_ROWS] * len(schema.slot_columns)), seed=0)
    names = [
        name.rpartition(".")[2]
        for name, module in chain.named_modules()
        if type(module).__name__.startswith("BatchNorm")
    ]
    if names:
        log_step(
            "model",
            f"{', '.join(names)} will normalize each replica's rows of a micro-batch by their own mean and variance, "
            f"not the batch's: what is learned follows the plan; torch.nn.LayerNorm depends on no other row",
        )


@step("profile layers")
def profile_layers(
    workspace: Workspace,
    clicks: PreparedClicks,
    job: PlannedJob,
    *,
    model: str,
    batch_size: int,
    device_types: Sequence[str],
    trained_with: Mapping[str, Any] = MappingProxyType({}),
    is_here: bool = False,
) -> ProfiledModel:
    """Time each layer alone on this machine, and estimate the device types that are not at hand.

    Where it is trained on this machine (`is_here`), its own cores have the times of what a single stage trains at
    once, its cards are measured as well, and replicas exchange rows as those of a dry run do.

    The profiling batch is a micro-batch, which is what is trained at once: that of the data for the dry run, and
    that of the planned job for the plan, since small batches cost more for each sample, most of all on a GPU.
    `trained_with` has further values of the `ProfileRequest`, so that the profiler measures the trained model.

    Raises:
        UnknownNameError, ConfigurationError: The model or a device type cannot be used.
    """
    from heterps_core.profiling.measurement.layer_profiler import trace_model

    cache = workspace.profiles_directory
    known_as = clicks.profiled_as
    request = _profile_request(
        clicks.open(), model=model, batch_size=batch_size, known_as=known_as, **trained_with
    )
    graph = trace_model(request)
    planned_graph = trace_model(replace(request, features=job.features))
    large_request = replace(request, batch_size=_rows_of_microbatch(job.batch_size))
    if is_here:
        large_request = dry_run_request(large_request, job.batch_size)
    requests = (large_request if is_here else dry_run_request(request, batch_size), large_request)
    local_profile, large_profile = local_profiles(
        requests, graph, cache_directory=cache, has_replica_path=not is_here
    )
    profiles = with_estimates(graph, large_profile, device_types)
    if is_here:
        profiles |= _profiles_here(workspace, large_request, graph, large_profile, device_types)
    measured = _measured_device_types(workspace, large_request, graph, device_types)
    for name in device_types:
        kept = measured.get(name) or _measured_sibling(measured, name)
        if kept is not None:
            profiles[name] = kept.in_place_of(profiles[name])
    return ProfiledModel(
        graph=graph,
        local_profile=local_profile,
        planned_graph=planned_graph,
        profiles=profiles_for_larger_tables(profiles, measured=graph, planned=planned_graph),
        planned_request=large_request,
        measured=measured,
    )


def _profiles_here(
    workspace: Workspace,
    request: ProfileRequest,
    graph: ModelGraph,
    measured: LayerProfile,
    device_types: Sequence[str],
) -> dict[str, LayerProfile]:
    """Return the profile of this machine's cores, whose workers share memory; cards are measured where none is."""
    known = _measured_device_types(workspace, request, graph, device_types)
    profiles = {}
    exchange = measured.memory_sum
    path = ReplicaPath(
        message_seconds=0.0,
        peer_seconds=exchange.peer_seconds,
        table_seconds=2 * exchange.peer_seconds,
        byte_seconds=exchange.byte_seconds,
        relative_error=1.0,
    )
    for hardware in map(get_device_type, device_types):
        if hardware.name not in OWN_DEVICE_TYPES:
            continue
        if hardware.kind is DeviceKind.CPU:
            profiles[hardware.name] = replace(
                measured,
                device_type=hardware.name,
                measured_replica_path=path,
                network_boundary=measured.memory_boundary,
                network_sum=measured.memory_sum,
            )
        elif hardware.name not in known:
            (profile,) = measure_in_fresh_process(replace(without_dataset(request), device="cuda"))
            card = DeviceProfile(
                device_type=hardware.name,
                instance_type=hardware.instance_families[0],
                is_dry_run=False,
                profile=profile,
            )
            DeviceProfileCache(workspace.profiles_directory).keep(request, graph, card)
    return profiles


def _measured_device_types(
    workspace: Workspace, request: ProfileRequest, graph: ModelGraph, device_types: Sequence[str]
) -> dict[str, DeviceProfile]:
    """Return the device types with a kept measurement of the same model, batch size and software, not expired."""
    cache, now = DeviceProfileCache(workspace.profiles_directory), datetime.now(UTC)
    found = {name: cache.find(request, graph, device_type=name, now=now) for name in device_types}
    return {name: kept for name, kept in found.items() if kept is not None}


def _measured_sibling(measured: Mapping[str, DeviceProfile], name: str) -> DeviceProfile | None:
    """Return a measurement of another device type with the same processor or card, scaled by the peaks of the two."""
    kept = next((kept for other, kept in measured.items() if hardware_of(other) == hardware_of(name)), None)
    if kept is None:
        return None
    factor = (
        get_device_type(kept.device_type).peak_fp32_flops_per_s / get_device_type(name).peak_fp32_flops_per_s
    )
    return replace(kept, profile=kept.profile.scaled(factor))


def charge_measurements(workspace: Workspace, profiled: ProfiledModel, *, run_id: str) -> None:
    """Record that a run on rented machines bears the cost of the measurements that no other run has paid."""
    cache = DeviceProfileCache(workspace.profiles_directory)
    for kept in profiled.measured.values():
        if kept.charged_to is None:
            cache.keep(profiled.planned_request, profiled.graph, replace(kept, charged_to=run_id))


def _profile_request(
    dataset: PreparedDataset, *, model: str, batch_size: int, known_as: str = "", **others: Any
) -> ProfileRequest:
    """Return what to measure for training in batches of a size; `known_as` as `PreparedClicks.profiled_as`.

    Other fields of the request have the values of `others`.
    """
    return ProfileRequest(
        model=model,
        features=dataset.features,
        batch_size=_rows_of_microbatch(batch_size),
        dataset=str(dataset.directory),
        mean_lengths=dataset.manifest.mean_lengths,
        rows_per_list=dataset.manifest.rows_per_list,
        dataset_fingerprint=known_as or dataset.manifest.fingerprint,
        **others,
    )


def dry_run_request(request: ProfileRequest, batch_size: int) -> ProfileRequest:
    """Return the request for a dry run, from that of a micro-batch of two stages.

    Its half is that micro-batch, and where a batch has two of them it is what a single stage trains at once: times in
    between follow from both, where from smaller batches the noise of either would be doubled.
    """
    return replace(request, batch_size=min(2 * request.batch_size, batch_size))


def _rows_of_microbatch(batch_size: int) -> int:
    """Return the rows of a micro-batch in a pipeline of two stages or more."""
    return batch_size // default_microbatches(batch_size, num_stages=2)


@step("learn from past runs")
def learn_from_runs(workspace: Workspace, *, run_id: str) -> Calibration:
    """Read the speeds of past runs from the record; `run_id` itself, which may be resumed, is left out."""
    past = readable_past(workspace, most=_MOST_RUNS)
    speeds = [run.speed for run in past if run.run_id != run_id]
    return Calibration(tuple(speed for speed in speeds if speed is not None))
