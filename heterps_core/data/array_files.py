"""The three NumPy files of a prepared dataset: written in one streaming pass, then mapped into memory.

dense.npy [N, D] float32, ids.npy [N, S] int32, labels.npy [N] uint8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from heterps_core.data.features import FeatureSpec
from heterps_core.data.hashing import rows_of_texts
from heterps_core.data.numeric_transform import NumericTransform, fit_numeric_transform, take_logarithms
from heterps_core.data.reading.row_batch import RowBatch
from heterps_core.errors import DataError

ARRAY_NAMES = ("dense", "ids", "labels")

_ROWS_PER_CHUNK = 262_144


def write_arrays(
    directory: Path, batches: Iterable[RowBatch], features: FeatureSpec, is_count: tuple[bool, ...]
) -> int:
    """Append all batches to the three files; dense holds logarithms and NaN still. Return the rows."""
    num_rows = 0
    with (
        (directory / "dense.npy").open("wb") as dense_file,
        (directory / "ids.npy").open("wb") as ids_file,
        (directory / "labels.npy").open("wb") as labels_file,
    ):
        layouts: tuple[tuple[BinaryIO, type[np.generic], tuple[int, ...]], ...] = (
            (dense_file, np.float32, (features.num_dense,)),
            (ids_file, np.int32, (features.num_slots,)),
            (labels_file, np.uint8, ()),
        )
        for file, dtype, row_shape in layouts:
            _write_header(file, dtype, (0, *row_shape))
        for batch in _read_ahead(batches):
            dense_file.write(take_logarithms(batch.numbers, is_count).data)
            ids_file.write(hash_batch(batch, features.slot_rows).data)
            labels_file.write(batch.labels.data)
            num_rows += len(batch.labels)
        for file, dtype, row_shape in layouts:
            file.seek(0)
            _write_header(file, dtype, (num_rows, *row_shape))
    return num_rows


def standardise_in_place(
    directory: Path,
    num_train_rows: int,
    is_count: tuple[bool, ...],
    transform: NumericTransform | None = None,
) -> NumericTransform:
    """Fit the transform on the training rows of dense.npy, unless it is given, and apply it to all rows."""
    if not is_count:
        return NumericTransform(is_count=(), means=(), standard_deviations=())
    dense = np.load(directory / "dense.npy", mmap_mode="r+")
    if transform is None:
        starts = range(0, num_train_rows, _ROWS_PER_CHUNK)
        transform = fit_numeric_transform(
            (dense[start : min(start + _ROWS_PER_CHUNK, num_train_rows)] for start in starts), is_count
        )
    for start in range(0, len(dense), _ROWS_PER_CHUNK):
        chunk = dense[start : start + _ROWS_PER_CHUNK]
        chunk[:] = transform.standardise(chunk)
    return transform


def map_array(directory: Path, name: str) -> npt.NDArray[Any]:
    """Return an array of a prepared dataset, mapped read-only."""
    path = directory / f"{name}.npy"
    try:
        mapped = np.load(path, mmap_mode="r")
    except ValueError:
        # An array without columns has no bytes, which cannot be mapped.
        mapped = np.load(path)
    except OSError as error:
        raise DataError(
            path, f"cannot be read: {error.strerror or error}; prepare the dataset again"
        ) from error
    # A plain array over the same pages: slicing a memmap object costs several times more.
    return np.asarray(mapped)


def hash_batch(batch: RowBatch, slot_rows: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the embedding rows [n, S] of the categorical values of n rows."""
    ids = np.empty((len(batch.labels), len(slot_rows)), dtype=np.int32)
    for slot, (texts, num_rows) in enumerate(zip(batch.texts, slot_rows, strict=True)):
        ids[:, slot] = rows_of_texts(texts, slot=slot, num_rows=num_rows)
    return ids


def _read_ahead(batches: Iterable[RowBatch]) -> Iterator[RowBatch]:
    """Yield the batches while another thread fetches the next one.

    Arrow's streaming parser works only while it is asked, but leaves Python's lock meanwhile: parsing and
    hashing then share the time instead of adding up.
    """
    source = iter(batches)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as pool:
        coming = pool.submit(next, source, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, source, None)
            yield batch


def _write_header(file: BinaryIO, dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    """Write an .npy header; NumPy pads it so that its length is the same for any number of rows."""
    np.lib.format.write_array_header_1_0(
        file,
        {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape},
    )
