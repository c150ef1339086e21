"""How fast clicks come from a file into a model: parse, hash, prepare, assemble batches, in rows per second.

All parts run on the same synthetic rows in one run, and seconds are of the processor. Two baselines stand beside
them: Arrow's bare parser without our checks, and Python's csv module. To decode is what the feed of a worker does
with rows that are not in memory: it reads a row group, checks it and hashes its texts, of converted text and of
Parquet with larger row groups. Every figure is the median of several rounds, since other work on the machine slows
single ones.
"""

from __future__ import annotations

import csv
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.readers import read_rows
from heterps_core.data.row_arrays import rows_as_arrays
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream

NUM_ROWS = 200_000
BATCH_SIZE = 4_096
BUCKETS_PER_SLOT = 10_000
NUM_ROUNDS = 5
PARQUET_GROUP_ROWS = 65_536


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Measure all parts, print a table and return its figures in the form of the benchmark contract."""
    with tempfile.TemporaryDirectory() as folder:
        rows_per_s = measure(Path(folder), seed)
    figures = [figure(name, value, "rows/s") for name, value in rows_per_s.items()]
    figures.append(figure("parse_over_arrow", rows_per_s["parse"] / rows_per_s["arrow_parse"], "ratio"))
    figures.append(figure("parse_over_python_csv", rows_per_s["parse"] / rows_per_s["python_csv"], "ratio"))
    print(f"{NUM_ROWS} rows of 40 fields, batch {BATCH_SIZE}, median of {NUM_ROUNDS} rounds, seed {seed}")
    for entry in figures:
        print(f"{entry['name']:<32}{entry['value']:>16,.2f} {entry['unit']}")
    return figures


def measure(folder: Path, seed: int) -> dict[str, float]:
    """Return the rows per second of each part."""
    path = folder / "clicks.tsv"
    compressed = folder / "clicks.tsv.gz"
    write_click_stream(compressed, num_rows=NUM_ROWS, seed=seed)
    speeds = {
        "write_click_stream": speed(lambda: write_click_stream(path, num_rows=NUM_ROWS, seed=seed)),
        "python_csv": speed(lambda: count_fields(path)),
        "arrow_parse": speed(lambda: parse_bare(path)),
        "parse": speed(lambda: drain(path)),
        "parse_gzip": speed(lambda: drain(compressed)),
    }
    batches = list(read_rows([path], CRITEO_SCHEMA))
    features = FeatureSpec(num_dense=13, slot_rows=(BUCKETS_PER_SLOT,) * 26)
    transform = NumericTransform(is_count=(True,) * 13, means=(1.0,) * 13, standard_deviations=(2.0,) * 13)
    speeds["hash"] = speed(lambda: [rows_as_arrays(batch, features, transform) for batch in batches])
    # Alternating fractions, so that no round finds the work of the one before.
    fractions = iter(0.2 + 0.001 * number for number in range(NUM_ROUNDS + 1))
    speeds["prepare"] = speed(lambda: prepare(path, folder / "prepared", next(fractions)))
    dataset = PreparedDataset.open(folder / "prepared")
    speeds["decode"] = speed(lambda: decode(dataset))
    parquet = folder / "clicks.parquet"
    converted = [pq.read_table(file) for file in (folder / "prepared").glob("*.parquet")]
    pq.write_table(pa.concat_tables(converted), parquet, row_group_size=PARQUET_GROUP_ROWS)
    of_parquet = prepare(parquet, folder / "of_parquet", 0.2)
    speeds["decode_parquet"] = speed(lambda: decode(of_parquet))
    num_batch_rows = dataset.num_batches(BATCH_SIZE) * BATCH_SIZE
    speeds["assemble_batches"] = speed(lambda: assemble(dataset, seed), num_rows=num_batch_rows)
    return speeds


def speed(work: Callable[[], object], *, num_rows: int = NUM_ROWS) -> float:
    """Return rows per second of the processor in the median round, after one round to warm up."""
    seconds = []
    for _ in range(NUM_ROUNDS + 1):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return num_rows / statistics.median(seconds[1:])


def count_fields(path: Path) -> int:
    """Parse with the standard library."""
    with path.open(newline="") as file:
        return sum(len(fields) for fields in csv.reader(file, delimiter="\t"))


def parse_bare(path: Path) -> int:
    """Parse with Arrow and nothing else, into the same types."""
    names = CRITEO_SCHEMA.used_columns
    types = {name: pa.float64() if name in CRITEO_SCHEMA.numeric_columns else pa.string() for name in names}
    reader = pa_csv.open_csv(
        str(path),
        read_options=pa_csv.ReadOptions(column_names=names, block_size=4 * 1024 * 1024),
        parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=pa_csv.ConvertOptions(
            column_types=types, null_values=[""], strings_can_be_null=False
        ),
    )
    return sum(batch.num_rows for batch in reader)


def drain(path: Path) -> int:
    """Parse and check with our reader."""
    return sum(len(batch.labels) for batch in read_rows([path], CRITEO_SCHEMA))


def prepare(path: Path, out_dir: Path, eval_fraction: float) -> PreparedDataset:
    """Go the whole way from text to a prepared dataset."""
    return prepare_dataset(
        path,
        schema=CRITEO_SCHEMA,
        buckets_per_slot=BUCKETS_PER_SLOT,
        eval_fraction=eval_fraction,
        out_dir=out_dir,
    )


def decode(dataset: PreparedDataset) -> int:
    """Read all rows as the row groups of a model's input."""
    return sum(len(rows.labels) for rows in dataset.parts(0, NUM_ROWS))


def assemble(dataset: PreparedDataset, seed: int) -> float:
    """Make the tensors of one epoch's batches."""
    total = 0.0
    for index in range(dataset.num_batches(BATCH_SIZE)):
        rows = dataset.batch_rows(0, index, batch_size=BATCH_SIZE, seed=seed)
        total += float(dataset.batch(rows).labels.sum())
    return total


def figure(name: str, value: float, unit: str) -> dict[str, Any]:
    """Return one figure in the form of the benchmark contract."""
    suffix = "_rows_per_s" if unit == "rows/s" else ""
    return {
        "name": f"{name}{suffix}",
        "value": float(np.round(value, 3)),
        "unit": unit,
        "higher_is_better": True,
    }
