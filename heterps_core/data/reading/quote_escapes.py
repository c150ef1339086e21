r"""Rewrites quotes that a backslash escapes, as Spark and Hive write them, as RFC 4180 does: \" becomes "".

A backslash may also be the last character of a field in quotes, "C:\clicks\". So the first block of lines that has a
backslash before a quote decides for the file: where its fields are those of RFC 4180, it stays as it is.
"""

from __future__ import annotations

import re
from functools import cache

import pyarrow as pa

from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.errors import DataError

WAY_OUT = "write a quote within a field as two, in Spark by option('escape', '\"')"

_LINE_BYTES = 65_536
"""At least of one line."""

_ESCAPED = re.compile(rb'(\\+)"')


class QuoteEscapes:
    """Rewrites blocks of bytes of one text file, one after the other; those with a backslash by whole lines."""

    def __init__(self, path: SourcePath | str, delimiter: str) -> None:
        """Begin a file whose fields a character separates."""
        self._path = path
        self._delimiter = delimiter
        self._rest = b""
        self._begun_line = b""
        self._is_escaped: bool | None = None
        self._is_unclear = False

    def __call__(self, block: pa.Buffer) -> bytes:
        """Return the next bytes; an empty block ends the file.

        Raises:
            DataError: The file escapes quotes in both ways.
        """
        data: bytes = self._rest + block.to_pybytes()
        begun = self._begun_line
        if b"\\" not in data:
            end = data[-_LINE_BYTES:]
            self._rest, self._begun_line = b"", end[_num_whole(end) :]
            return data
        num_whole = _num_whole(data) if block.size else len(data)
        self._rest, self._begun_line = data[num_whole:], b""
        return self.rewritten(begun + data[:num_whole])[len(begun) :]

    def rewritten(self, lines: bytes) -> bytes:
        """Return lines, or the one of a header, with quotes escaped as RFC 4180 does; see `__call__`."""
        if self._is_escaped is False or b'\\"' not in lines:
            return lines
        escaped_field, doubled, plain_fields = _patterns(self._delimiter)
        if self._is_escaped is None and plain_fields.fullmatch(lines):
            self._is_escaped = False
            return lines
        is_escaped = self._is_escaped or escaped_field.search(lines)
        if is_escaped and (self._is_unclear or doubled.search(lines)):
            raise DataError(
                self._path, f"escapes quotes within fields both by a backslash and as two quotes; {WAY_OUT}"
            )
        if not is_escaped:
            self._is_unclear = True
            return lines
        self._is_escaped = True
        return _ESCAPED.sub(_doubled_quote, lines)


def _num_whole(data: bytes) -> int:
    """Return how many bytes whole lines have."""
    return max(data.rfind(b"\n"), data.rfind(b"\r")) + 1


@cache
def _patterns(delimiter: str) -> tuple[re.Pattern[bytes], ...]:
    """Return patterns of a field with escaped quotes, of doubled ones, and of fields of RFC 4180 alone."""
    ends = re.escape(delimiter).encode() + rb"\r\n"
    # From a quote at the begin of a field to one at its end, with no quote within but after a backslash.
    escaped_field = rb'(?:\A|[%b])"(?:[^"\\]|\\[^"])*+\\"(?:[^"\\]|\\.)*+"(?=[%b]|\Z)' % (ends, ends)
    # Two quotes that are neither an empty field nor begin with an escaped one.
    doubled = rb'""(?:(?<=[^\\"%b]"")|(?<!\\"")(?=[^%b]))' % (ends, ends)
    plain_fields = rb'(?:(?:"(?:[^"]++|"")*+"|[^"%b]*+)(?:[%b]|\Z))*+' % (ends, ends)
    return tuple(re.compile(pattern, re.DOTALL) for pattern in (escaped_field, doubled, plain_fields))


def _doubled_quote(found: re.Match[bytes]) -> bytes:
    """Return half as many backslashes as stand before a quote, and the quote, doubled where the last escapes it."""
    num_kept, is_escaped = divmod(len(found[1]), 2)
    return b"\\" * num_kept + (b'""' if is_escaped else b'"')
