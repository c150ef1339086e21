"""The table of docs/DATA.md, walked through: each writer that is installed here writes rows, which are read back."""

import gzip
import re
from dataclasses import replace

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.readers import list_source_files
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.errors import DataError
from tests.heterps_core.data.reading.tables.table_makers import SCHEMA
from tests.paths import PROJECT

deltalake = pytest.importorskip("deltalake")
catalogs = pytest.importorskip("pyiceberg.catalog")
Config = pytest.importorskip("pyiceberg.utils.config").Config

NUM_ROWS = 30
ROWS = pa.table(
    {
        "row": pa.array(range(NUM_ROWS), pa.int64()),
        "clicked": pa.array([row % 2 for row in range(NUM_ROWS)], pa.int64()),
        "town": [f"town {row % 3}" for row in range(NUM_ROWS)],
    }
)


def by_duckdb(folder):
    connection = duckdb.connect()
    connection.register("rows", ROWS)
    connection.sql(f"COPY rows TO '{folder}/rows.parquet' (ROW_GROUP_SIZE 2048)")
    return str(folder / "rows.parquet")


def by_pandas(folder):
    pd.DataFrame(ROWS.to_pydict()).to_parquet(folder / "rows.parquet")
    return str(folder / "rows.parquet")


def by_pyarrow(folder):
    for number in range(3):
        pq.write_table(ROWS.slice(10 * number, 10), folder / f"part-{number}.parquet")
    return str(folder)


def by_delta_rs(folder):
    deltalake.write_deltalake(str(folder / "clicks"), ROWS)
    return f"delta://{folder}/clicks"


def by_pyiceberg(folder):
    catalog = catalogs.load_catalog("here")
    catalog.create_namespace("shop")
    catalog.create_table("shop.clicks", ROWS.schema).append(ROWS)
    return "iceberg://here/shop.clicks"


def by_hand(folder):
    lines = ["row,clicked,town", *(f"{row},{row % 2},town {row % 3}" for row in range(NUM_ROWS))]
    (folder / "rows.csv.gz").write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))
    return str(folder / "rows.csv.gz")


WRITERS = {
    "DuckDB": by_duckdb,
    "pandas": by_pandas,
    "pyarrow": by_pyarrow,
    "delta-rs": by_delta_rs,
    "pyiceberg": by_pyiceberg,
    "any text": by_hand,
}
NOT_INSTALLED = {"Spark", "Hive", "Trino", "Flink", "Polars", "Hudi"}
"""By their own words; of these no file was read here."""


def documented():
    """Return the writers of each line of the table."""
    text = (PROJECT / "docs" / "DATA.md").read_text()
    lines = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    first = lines.index("Written by") + 1
    return {name for line in lines[first : first + 5] for name in re.split(r", ", line.partition(":")[0])}


@pytest.fixture(autouse=True)
def catalog(tmp_path, monkeypatch):
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__WAREHOUSE", f"file://{tmp_path}")
    monkeypatch.setattr(catalogs, "_ENV_CONFIG", Config())


def test_each_writer_of_the_table_is_tried_or_named_as_not_installed():
    assert documented() == {*WRITERS, *NOT_INSTALLED}


@pytest.mark.parametrize("writer", WRITERS)
def test_rows_of_a_writer_are_read_as_they_were_written(tmp_path, writer):
    folder = tmp_path / "written"
    folder.mkdir()
    data = WRITERS[writer](folder)
    source = TablePath.parse(data) or data
    if isinstance(source, TablePath):
        source = replace(source, time_column="row")

    dataset = prepare_dataset(source, schema=SCHEMA, buckets_per_slot=1_009, out_dir=tmp_path / "prepared")

    batch = dataset.batch(pa.array(range(NUM_ROWS)).to_numpy())
    assert batch.labels.tolist() == [row % 2 for row in range(NUM_ROWS)]
    assert batch.dense[:, 0].argsort().tolist() == [*range(NUM_ROWS)]
    towns = batch.ids[:, 0].tolist()
    assert towns == (towns[:3] * NUM_ROWS)[:NUM_ROWS]
    assert len({*towns}) == 3


def test_a_format_that_is_not_read_is_refused_in_one_line(tmp_path):
    pa.orc.write_table(ROWS, tmp_path / "rows.orc")

    with pytest.raises(DataError) as error:
        prepare_dataset(tmp_path / "rows.orc", schema=SCHEMA, out_dir=tmp_path / "prepared")

    assert "\n" not in str(error.value)


def test_a_folder_with_the_log_of_a_table_is_refused_with_the_name_of_the_table(tmp_path):
    by_delta_rs(tmp_path)

    with pytest.raises(DataError, match=f"delta://{tmp_path}/clicks"):
        list_source_files(tmp_path / "clicks")
