import gzip
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.proposal.day_check import check_day
from heterps_core.data.reading.bucket_path import source_path
from heterps_core.data.reading.days import partitions_of
from heterps_core.data.reading.readers import (
    check_columns,
    holds_rows,
    list_source_files,
    read_columns,
    read_rows,
)
from heterps_core.data.reading.source_files import data_files_of
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema
from heterps_core.errors import DataError
from tests.heterps_core.data.synthetic_rows import COLUMNS, criteo_lines, write_lines


def names(files):
    return [file.name for file in files]


def test_files_of_a_folder_come_in_the_order_of_their_numbers(tmp_path):
    for name in ["day_10.tsv", "day_2.tsv", "day_1.tsv", "_SUCCESS", ".hidden"]:
        write_lines(tmp_path / name, ["x"])
    (tmp_path / "folder").mkdir()

    assert names(list_source_files(tmp_path)) == ["day_1.tsv", "day_2.tsv", "day_10.tsv"]


def test_partitions_within_a_folder_come_in_the_order_of_their_numbers(tmp_path):
    for name in ["hour=10/b.tsv", "hour=9/part=2/a.tsv", "hour=9/part=2/_SUCCESS", "_old/c.tsv", "a.tsv"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_lines(tmp_path / name, ["x"])

    files = [tmp_path / name for name in ("a.tsv", "hour=9/part=2/a.tsv", "hour=10/b.tsv")]
    assert list_source_files(tmp_path) == tuple(files)
    assert list_source_files(str(tmp_path / "hour=*")) == tuple(files[1:])


def test_a_folder_within_that_is_no_partition_is_refused_by_name(tmp_path):
    (tmp_path / "backup" / "deep").mkdir(parents=True)
    for name in ["a.tsv", "backup/deep/a.tsv"]:
        write_lines(tmp_path / name, ["x"])

    with pytest.raises(
        DataError, match="but holds the folder 'backup'; rename it to _backup to leave it out"
    ):
        list_source_files(tmp_path)


LEFT_BY_WRITERS = [
    *(
        "_SUCCESS",
        "_committed_1",
        "_started_1",
        "_metadata",
        "_common_metadata",
        ".part-0.tsv.crc",
        ".DS_Store",
    ),
    *("part-0.tsv.crc", "day=1_$folder$", "part-1.tsv.tmp", "part-2.tsv._COPYING_", "part-0.tsv~"),
]


@pytest.mark.parametrize("name", ["", "*", "hour=*", "hour=*/*"])
def test_what_writers_leave_is_passed_over(tmp_path, name):
    (tmp_path / "hour=01").mkdir()
    for left in ("part-0.tsv", *LEFT_BY_WRITERS):
        write_lines(tmp_path / "hour=01" / left, ["x"])
        if left in LEFT_BY_WRITERS:
            write_lines(tmp_path / left, ["x"])

    assert list_source_files(tmp_path / name) == (tmp_path / "hour=01" / "part-0.tsv",)


@pytest.mark.parametrize(
    ("log", "data", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "day=2026-11-01/a.parquet", "Delta"),
        ("metadata/v1.metadata.json", "data/day=2026-11-01/a.parquet", "Iceberg"),
        (".hoodie/hoodie.properties", "day=2026-11-01/a.parquet", "Hudi"),
    ],
)
@pytest.mark.parametrize("inner", ["", "lake/region=eu"])
@pytest.mark.parametrize("below", [0, 1, 2, "*"])
def test_a_table_with_a_log_is_refused_at_every_level(tmp_path, log, data, kind, inner, below):
    table = tmp_path / inner
    for name in (log, data):
        (table / name).parent.mkdir(parents=True, exist_ok=True)
        write_lines(table / name, ["x"])
    file = table / data
    source = [table, file.parent, file][below] if below != "*" else file.parent.parent / "*"

    for find in (list_source_files, partitions_of):
        with pytest.raises(
            DataError, match=f"is a table of {kind}.* (write the rows to a folder of plain|name the table as)"
        ):
            find(source)


def test_a_day_that_was_copied_out_of_a_hudi_table_is_refused(tmp_path):
    for name in (".hoodie_partition_metadata", "a.parquet"):
        write_lines(tmp_path / name, ["x"])

    with pytest.raises(DataError, match=r"is a table of Hudi, as \.hoodie_partition_metadata shows"):
        list_source_files(tmp_path)


def test_a_folder_of_metadata_is_no_table_of_its_own(tmp_path):
    (tmp_path / "metadata").mkdir()
    write_lines(tmp_path / "metadata" / "columns.json", ["{}"])
    write_lines(tmp_path / "a.tsv", ["x"])

    assert list_source_files(tmp_path / "a.tsv") == (tmp_path / "a.tsv",)


