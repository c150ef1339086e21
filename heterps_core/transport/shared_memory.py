"""Memory files without a name, large pages, and sockets that hand files over, for workers of one machine.

The system takes the memory back with the last process that holds it. Shapes: R rows, C columns of any tensor.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import socket
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heterps_core.transport.json_messages import gather_json
from heterps_core.transport.token_connections import connect_by_token, this_machine

_ALIGNMENT_BYTES = 64
"""At which tensors begin: a cache line."""

SMALLEST_BUFFER_BYTES = 2**20

HUGE_PAGE_BYTES = 2**21

MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
"""Constants of Linux' mman.h; the second from 6.1 on, before that the kernel joins pages when it finds the time."""

_MAP_FIXED = 0x10
"""Constant of Linux' mman.h; `mmap` has all but this one."""


class SharedBuffer:
    """A memory file of one process as another, or itself, sees it; it only ever grows."""

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
    """Return the first position after so many bytes at which a tensor may begin."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


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


def use_huge_pages(tensor: Tensor) -> None:
    """Ask the system to hold a tensor in pages of 2 MiB, for fewer TLB misses; where it cannot, nothing changes.

    At 10 M rows of 16 floats a bf16 step on two cores takes 36.6 ms with them and 38.4 ms without.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or tensor.device.type != "cpu":
        return
    first = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    stop = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if first < stop:
        for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), advice)


def map_aligned(file: int, num_bytes: int) -> memoryview:
    """Map a memory file to where its pages can be joined; writes to it are seen by all who map it.

    Left to itself the system joins pages of a file only where `shmem_enabled` says so, and maps it anywhere else.

    Raises:
        OSError: There is no such file, or no room for it.
    """
    reserved = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    first = -address % HUGE_PAGE_BYTES
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    # In place of pages that `reserved` gives back in the end.
    found = system.mmap(
        ctypes.c_void_p(address + first),
        ctypes.c_size_t(num_bytes),
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | _MAP_FIXED,
        file,
        ctypes.c_long(0),
    )
    if found != address + first:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return memoryview(reserved)[first : first + num_bytes]


logger = logging.getLogger(__name__)


def connect_locally(
    rank: int,
    *,
    wanted: Callable[[Mapping[int, str]], Collection[int]],
    group: ProcessGroup | None,
    takes_part: bool = True,
) -> dict[int, socket.socket] | None:
    """Connect workers that share a machine; every process of the group calls it.

    Args:
        rank: Of this worker.
        wanted: Given the machine of each worker that takes part, by rank, returns the ranks to connect with. Whom
            a worker wants must want it too.
        group: By default the whole world.
        takes_part: False for a worker that is connected with none.

    Returns:
        By rank; None, on all of them, where one cannot: a system is not Linux, or forbids it. The log says why.
    """
    error: str | None = None
    machine: str | None = None
    found: dict[int, socket.socket] = {}
    try:
        os.close(new_file(1))
        machine = this_machine() if takes_part else None
    except (AttributeError, OSError) as problem:
        error = str(problem)
    machines = {other: name for other, name in gather_json((rank, machine), group) if name is not None}
    others = wanted(machines) if machine is not None else ()
    try:
        found = connect_by_token(others, group, local_kind=socket.SOCK_SEQPACKET)
    except OSError as problem:
        error = str(problem)
    errors = [text for text in gather_json(error, group) if text]
    if not errors:
        return found
    logger.warning("workers of one machine exchange rows by messages, not in shared memory: %s", errors[0])
    for connection in found.values():
        connection.close()
    return None


def receive_files(connection: socket.socket, count: int) -> list[int]:
    """Return the descriptors of files that the other end sends.

    Raises:
        OSError: It sent none, or has ended.
    """
    _, files, _, _ = socket.recv_fds(connection, 16, count)
    if len(files) != count:
        raise OSError("another worker of this machine sent no memory files")
    return files
