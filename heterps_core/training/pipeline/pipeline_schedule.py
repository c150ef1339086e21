"""The order in which a stage runs forward and backward passes of the micro-batches of a step: 1F1B.

Gradients of weights are in neither: they are worked out whenever a stage waits (`weight_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

WARMUP_PER_STAGE = 4
"""Forward passes that a stage runs ahead of the next stage, by default.

With 1 a stage waits for every message there and back. 2 close the gaps where weight gradients fill them and messages
take no time; 4 also hide messages as long as a pass (simulated; docs/LOG.md). What is alive never exceeds a batch.
"""


class Action(NamedTuple):
    """One pass of one micro-batch."""

    direction: Literal["forward", "backward"]
    microbatch: int


def one_forward_one_backward(
    *,
    num_microbatches: int,
    num_stages: int,
    stage: int,
    warmup_per_stage: int = WARMUP_PER_STAGE,
    most_ahead: int | None = None,
) -> Iterator[Action]:
    """Yield the passes of a stage in the order in which they must run.

    After a warm-up of `warmup_per_stage` forward passes for each later stage a stage alternates, so that it
    holds the activations of `warmup_per_stage * (num_stages - 1 - stage) + 1` micro-batches at most (with 1:
    PipeDream-Flush; Narayanan et al. 2021). With delayed updates micro-batches of all steps follow one another, and
    a stage is a batch ahead at the most (`most_ahead`).

    Example:
        >>> order = one_forward_one_backward(num_microbatches=3, num_stages=2, stage=0, warmup_per_stage=1)
        >>> [f"{action.direction[0]}{action.microbatch}" for action in order]
        ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    limit = num_microbatches if most_ahead is None else min(num_microbatches, most_ahead)
    num_warmup = min(limit, warmup_per_stage * (num_stages - 1 - stage))
    for microbatch in range(num_warmup):
        yield Action("forward", microbatch)
    for microbatch in range(num_microbatches):
        if num_warmup + microbatch < num_microbatches:
            yield Action("forward", num_warmup + microbatch)
        yield Action("backward", microbatch)
