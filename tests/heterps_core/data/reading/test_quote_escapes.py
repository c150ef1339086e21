import bz2
import gzip
import random
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.proposal.schema_proposal import propose_schema
from heterps_core.data.proposal.table_sample import sample_table
from heterps_core.data.reading import text_reader
from heterps_core.data.reading.readers import check_columns, read_columns, read_rows
from heterps_core.data.row_query import RowQuery
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError

SCHEMA = DataSchema(name="clicks", label_column="click", categorical_columns=("title", "site"))
COMPRESSED = {".csv": bytes, ".csv.gz": gzip.compress, ".csv.bz2": bz2.compress}


def by_spark(text):
    r"""Write a field as Spark does by default: \" for a quote, \\ for a backslash before one."""
    if text and not set(text) & set(',"\n'):
        return text
    return '"{}"'.format(
        re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), text)
    )


def by_rfc(text):
    return '"{}"'.format(text.replace('"', '""')) if not text or set(text) & set(',"\n') else text


def write(path, rows, field):
    lines = ["click,title,site", *(",".join(map(field, row)) for row in rows)]
    compress = COMPRESSED["".join(path.suffixes)]
    path.write_bytes(compress("".join(f"{line}\n" for line in lines).encode()))
    return path


def read(path):
    """Return the texts of title and site."""
    batches = list(read_rows([path], SCHEMA))
    return [
        row for batch in batches for row in zip(*(texts.to_pylist() for texts in batch.texts), strict=True)
    ]


def random_rows(seed):
    rng = random.Random(seed)
    letters = rng.choice(['ab"\\,', 'abcdef" ,', "ab\\", 'a"\\ ,{}:\n', 'a"'])
    texts = partial(rng.choices, letters)
    return [
        (str(rng.randrange(2)), "".join(texts(k=rng.randrange(1, 6))), "".join(texts(k=rng.randrange(1, 12))))
        for _ in range(rng.choice([3, 20, 200]))
    ]


@pytest.mark.parametrize("ending", COMPRESSED)
@pytest.mark.parametrize("block_bytes", [1000, 4 * 1024 * 1024])
def test_rows_of_spark_are_those_of_rfc_4180(tmp_path, ending, block_bytes, monkeypatch):
    monkeypatch.setattr(text_reader, "_BLOCK_BYTES", block_bytes)
    rows = [
        *[("1", "plain", "a, b")] * 40,
        ("1", 'say "hi"', "a"),
        ("0", '"', '27"'),
        ("1", 'a, "b", c\\', 'C:\\new\\"x'),
        *[("0", 'tall, 5"', "C:\\temp")] * 40,
        ("1", 'far \\ beyond "a" block ' * 30, "a"),
    ]

    of_spark = write(tmp_path / f"spark{ending}", rows, by_spark)

    assert read(of_spark) == [row[1:] for row in rows]
    assert read(write(tmp_path / f"rfc{ending}", rows, by_rfc)) == [row[1:] for row in rows]


@pytest.mark.parametrize("seed", range(30))
def test_the_way_of_escaping_is_seen_in_random_rows(tmp_path, seed):
    rows = random_rows(seed)

    assert read(write(tmp_path / "rfc.csv", rows, by_rfc)) == [row[1:] for row in rows]
    of_spark = write(tmp_path / "spark.csv", rows, by_spark)
    if any('"' in text for row in rows for text in row):
        assert read(of_spark) == [row[1:] for row in rows]


def test_quotes_that_are_escaped_late_in_a_large_file_are_read(tmp_path):
    rows = [("1", f"{number:030}", "a, b") for number in range(120_000)] + [("0", 'a "b", c', "x")] * 2

    assert read(write(tmp_path / "rows.csv", rows, by_spark))[-3:] == [
        (f"{119_999:030}", "a, b"),
        ('a "b", c', "x"),
        ('a "b", c', "x"),
    ]


def test_every_reader_sees_the_same_fields(tmp_path):
    rows = [(str(number % 2), f'a "{number % 3}", b', "x") for number in range(60)]
    spark, rfc = (write(tmp_path / f"{field.__name__}.csv", rows, field) for field in (by_spark, by_rfc))

    check_columns(spark, SCHEMA)
    proposals = [propose_schema(file, source="clicks", label="click").schema for file in (spark, rfc)]
    columns = [next(read_columns(file, SCHEMA, ["title"])).to_pydict() for file in (spark, rfc)]
    batches = [
        prepare_dataset(file, schema=SCHEMA, out_dir=tmp_path / file.stem).batch(np.arange(48))
        for file in (spark, rfc)
    ]

    assert replace(proposals[0], name="") == replace(proposals[1], name="")
    assert columns[0] == columns[1]
    assert sample_table(spark).columns[1].texts[:3].to_pylist() == [row[1] for row in rows[:3]]
    np.testing.assert_array_equal(batches[0].ids, batches[1].ids)


def test_a_header_may_have_escaped_quotes(tmp_path):
    (tmp_path / "rows.csv").write_text('click,"the \\"real\\", title",site\n1,a,b\n')

    schema = DataSchema(
        name="clicks", label_column="click", categorical_columns=('the "real", title', "site")
    )

    assert [batch.texts[0].to_pylist() for batch in read_rows([tmp_path / "rows.csv"], schema)] == [["a"]]


@pytest.mark.parametrize("title", ["C:\\clicks\\", 'say \\"hi"', "C:\\clicks, D:\\", '{"path": "C:\\\\"}'])
def test_a_backslash_of_rfc_4180_stays_a_character(tmp_path, title):
    rows = [("1", title, "a, b"), ("0", "x", title)] * 3

    path = write(tmp_path / "rows.csv", rows, lambda text: '"{}"'.format(text.replace('"', '""')))

    assert read(path) == [row[1:] for row in rows]


def test_a_file_that_escapes_in_both_ways_is_refused_with_what_to_write(tmp_path):
    (tmp_path / "rows.csv").write_text('click,title,site\n1,"say \\"hi\\", you",a\n0,"say ""hi"", you",a\n')

    with pytest.raises(DataError, match=r"rows.csv: escapes quotes .* both .*option\('escape', '\"'\)"):
        read(tmp_path / "rows.csv")


def test_a_bad_line_after_escaped_quotes_is_named_as_it_is(tmp_path):
    rows = [("1", 'a "b", c', "x")] * 5

    path = write(tmp_path / "rows.csv", [*rows, ("2", 'a "b", c', "x")], by_spark)

    with pytest.raises(DataError, match=r"line 7: .*got '2'"):
        read(path)


def test_a_query_on_escaped_quotes_is_refused_with_what_to_write(tmp_path):
    path = write(tmp_path / "rows.csv", [("1", 'a "b", c', "x")] * 5, by_spark)

    (tmp_path / "rows.sql").write_text("SELECT * FROM rows ORDER BY click")
    query = RowQuery.load(tmp_path / "rows.sql")

    with pytest.raises(DataError, match=r"which a query does not read; .*option\('escape', '\"'\)"):
        query.check([path], day=None, schema=SCHEMA)
