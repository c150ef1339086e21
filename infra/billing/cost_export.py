"""Reads what a cloud charged: AWS cost and usage exports, the older report and CUR 2.0, as CSV, gzip or Parquet.

Only the columns that a bill is checked by are read. The two forms name them alike but for spelling:
`lineItem/ResourceId` and `line_item_resource_id`; tags are columns of their own in the older one
(`resourceTags/user:heterps:run-id`) and a map in the newer one (AWS Data Exports user guide, table dictionary).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from heterps_core.errors import DataError

USAGE_TYPES_OF_COST = ("Usage", "DiscountedUsage", "SavingsPlanCoveredUsage")
"""Line item types that stand for something used; taxes, credits and fees belong to no instance."""

REQUIRED_COLUMNS = (
    "line_item_line_item_type",
    "line_item_usage_start_date",
    "line_item_usage_type",
    "line_item_resource_id",
    "line_item_usage_amount",
    "line_item_unblended_cost",
)

_RUN_TAG_LETTERS = "heterpsrunid"
"""What is left of the tag's name in any spelling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChargedItem:
    """One line of an export."""

    resource_id: str
    """For instance i-0abc; empty where the usage has no resource."""

    usage_type: str
    """For instance "BoxUsage:c7i.large", "SpotUsage:c7i.large", "EBS:VolumeUsage.gp3"."""

    started_at: datetime
    usage_amount: float
    """In hours for instances."""

    cost_usd: float
    """Unblended."""

    run_id: str | None
    """Of our tag, where it is enabled as a cost allocation tag."""


def read_cost_export(path: Path) -> list[ChargedItem]:
    """Read an export.

    Args:
        path: File named .csv, .csv.gz or .parquet.

    Raises:
        DataError: It cannot be read, a column is missing, or a value is no number or time.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            table = pyarrow.parquet.read_table(path)
        else:
            # Compression is told by the name; everything is text, since an empty cost column has no type.
            with pyarrow.csv.open_csv(path) as head:
                names = head.schema.names
            texts = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
            table = pyarrow.csv.read_csv(path, convert_options=texts)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            path, f"must be a cost and usage export as CSV, gzip or Parquet, but {error}"
        ) from error
    columns = {snake_name(name): name for name in table.column_names}
    missing = [name for name in REQUIRED_COLUMNS if name not in columns]
    if missing:
        raise DataError(
            path,
            f"must have the columns of a cost and usage export, but lacks {', '.join(missing)}; "
            f"make the export with resource ids (INCLUDE_RESOURCES)",
        )
    return list(_items(path, table.rename_columns([snake_name(name) for name in table.column_names])))


def snake_name(name: str) -> str:
    """Return a column's name as CUR 2.0 spells it.

    Example:
        >>> snake_name("lineItem/ResourceId"), snake_name("resourceTags/user:heterps:run-id")
        ('line_item_resource_id', 'resource_tags_user_heterps_run_id')
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def _items(path: Path, table: Any) -> Iterator[ChargedItem]:
    wanted = [name for name in table.column_names if name in REQUIRED_COLUMNS or "tags" in name]
    for line, row in enumerate(table.select(wanted).to_pylist(), start=2):
        if row["line_item_line_item_type"] not in USAGE_TYPES_OF_COST:
            continue
        try:
            yield ChargedItem(
                resource_id=(row["line_item_resource_id"] or "").rpartition("/")[2],
                usage_type=row["line_item_usage_type"] or "",
                started_at=_time(row["line_item_usage_start_date"]),
                usage_amount=float(row["line_item_usage_amount"] or 0),
                cost_usd=float(row["line_item_unblended_cost"] or 0),
                run_id=_run_id(row),
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(
                path, f"a value must be a number or a time in ISO 8601, but {error}", line=line
            ) from error


def _time(value: str | datetime) -> datetime:
    time = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _run_id(row: Mapping[str, Any]) -> str | None:
    """Return the value of the run's tag, from a column of its own or from the map of all tags."""
    for name, value in row.items():
        if "tags" not in name or not value:
            continue
        tags = {name: value} if _is_run_tag(name) else _tags(value)
        found = next((text for key, text in tags.items() if _is_run_tag(key) and text), None)
        if found is not None:
            return found
    return None


def _tags(value: Any) -> dict[str, str]:
    """Return a map of tags, which Parquet holds as pairs and CSV as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return dict(value) if isinstance(value, Mapping | list) else {}


def _is_run_tag(name: str) -> bool:
    return re.sub(r"[^a-z]", "", name.lower()).endswith(_RUN_TAG_LETTERS)
