"""Tells by its first bytes, not by its name, whether a file is Parquet or text, also compressed; names all else."""

from __future__ import annotations

import re
import shlex
from pathlib import Path, PurePosixPath

import pyarrow as pa

from heterps_core.data.reading.arrow_errors import one_line
from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.errors import DataError

_PARQUET = b"PAR1"
_HEAD_BYTES = 512

_CODECS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
"""Arrow's names of those that it reads."""

_ENDINGS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}

_UNPACKED = "{} {{file}} | gzip > {{stem}}.gz"
_BY_PANDAS = (
    'python -c "import pandas, sys; pandas.read_{}.to_parquet(sys.argv[2])" {{file}} {{stem}}.parquet'
)
_BY_DUCKDB = "duckdb -c \"INSTALL avro; LOAD avro; COPY (FROM read_avro('{path}')) TO '{stem}.parquet'\""

_OTHERS: dict[bytes, tuple[str, str]] = {
    rb"PK\x03\x04.{26,90}?(?:Content_Types|_rels/|xl/)": ("Excel", _BY_PANDAS.format("excel(sys.argv[1])")),
    rb"\xd0\xcf\x11\xe0": ("Excel", _BY_PANDAS.format("excel(sys.argv[1])")),
    rb"PK[\x03\x05]": ("a zip archive", _UNPACKED.format("unzip -p")),
    rb"\xfd7zXZ\0": ("compressed by xz", _UNPACKED.format("xz -dc")),
    rb".{257}ustar": ("a tar archive", _UNPACKED.format("tar -xOf")),
    rb"ORC[\x00-\x1f]": ("ORC", _BY_PANDAS.format("orc(sys.argv[1])")),
    rb"ARROW1|FEA1": ("Feather (Arrow IPC)", _BY_PANDAS.format("feather(sys.argv[1])")),
    rb"Obj\x01": ("Avro", _BY_DUCKDB),
    rb"SQLite format 3\0": ("SQLite", "sqlite3 -header -csv {file} 'SELECT * FROM A_TABLE' > {stem}.csv"),
    rb".{8}DUCK": ("DuckDB", "duckdb {file} \"COPY A_TABLE TO '{stem}.parquet'\""),
    rb"\x89HDF": ("HDF5", _BY_PANDAS.format("hdf(sys.argv[1])")),
    rb"\x80[\x02-\x05][\x8c\x95cq}\]]": ("a pickle", _BY_PANDAS.format("pickle(sys.argv[1])")),
    rb"PARE": ("encrypted Parquet", "write it without encryption"),
    rb"\xff\xfe|\xfe\xff": ("text in UTF-16", "iconv -f UTF-16 -t UTF-8 {file} > {stem}.utf8.csv"),
    rb"version https://git-lfs": ("a pointer of Git LFS", "git lfs pull"),
    rb"(?i)\s*<(?:!doctype|html|\?xml)": ("a page of HTML or XML", "get the file again"),
    rb'(?:\xef\xbb\xbf)?\s*(?:\{\s*"|\[\s*[\{\[])': (
        "JSON",
        _BY_PANDAS.format("json(sys.argv[1], lines=True)"),
    ),
}
"""By how they begin: what they are, and a way to make of them what is read."""


def is_parquet(path: SourcePath) -> bool:
    """Tell whether a file is Parquet, else text; an empty one is text.

    Raises:
        DataError: It cannot be read, is something else, or is not compressed as its name says.
    """
    try:
        head = _head_of(path)
        codec = _codec_of(head)
        if head and _ENDINGS.get(path.suffix, codec) != codec:
            raise DataError(
                path,
                f"must be a {_ENDINGS[path.suffix]} file, as its name ends in {path.suffix}; rename it or get it "
                f"again",
            )
        if codec is not None:
            with open_text(path) as stream:
                head = stream.read(_HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    if head.startswith(_PARQUET):
        if codec is None:
            return True
        raise _other_kind(path, f"Parquet within {codec}", f"{codec} -d {{file}}")
    for pattern, (name, way_out) in _OTHERS.items():
        if re.match(pattern, head, re.DOTALL):
            raise _other_kind(path, name, way_out)
    return False


def open_text(path: SourcePath) -> pa.NativeFile:
    """Open a text file, plain or compressed, to read its text."""
    file = pa.OSFile(str(path)) if isinstance(path, Path) else path.open_ranges()
    codec = _codec_of(_head_of(path))
    return file if codec is None else pa.CompressedInputStream(file, codec)


def unreadable(path: SourcePath, error: Exception) -> DataError:
    """Say why reading failed: an error of the system has a text, a damaged stream has none."""
    reason = getattr(error, "strerror", None) or ("AWS Error" in str(error) and one_line(error))
    if reason:
        return DataError(path, f"cannot be read: {reason}")
    return DataError(path, f"the compressed stream is truncated or damaged ({error}); get the file again")


def _head_of(path: SourcePath) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def _codec_of(head: bytes) -> str | None:
    return next((codec for magic, codec in _CODECS.items() if head.startswith(magic)), None)


def _other_kind(path: SourcePath, name: str, way_out: str) -> DataError:
    stem = PurePosixPath(path.name.removesuffix(path.suffix)).name
    command = way_out.format(file=shlex.quote(path.name), stem=stem, path=path.name)
    return DataError(path, f"must be Parquet, or text, plain or compressed by gzip, but is {name}: {command}")
