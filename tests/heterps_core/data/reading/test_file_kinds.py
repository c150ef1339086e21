import bz2
import gzip
import io
import lzma
import pickle
import sqlite3
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest

from heterps_core.data.proposal.schema_proposal import propose_schema
from heterps_core.data.reading.file_kinds import is_parquet
from heterps_core.data.reading.readers import check_columns, read_columns, read_rows
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError

SCHEMA = DataSchema(name="rows", label_column="label", categorical_columns=("site",))
TABLE = pa.table({"label": [0, 1, 0], "site": ["a", "b", "a"]})
TEXT = b"label,site\n0,a\n1,b\n0,a\n"


def in_memory(write):
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def zipped(*names):
    def write(buffer):
        with zipfile.ZipFile(buffer, "w") as archive:
            for name in names:
                archive.writestr(name, TEXT)

    return in_memory(write)


def tarred(buffer):
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("rows.csv"), io.BytesIO())


def in_sqlite():
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE clicks (label, site)")
    return connection.serialize()


OFFICE = zipped("[Content_Types].xml", "xl/workbook.xml")
PARQUET = in_memory(lambda buffer: pq.write_table(TABLE, buffer))

OTHERS = {
    "rows.zip": (zipped("rows.csv"), "a zip archive: unzip -p rows.zip | gzip > rows.gz"),
    "rows.xlsx": (
        zipped("[Content_Types].xml", "xl/workbook.xml"),
        "Excel: python -c .*read_excel.* rows.xlsx rows.parquet",
    ),
    "rows.xls": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "Excel: "),
    "rows.csv.xz": (lzma.compress(TEXT), "compressed by xz: xz -dc rows.csv.xz | gzip > rows.csv.gz"),
    "rows.tar": (in_memory(tarred), "a tar archive: tar -xOf"),
    "rows.tgz": (gzip.compress(in_memory(tarred)), "a tar archive"),
    "rows.orc": (in_memory(lambda buffer: orc.write_table(TABLE, buffer)), "ORC: python -c .*read_orc"),
    "rows.feather": (
        in_memory(lambda buffer: feather.write_feather(TABLE, buffer)),
        "Feather .*read_feather",
    ),
    "rows.avro": (b"Obj\x01\x04\x16avro.schema", "Avro: duckdb"),
    "rows.sqlite": (in_sqlite(), "SQLite: sqlite3 -header -csv rows.sqlite"),
    "rows.pkl": (pickle.dumps({"label": [0]}), "a pickle: "),
    "rows.jsonl": (b'{"label": 0, "site": "a"}\n', "JSON: python -c .*read_json"),
    "rows.jsonl.gz": (gzip.compress(b'{"label": 0, "site": "a"}\n'), "JSON: "),
    "rows.json": (b'[\n  {"label": 0}]\n', "JSON: "),
    "utf16.csv": (TEXT.decode().encode("utf-16"), "text in UTF-16: iconv"),
    "denied.csv": (
        b'<?xml version="1.0"?><Error>AccessDenied</Error>',
        "a page of HTML or XML: get the file again",
    ),
    "pointer.csv": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS: git lfs pull"),
    "rows.parquet.gz": (
        gzip.compress(PARQUET),
        "Parquet within gzip: gzip -d",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_is_not_read_is_named_as_what_it_is_with_a_way_to_convert_it(tmp_path, name):
    content, said = OTHERS[name]
    path = tmp_path / name
    path.write_bytes(content)

    for read in (
        lambda: list(read_rows([path], SCHEMA)),
        lambda: check_columns(path, SCHEMA),
        lambda: list(read_columns(path, SCHEMA, ["site"])),
        lambda: propose_schema(path, source=str(path)),
    ):
        with pytest.raises(DataError, match=f"{name}: must be Parquet, or text, .* but is {said}"):
            read()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv.bz2", bz2.compress(TEXT[:20]) + bz2.compress(TEXT[20:])),
        ("rows.csv.zst", pa.compress(TEXT, codec="zstd", asbytes=True)),
        ("rows.csv.lz4", pa.compress(TEXT, codec="lz4", asbytes=True)),
        ("rows.csv.gz", gzip.compress(TEXT, mtime=0)),
        ("rows", bz2.compress(TEXT)),
        ("rows.csv", TEXT),
    ],
)
def test_compressed_text_is_read_as_plain_text_is(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)

    [batch] = read_rows([tmp_path / name], SCHEMA)

    assert batch.labels.tolist() == [0, 1, 0]
    assert batch.texts[0].to_pylist() == ["a", "b", "a"]


def test_text_that_begins_as_another_kind_does_is_text(tmp_path):
    for text in (
        "ORDER,label\n1,0\n",
        "Objects,label\n",
        "SEQUENCE,label\n",
        "[0],1\n",
        "{a},1\n",
        "PK,label\n",
    ):
        (tmp_path / "rows.csv").write_text(text)
        assert not is_parquet(tmp_path / "rows.csv")
