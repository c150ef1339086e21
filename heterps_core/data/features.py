"""What a model must know about its input: how many dense columns, how many rows per embedding table."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from heterps_core.errors import ConfigurationError
from heterps_core.json_codec import JsonDocument, JsonForm

MISSING_ROW = 0
"""Row of every slot that stands for "no value"; real values hash to the rows after it."""

MIN_SLOT_ROWS = 2
"""One row for a missing value and at least one for the values."""

MIN_BUCKETS, MAX_BUCKETS = 1_024, 131_072

ROWS_PER_BUCKET = 16
"""A bucket that is hardly ever seen learns nothing."""

OUTGROWN = 4
"""Tables this many times smaller than new ones would be are worth a word; days differ by less."""


BUFFER_BYTES = 1 << 30
"""Of the row groups that all replicas of a stage hold together; the larger they are, the fewer lie side by side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSpec(JsonDocument):
    """Shape of the input of a click model: dense columns and categorical slots.

    Ids count from 0 inside each slot; a model that keeps all slots in one table adds `slot_offsets`.

    Example:
        >>> features = FeatureSpec(num_dense=1, slot_rows=(10, 4))
        >>> features.total_rows, features.slot_offsets
        (14, (0, 10))
    """

    json_form = JsonForm(what="features", version=1)

    num_dense: int
    """Numeric columns, at least 0."""

    slot_rows: tuple[int, ...]
    """Rows of the embedding table of each categorical slot, each at least 2."""

    slot_names: tuple[str, ...] = ()
    """One name per slot; empty stands for slot_0, slot_1, ..."""

    dense_names: tuple[str, ...] = ()
    """One name per dense column; empty stands for dense_0, dense_1, ..."""

    def __post_init__(self) -> None:
        if self.num_dense < 0:
            raise ConfigurationError(f"num_dense must be at least 0, got {self.num_dense}")
        if not self.slot_rows:
            raise ConfigurationError("a click model needs at least one categorical slot, got none")
        small = [rows for rows in self.slot_rows if rows < MIN_SLOT_ROWS]
        if small:
            raise ConfigurationError(
                f"every slot needs at least {MIN_SLOT_ROWS} rows (one of them for missing values), "
                f"got {small[0]}; raise the number of buckets"
            )
        object.__setattr__(
            self, "slot_names", self.slot_names or tuple(f"slot_{i}" for i in range(len(self.slot_rows)))
        )
        object.__setattr__(
            self, "dense_names", self.dense_names or tuple(f"dense_{i}" for i in range(self.num_dense))
        )
        _check_names("slot_names", self.slot_names, len(self.slot_rows))
        _check_names("dense_names", self.dense_names, self.num_dense)

    @property
    def num_slots(self) -> int:
        """Number of categorical slots."""
        return len(self.slot_rows)

    @property
    def total_rows(self) -> int:
        """Rows of all slots together."""
        return sum(self.slot_rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in memory: float32 numbers, int32 ids, a label."""
        return 4 * (self.num_dense + self.num_slots) + 1

    @property
    def slot_offsets(self) -> tuple[int, ...]:
        """First row of each slot where all slots lie in one table, in slot order."""
        return tuple(accumulate(self.slot_rows[:-1], initial=0))


def _check_names(field: str, names: tuple[str, ...], count: int) -> None:
    if len(names) != count:
        raise ConfigurationError(f"{field} must hold one name per column, {count}, got {len(names)}")
    if len(set(names)) != count:
        raise ConfigurationError(f"{field} must differ from one another, got {', '.join(names)}")


def buckets_for_rows(num_rows: int) -> int:
    """Return the rows of each slot's table for so many rows of data: a power of two, in fixed limits.

    Example:
        >>> buckets_for_rows(200_000), buckets_for_rows(0)
        (8192, 1024)
    """
    wanted = max(1, num_rows // ROWS_PER_BUCKET)
    return min(max(1 << (wanted.bit_length() - 1), MIN_BUCKETS), MAX_BUCKETS)


def outgrown_tables(buckets_per_slot: int, *, num_rows: int) -> str | None:
    """Return for people that data has outgrown its tables, and the way out; None where it has not."""
    wanted = buckets_for_rows(num_rows)
    if wanted < OUTGROWN * buckets_per_slot:
        return None
    return (
        f"each keeps the champion's {buckets_per_slot:,} rows, but {num_rows:,} rows of data would get {wanted:,} in "
        f"a new model, with fewer collisions; start_from=scratch trains one"
    )