def test_partitions_of_something_else_than_time_have_no_latest_rows(tmp_path):
    for name in ("region=eu/hour=01/a.tsv", "region=us/hour=01/a.tsv"):
        (tmp_path / name).parent.mkdir(parents=True)
        write_lines(tmp_path / name, criteo_lines(5))

    with pytest.raises(DataError, match="region=eu and region=us lie side by side; name a time_column"):
        prepare_dataset(tmp_path, schema=CRITEO_SCHEMA, out_dir=tmp_path / "out")
    one = prepare_dataset(tmp_path / "region=eu", schema=CRITEO_SCHEMA, out_dir=tmp_path / "one")
    in_an_order = sorted(tmp_path.glob("region=*"))
    both = prepare_dataset(in_an_order, schema=CRITEO_SCHEMA, out_dir=tmp_path / "both")
    assert (one.manifest.num_rows, both.manifest.num_rows) == (5, 10)


def test_rows_whose_hour_is_unknown_are_not_taken_for_the_latest(tmp_path):
    for hour in ("01", "02", "__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / f"hour={hour}").mkdir()
        write_lines(tmp_path / f"hour={hour}" / "a.tsv", criteo_lines(5))

    with pytest.raises(DataError, match="hour=__HIVE_DEFAULT_PARTITION__ lie side by side"):
        prepare_dataset(tmp_path, schema=CRITEO_SCHEMA, out_dir=tmp_path / "out")


def test_links_are_files_and_folders_and_one_to_nothing_is_refused(tmp_path):
    source, kept = tmp_path / "source", tmp_path / "kept"
    source.mkdir()
    kept.mkdir()
    write_lines(kept / "a.tsv", ["x"])
    (source / "hour=1").symlink_to(kept)
    (source / "b.tsv").symlink_to(kept / "a.tsv")
    assert list_source_files(source) == (source / "b.tsv", source / "hour=1" / "a.tsv")

    (source / "c.tsv").symlink_to(kept / "was-never-fetched")
    with pytest.raises(DataError, match=r"c\.tsv: is a link that leads to no file; get the file"):
        list_source_files(source)


def test_a_folder_that_holds_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "hour=1").symlink_to(tmp_path)

    with pytest.raises(DataError, match="hour=1: is a link that leads to no file"):
        list_source_files(tmp_path)


def test_a_pipe_is_refused_before_it_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(DataError, match="must be a file, as it is read several times, but is a pipe"):
        list_source_files(tmp_path / "pipe")


def test_a_folder_that_cannot_be_listed_is_named_with_the_cause(tmp_path):
    with pytest.raises(DataError, match="gone: cannot be listed: No such file or directory"):
        data_files_of(tmp_path / "gone")


def test_a_pattern_takes_the_files_that_match(tmp_path):
    for name in ["b_2.tsv", "b_10.tsv", "a.tsv"]:
        write_lines(tmp_path / name, ["x"])

    assert names(list_source_files(str(tmp_path / "b_*.tsv"))) == ["b_2.tsv", "b_10.tsv"]


def test_a_list_keeps_its_order(tmp_path):
    files = [write_lines(tmp_path / name, ["x"]) for name in ("b", "a")]

    assert list_source_files(files) == tuple(files)


def test_a_name_with_pattern_characters_is_that_file(tmp_path):
    path = write_lines(tmp_path / "rows[1].tsv", ["x"])

    assert list_source_files(str(path)) == (path,)


@pytest.mark.parametrize(
    ("uri", "command"),
    [
        ("gs://bucket/clicks", r"gs: is another store; copy .*: gcloud storage cp -r gs://bucket/clicks \."),
        ("hdfs://name/clicks", "hdfs dfs -get hdfs://name/clicks"),
        ("abfss://box@account.dfs.core.windows.net/clicks", "azcopy copy"),
        (
            "https://user:secret@host/clicks.csv?sig=secret",
            "with a program that knows https://host/clicks.csv$",
        ),
        ("swift://box/clicks", "with a program that knows swift://box/clicks"),
        (Path("gs://bucket/clicks"), "gcloud storage cp -r gs:/bucket/clicks"),
    ],
)
def test_another_store_is_named_with_a_command_that_copies_from_there(uri, command):
    for find in (list_source_files, partitions_of):
        with pytest.raises(DataError, match=command) as caught:
            find(uri)

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("uri", ["file://{}", "file:{}", "file://localhost{}", "FILE://{}"])
def test_a_file_uri_is_that_path(tmp_path, uri):
    path = write_lines(tmp_path / "a b.tsv", ["x"])

    assert list_source_files(uri.format(str(path).replace(" ", "%20"))) == (path,)


@pytest.mark.parametrize("uri", ["s3a://bucket/clicks", "s3n://bucket/clicks/", Path("s3://bucket/clicks")])
def test_names_that_other_programs_give_s3_are_s3(uri):
    assert str(source_path(uri)) == "s3://bucket/clicks"


@pytest.mark.parametrize("name", ["none.tsv", "none_*.tsv"])
def test_a_missing_file_is_an_error(tmp_path, name):
    with pytest.raises(DataError, match="there is no such file or folder") as caught:
        list_source_files(tmp_path / name)

    assert str(tmp_path / name) in str(caught.value)


