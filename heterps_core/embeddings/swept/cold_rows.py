"""All rows of a table shard in files on disk, which are read and written in whole blocks.

Files have no names: they are scratch, made from initial rows or a checkpoint. So two processes never share one, none
is taken for that of another model, and a killed process leaves no file. Where the file system can,
blocks go past the page cache, which would count against the memory of a container. Several disks
have blocks in turns, so that a sweep keeps all of them busy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from heterps_core.errors import ConfigurationError, TrainingError
from heterps_core.units import BYTES_PER_FLOAT32

BLOCK_BYTES = 4 * 1024**2
"""About what a block of a large shard has: sequential speed of a disk, and small beside the memory of a worker."""

_MIN_BLOCKS = 64
"""A small shard has so many, so that the buffers of a sweep, some blocks, are small beside it."""

_ROWS_PER_PAGE = 1024
"""So many records of float32 always fill whole pages of 4 KiB, as reads and writes past the page cache must."""


class ColdRows:
    """Records of rows, each `width` float32, in unnamed files; all 0 at first.

    Blocks may be read and written by several threads, each block by one at a time.

    Args:
        folders: Where files lie, one on each disk; they are made if they are not there.
        what: Whose rows they are, for messages.
        num_rows: Number of records.
        width: Values of a record.

    Raises:
        ConfigurationError: There is a folder that cannot be made, or they have no room for it.
    """

    def __init__(self, folders: Sequence[Path], *, what: str, num_rows: int, width: int) -> None:
        self.num_rows, self.width, self._what = num_rows, width, what
        self.rows_per_block = rows_per_block(num_rows, width)
        self.num_blocks = -(-num_rows // self.rows_per_block)
        self.block_bytes = self.rows_per_block * width * BYTES_PER_FLOAT32
        for folder in folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigurationError(
                    f"a folder for rows on disk must exist, or be one that can be made: {error}"
                ) from error
        free_bytes = [shutil.disk_usage(folder).free for folder in folders]
        rooms = [free // self.block_bytes for free in free_bytes]
        try:
            if sum(rooms) < self.num_blocks:
                raise OSError("no space is left")
            self._files = [_ScratchFile(folder) for folder in folders]
            # Disks take turns, each while it has room.
            turns = (
                (disk, turn) for turn in range(max(rooms)) for disk, room in enumerate(rooms) if turn < room
            )
            self._places = list(islice(turns, self.num_blocks))
            for index, file in enumerate(self._files):
                # What is reserved now cannot be missing in the middle of a sweep.
                file.resize(self.block_bytes * sum(own == index for own, _ in self._places))
        except OSError as error:
            places = " and ".join(
                f"{folder} has {free:,} free" for folder, free in zip(folders, free_bytes, strict=True)
            )
            raise ConfigurationError(
                f"the rows of {what} that do not fit into embedding_memory_bytes need "
                f"{self.num_blocks * self.block_bytes:,} bytes of disk, but {places}: {error}; free space there, or "
                f"raise embedding_memory_bytes"
            ) from error

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

    def _transfer(self, call: Transfer, block: int, buffer: npt.NDArray[np.float32]) -> None:
        index, position = self._places[block]
        file, start = self._files[index], position * self.block_bytes
        try:
            file.transfer(call, start, buffer)
        except OSError as error:
            verb = "read" if call is os.preadv else "written"
            raise TrainingError(
                f"bytes {start:,} to {start + self.block_bytes:,} of the file with the rows of {self._what} in "
                f"{file.folder} could not be {verb}: {error}; check that disk, and resume the run"
            ) from error


Transfer = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""


class _ScratchFile:
    """A file without a name, as long as this object lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file, name = tempfile.mkstemp(dir=folder)
        weakref.finalize(self, os.close, self._file)
        Path(name).unlink()
        self._is_direct = _go_past_page_cache(self._file)

    def resize(self, num_bytes: int) -> None:
        os.ftruncate(self._file, num_bytes)
        os.posix_fallocate(self._file, 0, max(num_bytes, 1))

    def transfer(self, call: Transfer, start: int, buffer: npt.NDArray[np.float32]) -> None:
        done, content = 0, buffer.data.cast("B")
        while done < buffer.nbytes:
            count = call(self._file, [content[done:]], start + done)
            if not count:
                raise OSError("the file ends before")
            done += count
        if not self._is_direct:
            os.posix_fadvise(self._file, start, buffer.nbytes, os.POSIX_FADV_DONTNEED)


def rows_per_block(num_rows: int, width: int) -> int:
    """Return how many records of `width` float32 a block of a shard with so many rows has."""
    row_bytes = width * BYTES_PER_FLOAT32
    block_bytes = min(BLOCK_BYTES, num_rows * row_bytes // _MIN_BLOCKS)
    return max(1, block_bytes // (_ROWS_PER_PAGE * row_bytes)) * _ROWS_PER_PAGE


def _go_past_page_cache(file: int) -> bool:
    """Ask that reads and writes of a file go past the page cache; tell whether its file system does so."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True
