"""The batches of one replica, read and cut into micro-batches on a thread while the step before runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.embeddings.row_exchange import LookupRows
from heterps_core.embeddings.row_range import RowRange
from heterps_core.embeddings.sharded_table import ShardedTable, exchange_row_numbers
from heterps_core.models.row_dropout import RowDropout, keys_of_rows
from heterps_core.models.slot_embedding import SlotEmbedding, share_sequences
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import TrainingConfig, batches_at_once
from heterps_core.training.pipeline.stage_exchange import part_starts
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.swept_batches import SweptBatches

BATCHES_AHEAD = 2
"""One that waits and one that is read: a slow read is made up for while the next step runs."""

Announced: TypeAlias = Sequence[tuple[ShardedTable, LookupRows]]
"""The rows that a batch looks up, by table."""

Position = TypeVar("Position")
Batch = TypeVar("Batch")


class BatchFeed(Generic[Position, Batch]):
    """Iterates over prepared batches; an error while preparing one is raised where its turn comes.

    Args:
        prepare: Makes the batch of a position; called on one other thread, in order.
    """

    def __init__(self, prepare: Callable[[Position], Batch], positions: Iterable[Position]) -> None:
        self._prepare = prepare
        self._positions = iter(positions)
        self.waited_s = 0.0
        """Time for which the training had nothing to do but wait for data."""

    def __iter__(self) -> Generator[tuple[Position, Batch], None, None]:
        """Yield each position with its batch."""
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
            ahead: deque[tuple[Position, Future[Batch]]] = deque(
                (position, thread.submit(self._prepare, position))
                for position in islice(self._positions, BATCHES_AHEAD)
            )
            while ahead:
                position, future = ahead.popleft()
                started_s = time.perf_counter()
                batch = future.result()
                self.waited_s += time.perf_counter() - started_s
                ahead.extend(
                    (following, thread.submit(self._prepare, following))
                    for following in islice(self._positions, 1)
                )
                yield position, batch


def spread(
    num_rows: int, num_microbatches: int, slices: Sequence[tuple[int, RowRange]]
) -> npt.NDArray[np.int64]:
    """Return the positions in a batch of the rows of a replica's slices, one after the other.

    Micro-batch j of m takes positions j, j + m, j + 2 m, ..., so that the slices of a replica are neighbours in the
    batch, whose positions stand for places in the files. A batch that m does not divide is cut as it lies.

    Example:
        >>> spread(8, 2, [(4, RowRange(2, 4)), (4, RowRange(6, 8))]).tolist()
        [4, 6, 5, 7]
    """
    places = np.concatenate([np.arange(mine.first, mine.stop) for _, mine in slices])
    if num_rows % num_microbatches:
        return places
    size = num_rows // num_microbatches
    positions: npt.NDArray[np.int64] = places % size * num_microbatches + places // size
    return positions


def request_rows(batch: ClickBatch, model: StageModel, *, num_batches: int = 1) -> Sequence[Announced]:
    """Request the table rows that batches of a replica look up, in one message for all of them.

    Rows are requested from their owners, but not where replicas share a table's memory; rows of dynamic ids are
    found, and rows on disk listed. All replicas of a stage must do so for the same batches in the same order.

    Args:
        batch: Rows of the batches, one batch after the other, as many of each.

    Returns:
        For each batch the rows that it looks up, by table.
    """
    lookups = [
        (layer.table, layer.row_numbers(batch))
        for layer in model.layers.values()
        if isinstance(layer, SlotEmbedding) and layer.table is not None and layer.table.looks_ahead
    ]
    size = batch.num_rows // num_batches
    return exchange_row_numbers(
        [
            [(table, rows_BK[number * size : (number + 1) * size]) for table, rows_BK in lookups]
            for number in range(num_batches)
        ]
    )


def cut_batch(
    batch: ClickBatch,
    slices: Sequence[tuple[int, RowRange]],
    announced: Announced,
    *,
    device: torch.device = CPU,
    row_keys: Tensor | None = None,
) -> list[MicroBatch]:
    """Cut a replica's rows of a batch into micro-batches.

    Args:
        batch: The rows of the replica's slices, one slice after the other.
        slices: Size of each micro-batch over all replicas, and which rows of the whole batch are the replica's.
        announced: Of the batch, as `request_rows` returns it.
        device: Computes the micro-batches.
        row_keys: Keys of the rows for dropout; none for predictions.
    """
    ends = accumulate((mine.num_rows for _, mine in slices), initial=0)
    return [
        MicroBatch(
            size,
            batch.rows(first, stop).to(device),
            [(table, rows.part(first, stop)) for table, rows in announced],
            None if row_keys is None else row_keys[first:stop],
        )
        for (size, _), (first, stop) in zip(slices, pairwise(ends), strict=True)
    ]


class _Block(NamedTuple):
    """A replica's rows of neighbouring batches of an epoch, one batch after the other."""

    epoch: int
    indices: range
    rows: npt.NDArray[np.int64]
    batch: ClickBatch
    announced: Sequence[Announced]


