"""The errors that Arrow raises while it reads or converts, as one line that names the file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.errors import DataError

ARROW_ERRORS = (pa.ArrowException, OSError, KeyError, ValueError, OverflowError)
"""Beside its own Arrow raises Python's errors: two columns of one name, bytes that are no UTF-8, dates far away."""


def one_line(error: BaseException) -> str:
    """Return the text of an error without line breaks and colours."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(re.sub(r"\x1b\[\d*m", "", str(text)).split())


@contextmanager
def named_reading(
    path: SourcePath | str, part: str = "", *, problem: str = "cannot be read as Parquet"
) -> Iterator[None]:
    """Raise each of `ARROW_ERRORS` within the block as a `DataError` of this file."""
    try:
        yield
    except ARROW_ERRORS as error:
        raise DataError(path, f"{part}{problem}: {one_line(error)}; write or get the file again") from error
