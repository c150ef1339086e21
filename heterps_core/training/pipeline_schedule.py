"""The order in which a stage runs forward and backward passes of the micro-batches of a step: 1F1B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One pass of one micro-batch."""

    direction: Literal["forward", "backward"]
    microbatch: int


def one_forward_one_backward(*, num_microbatches: int, num_stages: int, stage: int) -> Iterator[Action]:
    """Yield the passes of a stage in the order in which they must run.

    After a warm-up of `num_stages - 1 - stage` forward passes a stage alternates, so that it never holds the
    activations of more than `num_stages - stage` micro-batches (PipeDream-Flush; Narayanan et al. 2021).

    Example:
        >>> order = one_forward_one_backward(num_microbatches=3, num_stages=2, stage=0)
        >>> [f"{action.direction[0]}{action.microbatch}" for action in order]
        ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    num_warmup = min(num_microbatches, num_stages - 1 - stage)
    for microbatch in range(num_warmup):
        yield Action("forward", microbatch)
    for microbatch in range(num_microbatches):
        if num_warmup + microbatch < num_microbatches:
            yield Action("forward", num_warmup + microbatch)
        yield Action("backward", microbatch)
