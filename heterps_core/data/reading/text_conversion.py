"""Writes the rows of a text file as Parquet that the same schema reads."""

from __future__ import annotations

from itertools import compress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.text_reader import read_text
from heterps_core.data.schema import DataSchema

ROWS_PER_GROUP = 16_384
"""Rows of a row group: a gigabyte holds 417 row groups of Criteo's columns."""


def write_parquet(source: SourcePath, target: Path, schema: DataSchema) -> None:
    """Write the rows of a file as Parquet that the same schema reads."""
    label_texts = pa.array([schema.label_negative[0], schema.label_positive[0]])
    types = [pa.dictionary(pa.int8(), pa.string())] * len(schema.labels)
    types += [pa.float32()] * len(schema.weight_columns) + [pa.float64()] * len(schema.numeric_columns)
    types += [
        pa.list_(pa.string()) if name in schema.list_columns else pa.string() for name in schema.text_columns
    ]
    named = {*schema.target_columns, *schema.numeric_columns, *schema.text_columns}
    pointers = [name not in named for name in schema.pointer_columns]
    types += [pa.string()] * sum(pointers)
    table_schema = pa.schema(list(zip(schema.used_columns, types, strict=True)))
    # LZ4 takes a third more of the disk than Zstandard, and a quarter less time to read.
    with pq.ParquetWriter(target, table_schema, compression="lz4", write_statistics=False) as writer:
        held: list[pa.RecordBatch] = []
        for batch in read_text(source, schema):
            columns = [
                pa.DictionaryArray.from_arrays(pa.array(labels.view(np.int8)), label_texts)
                for labels in np.atleast_2d(batch.labels.T)
            ]
            columns += [] if batch.weights is None else [pa.array(batch.weights)]
            columns += [pa.array(numbers, from_pandas=True) for numbers in batch.numbers.T]
            texts = dict(zip(schema.row_slots, batch.texts, strict=True))
            columns += [texts[name] for name in schema.text_columns]
            columns += compress(batch.pointers or (), pointers)
            held.append(pa.record_batch(columns, schema=table_schema))
            if sum(each.num_rows for each in held) >= ROWS_PER_GROUP:
                held = _write_groups(writer, held, at_least=ROWS_PER_GROUP)
        _write_groups(writer, held, at_least=1)


def _write_groups(
    writer: pq.ParquetWriter, batches: list[pa.RecordBatch], *, at_least: int
) -> list[pa.RecordBatch]:
    """Write full row groups of the batches; returns the rest, of fewer rows than `at_least`."""
    table = pa.Table.from_batches(batches, writer.schema) if batches else None
    first = 0
    while table is not None and table.num_rows - first >= at_least:
        writer.write_table(table.slice(first, ROWS_PER_GROUP))
        first += ROWS_PER_GROUP
    return [] if table is None else list(table.slice(first).to_batches())
