"""Memory that several processes of one machine see: files without a name.

The system takes the memory back with the last process that holds it, however that ends.

Shapes: R rows, C columns of any tensor.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
"""At which tensors begin: a cache line."""

SMALLEST_BUFFER_BYTES = 2**20


class SharedBuffer:
    """A memory file of one process as another, or itself, sees it; it only ever grows.

    Args:
        file: Descriptor of a file of at least `SMALLEST_BUFFER_BYTES`.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._mapped = mmap.mmap(file, SMALLEST_BUFFER_BYTES)

    def grow(self, num_bytes: int) -> None:
        """Make room for so many bytes; only the owner does."""
        if num_bytes > len(self._mapped):
            os.ftruncate(self._file, 2 * num_bytes)
            self._mapped = mmap.mmap(self._file, 2 * num_bytes)

    def view(self, first: int, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
        """Return the tensor [R, C] that begins at byte `first`, where it lies."""
        if first + num_rows * num_columns * dtype.itemsize > len(self._mapped):
            self._mapped = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return tensor_view(self._mapped, first, num_rows, num_columns, dtype)


def aligned(num_bytes: int) -> int:
    """Return the first position behind so many bytes at which a tensor may begin."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def new_file(num_bytes: int) -> int:
    """Return the descriptor of a new memory file of zeros.

    Raises:
        AttributeError: The system is not Linux.
        OSError: It forbids it.
    """
    file = os.memfd_create("heterps")
    os.ftruncate(file, num_bytes)
    return file


def tensor_view(
    mapped: mmap.mmap | memoryview, first: int, num_rows: int, num_columns: int, dtype: torch.dtype
) -> Tensor:
    """Return the tensor [R, C] that begins at byte `first` of a mapped file, where it lies."""
    if not num_rows * num_columns:
        return torch.empty(num_rows, num_columns, dtype=dtype)
    flat = torch.frombuffer(mapped, dtype=dtype, count=num_rows * num_columns, offset=first)
    return flat.view(num_rows, num_columns)
