"""What a dry run on this machine should reach: the same cut, replicas as few as there are cores.

The plan's device types are not at hand, so a dry run is predicted from the profile of this machine alone and
compared with that, never with the plan's own figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heterps_core.errors import ConfigurationError
from heterps_core.models.model_graph import Layer, ModelGraph
from heterps_core.planning.cost_model.evaluation import PlanEvaluation, evaluate
from heterps_core.planning.problem.scheduling_problem import (
    LayerCosts,
    SchedulingProblem,
    StepModel,
    UnitType,
)
from heterps_core.plans.scheduling_plan import Stage, check_stages_cover_chain
from heterps_core.profiling.layer_profile import LayerProfile
from heterps_core.training.job import MOST_IN_ONE_TABLE
from heterps_core.units import MS_PER_S

PRICE_USD_PER_HOUR = 1.0
"""A dry run's price is not predicted, but the contract wants a positive one."""

UNLIMITED = 1e18
"""Bytes, or bytes/s. The dry run runs in the memory that there is; that it fits was not planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunPrediction:
    """Predicted speed of a dry run."""

    evaluation: PlanEvaluation
    """As if each worker had a core of its own."""

    work_seconds: float
    """Processor time of a training step, of all workers together."""

    step_seconds: float
    """Time of a training step on this machine; see `predict_dry_run`."""


def predict_dry_run(
    graph: ModelGraph,
    profile: LayerProfile,
    stages: Sequence[Stage],
    *,
    batch_size: int,
    num_microbatches: int,
    num_cores: int,
    drains: bool = True,
    decoded_share: float = 0.0,
) -> DryRunPrediction:
    r"""Predict the speed of a dry run, one worker with one core for each replica.

    The trainer's step of the planner, simulated (`pipeline_simulation.py`), or where workers share cores

    .. math:: \frac{1}{n} \sum_s k_s (XT_s + CT_s)

    with k_s replicas and n cores, whichever is longer. Ignored: that replicas wait for the slowest of them at every
    exchange, which makes the measured throughput the lower one.

    Args:
        profile: Measured on this machine, with the micro-batch as its batch where possible.
        stages: The dry-run cut and replica counts; their device types do not matter.
        drains: Updates are not delayed.
        decoded_share: Share of the rows whose row groups are not in memory.

    Raises:
        ConfigurationError: The stages do not cover the chain, the profile is of another model, or a count is
            below 1.
    """
    for name, count in (("num_microbatches", num_microbatches), ("num_cores", num_cores)):
        if count < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {count}")
    problem, renamed = dry_run_problem(
        graph,
        profile,
        stages,
        batch_size=batch_size,
        num_microbatches=num_microbatches,
        drains=drains,
        decoded_share=decoded_share,
    )
    evaluation = evaluate(problem, renamed, num_microbatches=num_microbatches)
    work_seconds = sum(
        part.stage.num_replicas * (part.exchange_seconds + part.compute_seconds) for part in evaluation.stages
    )
    return DryRunPrediction(
        evaluation=evaluation,
        work_seconds=work_seconds,
        step_seconds=max(batch_size / evaluation.throughput_samples_per_s, work_seconds / num_cores),
    )


def dry_run_problem(
    graph: ModelGraph,
    profile: LayerProfile,
    stages: Sequence[Stage],
    *,
    batch_size: int,
    num_microbatches: int,
    drains: bool = True,
    decoded_share: float = 0.0,
) -> tuple[SchedulingProblem, tuple[Stage, ...]]:
    """Return a dry run as a planning problem of its own, and its stages with that problem's device types.

    Each stage becomes a device type "<name>-stage-<i>", as the messages of a table cost each replica more where its
    stage has more of them. Replica counts are known here, so computing is exact: an alpha of 1 divides it by k, and
    each layer's seconds are k times those of one replica. What crosses between stages and among replicas lies in
    memory, which costs processor time alone; above `MOST_IN_ONE_TABLE` replicas exchange rows by messages.

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
    crowding = profile.crowding if sum(stage.num_replicas for stage in stages) > 1 else 1.0
    replicas = [each.num_replicas for each in stages for _ in range(each.first_layer, each.last_layer + 1)]
    reading_seconds = profile.reading.seconds(
        profile.batch_size,
        num_batches=stages[0].num_replicas * profile.update_share(batch_size),
        decoded_share=decoded_share,
    )
    layers = tuple(
        LayerCosts(
            name=layer.name,
            kind=layer.kind.value,
            is_sharded=layer.is_sharded,
            state_bytes=layer.state_bytes,
            output_bytes_per_sample=layer.output_bytes_per_sample,
            compute_seconds=dict.fromkeys(
                names,
                crowding
                * _nominal_compute_seconds(
                    profile,
                    index,
                    num_replicas=replicas[index],
                    batch_size=batch_size,
                    num_microbatches=num_microbatches,
                )
                + reading_seconds * (index == 0),
            ),
            communication_seconds=dict.fromkeys(names, 0.0),
            exchanged_bytes=profile.timings[index].exchanged_bytes
            if layer.is_sharded and replicas[index] > MOST_IN_ONE_TABLE
            else _shared_bytes(layer, profile.batch_size),
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
                memory_bytes=UNLIMITED,
                bandwidth_bytes_per_s=UNLIMITED,
                compute_parallel_fraction=1.0,
                communication_parallel_fraction=1.0,
                **_exchange_terms(profile, stage.num_replicas),
                sum_seconds_per_peer=profile.memory_sum.peer_seconds,
                sum_seconds_per_byte=profile.memory_sum.byte_seconds,
                boundary_seconds=profile.memory_boundary.microbatch_seconds,
                boundary_seconds_per_byte=profile.memory_boundary.byte_seconds,
                later_reading_seconds=profile.reading.batch_ms / MS_PER_S,
                later_reading_seconds_per_sample=profile.reading.row_ms / MS_PER_S,
            )
            for name, stage in zip(names, stages, strict=True)
        },
        single_replica_communicates=False,
        step_model=StepModel.TRAINER,
        drains=drains,
    )
    renamed = tuple(stage.on({name: stage.num_replicas}) for stage, name in zip(stages, names, strict=True))
    return problem, renamed


def _exchange_terms(profile: LayerProfile, num_replicas: int) -> dict[str, Any]:
    """Return what the exchange of rows costs each of some replicas of one machine, as fields of a unit type."""
    if num_replicas > MOST_IN_ONE_TABLE:
        return profile.replica_path.exchange_seconds()
    # The updates of a table begin and end with a message to all, as the sum of gradients does.
    peer_seconds, byte_seconds = profile.memory_sum.peer_seconds, profile.memory_sum.byte_seconds
    return {
        "exchange_seconds_per_table": 2 * (num_replicas - 1) * peer_seconds,
        "exchange_seconds_per_byte": byte_seconds,
    }


def _shared_bytes(layer: Layer, num_samples: int) -> float:
    """Return the bytes that replicas write for each other: row indices with gradients of rows, or dense gradients."""
    if not layer.is_sharded:
        return layer.parameter_bytes
    return num_samples * (layer.input_bytes_per_sample + layer.looked_up_bytes_per_sample)


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
    timing = profile.timings[layer]
    milliseconds = (
        (0.0 if timing.is_sharded else timing.update.median_ms)
        + num_microbatches * per_microbatch
        + batch_size / num_replicas * per_sample
    )
    return num_replicas * profile.update_share(batch_size) * milliseconds / MS_PER_S
