"""What each replica of a pipeline does for a micro-batch: seconds of computing, and seconds on its link.

A planning problem knows a stage by two numbers, CT and DT. Here they are taken apart into passes, messages,
exchanges and an all-reduce, in such a way that they add up to CT and DT again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterps_core.errors import ConfigurationError
from heterps_core.models.model_graph import LayerKind
from heterps_core.planning.cost_model.mixed_stage import PlanParts
from heterps_core.planning.cost_model.step_model import FORWARD_SHARE, WEIGHT_GRADIENT_SHARE
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.plans.scheduling_plan import Stage, check_stages_cover_chain
from heterps_core.units import ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoad:
    """What one replica of a stage does, for a micro-batch of mean size unless it says otherwise.

    A link has two lanes, in and out, each with half of the link's bandwidth: the planning contract charges both
    directions to one bandwidth, and what a replica sends forward comes back as gradients. So each lane is busy
    for DT in every batch.
    """

    num_replicas: int
    forward_seconds: float
    backward_seconds: float
    """Work that must be done before gradients go on to the stage before."""

    weight_gradient_seconds: float
    """Work that fills the time without messages, and at the latest the end of a step."""

    compute_row_share: float
    """Share of all three that grows with the rows of a slice, in [0, 1]; the rest is fixed."""

    input_seconds: float
    """The slice's rows across the boundary with the stage before, in one direction, on one lane; 0 for the first
    stage."""

    output_seconds: float
    """The same with the next stage; 0 for the last."""

    exchange_seconds: float
    """All replicas of the stage together pull rows of embeddings before the forward pass (on the lanes in) and
    push gradients after the backward pass (on the lanes out): the time of either."""

    all_reduce_seconds: float
    """Time of the sum of dense gradients, for a whole batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineLoad:
    """The load of all stages, in order."""

    batch_size: int
    num_microbatches: int
    stages: tuple[StageLoad, ...]
    drains: bool = True
    """At the end of each step; otherwise updates are delayed, see `simulate`."""

    stops_to_exchange: bool = False
    """Workers exchange rows before and after passes; otherwise links do, beside the passes."""

    beside_seconds: float = 0.0
    """The longest time of a stage for what is done for a batch beside its passes: reading rows, or a batch's share of
    a pass over its file of table rows."""


def pipeline_load(
    problem: SchedulingProblem,
    stages: Sequence[Stage],
    *,
    num_microbatches: int,
) -> PipelineLoad:
    """Take the times of a plan's stages apart.

    CT of a stage, for one of its k replicas and a whole batch, is divided evenly among m micro-batches. Boundaries,
    the exchange of sharded layers and the all-reduce of the others each have a term of the trainer's step
    (`step_model.py`), in a step that drains too. A plain contract, in which a single replica communicates, gives
    only DT, which is divided among them in proportion to their shares of ODT.

    Args:
        num_microbatches: m, in 1..B.

    Raises:
        ConfigurationError: The stages do not cover the chain, or a number is out of its range.
    """
    check_stages_cover_chain(stages, problem.num_layers)
    if not 1 <= num_microbatches <= problem.batch_size:
        raise ConfigurationError(
            f"a batch of {problem.batch_size} rows must be cut into 1 to {problem.batch_size} micro-batches, "
            f"got {num_microbatches}"
        )
    drains = problem.drains or problem.step_model is StepModel.PAPERS
    if not problem.single_replica_communicates and problem.step_model is not StepModel.TRAINER:
        problem = replace(problem, step_model=StepModel.TRAINER)
    of_types = PlanParts.of(problem, stages, num_microbatches=num_microbatches)
    replicas = of_types.replicas
    table, sweeps = of_types.table.sweeping(
        np.where(of_types.in_stage > 0, np.inf, replicas), problem.hot_shares
    )
    # A replica with the mean number of rows; the rows of others count in the durations of their slices. All replicas
    # exchange for as long as the one with most rows. With two device types all are as slow as those of the slower.
    means, slowest = of_types.terms(table, replicas), of_types.terms(table, table.pacing(replicas))
    seconds = np.stack(np.broadcast_arrays(*means._replace(exchange=slowest.exchange)), axis=1)
    # Twice the replicas save half of the part that grows with the rows.
    with_rows = 2 * (means.compute - of_types.terms(table, 2 * replicas).compute)
    parts = of_types.slowest(slowest.total).tolist()
    return PipelineLoad(
        batch_size=problem.batch_size,
        num_microbatches=num_microbatches,
        stages=tuple(
            _stage_load(
                problem,
                stage.on({of_types.parts[part].device_type: stage.num_replicas}),
                seconds[part].tolist(),
                float(with_rows[part]),
                num_microbatches,
            )
            for stage, part in zip(stages, parts, strict=True)
        ),
        drains=drains,
        stops_to_exchange=problem.step_model is StepModel.TRAINER,
        beside_seconds=max(
            [float(np.max(slowest.reading)), *(sweep.seconds for sweep in sweeps if sweep is not None)]
        ),
    )


def _stage_load(
    problem: SchedulingProblem,
    stage: Stage,
    terms: Sequence[float],
    row_seconds: float,
    num_microbatches: int,
) -> StageLoad:
    layers = problem.layers[stage.first_layer : stage.last_layer + 1]
    cut_bytes = [
        problem.layers[stage.first_layer - 1].output_bytes_per_sample if stage.first_layer else 0.0,
        layers[-1].output_bytes_per_sample if stage.last_layer < problem.num_layers - 1 else 0.0,
    ]
    compute, exchange, across, all_reduce_seconds, *_ = terms
    boundary_seconds = across
    # Rows are pulled and gradients pushed one after the other.
    pull_seconds = exchange / 2
    if problem.step_model is StepModel.PAPERS:
        bandwidth = problem.device_types[stage.device_type].bandwidth_bytes_per_s
        across_odt = 2 * problem.profile_batch_size * sum(cut_bytes) / bandwidth
        exchange_odt, all_reduce_odt = (
            sum(
                layer.communication_seconds[stage.device_type]
                for layer in layers
                if layer.is_sharded is sharded
            )
            for sharded in (True, False)
        )
        share = ratio(across, across_odt + exchange_odt + all_reduce_odt, otherwise=0.0)
        boundary_seconds, pull_seconds, all_reduce_seconds = (
            share * odt for odt in (across_odt, exchange_odt, all_reduce_odt)
        )
    input_seconds, output_seconds = (
        ratio(boundary_seconds * each, sum(cut_bytes), otherwise=0.0) / num_microbatches for each in cut_bytes
    )
    compute_seconds = compute / num_microbatches
    layer_seconds = sum(layer.compute_seconds[stage.device_type] for layer in layers)
    connected_seconds = sum(
        layer.compute_seconds[stage.device_type]
        for layer in layers
        if layer.kind == LayerKind.FULLY_CONNECTED
    )
    weight_share = ratio(connected_seconds, layer_seconds, otherwise=0.0) * WEIGHT_GRADIENT_SHARE
    return StageLoad(
        num_replicas=stage.num_replicas,
        forward_seconds=FORWARD_SHARE * compute_seconds,
        backward_seconds=(1 - FORWARD_SHARE - weight_share) * compute_seconds,
        weight_gradient_seconds=weight_share * compute_seconds,
        compute_row_share=ratio(row_seconds, compute, otherwise=0.0),
        input_seconds=input_seconds,
        output_seconds=output_seconds,
        exchange_seconds=pull_seconds / num_microbatches,
        all_reduce_seconds=all_reduce_seconds,
    )
