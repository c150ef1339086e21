"""What the statistics in the footer of a Parquet file show of its values, so that row groups need not be read."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq

from heterps_core.data.reading.parquet_rows import AS_STORED, FileView
from heterps_core.data.schema import DataSchema

_SURELY_EXACT = 2.0**11
"""Whole numbers up to here differ in every floating type."""


def unproven_groups(
    footer: pq.FileMetaData, schema: DataSchema, view: FileView = AS_STORED
) -> dict[int, bool]:
    """Return the row groups that must be read to know that no row breaks the schema: statistics do not show it.

    The value says whether it suffices to read labels and weights.
    """
    kinds = [footer.schema.column(index) for index in range(footer.num_columns)]
    held = {view.name_in_file(name): name for name in schema.used_columns if name not in view.values}
    names = [each.path if each.path in held else each.path.partition(".")[0] for each in kinds]
    used = [(index, held[name]) for index, name in enumerate(names) if name in held]
    unproven = {}
    of_partition = {name for name in schema.number_columns if view.values.get(name) is not None}
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        doubtful = {
            name for column, name in used if not _is_proven(group.column(column), kinds[column], name, schema)
        } | of_partition
        if doubtful:
            unproven[index] = doubtful.issubset(schema.target_columns)
    return unproven


def _is_proven(chunk: pq.ColumnChunkMetaData, kind: pq.ColumnSchema, name: str, schema: DataSchema) -> bool:
    """Tell whether statistics show that all values of a column of a row group can be used; they do not count NaN."""
    if any(name in names for names in schema.histories):
        # Their lists must be as long as each other.
        return False
    is_whole = chunk.physical_type in ("INT32", "INT64", "BOOLEAN")
    if name not in schema.target_columns and is_whole:
        return True
    if name in (*schema.text_columns, *schema.pointer_columns[:1]) and chunk.physical_type == "BYTE_ARRAY":
        return bool(kind.logical_type.type == "STRING" or kind.converted_type == "UTF8")
    found = chunk.statistics
    if found is not None and name not in schema.target_columns and found.null_count == chunk.num_values:
        return True
    if found is None or not found.has_min_max or not (is_whole or chunk.physical_type in ("FLOAT", "DOUBLE")):
        return False
    low, high = found.min, found.max
    if name not in schema.target_columns:
        largest = _SURELY_EXACT if name in schema.text_columns else float(np.finfo(np.float32).max)
        return bool(-largest <= low <= high <= largest)
    if not is_whole or not isinstance(low, int) or not found.has_null_count or found.null_count:
        return False
    if name in schema.weight_columns:
        return low >= 0
    labels = {str(int(each)) for each in (low, high)}
    return high - low <= 1 and labels.issubset((*schema.label_positive, *schema.label_negative))
