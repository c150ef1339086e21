"""Into how many micro-batches the trainer cuts a batch, where nobody says otherwise."""

from __future__ import annotations

import math

ROWS_OF_FIXED_COST = 60
"""Packing weights, calls and messages cost a stage as much for each micro-batch as so many more rows would; measured
on CTR-DNN (docs/LOG.md)."""

LEAST_MICROBATCH_ROWS = 64
"""Below, the fixed cost of a message and of a layer's call outweighs its work."""


def default_microbatches(batch_size: int, *, num_stages: int) -> int:
    """Return the number of micro-batches m, a power of two; a pipeline of one stage has nothing to overlap.

    With S equal stages a step of B rows takes as long as (B + m F) (1 + (S - 1) / (3 m)) rows on one of them: the
    second factor is what filling and draining the pipeline costs where too few micro-batches leave gaps that
    weight gradients, a third of the work, cannot close, and F the fixed cost. It is least where
    m = sqrt(B (S - 1) / (3 F)). Unequal stages wait less and want fewer, so m is rounded down, but not to one:
    stages that take turns with a whole batch overlap nothing but its weight gradients.

    Example:
        >>> [default_microbatches(batch_size, num_stages=2) for batch_size in (64, 256, 4096, 16384)]
        [1, 2, 4, 8]
    """
    if num_stages == 1:
        return 1
    best = max(2.0, math.sqrt(batch_size * (num_stages - 1) / (3 * ROWS_OF_FIXED_COST)))
    count = 1 << int(math.log2(best))
    while count > 1 and (batch_size % count or batch_size // count < LEAST_MICROBATCH_ROWS):
        count //= 2
    return count
