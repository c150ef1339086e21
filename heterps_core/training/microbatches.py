"""Into how many micro-batches the trainer cuts a batch, where nobody says otherwise."""

from __future__ import annotations

MOST_MICROBATCHES = 4
"""With as many a pipeline of two equal stages is idle for a fifth of a step; more make messages small."""

LEAST_MICROBATCH_ROWS = 64
"""Below, the fixed cost of a message and of a layer's call outweighs its work."""


def default_microbatches(batch_size: int, *, num_stages: int) -> int:
    """Return the number of micro-batches; a pipeline of one stage has nothing to overlap.

    Example:
        >>> [default_microbatches(batch_size, num_stages=2) for batch_size in (64, 128, 150, 512, 4096)]
        [1, 2, 2, 4, 4]
    """
    count = MOST_MICROBATCHES if num_stages > 1 else 1
    while count > 1 and (batch_size % count or batch_size // count < LEAST_MICROBATCH_ROWS):
        count //= 2
    return count
