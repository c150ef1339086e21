"""How many rows the embedding tables get: by the number of rows of data, whatever files hold them."""

from __future__ import annotations

MIN_BUCKETS, MAX_BUCKETS = 1_024, 131_072

ROWS_PER_BUCKET = 16
"""A bucket that is hardly ever seen learns nothing."""

OUTGROWN = 4
"""Tables this many times smaller than new ones would be are worth a word; days differ by less."""


def buckets_for_rows(num_rows: int) -> int:
    """Return the rows of each slot's table for so many rows of data: a power of two, in fixed limits.

    Example:
        >>> buckets_for_rows(200_000), buckets_for_rows(0)
        (8192, 1024)
    """
    wanted = max(1, num_rows // ROWS_PER_BUCKET)
    return min(max(1 << (wanted.bit_length() - 1), MIN_BUCKETS), MAX_BUCKETS)


def outgrown_tables(buckets_per_slot: int, *, num_rows: int) -> str | None:
    """Return for people that data has outgrown its tables, and the way out; None where it has not.

    Args:
        buckets_per_slot: Rows of each table, which training goes on with.
        num_rows: That are trained on.
    """
    wanted = buckets_for_rows(num_rows)
    if wanted < OUTGROWN * buckets_per_slot:
        return None
    return (
        f"each keeps the champion's {buckets_per_slot:,} rows, but {num_rows:,} rows of data would get {wanted:,} in "
        f"a new model, with fewer collisions; start_from=scratch trains one"
    )
