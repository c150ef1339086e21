"""Writes checkpoints beside the training: what changed since the last one, and a whole one now and then.

At a step boundary a worker copies the rows that were updated since the last checkpoint and the dense part, and trains
on; a thread writes the copies to the store. Where the last of all workers has written, the first writes the manifest.

Whole rows need no copy: a thread reads the table while it is trained, so that what it writes is of no single step.
But every row that was updated since it began is marked, and stands in the next checkpoint after it: both together
are what the table was then (a fuzzy checkpoint, as databases take them; Haerder and Reuter 1983).

Of a table that is larger than memory, changed rows that are on disk are not copied either: the thread reads them, and
no sweep writes a block before it was there (`embeddings/swept/block_changes.py`).

The newest two checkpoints are kept, and the newest that has no file in common with the last, so that one damaged file
never spoils all.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from queue import Queue

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heterps_core.embeddings.row_range import RowRange
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.errors import CheckpointError
from heterps_core.json_codec import from_json, to_json
from heterps_core.training.checkpoint import (
    WHOLE_SUFFIX,
    TrainingCursor,
    all_tensors,
    complete_checkpoints,
    read_checkpoint,
    write_manifest,
)
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.storage.named_tensors import rows_on_host, tables_by_tensor
from heterps_core.training.storage.run_directory import CHECKPOINTS, RunDirectory
from heterps_core.training.storage.stored_tensors import TensorManifest, TensorRows, write_tensors
from heterps_core.training.storage.verified_files import HASHES_SUFFIX, DamagedFileError
from heterps_core.transport.json_messages import gather_json

logger = logging.getLogger(__name__)

COPIED_BYTES = 256 * 1024**2
"""Most bytes of rows that wait in memory to be written; the training waits where more have changed."""

PIECE_BYTES = 16 * 1024**2
"""Bytes of rows that are copied and written at once."""

SMALL_BYTES = 16 * 1024**2
"""Up to so many bytes of rows a worker copies all of them each time, which takes some 10 ms."""

CHANGED_SHARE = 0.5
"""Share of the bytes of whole rows: where later changed ones add up to more, whole ones are written again."""

_KEPT_CHECKPOINTS = 2

_SETTLE_S = 3.0
"""Less than the silence after which a worker counts as lost."""


class _AbandonedError(Exception):
    """Whole rows are not needed any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One worker's part of a checkpoint."""

    layers: Mapping[str, TensorManifest]
    """By folder: with all that stands in folders of before and is needed still."""

    is_whole: bool
    """They have all of its rows."""

    folder_in_use: str | None
    """The folder to which it is writing whole rows."""

    whole_bytes: int
    changed_bytes: int


