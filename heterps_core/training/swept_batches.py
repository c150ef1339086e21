"""Batches in windows, so that the rows of tables that are larger than memory are there when their turn comes.

While one window of batches is trained, a part of each table is visited on a thread for the following windows, and the
last of these is read, a batch for each that is handed out. Until their turn comes batches wait in unnamed files: all
together they would take as much memory as their rows. Without such tables batches are passed on.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from threading import Condition
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heterps_core.data.batch import ClickBatch
from heterps_core.embeddings.row_exchange import LookupRows, RowExchange, share_messages
from heterps_core.embeddings.row_lists import Rows, union_of
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.embeddings.swept.row_windows import BATCHES_AHEAD, RowWindow, WindowLength, WindowPlan
from heterps_core.embeddings.swept.sweep_memory import MOST_BATCHES, NUM_PARTS
from heterps_core.embeddings.swept.swept_table import SweptTable
from heterps_core.errors import ConfigurationError, TrainingError
from heterps_core.training.pipeline.stage_runner import MicroBatch

LARGEST_INT32 = 2**31 - 1


class SweptBatches:
    """Hands out batches whose rows are in memory. Steps run within its `with` block; `close` comes after the block.

    Args:
        batches: In order; each with the exchanges of all look-ups in swept tables. They are read on the thread that
            calls `next_batch`.
        tables: The swept tables of this worker; none to pass batches on.
        writes: Rows are trained; else they are only read.
    """

    def __init__(
        self,
        batches: Iterable[list[MicroBatch]],
        tables: Sequence[SweptTable],
        *,
        writes: bool,
    ) -> None:
        self._batches, self._tables = iter(batches), tables
        self._writes = writes
        self._waiting = deque([_BatchFile()])
        self._steps = _Steps()
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="sweeps")
        self._handed_out = self._swept() if tables else self._batches

    def __enter__(self) -> SweptBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self._steps.end()

    def close(self) -> None:
        """Take all rows out of memory, after the last call of `next_batch` has returned."""
        self._sweeper.shutdown()
        for table in self._tables:
            table.empty(writes=self._writes)

    def next_batch(self) -> list[MicroBatch]:
        """Return the next batch; an empty one where no step follows any more. Another thread may call it than trains.

        Raises:
            StopIteration: There is none.
            ConfigurationError: Memory does not hold the rows of so few batches that each window has one.
            TrainingError: A file of rows or batches cannot be read or written.
        """
        return next(self._handed_out)

    def finish_step(self) -> None:
        """Say that all gradients of one more batch are applied."""
        self._steps.advance()

    def _swept(self) -> Iterator[list[MicroBatch]]:
        windows = self._planned_windows()
        nothing = _Window(0, [RowWindow() for _ in self._tables])
        # Each part is visited once before the first window has its turn.
        ahead = deque([nothing] * NUM_PARTS + [_next_whole(windows) or nothing])
        num_steps = 0
        for part in cycle(range(NUM_PARTS)):
            if all(window is nothing for window in ahead):
                return
            # What leaves was last used in the window before the one that has its turn now.
            visit = self._begin_visit(part, [window.rows for window in ahead], num_steps=num_steps)
            current, planned = ahead.popleft(), None
            for _ in range(current.num_batches):
                # Where the training has ended replicas still read alike, so that none waits for a message.
                yield [] if self._steps.have_ended else self._next_waiting(current.rows)
                planned = planned or next(windows, None)
            num_steps += current.num_batches
            ahead.append(planned or _next_whole(windows) or nothing)
            visit.result()

    def _begin_visit(self, part: int, rows: Sequence[list[RowWindow]], *, num_steps: int) -> Future[None]:
        def visit() -> None:
            if self._steps.wait_for(num_steps):
                for table, *windows in zip(self._tables, *rows, strict=True):
                    table.visit(part, windows, writes=self._writes)

        return self._sweeper.submit(visit)

    def _planned_windows(self) -> Iterator[_Window | None]:
        """Yield each window once it is known, and None for each batch that ends none."""
        plans = [table.new_plan() for table in self._tables]
        length, num_batches = WindowLength(), 0
        for rows, *following in self._read_ahead():
            while True:
                fits = all(
                    plan.fits(own, coming) for plan, own, *coming in zip(plans, rows, *following, strict=True)
                )
                is_full = self._agreed(not fits)
                if not is_full and num_batches < length.most_batches:
                    break
                if not num_batches:
                    # Its visit would wait for the last step before it, and that for the next batch.
                    raise self._too_little_memory(plans, rows)
                length.end_window(num_batches, is_full=is_full)
                yield _Window(num_batches, [plan.end_window() for plan in plans])
                self._waiting.append(_BatchFile())
                num_batches = 0
            for plan, own in zip(plans, rows, strict=True):
                plan.add(own)
            num_batches += 1
            yield None
        yield _Window(num_batches, [plan.end_window() for plan in plans])

    def _read_ahead(self) -> Iterator[list[list[Rows]]]:
        """Put batches into files; yield the rows of each, and of `BATCHES_AHEAD` later ones, by table."""
        ahead: deque[list[Rows]] = deque()
        for batch in self._batches:
            self._waiting[-1].append(batch, self._tables[0].folder)
            ahead.append([_distinct_rows(batch, table) for table in self._tables])
            if len(ahead) > BATCHES_AHEAD:
                yield list(ahead)
                ahead.popleft()
        while ahead:
            yield list(ahead)
            ahead.popleft()

    def _next_waiting(self, rows: Sequence[RowWindow]) -> list[MicroBatch]:
        """Return the batch that has waited longest, of a window with these rows."""
        while not self._waiting[0].num_batches:
            self._waiting.popleft()
        return self._waiting[0].next_batch(rows)

    def _too_little_memory(self, plans: Sequence[WindowPlan], rows: Sequence[Rows]) -> ConfigurationError:
        needed = [plan.slots_with(rows_U) for plan, rows_U in zip(plans, rows, strict=True)]
        missing_bytes = sum(
            max(slots - plan.num_slots, 0) * table.slot_bytes
            for slots, plan, table in zip(needed, plans, self._tables, strict=True)
        )
        return ConfigurationError(
            f"embedding_memory_bytes must hold the rows of {MOST_BATCHES} batches on each worker, here "
            f"{sum(needed):,} rows, got room for {sum(plan.num_slots for plan in plans):,}; raise it by "
            f"{missing_bytes:,} bytes at least, or use smaller batches or more replicas"
        )

    def _agreed(self, is_full: bool) -> bool:
        """Tell whether a window is full on any replica; they end windows together."""
        peers = self._tables[0].peers
        if peers is None:
            return is_full
        answers = peers.requests.exchange_sized([bytes([is_full])] * peers.requests.num_members)
        return any(answer[0] for answer in answers)


def _next_whole(windows: Iterator[_Window | None]) -> _Window | None:
    """Return the next window once all its batches are read; None after the last."""
    return next((window for window in windows if window is not None), None)


def _distinct_rows(batch: Sequence[MicroBatch], table: SweptTable) -> Rows:
    """Return the rows of a shard that a batch looks up, once each, ascending."""
    of_table = dict(batch[0].announced)[table]
    assert of_table.exchange is not None
    return union_of([of_table.exchange.local_rows.numpy()])


class _Window(NamedTuple):
    num_batches: int
    rows: list[RowWindow]
    """Rows of each swept table."""


class _BatchFile:
    """Some batches in an unnamed file, which is gone with the last of them."""

    def __init__(self) -> None:
        self.num_batches = 0
        """Batches that wait."""

        self._tables: list[ShardedTable] = []
        """Tables of all look-ups in a batch, in order."""

        self._file: IO[bytes] | None = None
        self._num_read_bytes = 0

    def append(self, batch: Sequence[MicroBatch], folder: Path) -> None:
        """Write a batch after the others, into a file in a folder.

        Raises:
            TrainingError: There is no room for it.
        """
        self._tables = [table for table, _ in batch[0].announced]
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            self._file.seek(0, os.SEEK_END)
            pickle.dump(_packed(batch), self._file, protocol=5)
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"batches that wait for their rows must find room in {folder}, but could not be written: "
                f"{error}; free space there and resume the run"
            ) from error
        self.num_batches += 1

    def next_batch(self, rows: Sequence[RowWindow]) -> list[MicroBatch]:
        """Return the next batch with the slots of its rows, which are in memory by now."""
        assert self._file is not None
        self._file.seek(self._num_read_bytes)
        batch = self._unpacked(rows, *pickle.load(self._file))
        self._num_read_bytes = self._file.tell()
        self.num_batches -= 1
        os.posix_fadvise(self._file.fileno(), 0, self._num_read_bytes, os.POSIX_FADV_DONTNEED)
        return batch

    def _unpacked(
        self, rows: Sequence[RowWindow], parts: Sequence[Any], looked_up: Sequence[Any]
    ) -> list[MicroBatch]:
        windows = iter(rows)
        announced: list[tuple[ShardedTable, LookupRows]] = []
        for table, (rows_BS, local_rows, sent_counts, received_counts) in zip(
            self._tables, looked_up, strict=True
        ):
            exchange = RowExchange(_tensor(local_rows), sent_counts, received_counts)
            of_batch = LookupRows(_tensor(rows_BS), exchange)
            if isinstance(table, SweptTable):
                of_batch = table.with_slots(of_batch, next(windows))
            announced.append((table, of_batch))
        share_messages(announced)
        batch, first = [], 0
        for num_rows, columns, is_repeated, keys in parts:
            slice_ = replace(ClickBatch.from_numpy(*columns), is_repeated=is_repeated)
            stop = first + slice_.num_rows
            own = [(table, of_batch.part(first, stop)) for table, of_batch in announced]
            batch.append(MicroBatch(num_rows, slice_, own, None if keys is None else torch.from_numpy(keys)))
            first = stop
        return batch


def _packed(batch: Sequence[MicroBatch]) -> tuple[list[Any], list[Any]]:
    """Return what the file holds of a batch: its parts, and for each table the rows of its look-ups."""
    parts, looked_up = [], []
    for part in batch:
        own = part.batch
        weights = None if own.weights is None else own.weights.numpy()
        columns = [own.dense.numpy(), _array(own.ids), own.labels.numpy(), weights]
        parts.append(
            (
                part.num_rows,
                columns,
                own.is_repeated,
                None if part.row_keys is None else part.row_keys.numpy(),
            )
        )
    for of_table in zip(*(part.announced for part in batch), strict=True):
        exchange = of_table[0][1].exchange
        assert exchange is not None
        rows_BS = torch.cat([rows.rows_BS for _, rows in of_table])
        looked_up.append(
            (
                _array(rows_BS),
                _array(exchange.local_rows),
                exchange.sent_counts,
                exchange.received_counts,
            )
        )
    return parts, looked_up


def _array(numbers: Tensor) -> npt.NDArray[Any]:
    """Return whole numbers in four bytes each where these suffice."""
    array: npt.NDArray[np.int64] = numbers.numpy()
    return array.astype(np.int32) if not array.size or array.max() <= LARGEST_INT32 else array


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False))


class _Steps:
    """How many steps are done, for a thread that waits for some."""

    def __init__(self) -> None:
        self._num_done = 0
        self._changed = Condition()
        self.have_ended = False
        """No further step follows."""

    def advance(self) -> None:
        with self._changed:
            self._num_done += 1
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self.have_ended = True
            self._changed.notify_all()

    def wait_for(self, num_steps: int) -> bool:
        """Wait for the end of so many steps; tells whether it came."""
        with self._changed:
            self._changed.wait_for(lambda: self.have_ended or self._num_done >= num_steps)
            return self._num_done >= num_steps
