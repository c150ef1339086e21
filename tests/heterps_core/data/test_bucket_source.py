"""Rows that lie in a bucket: found, read in parts, and refused by name where they are not as they were prepared."""

from __future__ import annotations

import time
from collections import Counter

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import DomainDispatcherApplication

from heterps_core.data import row_groups
from heterps_core.data.dataset import STEPS_AHEAD, PreparedDataset
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.reading.bucket_path import BucketPath
from heterps_core.data.reading.days import find_night, partitions_of
from heterps_core.data.reading.readers import list_source_files
from heterps_core.data.schema import DataSchema
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.training.storage.run_directory import RunDirectory
from tests.heterps_core.data.synthetic_rows import all_rows, criteo_lines, prepare, write_lines, write_parquet
from tests.moto_server import empty_cloud

pytestmark = pytest.mark.slow

SERVE = DomainDispatcherApplication.__call__
AS_WRITTEN = {
    "numeric_transform": NumericTransform(
        is_count=(True,) * 13, means=(0.0,) * 13, standard_deviations=(1.0,) * 13
    )
}


class Bucket:
    """A bucket named clicks, what its server was asked for and sent, and how it is to fail."""

    def __init__(self):
        self.requests = []
        self.sent_bytes = Counter()
        self.faults = []
        """What happens to the next reads of objects: a status that answers them, or what is done to their content."""

    @property
    def client(self):
        return boto3.client("s3")

    def put(self, key, path):
        self.client.upload_file(str(path), "clicks", key)
        return f"s3://clicks/{key}"

    def answer(self, application, environment, start_response):
        method, path = environment["REQUEST_METHOD"], environment["PATH_INFO"]
        self.requests.append((method, path, environment.get("QUERY_STRING", "")))
        fault = (
            self.faults.pop(0) if self.faults and method == "GET" and "HTTP_RANGE" in environment else None
        )
        if isinstance(fault, int):
            start_response(f"{fault} as it was asked", [("Content-Length", "0")])
            yield b""
            return
        for content in SERVE(application, environment, start_response):
            self.sent_bytes[path] += len(content) if method == "GET" else 0
            yield content if fault is None else fault(content)


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(row_groups, "_TRIED_AGAIN_AFTER_S", (0.0, 0.0))
    bucket = Bucket()
    monkeypatch.setattr(DomainDispatcherApplication, "__call__", lambda *request: bucket.answer(*request))
    with empty_cloud() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        bucket.client.create_bucket(Bucket="clicks")
        yield bucket


def test_rows_in_a_bucket_are_prepared_as_those_of_this_machine(bucket, tmp_path):
    here = prepare(
        write_parquet(tmp_path / "in" / "rows.parquet", 103, rows_per_group=20),
        tmp_path / "here",
        **AS_WRITTEN,
    )
    uri = bucket.put("a/rows.parquet", tmp_path / "in" / "rows.parquet")
    text = bucket.put("b/rows.tsv.gz", write_lines(tmp_path / "rows.tsv.gz", criteo_lines(103)))

    for source, name in ((uri, "parquet"), ("s3://clicks/b", "text"), ([uri, text], "both")):
        there = prepare(source, tmp_path / name, **AS_WRITTEN)
        num_copies = len(list((tmp_path / name).glob("*.parquet")))
        assert num_copies == (name != "parquet")
        for rows in ("labels", "dense", "ids"):
            found = getattr(all_rows(PreparedDataset.open(there.directory)), rows)
            np.testing.assert_allclose(found[:103], getattr(all_rows(here), rows), atol=1e-5)


