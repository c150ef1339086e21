"""A file in a bucket that counts what is asked for."""

from __future__ import annotations

import io
import os
from collections.abc import Callable

import pyarrow as pa


class CountedFile(io.RawIOBase):
    """Reads a file in a bucket, and tells `count` of each request."""

    def __init__(self, source: pa.NativeFile, count: Callable[..., None]) -> None:
        self._source, self._count = source, count

    def read(self, size: int = -1) -> bytes:
        """Read on from where the file stands."""
        content: bytes = self._source.read(None if size < 0 else size)
        self._count(get_requests=1, bytes_read=len(content))
        return content

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a place."""
        return int(self._source.seek(offset, whence))

    def tell(self) -> int:
        """Return where the file stands."""
        return int(self._source.tell())

    def seekable(self) -> bool:
        """Return that it can."""
        return True

    def readable(self) -> bool:
        """Return that it can."""
        return True
