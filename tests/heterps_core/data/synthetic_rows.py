"""Rows in the Criteo format, all made up."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FIRST_TEXT_RULE, FeatureSpec
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.row_arrays import RowArrays, ids_of_texts
from heterps_core.data.schema import CRITEO_SCHEMA

COLUMNS = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]


def criteo_fields(number: int, **changes: str) -> list[str]:
    """Return the 40 fields of a row that differs with `number`; every third row is a click."""
    row = {"label": str(int(number % 3 == 0))}
    row |= {f"I{i}": str(number * i % 97) for i in range(1, 14)}
    row |= {f"C{i}": f"{(number * 2654435761 + i) % 2**32:08x}" for i in range(1, 27)}
    return list((row | changes).values())


def criteo_lines(num_rows: int) -> list[str]:
    """Return tab-separated lines without their ends."""
    return ["\t".join(criteo_fields(number)) for number in range(num_rows)]


def write_lines(path: Path, lines: Sequence[str | bytes], *, end: bytes = b"\n") -> Path:
    """Write lines as plain text, or as gzip where the name says so."""
    content = b"".join((line if isinstance(line, bytes) else line.encode()) + end for line in lines)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_parquet(path: Path, stop: int, *, first: int = 0, rows_per_group: int = 1_000_000) -> Path:
    """Write rows first..stop - 1 as Parquet, numbers as such."""
    columns = zip(*(criteo_fields(number) for number in range(first, stop)), strict=True)
    table = pa.table(
        {
            name: [int(value) for value in values] if name[0] in "lI" else list(values)
            for name, values in zip(COLUMNS, columns, strict=True)
        }
    )
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path, row_group_size=rows_per_group)
    return path


def prepare(source, out_dir: Path, **changes) -> PreparedDataset:
    """Prepare rows, in tables of 50 rows a slot."""
    parameters = {"schema": CRITEO_SCHEMA, "buckets_per_slot": 50} | changes
    return prepare_dataset(source, out_dir=out_dir, **parameters)


def all_rows(dataset: PreparedDataset) -> RowArrays:
    """Return all rows of a dataset, in order."""
    parts = list(dataset.parts(0, dataset.manifest.num_rows))
    return RowArrays(
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("dense", "ids", "labels", "weights")
            if getattr(parts[0], name) is not None
        }
    )


def held_out(dataset: PreparedDataset) -> npt.NDArray[np.int64]:
    """Return the indices of the held-out rows."""
    return np.arange(dataset.num_train_rows, dataset.manifest.num_rows)


def rows_of_texts(texts: pa.Array, *, slot: int, num_rows: int) -> npt.NDArray[np.integer]:
    """Return the table row [n] of each text in a slot, texts taken as they are written."""
    features = FeatureSpec(num_dense=0, slot_rows=(num_rows,) * (slot + 1), text_rule=FIRST_TEXT_RULE)
    return ids_of_texts([texts] * (slot + 1), features)[:, slot]


def held_out_labels(dataset: PreparedDataset) -> np.ndarray:
    """The labels of the held-out rows, in order, the first of several."""
    return dataset.targets(dataset.num_train_rows, dataset.manifest.num_rows)[0]