def test_only_columns_and_row_groups_in_use_are_read(bucket, tmp_path):
    path = write_parquet(tmp_path / "rows.parquet", 4_000, rows_per_group=1_000)
    dataset = prepare(bucket.put("rows.parquet", path), tmp_path / "out", **AS_WRITTEN)
    opened = PreparedDataset.open(dataset.directory)
    bucket.sent_bytes.clear()

    opened.target_batch(np.arange(2_000, 2_100))
    labels_bytes = bucket.sent_bytes.total()
    bucket.sent_bytes.clear()
    opened.batch(np.array([1_999, 2_000]))

    footer = pq.read_metadata(path)
    used = [
        footer.row_group(group).column(column).total_compressed_size
        for group in (1, 2)
        for column in range(40)
    ]
    assert labels_bytes == used[40]
    assert bucket.sent_bytes.total() == sum(used)


def test_requests_and_bytes_are_counted_as_the_server_answers_them(bucket, tmp_path):
    """Of the columns in use two touch, one lies behind a small hole, and one behind a large one."""
    columns = {
        "click": np.arange(40_000) % 2,
        "a": np.arange(40_000),
        "small": np.zeros(40_000, dtype=np.int64),
    }
    columns |= {
        "b": np.arange(40_000) * 3,
        "large": np.random.default_rng(0).random(40_000),
        "c": np.arange(40_000) * 5,
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=20_000)
    schema = DataSchema(name="clicks", label_column="click", categorical_columns=("a", "b", "c"))
    prepare(bucket.put("rows.parquet", tmp_path / "rows.parquet"), tmp_path / "out", schema=schema)
    dataset = PreparedDataset.open(tmp_path / "out")
    bucket.requests.clear()
    bucket.sent_bytes.clear()

    dataset.batch(np.arange(19_990, 20_010))
    dataset.target_batch(np.arange(10))

    of_object = [method for method, path, _ in bucket.requests if path == "/clicks/rows.parquet"]
    assert dataset.bucket_requests == (len(of_object), bucket.sent_bytes["/clicks/rows.parquet"])


def test_workers_elsewhere_read_the_same_rows_by_the_run_directory(bucket, tmp_path):
    path = write_parquet(tmp_path / "rows.parquet", 103, rows_per_group=20)
    here = prepare(bucket.put("rows.parquet", path), tmp_path / "out")
    run = RunDirectory("s3://clicks/runs/night-1")
    run.upload_folder(tmp_path / "out", "data")

    there = PreparedDataset.open(f"{run.location}/data", folder=lambda name: run.open_file(f"data/{name}"))

    assert run.names("data") == ["manifest.json", "row_groups.npy", "rows-00000.footer.zst"]
    np.testing.assert_array_equal(all_rows(there).dense, all_rows(here).dense)


