"""Tensors in flat files of a run, written by their owners and read by the ranges that are needed.

A file is the bytes of its tensors one after the other, little-endian, rows in order; a manifest says what stands
where. Rows that are not neighbours, such as those that changed since a moment, follow a list of their numbers.
What is read is checked block by block (`verified_files.py`): damaged bytes never reach a tensor. None of it is
a pickle. The file of an exported model in the safetensors format is such a file too, after its header.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from heterps_core.embeddings.row_range import RowRange
from heterps_core.errors import CheckpointError
from heterps_core.json_codec import JsonDocument
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.storage.verified_files import BlockHasher, HashedFile, VerifiedFile, write_hashes

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
    """Rows of a tensor, the first size of its shape; a tensor without sizes is one row."""

    tensor: str
    dtype: str
    """Name in `DTYPES`."""

    shape: tuple[int, ...]
    """Sizes of the whole tensor."""

    first_row: int
    num_rows: int
    file: str
    offset: int
    """Place of the first byte in the file."""

    numbers_offset: int | None = None
    """Place of the numbers of these rows in the file, int64 and ascending; None where they are consecutive."""

    stop_row: int | None = None
    """One after the last, where they are not consecutive."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * DTYPES[self.dtype].itemsize

    @property
    def span(self) -> RowRange:
        """The rows from the first to the last."""
        stop = self.first_row + self.num_rows if self.stop_row is None else self.stop_row
        return RowRange(self.first_row, stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorManifest(JsonDocument):
    """Places of tensors in the files of one folder."""

    files: tuple[HashedFile, ...] = ()
    rows: tuple[StoredRows, ...] = ()

    def __post_init__(self) -> None:
        if unknown := {rows.file for rows in self.rows} - {file.name for file in self.files}:
            raise ValueError(f"each file must be listed, got rows in {', '.join(sorted(unknown))}")

    def __add__(self, other: TensorManifest) -> TensorManifest:
        return TensorManifest(files=self.files + other.files, rows=self.rows + other.rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    def of(self, names: Collection[str]) -> TensorManifest:
        """Return the part with tensors of these names."""
        rows = tuple(each for each in self.rows if each.tensor in names)
        used = {each.file for each in rows}
        return TensorManifest(files=tuple(file for file in self.files if file.name in used), rows=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLayer:
    """The tensors in one folder; of several layers, a later one has the newer rows."""

    folder: str
    tensors: TensorManifest


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRows:
    """Rows of a tensor in memory."""

    tensor: Tensor
    """These rows alone, contiguous and on the host."""

    rows: RowRange
    """From the first to the last."""

    num_rows: int
    """Sizes of the whole tensor."""

    numbers_U: Tensor | None = None
    """Numbers of these rows, int64 and ascending; None where they are consecutive."""

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorRows:
        """Return all rows of a tensor."""
        num_rows = len(tensor) if tensor.ndim else 1
        return cls(tensor=tensor, rows=RowRange(0, num_rows), num_rows=num_rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the whole tensor."""
        return (self.num_rows, *self.tensor.shape[1:]) if self.tensor.ndim else ()


def write_tensors(
    run: RunDirectory, folder: str, name: str, parts: Iterable[tuple[str, TensorRows]]
) -> TensorManifest:
    """Write parts of tensors to one new file of a folder, and the hashes of its blocks; durable on return.

    Args:
        parts: With the names of their tensors, in the order in which they are to stand; each is let go once it is
            written. Nothing is written where there are none.

    Raises:
        OSError: It cannot be written.
    """
    remaining = iter(parts)
    first = next(remaining, None)
    if first is None:
        return TensorManifest()
    stored: list[StoredRows] = []
    hasher = BlockHasher()
    numbers_U: Tensor | None = None
    numbers_offset = 0
    with run.appending(f"{folder}/{name}") as append, ThreadPoolExecutor(1) as beside:

        def put(tensor: Tensor) -> int:
            """Append a tensor, and return where it begins."""
            begins = hasher.num_bytes
            content = _bytes_of(tensor).data
            hashing = beside.submit(hasher.update, content)
            append(content)
            hashing.result()
            return begins

        for tensor_name, part in chain([first], remaining):
            if part.numbers_U is not None and part.numbers_U is not numbers_U:
                # The tensors of a table have them in common.
                numbers_U, numbers_offset = part.numbers_U, put(part.numbers_U)
            is_listed = part.numbers_U is not None
            rows = StoredRows(
                tensor=tensor_name,
                dtype=_DTYPE_NAMES[part.tensor.dtype],
                shape=part.shape,
                first_row=part.rows.first,
                num_rows=len(part.tensor) if part.tensor.ndim else 1,
                file=name,
                offset=put(part.tensor),
                numbers_offset=numbers_offset if is_listed else None,
                stop_row=part.rows.stop if is_listed else None,
            )
            if stored and _goes_on(stored[-1], rows):
                stored[-1] = replace(stored[-1], num_rows=stored[-1].num_rows + rows.num_rows)
            else:
                stored.append(rows)
    return TensorManifest(files=(write_hashes(run, folder, name, hasher),), rows=tuple(stored))


def read_tensors(run: RunDirectory, layers: Sequence[StoredLayer], wanted: Mapping[str, TensorRows]) -> None:
    """Fill tensors in place with the rows of the same name, reading no more than these.

    Args:
        layers: Oldest first; what a later one has takes the place of what stands in those before it.
        wanted: By name, what is to be filled; the writer may have cut the rows otherwise.

    Raises:
        CheckpointError: The files hold other tensors or sizes; nothing was filled.
        DamagedFileError: A file is missing or damaged; some tensors may have been filled, with true values.
    """
    by_name: dict[str, list[StoredRows]] = {}
    for layer in layers:
        for rows in layer.tensors.rows:
            by_name.setdefault(rows.tensor, []).append(rows)
    for name, part in wanted.items():
        _check_stored(name, part, by_name.get(name, []))
    for layer in layers:
        by_file: dict[str, list[tuple[StoredRows, TensorRows]]] = {}
        for rows in layer.tensors.rows:
            target = wanted.get(rows.tensor)
            if target is not None and _overlap(rows.span, target.rows).num_rows > 0:
                by_file.setdefault(rows.file, []).append((rows, target))
        files = {file.name: file for file in layer.tensors.files}
        for file_name, found in by_file.items():
            file = VerifiedFile(run, layer.folder, files[file_name])
            _copy(file, [_consecutive(*each) for each in found if each[0].numbers_offset is None])
            listed = [each for each in found if each[0].numbers_offset is not None]
            for _, of_list in groupby(listed, key=lambda each: each[0].numbers_offset):
                _fill_listed(file, list(of_list))


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


def _copy(file: VerifiedFile, copies: Sequence[_Copy]) -> None:
    if not copies:
        return
    ranges = [(copy.offset, copy.offset + len(copy.target)) for copy in copies]
    for start, content in file.read(ranges):
        source = np.frombuffer(content, dtype=np.uint8)
        for copy in copies:
            copy.fill(source, start)


def _consecutive(rows: StoredRows, part: TensorRows) -> _Copy:
    """Return the copy of consecutive rows to their places in a tensor."""
    both = _overlap(rows.span, part.rows)
    own = slice(
        (both.first - part.rows.first) * rows.row_bytes, (both.stop - part.rows.first) * rows.row_bytes
    )
    return _Copy(rows.offset + (both.first - rows.first_row) * rows.row_bytes, _bytes_of(part.tensor)[own])


def _fill_listed(file: VerifiedFile, found: Sequence[tuple[StoredRows, TensorRows]]) -> None:
    """Fill tensors of one table with rows that follow one list of their numbers."""
    listed = found[0][0]
    assert listed.numbers_offset is not None
    numbers_U = np.empty(listed.num_rows, dtype=np.int64)
    _copy(file, [_Copy(listed.numbers_offset, numbers_U.view(np.uint8))])
    copies, moves = [], []
    for rows, part in found:
        first, stop = np.searchsorted(numbers_U, [part.rows.first, part.rows.stop]).tolist()
        content = np.empty((stop - first) * rows.row_bytes, dtype=np.uint8)
        copies.append(_Copy(rows.offset + first * rows.row_bytes, content))
        moves.append((part, numbers_U[first:stop] - part.rows.first, content, rows.row_bytes))
    _copy(file, copies)
    for part, places, content, row_bytes in moves:
        _bytes_of(part.tensor).reshape(-1, row_bytes)[places] = content.reshape(-1, row_bytes)


def _check_stored(name: str, part: TensorRows, stored: Sequence[StoredRows]) -> None:
    """Check that all rows of a tensor with these sizes are stored."""
    kind = (_DTYPE_NAMES[part.tensor.dtype], part.shape)
    for rows in stored:
        if (rows.dtype, rows.shape) != kind:
            raise _other_sizes(name, part, f"{rows.dtype} {list(rows.shape)}")
    num_found, reached = 0, part.rows.first
    for span in sorted(
        (rows.span for rows in stored if rows.numbers_offset is None), key=lambda span: span.first
    ):
        own = _overlap(span, RowRange(reached, part.rows.stop))
        if own.num_rows > 0:
            num_found, reached = num_found + own.num_rows, own.stop
    if num_found != part.rows.num_rows:
        raise _other_sizes(name, part, f"{num_found} of its rows" if stored else "none")


def _goes_on(before: StoredRows, rows: StoredRows) -> bool:
    """Tell whether rows are the next ones of the same tensor; what is written one after the other is adjacent."""
    return (
        before.tensor == rows.tensor
        and before.numbers_offset is None
        and rows.numbers_offset is None
        and before.span.stop == rows.first_row
    )


def _overlap(one: RowRange, other: RowRange) -> RowRange:
    """Return the rows of both, of a negative number where there are none."""
    return RowRange(max(one.first, other.first), min(one.stop, other.stop))


def _other_sizes(name: str, part: TensorRows, found: str) -> CheckpointError:
    return CheckpointError(
        f"{name} must be stored as {_DTYPE_NAMES[part.tensor.dtype]} with the sizes {list(part.shape)} of the model "
        f"that is trained, got {found}"
    )


def _bytes_of(tensor: Tensor) -> np.typing.NDArray[np.uint8]:
    """Return the memory of a contiguous tensor on the host."""
    array: np.typing.NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array