class CheckpointWriter:
    """Writes the checkpoints of one worker; the workers of all stages make one and call it at the same steps.

    Args:
        run: Where to.
        model: This replica's layers and shards.
        group: The replicas of this stage; None where this process is alone.
        world: All workers, in a group that nothing else uses meanwhile.
    """

    def __init__(
        self, run: RunDirectory, model: StageModel, *, group: ProcessGroup | None, world: ProcessGroup | None
    ) -> None:
        self.blocked_s = 0.0
        """For which the training stood still."""

        self._run, self._model, self._world = run, model, world
        self._rank = dist.get_rank()
        self._is_first = group is None or dist.get_rank(group) == 0
        self._tables = {
            name: table for name, table in model.tables.items() if self._is_first or table.num_shards > 1
        }
        self._is_small = sum(map(_shard_bytes, self._tables.values())) <= SMALL_BYTES
        self._layers: dict[str, TensorManifest] = {}
        self._has_whole = self._is_small
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="checkpoint")
        self._saving: Future[bool] | None = None
        self._whole: tuple[str, Future[TensorManifest]] | None = None
        self._is_abandoned = threading.Event()

    def begin(self, step: int) -> None:
        """Begin to write whole rows, at the first step of a training; changed ones are counted from here on."""
        if self._rank == 0:
            # What an attempt of before left unfinished.
            _delete_unused(self._run, in_use=())
        dist.barrier(self._world)
        for table in self._tables.values():
            table.forget_changes()
        if not self._is_small:
            self._begin_whole(step)

    def check(self) -> None:
        """Raise what has gone wrong meanwhile; costs nothing.

        Raises:
            CheckpointError: A checkpoint could not be written, for instance because the disk is full.
        """
        for future in (self._saving, None if self._whole is None else self._whole[1]):
            if future is not None and future.done():
                future.result()

    def save(self, cursor: TrainingCursor, *, is_last: bool = False) -> None:
        """Begin to write a checkpoint of this moment, between two steps.

        Waits for the one before. While the first whole rows of a run are being written, there is none yet.

        Args:
            cursor: The batch that comes next.
            is_last: It must be complete, so it waits for those whole rows.

        Raises:
            CheckpointError: The one before could not be written.
        """
        started_s = time.perf_counter()
        is_whole_due = self._saving is not None and self._saving.result()
        self._take_whole(is_last=is_last)
        copies: Queue[tuple[str, TensorRows] | BaseException | None] = Queue(COPIED_BYTES // PIECE_BYTES)
        parts = chain(_until_end(copies), self._remaining_rows())
        self._saving = self._threads.submit(self._write, cursor, parts)
        try:
            for copied in self._all_parts():
                copies.put(copied)
            copies.put(None)
        except BaseException as error:
            # A part of the changed rows would look like all of them.
            copies.put(error)
            raise
        if is_whole_due and self._whole is None and not is_last:
            self._begin_whole(cursor.step)
        self.blocked_s += time.perf_counter() - started_s

    def finish(self) -> None:
        """Wait until the last checkpoint is complete; raises as `check` does."""
        started_s = time.perf_counter()
        if self._saving is not None:
            self._saving.result()
        self._abandon_whole()
        self._threads.shutdown()
        self.blocked_s += time.perf_counter() - started_s

    def settle(self) -> None:
        """Let a checkpoint that is being written come to its end, for some seconds, where the training has failed."""
        if self._saving is not None:
            wait([self._saving], timeout=_SETTLE_S)

    def _begin_whole(self, step: int) -> None:
        folder = f"{step:08d}{WHOLE_SUFFIX}"
        self._whole = folder, self._threads.submit(self._write_whole, folder)

    def _take_whole(self, *, is_last: bool) -> None:
        """Let the next checkpoint begin with whole rows that are written by now."""
        if self._whole is None:
            return
        folder, writing = self._whole
        if is_last and self._has_whole:
            self._abandon_whole()
        elif is_last or writing.done():
            later = {name: layer for name, layer in self._layers.items() if name > folder}
            self._layers = {folder: writing.result()} | later
            self._has_whole, self._whole = True, None

    def _abandon_whole(self) -> None:
        if self._whole is not None:
            self._is_abandoned.set()
            wait([self._whole[1]])
            self._whole = None

    def _write_whole(self, folder: str) -> TensorManifest:
        key = f"{CHECKPOINTS}/{folder}"
        try:
            return write_tensors(self._run, key, self._file, self._whole_rows())
        except OSError as error:
            with suppress(OSError):
                for name in (self._file, f"{self._file}{HASHES_SUFFIX}"):
                    self._run.delete_file(f"{key}/{name}")
            raise CheckpointError(_why_not_written(str(error), self._run, folder)) from error

    def _write(self, cursor: TrainingCursor, parts: Iterator[tuple[str, TensorRows]]) -> bool:
        """Write a checkpoint with all others, and return whether whole rows should be written again."""
        folder = f"{cursor.step:08d}"
        own: _Part | str
        try:
            own = self._part(folder, write_tensors(self._run, f"{CHECKPOINTS}/{folder}", self._file, parts))
        except OSError as error:
            own = str(error)
        finally:
            # Who copies must never wait for one that has given up.
            for _ in parts:
                pass
        found = gather_json(to_json(own), self._world)
        outcome: str | bool | None = None
        if self._rank == 0:
            problems = [part for part in found if isinstance(part, str)]
            written = [from_json(_Part, part) for part in found if not isinstance(part, str)]
            outcome = _complete(self._run, cursor, written, problems)
        outcome = gather_json(outcome, self._world)[0]
        if isinstance(outcome, str):
            raise CheckpointError(outcome)
        return bool(outcome)

    def _part(self, folder: str, written: TensorManifest) -> _Part:
        """Keep in mind what later checkpoints need of this one, and return what it needs itself."""
        if not self._is_small:
            names = {f"{layer}.{key}" for layer, table in self._tables.items() for key in table.tensors()}
            self._layers[folder] = written.of(names)
        sizes = {name: layer.num_bytes for name, layer in self._layers.items()}
        whole = sum(size for name, size in sizes.items() if name.endswith(WHOLE_SUFFIX))
        return _Part(
            layers=self._layers | {folder: written},
            is_whole=self._has_whole,
            folder_in_use=None if self._whole is None else self._whole[0],
            whole_bytes=whole,
            changed_bytes=sum(sizes.values()) - whole,
        )

    @property
    def _file(self) -> str:
        return f"rank-{self._rank:05d}.bin"

    def _all_parts(self) -> Iterator[tuple[str, TensorRows]]:
        """Yield copies of what a checkpoint of this moment has from this worker."""
        if self._is_first:
            tables = tables_by_tensor(self._model)
            dense = {name: each for name, each in all_tensors(self._model).items() if name not in tables}
            for name, rows in rows_on_host(self._model, dense).items():
                yield name, replace(rows, tensor=rows.tensor.clone())
        yield from self._whole_rows() if self._is_small else self._changed_rows()

    def _changed_rows(self) -> Iterator[tuple[str, TensorRows]]:
        for layer, table in self._tables.items():
            for rows_U, tensors in table.take_changes(PIECE_BYTES):
                yield from _listed_rows(layer, rows_U + table.rows.first, tensors, num_rows=table.num_rows)

    def _remaining_rows(self) -> Iterator[tuple[str, TensorRows]]:
        """Yield the changed rows of this checkpoint that are still as they were, on the thread that writes them."""
        for layer, table in self._tables.items():
            for rows_U, tensors in table.remaining_changes():
                yield from _listed_rows(layer, rows_U + table.rows.first, tensors, num_rows=table.num_rows)

    def _whole_rows(self) -> Iterator[tuple[str, TensorRows]]:
        for layer, table in self._tables.items():
            for rows, tensors in table.whole_rows(PIECE_BYTES):
                if self._is_abandoned.is_set():
                    raise _AbandonedError
                for key, tensor in tensors.items():
                    yield f"{layer}.{key}", TensorRows(tensor=tensor, rows=rows, num_rows=table.num_rows)


def _shard_bytes(table: ShardedTable) -> int:
    return table.rows.num_rows * sum(tensor[:1].nbytes for tensor in table.tensors().values())


def _listed_rows(
    layer: str, numbers_U: Tensor, tensors: Mapping[str, Tensor], *, num_rows: int
) -> Iterator[tuple[str, TensorRows]]:
    """Yield some rows [U] of a table of so many, at least one, by the names of their tensors.

    Args:
        numbers_U: Which of the table they are, ascending.
        tensors: What they hold, by the names in the table.
    """
    span = RowRange(int(numbers_U[0]), int(numbers_U[-1]) + 1)
    for key, tensor in tensors.items():
        yield (f"{layer}.{key}", TensorRows(tensor=tensor, rows=span, num_rows=num_rows, numbers_U=numbers_U))


def _until_end(
    copies: Queue[tuple[str, TensorRows] | BaseException | None],
) -> Iterator[tuple[str, TensorRows]]:
    """Yield what is put into a queue up to a None; raises an error that is put there."""
    while (copied := copies.get()) is not None:
        if isinstance(copied, BaseException):
            raise copied
        yield copied


def _complete(
    run: RunDirectory, cursor: TrainingCursor, parts: Sequence[_Part], problems: Sequence[str]
) -> str | bool | None:
    """Write the manifest of what all workers have written; returns why there is none, or whether to begin again.

    None: there is none as long as the first whole rows are being written.
    """
    folder = f"{cursor.step:08d}"
    problem = next(iter(problems), None)
    if problem is None and not all(part.is_whole for part in parts):
        logger.info("no checkpoint at step %d: the first whole rows are not written yet", cursor.step)
        return None
    layers: dict[str, TensorManifest] = {}
    for part in parts:
        for name, tensors in part.layers.items():
            layers[name] = layers.get(name, TensorManifest()) + tensors
    if problem is None:
        try:
            write_manifest(run, cursor, layers)
        except OSError as error:
            problem = str(error)
    if problem is not None:
        run.delete_folder(f"{CHECKPOINTS}/{folder}")
        return _why_not_written(problem, run, folder)
    # Whole rows that a worker begins to write right after this step are in a later folder.
    later = {name for name in run.names(CHECKPOINTS) if name > folder}
    _delete_unused(run, in_use=later.union(part.folder_in_use or "" for part in parts))
    logger.info("checkpoint at step %d written to %s/%s/%s", cursor.step, run.location, CHECKPOINTS, folder)
    changed_bytes = sum(part.changed_bytes for part in parts)
    return changed_bytes > CHANGED_SHARE * sum(part.whole_bytes for part in parts)


def _delete_unused(run: RunDirectory, *, in_use: Collection[str]) -> None:
    """Delete all folders but those of kept checkpoints, and those that are in use."""
    needed = []
    for name in reversed(complete_checkpoints(run)):
        with suppress(DamagedFileError):
            needed.append({layer.folder for layer in read_checkpoint(run, name).layers})
    kept = needed[:_KEPT_CHECKPOINTS] + [each for each in needed if each.isdisjoint(needed[0])][:1]
    folders = {f"{CHECKPOINTS}/{name}" for name in in_use}.union(*kept)
    for name in run.names(CHECKPOINTS):
        if f"{CHECKPOINTS}/{name}" not in folders:
            run.delete_folder(f"{CHECKPOINTS}/{name}")


def _why_not_written(cause: str, run: RunDirectory, folder: str) -> str:
    complete = complete_checkpoints(run)
    free = f", with {shutil.disk_usage(run.path('')).free:,} bytes free there" if run.is_local else ""
    kept = f"the checkpoint of step {int(complete[-1])} stays" if complete else "there is none before it"
    step = int(folder.removesuffix(WHOLE_SUFFIX))
    return (
        f"the checkpoint of step {step} could not be written to {run.location}{free}: {cause}; {kept}; "
        f"free space there and resume the run"
    )
