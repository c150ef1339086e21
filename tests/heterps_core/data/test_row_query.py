"""Rows that a SQL query makes: beside joins written by hand, kept while nothing has changed, refused in one line."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import boto3
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from heterps_core.data import row_query
from heterps_core.data.manifest import describe_source
from heterps_core.data.reading.readers import list_source_files
from heterps_core.data.row_query import RowQuery, inputs_of
from heterps_core.data.schema import DataSchema
from heterps_core.errors import ConfigurationError, DataError
from tests.moto_server import empty_cloud

pytest.importorskip("duckdb", reason="the package duckdb is not installed")

SCHEMA = DataSchema(name="clicks", label_column="label", categorical_columns=("site", "country"))
DAY = date(2026, 11, 1)
SHOWN = {"id": list(range(6)), "member": [1, 2, 1, 3, 9, 2], "site": ["a", "b", "a", "c", "c", "b"]}
CLICKED = {"id": [1, 4, 5], "at": [date(2026, 11, 1), date(2026, 11, 2), date(2026, 11, 4)]}
USERS = {"member": [1, 2, 3], "country": ["de", "fr", "de"]}
QUERY = """
WITH known AS (SELECT * FROM '{users}')
SELECT r.site, known.country, (c.id IS NOT NULL)::INT AS label
FROM rows r LEFT JOIN known USING (member)
LEFT JOIN '{clicked}' c ON r.id = c.id AND c.at <= $day::DATE + 1
ORDER BY r.id
"""
EXPECTED = {
    "site": ["a", "b", "a", "c", "c", "b"],
    "country": ["de", "fr", "de", "de", None, "fr"],
    # The click of row 5 came three days later.
    "label": [0, 1, 0, 0, 1, 0],
}


@pytest.fixture
def tables(tmp_path) -> dict[str, Path]:
    paths = {"shown": tmp_path / "shown.parquet", "clicked": tmp_path / "late" / "clicked.parquet"}
    paths["clicked"].parent.mkdir()
    pq.write_table(pa.table(SHOWN), paths["shown"])
    pq.write_table(pa.table(CLICKED), paths["clicked"])
    paths["users"] = tmp_path / "users.parquet"
    pq.write_table(pa.table(USERS), paths["users"])
    return paths


def query_of(tables, folder: Path, text: str = QUERY) -> RowQuery:
    path = folder / "rows.sql"
    path.write_text(text.format(**tables))
    return RowQuery.load(path)


def run(query: RowQuery, shown, folder: Path, day=DAY) -> Path:
    return query.result(list_source_files(str(shown)), day=day, schema=SCHEMA, folder=folder / "results")


def test_a_query_joins_the_rows_of_a_day_with_other_files(tables, tmp_path):
    found = run(query_of(tables, tmp_path), tables["shown"], tmp_path)

    assert pq.read_table(found).to_pydict() == EXPECTED
    inputs = inputs_of(describe_source(found))
    assert {Path(each.path) for each in inputs} == {*tables.values()}
    assert inputs_of(inputs[0]) == (inputs[0],)


def test_text_gives_texts_by_its_header_or_by_the_names_of_the_schema(tables, tmp_path):
    table = pa.table(SHOWN)
    pa_csv.write_csv(table, tmp_path / "with.csv")
    pa_csv.write_csv(
        table,
        tmp_path / "plain.tsv",
        pa_csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none"),
    )
    of_text = QUERY.replace("r.id =", "r.id::INT =").replace(
        "SELECT *", "SELECT member::TEXT AS member, country"
    )
    names = replace(SCHEMA, column_names=("label", "country", "site"))
    swapped = query_of({}, tmp_path, "SELECT country AS site, site AS country, label FROM rows")

    by_header = run(query_of(tables, tmp_path, of_text), tmp_path / "with.csv", tmp_path)
    by_names = query_of({}, tmp_path, swapped.text).result(
        [tmp_path / "plain.tsv"], day=None, schema=names, folder=tmp_path / "results"
    )

    assert pq.read_table(by_header).to_pydict() == EXPECTED
    assert pq.read_table(by_names).to_pydict() == {
        "site": list(map(str, SHOWN["member"])),
        "country": SHOWN["site"],
        "label": list(map(str, SHOWN["id"])),
    }


def test_a_result_is_kept_until_the_query_the_day_or_a_file_changes(tables, tmp_path):
    query = query_of(tables, tmp_path)
    first = run(query, tables["shown"], tmp_path)
    written = first.stat().st_mtime_ns
    copied = tmp_path / "copy.parquet"
    copied.write_bytes(tables["shown"].read_bytes())

    assert run(query, tables["shown"], tmp_path) == run(query, copied, tmp_path) == first
    assert first.stat().st_mtime_ns == written
    other_day = run(query, tables["shown"], tmp_path, day=date(2026, 11, 3))
    assert pq.read_table(other_day)["label"].to_pylist() == [0, 1, 0, 0, 1, 1]
    other_query = run(query_of(tables, tmp_path, QUERY + " LIMIT 2"), tables["shown"], tmp_path)
    assert pq.read_table(other_query).num_rows == 2
    pq.write_table(pa.table({"member": [1], "country": ["at"]}), tables["users"])
    other_users = run(query, tables["shown"], tmp_path)
    assert pq.read_table(other_users)["country"].to_pylist() == ["at", None, "at", None, None, None]
    assert len({first, other_day, other_query, other_users}) == 4


def test_a_run_that_was_cut_short_leaves_no_result(tables, tmp_path):
    query = query_of(tables, tmp_path)
    found = run(query, tables["shown"], tmp_path)
    found.with_name("made_from.json").unlink()
    found.write_bytes(b"half")

    assert run(query, tables["shown"], tmp_path) == found
    assert pq.read_table(found).to_pydict() == EXPECTED


def test_days_in_folders_are_columns_of_a_table(tables, tmp_path):
    for day, ids in (("2026-11-01", [1]), ("2026-11-02", [4, 5])):
        (tmp_path / "clicks" / f"day={day}").mkdir(parents=True)
        pq.write_table(pa.table({"id": ids}), tmp_path / "clicks" / f"day={day}" / "part.parquet")
    text = "SELECT site, 'x' AS country, (id IN (SELECT id FROM '{folder}' WHERE day = $day))::INT AS label FROM rows"

    found = run(query_of({"folder": tmp_path / "clicks"}, tmp_path, text), tables["shown"], tmp_path)

    assert pq.read_table(found)["label"].to_pylist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
@pytest.mark.parametrize("hour", [[7, 8], ["07", "08"], [date(2026, 11, 1), date(2026, 11, 2)]], ids=str)
def test_a_column_that_folders_name_too_is_that_of_the_files(tmp_path, suffix, hour):
    for place in (0, 1):
        folder = tmp_path / "rows" / f"zone={place}" / f"hour=0{place}"
        folder.mkdir(parents=True)
        table = pa.table({"label": [1], "site": ["a"], "country": ["de"], "hour": [hour[place]]})
        write = pq.write_table if suffix == ".parquet" else pa_csv.write_csv
        write(table, folder / f"a{suffix}")

    text = "SELECT *, hour::TEXT AS hours FROM rows"
    result = run(query_of({}, tmp_path, text), tmp_path / "rows", tmp_path)

    assert pq.read_table(result, columns=["hours", "zone"]).to_pydict() == {
        "hours": [*map(str, hour)],
        "zone": [0, 1],
    }


def test_a_mark_of_utf8_is_no_part_of_the_first_name(tmp_path):
    large = str(2**80 + 1)
    (tmp_path / "rows.csv").write_bytes(f"\ufeffsite,label,country\n{large},1,de\n".encode())

    query = query_of({}, tmp_path, "SELECT * FROM rows")
    result = run(query, tmp_path / "rows.csv", tmp_path)

    assert pq.read_table(result)["site"].to_pylist() == [large]


def test_tables_may_lie_in_a_bucket(tables, tmp_path, monkeypatch):
    with empty_cloud() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="clicks")
        for name, path in tables.items():
            client.upload_file(str(path), "clicks", f"{name}/part.parquet")
        uris = {name: f"s3://clicks/{name}" for name in tables}
        query = query_of(uris, tmp_path)

        found = run(query, uris["shown"], tmp_path)

        assert pq.read_table(found).to_pydict() == EXPECTED
        client.put_object(Bucket="clicks", Key="users/part.parquet", Body=tables["shown"].read_bytes())
        with pytest.raises(ConfigurationError, match=r'does not have a column named "country"') as refused:
            run(query, uris["shown"], tmp_path)
        assert "\n" not in str(refused.value)


def test_many_rows_become_row_groups_of_the_usual_size(tables, tmp_path):
    pq.write_table(pa.table({"n": list(range(40_000))}), tmp_path / "many.parquet")
    query = query_of({}, tmp_path, "SELECT n % 2 AS label, n AS site, n + 1 AS country FROM rows")

    found = run(query, tmp_path / "many.parquet", tmp_path)

    footer = pq.read_metadata(found)
    assert [footer.row_group(each).num_rows for each in range(footer.num_row_groups)] == [
        16_384,
        16_384,
        7_232,
    ]
    assert pq.read_table(found)["site"].to_pylist() == list(range(40_000))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SELEC 1", 'rows.sql must hold one SELECT: syntax error at or near "SELEC"'),
        ("SELECT nope FROM rows", r'Referenced column "nope" not found in FROM clause! .*"site"'),
        ("SELECT * FROM rows; DROP TABLE rows", r"must hold one SELECT: Only SELECT statements"),
        ("SELECT 1; SELECT 2", r"must hold one SELECT: got 2 of them"),
        ("COPY rows TO '/tmp/stolen.csv'", r"must hold one SELECT: Only SELECT statements"),
        ("SELECT * FROM read_parquet('{users}')", r"file system operations are disabled"),
        ("SELECT * FROM read_csv('/etc/passwd'), rows", r"file system operations are disabled"),
        (
            "SELECT * FROM rows, users",
            r"tables must be rows, or files, .* in quotes, got 'users': there is no",
        ),
        (
            "SELECT * FROM rows WHERE $day > 'x'",
            r"Values were not provided for the following parameters: day",
        ),
        ("SELECT site::INT AS label FROM rows", r"Could not convert string 'a' to INT32"),
        ("SELECT * FROM rows WHERE id > 9", r"must return at least one row, got none of"),
    ],
)
def test_a_query_that_cannot_be_used_is_refused_in_one_line(tables, tmp_path, text, message):
    with pytest.raises((ConfigurationError, DataError), match=message) as refused:
        run(query_of(tables, tmp_path, text), tables["shown"], tmp_path, day=None)

    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "results").iterdir())


def test_columns_are_checked_before_a_run(tables, tmp_path):
    files = list_source_files(str(tables["shown"]))

    query_of(tables, tmp_path).check(files, day=DAY, schema=SCHEMA)

    with pytest.raises(
        DataError, match=r"rows.sql: must return the columns label, country of the schema; returns id"
    ):
        query_of(tables, tmp_path, "SELECT * FROM rows").check(files, day=DAY, schema=SCHEMA)


def test_a_file_that_changes_while_it_is_read_leaves_no_result(tables, tmp_path, monkeypatch):
    def written_again(*arguments):
        pq.write_table(pa.table({"member": [1], "country": ["at"]}), tables["users"])
        return write(*arguments)

    write = row_query._write
    monkeypatch.setattr(row_query, "_write", written_again)

    with pytest.raises(DataError, match=r"rows.sql: the files of its tables must not change while it runs"):
        run(query_of(tables, tmp_path), tables["shown"], tmp_path)

    assert not list((tmp_path / "results").iterdir())


def test_a_damaged_file_is_reported_in_one_line(tables, tmp_path):
    whole = tables["users"].read_bytes()
    tables["users"].write_bytes(whole[:40] + bytes(len(whole) - 48) + whole[-8:])

    with pytest.raises(DataError, match=r"users.parquet: cannot be read as Parquet") as refused:
        run(query_of(tables, tmp_path), tables["shown"], tmp_path)

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        ([pa.nulls(2), pa.array(["a", "b"])], [None, None, "a", "b"]),
        ([pa.array(["a", "b"]), pa.array(["c", "d"], pa.string_view())], ["a", "b", "c", "d"]),
        ([pa.array([1, 2]), pa.array(["c", "d"])], ["1", "2", "c", "d"]),
        ([pa.array([b"a", b"b"]), pa.array([3, 4])], ["a", "b", "3", "4"]),
        ([pa.array([1, 2]), pa.array([3.5, None])], [1.0, 2.0, 3.5, None]),
        ([pa.nulls(2), pa.nulls(2)], [None] * 4),
    ],
)
def test_files_whose_types_differ_are_one_table_of_all_their_values(tmp_path, sites, expected):
    for part, site in enumerate(sites):
        (tmp_path / f"hour={part}").mkdir()
        pq.write_table(pa.table({"label": [0, 1], "site": site}), tmp_path / f"hour={part}" / "rows.parquet")
    query = query_of({}, tmp_path, "SELECT label, site, hour, 'x' AS country FROM rows")

    found = pq.read_table(run(query, tmp_path / "hour=*", tmp_path)).to_pydict()

    assert found["site"] == expected
    assert found["hour"] == [0, 0, 1, 1]


def test_a_query_reads_text_with_line_breaks_in_quotes_other_separators_and_parts_without_rows(tmp_path):
    (tmp_path / "in").mkdir()
    for part, text in enumerate(["", "label;site\n", 'label;site\n0;"a\n,b"\n1;c\n']):
        (tmp_path / "in" / f"part-{part}.csv").write_text(text)
    query = query_of({}, tmp_path, "SELECT label, site, 'x' AS country FROM rows")
    schema = replace(SCHEMA, separator=";")

    found = query.result(
        list_source_files(tmp_path / "in"), day=DAY, schema=schema, folder=tmp_path / "results"
    )

    assert pq.read_table(found)["site"].to_pylist() == ["a\n,b", "c"]


def test_without_duckdb_it_is_reported_how_to_get_it(tables, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)

    with pytest.raises(
        ConfigurationError, match=r"needs the package duckdb, .* pip install 'heterps\[sql\]'"
    ):
        run(query_of(tables, tmp_path), tables["shown"], tmp_path)


TIMES = list(range(60_000))
LOSE_ORDER = {
    "join": "SELECT r.*, u.country FROM rows r LEFT JOIN '{many_users}' u USING (member)",
    "comma": "SELECT r.*, u.country FROM rows r, '{many_users}' u WHERE r.member = u.member",
    "group": "SELECT n, any_value(site) AS site, any_value(label) AS label, 'x' AS country FROM rows GROUP BY n",
    "distinct": "SELECT DISTINCT *, 'x' AS country FROM rows",
    "union": "SELECT *, 'x' AS country FROM rows WHERE n > 9 UNION ALL SELECT *, 'x' FROM rows WHERE n <= 9",
    "window": "SELECT *, row_number() OVER (PARTITION BY site)::TEXT AS country FROM rows",
    "subquery": "SELECT *, 'x' AS country FROM rows WHERE member IN (SELECT member FROM '{many_users}')",
    "below": "WITH r AS (SELECT r.*, u.country FROM rows r JOIN '{many_users}' u USING (member)) SELECT * FROM r",
}


@pytest.fixture
def timed(tables, tmp_path):
    columns = {
        "n": TIMES,
        "member": [n * 7919 % 1_000 for n in TIMES],
        "site": [f"s{n % 9}" for n in TIMES],
        "label": [n % 2 for n in TIMES],
    }
    pq.write_table(pa.table(columns), tmp_path / "timed.parquet", row_group_size=5_000)
    users = {"member": list(range(1_000)), "country": [f"c{member % 50}" for member in range(1_000)]}
    pq.write_table(pa.table(users), tmp_path / "many_users.parquet")
    tables |= {"timed": tmp_path / "timed.parquet", "many_users": tmp_path / "many_users.parquet"}
    return tables


@pytest.mark.parametrize("way", LOSE_ORDER)
def test_rows_of_a_query_that_loses_the_order_are_sorted_or_refused(timed, tmp_path, way):
    files = list_source_files(str(timed["timed"]))
    in_time = replace(SCHEMA, time_column="n")
    query = query_of(timed, tmp_path, LOSE_ORDER[way])
    folder = tmp_path / "results"

    for use in (query.check, partial(query.result, folder=folder)):
        with pytest.raises(ConfigurationError, match=r"must end with an ORDER BY .*, or .* a time_column"):
            use(files, day=None, schema=SCHEMA)
    query.check(files, day=DAY, schema=SCHEMA)
    query.check(files, day=None, schema=in_time)
    found = query.result(files, day=None, schema=in_time, folder=folder)
    assert pq.read_table(found)["n"].to_pylist() == TIMES
    ordered = query_of(timed, tmp_path, f"{LOSE_ORDER[way]} ORDER BY n DESC")
    found = ordered.result(files, day=None, schema=in_time, folder=folder)
    assert pq.read_table(found)["n"].to_pylist() == TIMES[::-1]


@pytest.mark.parametrize(
    "text",
    [
        "SELECT *, 'x' AS country FROM rows",
        "SELECT n, site, label + 0 AS label, upper(site) AS country FROM rows WHERE member > 3; -- all",
        "WITH few AS (SELECT * FROM rows WHERE n % 3 > 0) SELECT *, 'x' AS country FROM few LIMIT 30000",
    ],
)
def test_a_query_of_one_table_keeps_its_order(timed, tmp_path, text):
    query, files = query_of(timed, tmp_path, text), list_source_files(str(timed["timed"]))

    found = query.result(files, day=None, schema=SCHEMA, folder=tmp_path / "results")

    times = pq.read_table(found)["n"].to_pylist()
    assert times == sorted(times)
    assert len(times) >= 30_000


@pytest.mark.parametrize(
    "times",
    [["10", "9", "200"], ["2026-11-02T00:00:00Z", "2026-11-01T23:00:00.5Z", "2026-11-10"]],
)
def test_times_in_text_are_sorted_by_value(tmp_path, times):
    (tmp_path / "x.csv").write_text("label,site,at\n" + "".join(f"1,s,{at}\n" for at in times))
    schema = replace(SCHEMA, categorical_columns=("site",), time_column="at")
    query = query_of({}, tmp_path, "SELECT DISTINCT * FROM rows")

    found = query.result([tmp_path / "x.csv"], day=None, schema=schema, folder=tmp_path / "results")

    assert pq.read_table(found)["at"].to_pylist() == [times[1], times[0], times[2]]


def test_a_table_of_parquet_and_text_is_refused(tmp_path):
    pq.write_table(pa.table({"label": ["1"], "site": ["a"]}), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("label,site\n0,b\n")
    query = RowQuery(tmp_path / "rows.sql", "SELECT * FROM rows")

    with pytest.raises(
        DataError, match=r"b.csv: the files of a table must be all Parquet or all text, .*a.parquet"
    ):
        query.result(
            [tmp_path / "a.parquet", tmp_path / "b.csv"], day=None, schema=SCHEMA, folder=tmp_path / "r"
        )