class ReplicaBatches:
    """Reads the rows of one replica, cuts them into micro-batches, and requests the table rows of each batch.

    Args:
        dataset: Has the rows.
        config: Says how batches are cut.
        model: The replica's part of the model.
        runner: Runs it.
    """

    def __init__(
        self, dataset: PreparedDataset, config: TrainingConfig, model: StageModel, runner: StageRunner
    ) -> None:
        self._dataset, self._config, self._model, self._runner = dataset, config, model, runner
        parts = [part for layer in model.layers.values() for part in layer.modules()]
        self._shares_sequences = dataset.has_requests and share_sequences(model.layers.values())
        self._has_dropout = any(isinstance(part, RowDropout) for part in parts)
        self.follow_shares()

    def follow_shares(self) -> None:
        """Read, from the next batch on, the rows that the runner's shares give this replica."""
        batch_size, num_microbatches = self._config.batch_size, self._config.num_microbatches
        self._slices = self._runner.row_slices(batch_size, num_microbatches)
        self._positions = self._spread(batch_size, self._slices)
        self._begins = part_starts(self._slices, self._runner.place.layout)
        self._block = _Block(0, range(0), np.empty(0, dtype=np.int64), _NO_ROWS, [])

    def training_batch(self, cursor: TrainingCursor) -> list[MicroBatch]:
        """Read this replica's rows of a batch, cut them into micro-batches, and request the table rows.

        All replicas of a stage must do so for the same batches in the same order.

        Raises:
            DataError: An id lies outside of its slot's table.
        """
        if self._block.epoch != cursor.epoch or cursor.batch_index not in self._block.indices:
            self._block = self._read_block(cursor)
        size = len(self._positions)
        index = cursor.batch_index - self._block.indices.start
        first = index * size
        rows = self._block.rows[first : first + size]
        keys = None
        if self._has_dropout:
            keys = keys_of_rows(rows, seed=self._config.seed, epoch=cursor.epoch).to(self._model.device)
        batch = self._block.batch.rows(first, first + size)
        announced, device = self._block.announced[index], self._model.device
        return cut_batch(batch, self._slices, announced, device=device, row_keys=keys)

    def held_out_batch(self, index: int) -> list[MicroBatch]:
        """Read this replica's rows of a held-out batch, as `training_batch` does of one that is trained."""
        batch_size, num_microbatches = self._config.batch_size, self._config.num_microbatches
        num_rows = min(batch_size, self._dataset.num_eval_rows - index * batch_size)
        slices = self._runner.row_slices(num_rows, num_microbatches)
        positions = self._spread(num_rows, slices)
        rows = self._dataset.held_out_rows(index, batch_size=batch_size, positions=positions)
        batch = self._read(rows, part_starts(slices, self._runner.place.layout))
        (announced,) = request_rows(batch, self._model)
        return cut_batch(batch, slices, announced, device=self._model.device)

    def swept(self, batches: Iterable[list[MicroBatch]], *, writes: bool) -> SweptBatches:
        """Return batches whose rows of swept tables are in memory; see `SweptBatches`."""
        tables = list(self._model.swept_tables.values())
        return SweptBatches(batches, tables, writes=writes)

    def _spread(self, num_rows: int, slices: Sequence[tuple[int, RowRange]]) -> npt.NDArray[np.int64]:
        """Return the positions of the replica's rows in a batch, which is cut as it lies where it has requests."""
        return spread(num_rows, 1 if self._dataset.has_requests else self._config.num_microbatches, slices)

    def _read_block(self, cursor: TrainingCursor) -> _Block:
        """Read a batch, and with a small one those that follow it: calls of NumPy and messages cost by their number.

        All replicas read as many batches at once.
        """
        first, config = cursor.batch_index, self._config
        stop = first + batches_at_once(-(-config.batch_size // self._runner.place.num_replicas))
        indices = range(first, min(stop, self._dataset.num_batches(config.batch_size)))
        if not (self._model.reads_batch or self._runner.is_last or self._has_dropout):
            # A stage between others asks for no row.
            return _Block(cursor.epoch, indices, np.empty(0, dtype=np.int64), _NO_ROWS, [[]] * len(indices))
        rows = self._dataset.batch_rows(
            cursor.epoch,
            np.repeat(indices, len(self._positions)),
            batch_size=config.batch_size,
            seed=config.seed,
            positions=np.tile(self._positions, len(indices)),
        )
        batch = replace(self._read(rows, np.tile(self._begins, len(indices))), is_repeated=cursor.epoch > 0)
        announced = request_rows(batch, self._model, num_batches=len(indices))
        return _Block(cursor.epoch, indices, rows, batch, announced)

    def _read(self, rows: npt.NDArray[np.int64], begins: npt.NDArray[np.bool_]) -> ClickBatch:
        """Read what this stage needs of this replica's rows; parts of a micro-batch begin with some of them."""
        if self._model.reads_batch:
            return self._dataset.batch(rows, begins=begins if self._shares_sequences else None)
        return self._dataset.target_batch(rows) if self._runner.is_last else _NO_ROWS


_NO_ROWS = ClickBatch(
    dense=torch.empty(0, 0, device=CPU),
    ids=torch.empty(0, 0, dtype=torch.int64, device=CPU),
    labels=torch.empty(0, device=CPU),
)
"""For stages that neither look rows up nor see labels."""
