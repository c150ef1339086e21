r"""Two models of a training step: the papers' closed form, and the step that the trainer takes.

Both take the longest time of a stage for the time of a step. `papers` is the formula of the planning contract,

    ET(k) = max(CT(k), DT(k)),   CT(k) = OCT s (1 - alpha + alpha / k),   DT(k) = ODT s (1 - beta + beta / k)

with s = B / B_o. `trainer` is the pipeline with delayed updates (`training/pipeline/stage_runner.py`), which does
not drain between steps. A worker exchanges embedding rows with nothing else beside; what crosses the stage's
boundaries and the sum of a batch's gradients travel while it computes:

    ET(k) = XT(k) + max(CT(k), YT(k) + AT(k))
    CT(k) = OCT (m (1 - alpha) + alpha s / k)
    YT(k) = Y s / k
    XT(k) = (k - 1) / k  E (m (1 - beta) + beta s / k)
    AT(k) = (k - 1) / k  A s

with m micro-batches, Y the boundaries' share of ODT, E that of sharded layers (the exchange) and A that of the others
(the all-reduce, once a step); the shares 1 - alpha and 1 - beta are fixed costs of each micro-batch, which the papers
count B / B_o times. What crosses boundaries belongs to rows alone; of the exchange, rows that several samples look up
are what does not shrink. The factor (k - 1) / k, what of a replica's traffic goes to another one, is left out where a
problem says that a single replica communicates. Replicas have whole rows of a micro-batch, and the one with most of
them sets the pace: k stands for R / ceil(R / k), with R = B / m.

A pipeline of S stages does not wait for itself where each stage is `WARMUP_PER_STAGE` micro-batches ahead of the one
behind it, and the first at most a batch ahead: with 4 (S - 1) micro-batches. Fewer cost less, so m is the least
divisor of B that is enough. Over 100 drawn plans of 1 to 5 stages the simulated step is 0.02 % longer in one of ten
and 0.5 % in the worst (docs/LOG.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from heterps_core.planning.cost_model.stage_cost import boundary_seconds, replicated_seconds
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel, UnitType
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import default_microbatches, delayed_microbatches


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTerms:
    """What a time of a profiling batch becomes with k replicas: time * scale * (1 - fraction + fraction / k)."""

    compute_scale: float
    compute_fraction: float
    communication_scale: float
    communication_fraction: float
    boundary_scale: float
    boundary_fraction: float


def step_terms(problem: SchedulingProblem, unit: UnitType, num_microbatches: int) -> StepTerms:
    """Return the terms of a step; `num_microbatches` matters for the trainer's alone."""
    scale = problem.batch_size / problem.profile_batch_size
    alpha, beta = unit.compute_parallel_fraction, unit.communication_parallel_fraction
    if problem.step_model is StepModel.PAPERS:
        return StepTerms(
            compute_scale=scale,
            compute_fraction=alpha,
            communication_scale=scale,
            communication_fraction=beta,
            boundary_scale=scale,
            boundary_fraction=beta,
        )
    compute_scale, communication_scale = (
        num_microbatches * (1 - fraction) + fraction * scale for fraction in (alpha, beta)
    )
    return StepTerms(
        compute_scale=compute_scale,
        compute_fraction=alpha * scale / compute_scale,
        communication_scale=communication_scale,
        communication_fraction=beta * scale / communication_scale,
        boundary_scale=scale,
        boundary_fraction=1.0,
    )


class StageSeconds(NamedTuple):
    """Times of a stage for one training batch, by the terms of the formulas above."""

    compute: float
    """CT."""

    exchange: float
    """XT; 0 in the papers' model."""

    across: float
    """YT; DT in the papers' model."""

    gradient_sum: float
    """AT; 0 in the papers' model."""


def stage_seconds(
    problem: SchedulingProblem, stage: Stage, *, num_microbatches: int, num_replicas: float
) -> StageSeconds:
    """Return the times of a stage's layers with so many replicas, which need be no whole number."""
    unit = problem.device_types[stage.device_type]
    terms = step_terms(problem, unit, num_microbatches)
    layers = problem.layers[stage.first_layer : stage.last_layer + 1]
    is_first = stage.first_layer == 0
    is_last = stage.last_layer == problem.num_layers - 1
    across = boundary_seconds(
        0 if is_first else problem.layers[stage.first_layer - 1].output_bytes_per_sample,
        0 if is_last else layers[-1].output_bytes_per_sample,
        profile_batch_size=problem.profile_batch_size,
        bandwidth_bytes_per_s=unit.bandwidth_bytes_per_s,
    )
    communication = [layer.communication_seconds[stage.device_type] for layer in layers]
    exchange = gradient_sum = 0.0
    if problem.step_model is StepModel.TRAINER:
        crossing = crossing_share(problem, num_replicas)
        rows = sum(seconds for seconds, layer in zip(communication, layers, strict=True) if layer.is_sharded)
        exchange = crossing * replicated_seconds(
            rows * terms.communication_scale, terms.communication_fraction, num_replicas
        )
        gradient_sum = (
            crossing * (sum(communication) - rows) * problem.batch_size / problem.profile_batch_size
        )
    elif num_replicas > 1 or problem.single_replica_communicates:
        across = sum(communication) + across
    compute = sum(layer.compute_seconds[stage.device_type] for layer in layers)
    return StageSeconds(
        compute=replicated_seconds(compute * terms.compute_scale, terms.compute_fraction, num_replicas),
        exchange=exchange,
        across=replicated_seconds(across * terms.boundary_scale, terms.boundary_fraction, num_replicas),
        gradient_sum=gradient_sum,
    )


def crossing_share(problem: SchedulingProblem, num_replicas: float) -> float:
    """Return what share of a replica's traffic within its stage goes to others."""
    return 1.0 if problem.single_replica_communicates else 1 - 1 / num_replicas


def pacing_replicas(microbatch_rows: Any, num_replicas: Any) -> Any:
    """Return R / ceil(R / k): the replicas that would all be as slow as the one with most rows."""
    return microbatch_rows / np.maximum(np.ceil(microbatch_rows / num_replicas), 1.0)


def num_microbatches_of(problem: SchedulingProblem, num_stages: int) -> int:
    """Return m of the trainer's step for a plan of S stages; 1 in the papers' model, which has none.

    A step that drains has the trainer's `default_microbatches`; its formula is a lower bound, and the simulation adds
    the time in which stages fill and drain.

    Example: with batches of 4,096, plans of 1 to 5 stages have 1, 4, 8, 16 and 16.
    """
    if problem.step_model is StepModel.PAPERS:
        return 1
    microbatches = default_microbatches if problem.drains else delayed_microbatches
    return microbatches(problem.batch_size, num_stages=num_stages)


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Plans that have the same number of micro-batches."""

    num_microbatches: int
    most_stages: int | None


def step_groups(problem: SchedulingProblem) -> list[StepGroup]:
    """Return all groups of plans, by rising number of micro-batches; one for the papers' model."""
    if problem.step_model is StepModel.PAPERS:
        return [StepGroup(1, None)]
    most_stages: dict[int, int] = {}
    for num_stages in range(1, problem.num_layers + 1):
        most_stages[num_microbatches_of(problem, num_stages)] = num_stages
    return [StepGroup(m, stages) for m, stages in most_stages.items()]
