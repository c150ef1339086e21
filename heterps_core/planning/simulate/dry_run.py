"""What a dry run on this machine should reach: the same cut, replicas as few as there are cores.

The plan's device types are not at hand, so a dry run is predicted from the profile of this machine alone and
compared with that, never with the plan's own figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heterps_core.errors import ConfigurationError
from heterps_core.models.model_graph import ModelGraph
from heterps_core.planning.cost_model.evaluation import PlanEvaluation, evaluate
from heterps_core.planning.problem.problem_builder import ROUND_TRIP_MESSAGES
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem, UnitType
from heterps_core.plans.scheduling_plan import Stage, check_stages_cover_chain
from heterps_core.profiling.layer_profile import LayerProfile
from heterps_core.units import MS_PER_S

PRICE_USD_PER_HOUR = 1.0
"""A dry run's price is not predicted, but the contract wants a positive one."""

UNLIMITED_BYTES = 1e18
"""The dry run runs in the memory that there is; that it fits was not planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunPrediction:
    """Predicted speed of a dry run."""

    evaluation: PlanEvaluation
    """By the planner's cost model alone: a stage takes the longer of computing and communicating, and stages
    never wait for one another."""

    step_seconds: float
    """Time of a training step on this machine, with what the cost model leaves out; see `predict_dry_run`."""


def predict_dry_run(
    graph: ModelGraph,
    profile: LayerProfile,
    stages: Sequence[Stage],
    *,
    batch_size: int,
    num_microbatches: int,
    num_cores: int,
    drains: bool = True,
) -> DryRunPrediction:
    r"""Predict the speed of a dry run, one worker with one core for each replica.

    The cost model's times of a stage, CT and DT for a batch, become the time of a step by

    .. math:: T = \max\Big(\frac{1}{m} \sum_s S_s + \frac{m - 1}{m} \max_s S_s,\;
              \frac{1}{n} \sum_s k_s CT_s\Big), \quad S_s = CT_s + DT_s

    with m micro-batches, k_s replicas and n cores. S_s is a sum, and not the cost model's maximum, because a
    worker on CPU computes and communicates one after the other. The first term is a pipeline that fills and
    drains in every step; with delayed updates it does neither, and max_s S_s stands in its place. The second holds
    where workers share cores. Messages inside a stage take the time that the profile found between workers that
    compute. Ignored: that replicas wait for the slowest of them at every exchange, the latency at boundaries, and
    reading the batch. All three make the measured throughput the lower one.

    Args:
        profile: Measured on this machine, with the micro-batch as its batch where possible.
        stages: The dry-run cut and replica counts; their device types do not matter.

    Raises:
        ConfigurationError: The stages do not cover the chain, the profile is of another model, or a count is
            below 1.
    """
    for name, count in (("num_microbatches", num_microbatches), ("num_cores", num_cores)):
        if count < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {count}")
    problem, renamed = dry_run_problem(
        graph, profile, stages, batch_size=batch_size, num_microbatches=num_microbatches
    )
    evaluation = evaluate(problem, renamed)
    stage_seconds = [part.compute_seconds + part.communication_seconds for part in evaluation.stages]
    step_seconds = max(stage_seconds)
    if drains:
        step_seconds += (sum(stage_seconds) - step_seconds) / num_microbatches
    work_seconds = sum(part.stage.num_replicas * part.compute_seconds for part in evaluation.stages)
    return DryRunPrediction(
        evaluation=evaluation,
        step_seconds=max(step_seconds, work_seconds / num_cores),
    )


def dry_run_problem(
    graph: ModelGraph,
    profile: LayerProfile,
    stages: Sequence[Stage],
    *,
    batch_size: int,
    num_microbatches: int,
) -> tuple[SchedulingProblem, tuple[Stage, ...]]:
    """Return a dry run as a planning problem of its own, and its stages with that problem's device types.

    Each stage becomes a device type "<name>-stage-<i>", so that neighbours differ in type, as the contract asks.
    Replica counts are known here, so computing and in-stage communication are exact: an alpha and a beta of 1 divide
    them by k, and each layer's seconds are k times those of one replica.

    Raises:
        ConfigurationError: See `predict_dry_run`.
    """
    check_stages_cover_chain(stages, len(graph.layers))
    if profile.graph_fingerprint != graph.fingerprint():
        raise ConfigurationError(
            f"a dry run of {graph.name!r} must be predicted from its own profile, got one of "
            f"{profile.model!r} with other sizes; profile it again"
        )
    names = [f"{profile.device_type}-stage-{index}" for index in range(len(stages))]
    replicas = [each.num_replicas for each in stages for _ in range(each.first_layer, each.last_layer + 1)]
    last_layers = {stage.last_layer for stage in stages}
    layers = tuple(
        LayerCosts(
            name=layer.name,
            kind=layer.kind.value,
            is_sharded=layer.is_sharded,
            state_bytes=layer.state_bytes,
            output_bytes_per_sample=layer.output_bytes_per_sample,
            compute_seconds=dict.fromkeys(
                names,
                _nominal_compute_seconds(
                    profile,
                    index,
                    num_replicas=replicas[index],
                    batch_size=batch_size,
                    num_microbatches=num_microbatches,
                ),
            ),
            communication_seconds=dict.fromkeys(
                names,
                _nominal_seconds(
                    profile,
                    index,
                    num_replicas=replicas[index],
                    ends_stage=index in last_layers,
                    batch_size=batch_size,
                ),
            ),
        )
        for index, layer in enumerate(graph.layers)
    )
    problem = SchedulingProblem(
        model=graph.name,
        batch_size=batch_size,
        profile_batch_size=profile.batch_size,
        num_samples=batch_size,
        num_epochs=1,
        throughput_floor_samples_per_s=0.0,
        layers=layers,
        device_types={
            name: UnitType(
                price_usd_per_hour=PRICE_USD_PER_HOUR,
                max_units=stage.num_replicas,
                memory_bytes=UNLIMITED_BYTES,
                bandwidth_bytes_per_s=profile.boundary_link.bandwidth_bytes_per_s,
                compute_parallel_fraction=1.0,
                communication_parallel_fraction=1.0,
            )
            for name, stage in zip(names, stages, strict=True)
        },
    )
    renamed = tuple(replace(stage, device_type=name) for stage, name in zip(stages, names, strict=True))
    return problem, renamed


def _nominal_compute_seconds(
    profile: LayerProfile, layer: int, *, num_replicas: int, batch_size: int, num_microbatches: int
) -> float:
    r"""Return k times what one of k replicas computes for B_o of the B samples of a training batch.

    .. math:: \frac{k B_o}{B} \Big(U + m F + \frac{B}{k} V\Big)

    with m micro-batches, V the seconds of a sample and F those of a micro-batch of any size, from the times at B_o
    and at half of it, and U what is done once a training batch.
    """
    whole, half = (
        timings[layer].compute_ms(update_share=0.0)
        for timings in (profile.timings, profile.half_batch_timings)
    )
    per_sample = (whole - half) / (profile.batch_size - profile.half_batch_size)
    per_sample = min(max(per_sample, 0.0), whole / profile.batch_size)
    per_microbatch = whole - per_sample * profile.batch_size
    milliseconds = (
        profile.timings[layer].once_ms
        + num_microbatches * per_microbatch
        + batch_size / num_replicas * per_sample
    )
    return num_replicas * profile.update_share(batch_size) * milliseconds / MS_PER_S


def _nominal_seconds(
    profile: LayerProfile,
    layer: int,
    *,
    num_replicas: int,
    ends_stage: bool,
    batch_size: int,
) -> float:
    """Return k times the in-stage communication of one of k replicas for B_o samples; 0 for one.

    A replica looks up 1/k of the rows, of which (k - 1)/k lie elsewhere, in four messages a step. A ring moves
    2 (k - 1)/k |W| bytes, in one message a step that is charged to the last layer of the stage.
    """
    if num_replicas == 1:
        return 0.0
    timing = profile.timings[layer]
    elsewhere = (num_replicas - 1) / num_replicas
    if timing.is_sharded:
        exchanged_bytes = elsewhere * timing.exchanged_bytes / num_replicas
        seconds = exchanged_bytes / profile.exchange_link.bandwidth_bytes_per_s
        seconds += profile.update_share(batch_size) * ROUND_TRIP_MESSAGES * profile.busy_message_seconds
    else:
        seconds = profile.update_share(batch_size) * elsewhere * profile.all_reduce_seconds(layer)
    if ends_stage:
        seconds += profile.update_share(batch_size) * profile.busy_message_seconds
    return num_replicas * seconds
