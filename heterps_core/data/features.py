"""What a model must know about its input: how many dense columns, how many rows per embedding table.

This is the noun between data, models, planner and trainer. It imports neither torch nor pyarrow, so
that a plan can be made and a price computed without loading either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from heterps_core.errors import ConfigurationError
from heterps_core.schema_version import check_schema_version

SCHEMA_VERSION = 1

MISSING_ROW = 0
"""Row of every slot that stands for "no value"; real values hash to the rows after it."""

MIN_SLOT_ROWS = 2
"""One row for a missing value and at least one for the values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSpec:
    """Shape of the input of a click model: dense columns and categorical slots.

    Ids count from 0 inside each slot; a model that keeps all slots in one table adds `slot_offsets`.

    Example:
        >>> features = FeatureSpec(num_dense=1, slot_rows=(10, 4))
        >>> features.total_rows, features.slot_offsets
        (14, (0, 10))
    """

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
    def slot_offsets(self) -> tuple[int, ...]:
        """First row of each slot where all slots lie in one table, in slot order."""
        return tuple(accumulate(self.slot_rows[:-1], initial=0))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "schema_version": SCHEMA_VERSION,
            "num_dense": self.num_dense,
            "slot_rows": list(self.slot_rows),
            "slot_names": list(self.slot_names),
            "dense_names": list(self.dense_names),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> FeatureSpec:
        """Read the JSON form; fields that are not known are ignored.

        Raises:
            ConfigurationError: The schema version is another one, or a field is missing.
        """
        check_schema_version(document, SCHEMA_VERSION, what="features")
        missing = [name for name in ("num_dense", "slot_rows") if name not in document]
        if missing:
            raise ConfigurationError(f"features lack the fields {', '.join(missing)}")
        return cls(
            num_dense=document["num_dense"],
            slot_rows=tuple(document["slot_rows"]),
            slot_names=tuple(document.get("slot_names", ())),
            dense_names=tuple(document.get("dense_names", ())),
        )


def _check_names(field: str, names: tuple[str, ...], count: int) -> None:
    if len(names) != count:
        raise ConfigurationError(f"{field} must hold one name per column, {count}, got {len(names)}")
    if len(set(names)) != count:
        raise ConfigurationError(f"{field} must differ from one another, got {', '.join(names)}")