def test_a_folder_without_files_is_an_error(tmp_path):
    (tmp_path / "_SUCCESS").touch()

    with pytest.raises(DataError, match="a folder must hold at least one data file, got none"):
        list_source_files(tmp_path)


def test_an_empty_list_is_an_error():
    with pytest.raises(DataError, match="must name at least one file"):
        list_source_files([])


def test_many_files_are_one_stream_in_order(tmp_path):
    lines = criteo_lines(10)
    files = [
        write_lines(tmp_path / "1.tsv", lines[:4]),
        write_lines(tmp_path / "2.tsv.gz", lines[4:7]),
        write_lines(tmp_path / "3.csv", [line.replace("\t", ",") for line in lines[7:]]),
    ]

    last_texts = [text for batch in read_rows(files, CRITEO_SCHEMA) for text in batch.texts[25].to_pylist()]

    assert last_texts == [line.split("\t")[-1] for line in lines]


def test_names_the_file_of_many_that_is_bad(tmp_path):
    good, bad = criteo_lines(2)
    files = [write_lines(tmp_path / "1.tsv", [good]), write_lines(tmp_path / "2.tsv", [good, bad[2:]])]

    with pytest.raises(DataError, match=r"2.tsv, line 2: expected 40 fields"):
        list(read_rows(files, CRITEO_SCHEMA))


def test_a_file_that_vanishes_before_it_is_read_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"gone.tsv: cannot be read: No such file"):
        list(read_rows([tmp_path / "gone.tsv"], CRITEO_SCHEMA))


@pytest.fixture(scope="module")
def same_rows(tmp_path_factory):
    """40,000 rows as plain text, gzip, CSV with a header, and Parquet with two codecs."""
    folder = tmp_path_factory.mktemp("same")
    lines = criteo_lines(40_000)
    write_lines(folder / "rows.tsv", lines)
    write_lines(folder / "rows.tsv.gz", lines)
    write_lines(folder / "rows.csv", [",".join(COLUMNS), *(line.replace("\t", ",") for line in lines)])
    write_lines(folder / "unended.tsv", [*lines[:-1]])
    with (folder / "unended.tsv").open("a") as file:
        file.write(lines[-1])
    columns = zip(*(line.split("\t") for line in lines), strict=True)
    table = pa.table({name: list(values) for name, values in zip(COLUMNS, columns, strict=True)})
    for codec in ("zstd", "none"):
        pq.write_table(table, folder / f"{codec}.parquet", compression=codec)
    return folder


@pytest.mark.parametrize(
    "name", ["rows.tsv", "rows.tsv.gz", "rows.csv", "unended.tsv", "zstd.parquet", "none.parquet"]
)
def test_the_same_rows_get_the_same_tables_whatever_file_holds_them(same_rows, tmp_path, name):
    dataset = prepare_dataset(same_rows / name, schema=CRITEO_SCHEMA, out_dir=tmp_path / "out")

    assert dataset.manifest.num_rows == 40_000
    assert set(dataset.features.slot_rows) == {2_048}  # 32,000 rows to train on / 8 = 4,000


@pytest.mark.parametrize("name", ["rows.tsv.gz", "zstd.parquet"])
def test_a_damaged_file_cannot_be_prepared(same_rows, tmp_path, name):
    damaged = tmp_path / name
    damaged.write_bytes((same_rows / name).read_bytes()[:-9])

    with pytest.raises(DataError, match=r"truncated or damaged|cannot be read as Parquet"):
        prepare_dataset(damaged, schema=CRITEO_SCHEMA, out_dir=tmp_path / "out")


@pytest.mark.parametrize("blank", ["", "\n", "label,site\n", "label,site", "\ufefflabel,site\r\n"])
@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_parts_without_rows_are_passed_over_wherever_they_lie(tmp_path, blank, suffix):
    schema = DataSchema(name="rows", label_column="label", categorical_columns=("site",), time_column="site")
    for name, lines in (
        ("0", blank),
        ("1", "label,site\n0,1\n1,2\n"),
        ("2", blank),
        ("3", "label,site\n0,3\n"),
    ):
        content = lines.encode()
        (tmp_path / f"part-{name}{suffix}").write_bytes(
            gzip.compress(content) if suffix == ".csv.gz" else content
        )
    files = list_source_files(tmp_path)

    dataset = prepare_dataset(tmp_path, schema=schema, out_dir=tmp_path / "_out")

    assert dataset.manifest.num_rows == 3
    assert [holds_rows(file) for file in files] == [False, True, False, True]
    assert [batch.num_rows for file in files for batch in read_columns(file, schema, ["site"])] == [2, 1]
    assert check_day(files, schema).num_rows == 3
    check_columns(files[0], schema)
    with pytest.raises(DataError, match=r"part-0.* must hold at least one row of rows data, got none"):
        prepare_dataset(files[0], schema=schema, out_dir=tmp_path / "_none")
