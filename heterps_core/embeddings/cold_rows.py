"""All rows of a table shard in a file on disk, which is read and written in whole blocks.

The file has no name: it is scratch, made from initial rows or a checkpoint. So two processes never share one, none is
taken for that of another model, and a process that is killed leaves nothing behind. Where the file system can, blocks
go past the page cache, which would count against the memory of a container.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from heterps_core.errors import ConfigurationError, TrainingError
from heterps_core.units import BYTES_PER_FLOAT32

BLOCK_BYTES = 4 * 1024**2
"""About what a block of a large shard has: sequential speed of a disk, and small beside the memory of a worker."""

MIN_BLOCKS = 64
"""Of a small shard, so that the buffers of a sweep, some blocks, are small beside it."""

ROWS_PER_PAGE = 1024
"""So many records of float32 always fill whole pages of 4 KiB, as reads and writes past the page cache must."""


class ColdRows:
    """Records of rows, each `width` float32, in an unnamed file; all 0 at first.

    Blocks may be read and written by several threads, each block by one at a time.

    Args:
        folder: Where the file lies; it is made if it is not there.
        what: Whose rows they are, for messages.
        num_rows: Number of records.
        width: Values of a record.

    Raises:
        ConfigurationError: The folder has no room for it.
    """

    def __init__(self, folder: Path, *, what: str, num_rows: int, width: int) -> None:
        self.num_rows, self.width, self._what, self._folder = num_rows, width, what, folder
        self.rows_per_block = rows_per_block(num_rows, width)
        self.num_blocks = -(-num_rows // self.rows_per_block)
        self.block_bytes = self.rows_per_block * width * BYTES_PER_FLOAT32
        folder.mkdir(parents=True, exist_ok=True)
        num_bytes = self.num_blocks * self.block_bytes
        free_bytes = shutil.disk_usage(folder).free
        try:
            if num_bytes > free_bytes:
                raise OSError("no space is left")
            self._file, name = tempfile.mkstemp(dir=folder)
            weakref.finalize(self, os.close, self._file)
            Path(name).unlink()
            # What is reserved now cannot be missing in the middle of a sweep.
            os.posix_fallocate(self._file, 0, max(num_bytes, 1))
        except OSError as error:
            raise ConfigurationError(
                f"the rows of {what} that do not fit into embedding_memory_bytes need {num_bytes:,} bytes of disk, "
                f"but {folder} has {free_bytes:,} free: {error}; free space there, or raise embedding_memory_bytes"
            ) from error
        self._is_direct = _go_past_page_cache(self._file)

    def new_buffer(self) -> npt.NDArray[np.float32]:
        """Return memory for a block [rows_per_block, width] that reads and writes can use as it is."""
        pages = mmap.mmap(-1, self.block_bytes)
        return np.frombuffer(pages, dtype=np.float32).reshape(self.rows_per_block, self.width)

    def read(self, block: int, buffer: npt.NDArray[np.float32]) -> None:
        """Fill a buffer with a block.

        Raises:
            TrainingError: It cannot be read, or the file ends before it.
        """
        self._transfer(os.preadv, block, buffer)

    def write(self, block: int, buffer: npt.NDArray[np.float32]) -> None:
        """Write a block.

        Raises:
            TrainingError: It cannot be written.
        """
        self._transfer(os.pwritev, block, buffer)

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], block: int, buffer: npt.NDArray[np.float32]
    ) -> None:
        start, done = block * self.block_bytes, 0
        content = buffer.data.cast("B")
        verb = "read" if call is os.preadv else "written"
        try:
            while done < self.block_bytes:
                count = call(self._file, [content[done:]], start + done)
                if not count:
                    raise OSError("the file ends before")
                done += count
        except OSError as error:
            raise TrainingError(
                f"bytes {start:,} to {start + self.block_bytes:,} of the file with the rows of {self._what} in "
                f"{self._folder} could not be {verb}: {error}; check that disk, and resume the run"
            ) from error
        if not self._is_direct:
            os.posix_fadvise(self._file, start, self.block_bytes, os.POSIX_FADV_DONTNEED)


def rows_per_block(num_rows: int, width: int) -> int:
    """Return how many records of `width` float32 a block of a shard with so many rows has."""
    row_bytes = width * BYTES_PER_FLOAT32
    block_bytes = min(BLOCK_BYTES, num_rows * row_bytes // MIN_BLOCKS)
    return max(1, block_bytes // (ROWS_PER_PAGE * row_bytes)) * ROWS_PER_PAGE


def _go_past_page_cache(file: int) -> bool:
    """Ask that reads and writes of a file go past the page cache; tell whether its file system does so."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True
