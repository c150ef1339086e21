"""Tensors in flat files of a run, written by their owners and read by the ranges that are needed.

A file is the bytes of its tensors one after the other, little-endian, rows in order; a manifest says what stands
where. What is read is checked block by block (`verified_files.py`): damaged bytes never reach a tensor. None of it is
a pickle. The file of an exported model in the safetensors format is such a file too, behind its header.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from heterps_core.embeddings.row_range import RowRange
from heterps_core.errors import CheckpointError
from heterps_core.json_codec import JsonDocument
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.storage.verified_files import BlockHasher, HashedFile, read_verified, write_hashes

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By their names in the safetensors format."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRows:
    """Consecutive rows of a tensor, the first size of its shape; a tensor without sizes is one row."""

    tensor: str
    dtype: str
    """Name in `DTYPES`."""

    shape: tuple[int, ...]
    """Of the whole tensor."""

    first_row: int
    num_rows: int
    file: str
    offset: int
    """Of the first byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorManifest(JsonDocument):
    """Which tensors stand where in the files of one folder."""

    files: tuple[HashedFile, ...] = ()
    rows: tuple[StoredRows, ...] = ()

    def __post_init__(self) -> None:
        if unknown := {rows.file for rows in self.rows} - {file.name for file in self.files}:
            raise ValueError(f"each file must be listed, got rows in {', '.join(sorted(unknown))}")

    def __add__(self, other: TensorManifest) -> TensorManifest:
        return TensorManifest(files=self.files + other.files, rows=self.rows + other.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRows:
    """Rows of a tensor in memory."""

    tensor: Tensor
    """Those rows alone, contiguous and on the host."""

    rows: RowRange
    num_rows: int
    """Of the whole tensor."""

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorRows:
        """Return all rows of a tensor."""
        num_rows = len(tensor) if tensor.ndim else 1
        return cls(tensor=tensor, rows=RowRange(0, num_rows), num_rows=num_rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return (self.num_rows, *self.tensor.shape[1:]) if self.tensor.ndim else ()


def write_tensors(
    run: RunDirectory, folder: str, name: str, tensors: Iterable[tuple[str, TensorRows]]
) -> TensorManifest:
    """Write tensors to one new file of a folder, and the hashes of its blocks; durable on return.

    Args:
        tensors: With their names; several may be parts of one. Nothing is written where there are none.

    Raises:
        OSError: It cannot be written.
    """
    parts = iter(tensors)
    first = next(parts, None)
    if first is None:
        return TensorManifest()
    stored: list[StoredRows] = []
    offset = 0
    hasher = BlockHasher()
    with run.appending(f"{folder}/{name}") as append, ThreadPoolExecutor(1) as beside:
        hashed: Future[None] | None = None
        for tensor_name, part in chain([first], parts):
            stored.append(
                StoredRows(
                    tensor=tensor_name,
                    dtype=_DTYPE_NAMES[part.tensor.dtype],
                    shape=part.shape,
                    first_row=part.rows.first,
                    num_rows=part.rows.num_rows,
                    file=name,
                    offset=offset,
                )
            )
            content = _bytes_of(part.tensor).data
            if hashed is not None:
                # No more than two parts are held in memory for it.
                hashed.result()
            hashed = beside.submit(hasher.update, content)
            append(content)
            offset += content.nbytes
        if hashed is not None:
            hashed.result()
    return TensorManifest(files=(write_hashes(run, folder, name, hasher),), rows=tuple(stored))


def read_tensors(
    run: RunDirectory, folder: str, manifest: TensorManifest, wanted: Mapping[str, TensorRows]
) -> None:
    """Fill tensors in place with the rows of the same name, reading no more than these.

    Args:
        wanted: By name, what is to be filled; whoever wrote the rows may have cut them otherwise.

    Raises:
        CheckpointError: The files hold other tensors or sizes; nothing was filled.
        DamagedFileError: A file is missing or damaged; some tensors may have been filled, with true values.
    """
    copies: dict[str, list[_Copy]] = {}
    by_name: dict[str, list[StoredRows]] = {}
    for rows in manifest.rows:
        by_name.setdefault(rows.tensor, []).append(rows)
    for name, part in wanted.items():
        for file, copy in _copies(name, part, by_name.get(name, [])):
            copies.setdefault(file, []).append(copy)
    files = {file.name: file for file in manifest.files}
    for file_name, of_file in copies.items():
        ranges = [(copy.offset, copy.offset + len(copy.target)) for copy in of_file]
        for start, content in read_verified(run, folder, files[file_name], ranges):
            source = np.frombuffer(content, dtype=np.uint8)
            for copy in of_file:
                copy.fill(source, start)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Bytes of a file that fill a part of a tensor."""

    offset: int
    """In the file."""

    target: np.typing.NDArray[np.uint8]

    def fill(self, source: np.typing.NDArray[np.uint8], start: int) -> None:
        """Copy what a part of the file that begins at `start` has of these bytes."""
        first = max(self.offset, start)
        stop = min(self.offset + len(self.target), start + len(source))
        if first < stop:
            self.target[first - self.offset : stop - self.offset] = source[first - start : stop - start]


def _copies(name: str, part: TensorRows, stored: Sequence[StoredRows]) -> Iterator[tuple[str, _Copy]]:
    """Yield what fills a tensor, with the names of files; raises where no tensor with these sizes is stored."""
    kind = (_DTYPE_NAMES[part.tensor.dtype], part.shape)
    for rows in stored:
        if (rows.dtype, rows.shape) != kind:
            raise _other_sizes(name, part, f"{rows.dtype} {list(rows.shape)}")
    target = _bytes_of(part.tensor)
    num_found = 0
    for rows in stored:
        first, stop = (
            max(rows.first_row, part.rows.first),
            min(rows.first_row + rows.num_rows, part.rows.stop),
        )
        if first >= stop:
            continue
        num_found += stop - first
        own = slice((first - part.rows.first) * rows.row_bytes, (stop - part.rows.first) * rows.row_bytes)
        yield rows.file, _Copy(rows.offset + (first - rows.first_row) * rows.row_bytes, target[own])
    if num_found != part.rows.num_rows:
        raise _other_sizes(name, part, f"{num_found} of its rows" if stored else "none")


def _other_sizes(name: str, part: TensorRows, found: str) -> CheckpointError:
    return CheckpointError(
        f"{name} must be stored as {_DTYPE_NAMES[part.tensor.dtype]} with the sizes {list(part.shape)} of the model "
        f"that is trained, got {found}"
    )


def _bytes_of(tensor: Tensor) -> np.typing.NDArray[np.uint8]:
    """Return the memory of a contiguous tensor on the host."""
    array: np.typing.NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array
