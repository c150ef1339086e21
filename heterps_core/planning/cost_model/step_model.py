r"""Two models of a training step: the papers' closed form, and the step that the trainer takes.

Both take the longest time of a stage for the time of a step. `papers` is the formula of the planning contract,

    ET(k) = max(CT(k), DT(k)),   CT(k) = OCT s (1 - alpha + alpha / k),   DT(k) = ODT s (1 - beta + beta / k)

with s = B / B_o. `trainer` is the pipeline with delayed updates (`training/pipeline/stage_runner.py`), which does
not drain between steps. A worker exchanges embedding rows with nothing else beside; what crosses the stage's
boundaries and the sum of a batch's gradients travel while it computes:

    ET(k) = max(XT(k) + max(CT(k), YT(k) + AT(k)), IT(k))
    CT(k) = OCT (m (1 - alpha) + alpha s / k) + m b H + C V / k + r (J + K B / k)
    YT(k) = Y s / k
    XT(k) = ((k - 1) / k  E + W) (1 - beta + beta s / k) + F (2 + c / k) + P (2 (k - 1) + c) + G t + ST(k),
            with c = B / 4,096, for k > 1, else 0
    ST(k) = (k - 1) Z + 2 (k - 1) / k  Q D   with dense gradients, else 0
    AT(k) = (k - 1) / k  A s
    IT(k) = I s / k

with m micro-batches, Y the boundaries' share of ODT, E that of sharded layers (the exchange), A that of the others
(the all-reduce, once a step), and I the reading of input rows by a core that does not compute, batches ahead; 1 -
alpha is the fixed share of each micro-batch, which the papers count B / B_o times. Replicas exchange the rows of a
whole batch at once: 1 - beta is the share of rows that several samples look up. A message takes a worker's processor
F, and P for each peer, so more replicas may make a stage slower. A stage with tables has two in a step, and c / k for
requests of rows, which is more than it has where c > k (`profiling/replica_path.py`). Each of the stage's t tables
takes G, and to find, copy and add up rows takes W, beside the time E of the link. A ring sums the D bytes of dense
gradients once a step, which takes the processor Z for each peer and Q for each byte that is sent. Each of its b
boundaries takes the processor H for a micro-batch and V for each of the C bytes that cross both in a batch, there and
back (`profiling/boundary_measurement.py`). A later stage that looks up rows, or knows the labels, has r = 1: finding
its rows takes a replica J a batch and K a row. A stage between two others may fetch rows twice, which is not counted.
Where a problem says that a single replica communicates, the factor (k - 1) / k, the share of a replica's traffic that
goes to another one, is left out, and XT(1) has F, P, G, W and Q too. Replicas have whole rows of a micro-batch, and
the one with most of them sets the pace: k stands for R / ceil(R / k), with R = B / m.

A step that `drains` begins and ends with an empty pipeline and sums gradients after all passes. So it takes at least
DT(k), the longest of some chains of passes and messages through the stage (`drained_paths.py`).

A pipeline of S stages does not wait for itself where each stage is `WARMUP_PER_STAGE` micro-batches ahead of the one
after it, and the first at most a batch ahead: with 4 (S - 1) micro-batches. Fewer cost less, so m is the least
divisor of B that is enough. Over 100 drawn plans of 1 to 5 stages the simulated step is 0.02 % longer in one of ten
and 0.5 % in the worst (docs/LOG.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.training.job import default_microbatches, delayed_microbatches

FORWARD_SHARE = 1 / 3
"""Share of a layer's computing: the backward pass takes two matrix products for each of the forward pass."""

WEIGHT_GRADIENT_SHARE = 1 / 3
"""Share of a fully connected layer's computing: one of those two, which the trainer puts off (`weight_gradients`)."""


class StageSeconds(NamedTuple):
    """Terms of a stage's time for one training batch, by the formulas above; elementwise."""

    compute: Floats
    """CT."""

    exchange: Floats | float
    """XT; 0 in the papers' model."""

    across: Floats
    """YT; DT in the papers' model."""

    gradient_sum: Floats | float
    """AT; 0 in the papers' model."""

    drained: Floats | float
    """DT; 0 unless the step drains."""

    reading: Floats | float
    """IT; 0 in the papers' model."""

    @property
    def total(self) -> Floats:
        """ET, no less than DT."""
        beside = np.maximum(self.compute, self.across + self.gradient_sum)
        return np.maximum(np.maximum(self.exchange + beside, self.drained), self.reading)


def scale_and_fraction(
    problem: SchedulingProblem, parallel_fractions: Floats, num_microbatches: int
) -> tuple[Floats, Floats]:
    """Return q and g such that a time t of a profiling batch becomes t q (1 - g + g / k) with k replicas.

    `num_microbatches` matters for the trainer's step alone.
    """
    scale = problem.batch_size / problem.profile_batch_size
    if problem.step_model is StepModel.PAPERS:
        return np.full_like(parallel_fractions, scale), parallel_fractions
    scales = num_microbatches * (1 - parallel_fractions) + parallel_fractions * scale
    return scales, parallel_fractions * scale / scales


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