def test_row_groups_are_read_once_and_before_a_batch_needs_them(bucket, tmp_path):
    """As one of two replicas, over an epoch of which each batch needs a part of the row groups."""
    path = write_parquet(tmp_path / "rows.parquet", 3_000, rows_per_group=20)
    dataset = prepare(bucket.put("rows.parquet", path), tmp_path / "out", **AS_WRITTEN)
    whole, positions = all_rows(dataset), np.arange(8)
    reads, late = Counter(), []
    read = dataset._rows._read

    def counted(group):
        reads[group] += 1
        return read(group)

    dataset._rows._read = counted
    for index in range(dataset.num_batches(16)):
        rows = dataset.batch_rows(0, index, batch_size=16, seed=1, positions=positions)
        if index > STEPS_AHEAD:
            late += [group for group in rows // 20 if not reads[group]]
        np.testing.assert_array_equal(dataset.batch(rows).ids.numpy(), whole.ids[rows])

    assert late == []
    assert set(reads.values()) == {1}


def test_of_a_bucket_of_days_only_the_two_of_the_night_are_listed(bucket, tmp_path):
    path = write_parquet(tmp_path / "rows.parquet", 5)
    for day in range(10, 20):
        for hour in (9, 10):
            bucket.put(f"raw/dt=2026-11-{day}/hour={hour}/rows.parquet", path)
    bucket.requests.clear()

    night = find_night("s3://clicks/raw", None)

    assert [file.parent.name for file in night.train_files] == ["hour=9", "hour=10"]
    assert night.train_files[0] == BucketPath.parse("s3://clicks/raw/dt=2026-11-18/hour=9/rows.parquet")
    listed = [
        query for method, _, query in bucket.requests if "list-type" in query and "max-keys=1000" in query
    ]
    # The folder, each of both days and its hours, and the folder above for the log of a table, of three kinds.
    assert len(listed) == 1 + 2 * 3 + 3


@pytest.mark.parametrize("pattern", ["raw/dt=*", "raw/dt=2026-11-*/*.parquet", "raw/*/rows*"])
def test_a_pattern_finds_the_days_of_a_bucket(bucket, tmp_path, pattern):
    path = write_parquet(tmp_path / "rows.parquet", 5)
    for day in (9, 10):
        bucket.put(f"raw/dt=2026-11-{day:02}/rows.parquet", path)

    assert [str(day) for day in partitions_of(f"s3://clicks/{pattern}")] == ["2026-11-09", "2026-11-10"]
    assert len(list_source_files(f"s3://clicks/{pattern}")) == 2


@pytest.mark.parametrize(
    "folder",
    ["year=2026/month=11/day={:02}", "region=eu/ds=202611{:02}", "dt=2026-11-{:02}-23", "2026/11/{:02}/23"],
)
def test_days_of_a_bucket_may_be_written_in_other_forms(bucket, tmp_path, folder):
    path = write_parquet(tmp_path / "rows.parquet", 5)
    for day in (9, 10):
        bucket.put(f"raw/{folder.format(day)}/rows.parquet", path)
        bucket.put(f"raw/{folder.format(day)}/_SUCCESS", write_lines(tmp_path / "mark", []))
    bucket.put("raw/year=2026_$folder$", tmp_path / "mark")

    night = find_night("s3a://clicks/raw/", None)

    assert [str(file) for file in (*night.train_files, *night.eval_files)] == [
        f"s3://clicks/raw/{folder.format(day)}/rows.parquet" for day in (9, 10)
    ]


@pytest.mark.parametrize("source", ["lake/clicks", "lake/clicks/day=2026-11-01", "lake/clicks/day=*"])
def test_a_delta_table_in_a_bucket_is_refused(bucket, tmp_path, source):
    bucket.put("lake/clicks/_delta_log/00000000000000000000.json", write_lines(tmp_path / "log", ["{}"]))
    bucket.put("lake/clicks/day=2026-11-01/a.parquet", write_parquet(tmp_path / "rows.parquet", 5))

    for find in (partitions_of, list_source_files):
        with pytest.raises(DataError, match=r"s3://clicks/lake/clicks: is a table of Delta"):
            find(f"s3://clicks/{source}")


def test_a_bad_row_that_is_held_out_in_a_bucket_is_named_before_training(bucket, tmp_path):
    good = bucket.put("a.parquet", write_parquet(tmp_path / "a.parquet", 50))
    rows = pq.read_table(tmp_path / "a.parquet")
    labels = pa.array([None if row == 40 else row % 2 for row in range(50)])
    pq.write_table(rows.set_column(0, "label", labels), tmp_path / "b.parquet")

    with pytest.raises(
        DataError, match=r"^s3://clicks/b.parquet: row 41: the label \(column label\) must be"
    ):
        prepare(good, tmp_path / "out", eval_source=bucket.put("b.parquet", tmp_path / "b.parquet"))


def test_a_missing_object_is_named(bucket, tmp_path):
    with pytest.raises(DataError, match=r"s3://clicks/none: there is no such file or folder"):
        prepare("s3://clicks/none", tmp_path / "out")


@pytest.fixture
def dataset(bucket, tmp_path):
    """500 rows in five row groups, of which nothing was read yet but the footer."""
    bucket.put("rows.parquet", write_parquet(tmp_path / "rows.parquet", 500, rows_per_group=100))
    prepare("s3://clicks/rows.parquet", tmp_path / "out", **AS_WRITTEN)
    return PreparedDataset.open(tmp_path / "out")


def slowly(content):
    time.sleep(2.0)
    return content


@pytest.mark.parametrize(
    "faults",
    [[500, 503], [slowly], [lambda content: content[:100]], [lambda content: bytes(len(content))]],
    ids=["errors of the server", "slow", "cut off", "garbled on the way"],
)
def test_a_read_that_fails_for_a_while_is_made_up_for(bucket, dataset, tmp_path, faults):
    bucket.faults += faults

    batch = dataset.batch(np.arange(300, 310))

    assert bucket.faults == []
    whole = all_rows(prepare(tmp_path / "rows.parquet", tmp_path / "here", **AS_WRITTEN))
    np.testing.assert_array_equal(batch.ids.numpy(), whole.ids[300:310])


def test_an_object_that_is_replaced_in_mid_read_is_refused_by_name(bucket, dataset, tmp_path):
    """While the first answer is on its way, as a job does that writes the day once more."""
    other = write_parquet(tmp_path / "other.parquet", 500, rows_per_group=100)

    def replaced(content):
        bucket.put("rows.parquet", write_lines(other, ["another file"]))
        return content

    bucket.faults.append(replaced)

    with pytest.raises(
        DataError, match=r"s3://clicks/rows.parquet: must stay as it was .* the ETag \w+, but was repl"
    ):
        dataset.batch(np.arange(10))


def test_an_object_that_was_replaced_or_lost_before_the_run_is_refused_by_name(bucket, dataset, tmp_path):
    bucket.put("rows.parquet", write_parquet(tmp_path / "rows.parquet", 500, rows_per_group=100, first=1))
    bucket.sent_bytes.clear()
    with pytest.raises(
        DataError, match=r"s3://clicks/rows.parquet: must stay .* write new rows to a new name"
    ):
        dataset.batch(np.arange(10))
    assert sum(bucket.sent_bytes.values()) == 0

    bucket.client.delete_object(Bucket="clicks", Key="rows.parquet")
    with pytest.raises(DataError, match=r"s3://clicks/rows.parquet: cannot be read"):
        dataset.batch(np.arange(210, 220))


def test_a_damaged_row_group_of_an_object_is_named(bucket, tmp_path):
    path = write_parquet(tmp_path / "rows.parquet", 500, rows_per_group=100)
    column = pq.read_metadata(path).row_group(3).column(30)
    with path.open("r+b") as file:
        file.seek(column.dictionary_page_offset or column.data_page_offset)
        file.write(bytes(column.total_compressed_size))

    with pytest.raises(
        DataError, match=r"s3://clicks/rows.parquet: row group 3 of 5 cannot be read as Parquet"
    ):
        prepare(bucket.put("rows.parquet", path), tmp_path / "out")


def test_text_that_changes_while_it_is_converted_is_refused(bucket, tmp_path):
    uri = bucket.put("rows.tsv", write_lines(tmp_path / "rows.tsv", criteo_lines(103)))

    def replaced(content):
        bucket.put("rows.tsv", write_lines(tmp_path / "rows.tsv", criteo_lines(104)))
        return content

    bucket.faults += [replaced]
    with pytest.raises(DataError, match=r"s3://clicks/rows.tsv: must not change while it is read, but did"):
        prepare(uri, tmp_path / "other")


@pytest.mark.parametrize("source", ["s3://clicks/raw?regoin=us-east-1", "s3://"])
def test_a_uri_that_is_none_is_reported(source):
    with pytest.raises(ConfigurationError, match=r"a bucket must be given as s3://BUCKET/PREFIX"):
        list_source_files(source)


@pytest.mark.parametrize("look", [list_source_files, partitions_of, lambda source: find_night(source, None)])
def test_a_bucket_that_may_not_be_read_is_reported(bucket, look):
    def refuse(application, environment, start_response):
        start_response("403 Forbidden", [("Content-Length", "0")])
        return [b""]

    bucket.answer = refuse

    with pytest.raises(
        DataError, match=r"s3://clicks/raw.*: cannot be looked for: .*; check its name, the region and"
    ):
        look("s3://clicks/raw/*")
