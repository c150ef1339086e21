"""The shape of a model's input: how many dense columns, how many rows per embedding table."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from heterps_core.errors import ConfigurationError
from heterps_core.field_rules import count
from heterps_core.json_codec import JsonDocument, JsonForm

FIRST_TEXT_RULE, TEXT_RULE = 1, 2
"""Versions of the rule that gives values their texts: the first took each as it was written, so "5.0" was not 5."""

MISSING_ROW = 0
"""Row of every slot that stands for "no value"; real values hash to the rows after it."""

NO_ID = -1
"""Fills the places after the values of a shorter list."""

SUM, MEAN = POOLINGS = ("sum", "mean")
"""Ways to combine the vectors of a slot's values."""

SEQUENCE = "sequence"
"""In the place of a pooling: the values are in order; a model takes them so, or their mean."""

MIN_SLOT_ROWS = 2
"""One row for a missing value and at least one for the values."""

BUCKET_ROWS = 512
"""Rows of a bucket with dynamic ids. The hash of a value chooses its bucket; values without a row of their own
share its first row. With three quarters of the others in use a bucket overflows with a chance of about 1e-9."""

KEY_BITS = 62
"""Bits of a dynamic id: the number of its slot, then the leading bits of its value's hash."""

BUFFER_BYTES = 1 << 30
"""Memory for the row groups that all replicas of a stage hold together; larger row groups are fewer at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicIds(JsonDocument):
    """A value gets a row of its own once it was seen often enough, and loses it when it was not seen for long."""

    json_form = JsonForm(is_strict=True)

    min_sightings: Annotated[int, count(1_000)] = 2
    """Batches with a value, from which on it has a row of its own; before, it reads its bucket's shared row."""

    time_to_live_days: Annotated[int, count(3_650)] = 7
    """A value that none of the last so many days had is removed at the end of a night."""


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
    slot_rows: tuple[int, ...]
    """Rows of the embedding table of each categorical slot, each at least 2."""

    slot_names: tuple[str, ...] = ()
    """One name per slot; empty stands for slot_0, slot_1, ..."""

    dense_names: tuple[str, ...] = ()
    """One name per dense column; empty stands for dense_0, dense_1, ..."""

    slot_lengths: tuple[int, ...] = ()
    """Most values of a row in each slot, at least 1; empty stands for 1 each."""

    slot_poolings: tuple[str, ...] = ()
    """One of `POOLINGS` for each slot, or `SEQUENCE`; empty stands for the sum."""

    slot_dimensions: tuple[int | None, ...] = ()
    """Width of the vectors of each slot, at least 1; None stands for the model's own, and empty for None each."""

    slot_tables: tuple[int, ...] = ()
    """For each slot the first slot that looks up the same table; empty stands for a table of its own each."""

    slot_histories: tuple[int, ...] = ()
    """For each slot the first slot with values of the same events; empty for events of its own each."""

    num_labels: int = 1
    dynamic_ids: DynamicIds | None = None
    """None hashes values to rows, so that some share one. Otherwise an id is a key, not a row: the number of its slot
    and `hash_bits` of its value's hash; a table finds the key's row, and has whole buckets of rows for each slot."""

    text_rule: int = FIRST_TEXT_RULE
    """Version of the rule that gives values their texts, see `canonical_text.py`; documents of before have none."""

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
        if self.dynamic_ids is not None and any(rows % BUCKET_ROWS for rows in self.slot_rows):
            raise ConfigurationError(
                f"with dynamic ids every slot needs a multiple of {BUCKET_ROWS} rows, got {self.slot_rows}"
            )
        object.__setattr__(
            self, "slot_names", self.slot_names or tuple(f"slot_{i}" for i in range(len(self.slot_rows)))
        )
        object.__setattr__(
            self, "dense_names", self.dense_names or tuple(f"dense_{i}" for i in range(self.num_dense))
        )
        object.__setattr__(self, "slot_lengths", self.slot_lengths or (1,) * len(self.slot_rows))
        object.__setattr__(self, "slot_poolings", self.slot_poolings or (SUM,) * len(self.slot_rows))
        object.__setattr__(self, "slot_dimensions", self.slot_dimensions or (None,) * len(self.slot_rows))
        object.__setattr__(self, "slot_tables", self.slot_tables or tuple(range(len(self.slot_rows))))
        object.__setattr__(self, "slot_histories", self.slot_histories or tuple(range(len(self.slot_rows))))
        _check_names("slot_names", self.slot_names, len(self.slot_rows))
        _check_names("dense_names", self.dense_names, self.num_dense)
        sizes = list(zip(self.slot_rows, self.slot_dimensions, self.slot_tables, strict=True))
        for name, size in zip(self.slot_names, sizes, strict=True):
            if size[2] not in range(len(sizes)) or size != sizes[size[2]]:
                raise ConfigurationError(
                    f"slot {name} must have the rows, dimension and number of the first slot of its table, got {size}"
                )

    @property
    def num_slots(self) -> int:
        """Number of categorical slots."""
        return len(self.slot_rows)

    @property
    def num_ids(self) -> int:
        """Number of ids of a row: one for each value that a slot may have at most."""
        return sum(self.slot_lengths)

    @property
    def id_columns(self) -> tuple[range, ...]:
        """For each slot the columns of its ids."""
        return tuple(
            range(end - length, end)
            for end, length in zip(accumulate(self.slot_lengths), self.slot_lengths, strict=True)
        )

    @property
    def total_rows(self) -> int:
        """Rows of all slots together."""
        return sum(self.slot_rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in memory: float32 numbers, int32 ids or int64 keys, and a byte for each label."""
        return 4 * self.num_dense + self.id_bytes * self.num_ids + self.num_labels

    @property
    def id_bytes(self) -> int:
        """Bytes of an id in memory."""
        return 4 if self.dynamic_ids is None else 8

    @property
    def hash_bits(self) -> int:
        """Bits of the hash of a value in a dynamic id."""
        return KEY_BITS - (self.num_slots - 1).bit_length()

    @property
    def slot_offsets(self) -> tuple[int, ...]:
        """First row of each slot where all slots lie in one table, in slot order."""
        return tuple(accumulate(self.slot_rows[:-1], initial=0))


def _check_names(field: str, names: tuple[str, ...], count: int) -> None:
    if len(names) != count:
        raise ConfigurationError(f"{field} must hold one name per column, {count}, got {len(names)}")
    if len(set(names)) != count:
        raise ConfigurationError(f"{field} must differ from one another, got {', '.join(names)}")
