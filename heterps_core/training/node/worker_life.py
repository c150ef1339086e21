"""Signs of life of a node's workers: each writes them to memory that its node reads.

Who stands still or is killed leaves no last words, and its neighbours learn no more than that an answer is missing.
Its node writes last words for it: a worker that stands still is named and ended within the limit that holds between
neighbours, also where all others wait for it in a checkpoint; and it reports whether the
kernel killed a worker for lack of memory.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from heterps_core.errors import HeterpsError, TrainingError
from heterps_core.training.node.failures import OutOfMemoryError, WorkerFailure, write_failure
from heterps_core.training.node.host_memory import MemoryWatch, allocation_failure, process_bytes
from heterps_core.training.node.node_life import GENERATION_VARIABLE, repeated
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.transport.rank_layout import SILENCE_LIMIT_S, LostWorkerError, is_loss_of_another

logger = logging.getLogger(__name__)

SIGNS_VARIABLE = "HETERPS_SIGNS_FILE"
"""Names the file that a node's workers write their signs of life into, each at the place of its local rank."""

_BEAT_INTERVAL_S = 0.5
LOOK_INTERVAL_S = 0.25
_STILL_LIMIT_S = 0.75 * SILENCE_LIMIT_S
"""Longest silence towards the own node: it is to name who stands still before neighbours lose their patience, who
only know for whom they wait."""

_NOTED_SILENCE_S = 4 * _BEAT_INTERVAL_S
"""One that had been silent for so long when it ended had stood still before."""


class _State(IntEnum):
    """State of a worker."""

    ABSENT = 0
    WORKING = 1
    HAS_SPOKEN = 2
    """It came to its end, left last words, or was asked to end: nothing is to be said for it."""


class _Sign(NamedTuple):
    """A sign of life."""

    beat: int
    """Another at each sign of life."""

    pid: int
    rank: int
    attempt: int
    step: int
    """The last that it finished."""

    state: int


_SIGN = struct.Struct(f"<{len(_Sign._fields)}q")


def _read_signs(content: bytes | mmap.mmap) -> list[_Sign]:
    """Return the signs of the workers of a node from its file, by local rank."""
    return [_Sign._make(values) for values in _SIGN.iter_unpack(content)]


class SignsOfLife:
    """A worker's signs of life, given from a thread; nothing is written to a disk, which may be full.

    SIGTERM is how a node ends the others after one has failed: it ends this process at once, whatever its main
    thread does, and is noted as no failure of its own.

    Args:
        rank: In the world.
        attempt: Number of the generation.
        file: The node's, mapped; None where no node looks.
        slot: Local rank.
    """

    def __init__(self, rank: int, attempt: int, file: mmap.mmap | None = None, *, slot: int = 0) -> None:
        self.rank, self.attempt = rank, attempt
        self.place: tuple[int | None, int | None] = None, None
        """Stage and replica, once the worker knows them."""

        self._file, self._first_byte = file, slot * _SIGN.size
        self._sign = _Sign(0, os.getpid(), rank, attempt, 0, _State.WORKING)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Give the first sign, and further ones from a thread until the process ends; called in the main thread."""
        self._give()
        self._wakes, self._signalled = socket.socketpair()
        self._wakes.setblocking(False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._signalled.settimeout(_BEAT_INTERVAL_S)
        threading.Thread(target=self._beat, name="signs-of-life", daemon=True).start()

    def finish_step(self, step: int) -> None:
        """Report the last finished step."""
        self._give(step=step)

    def has_spoken(self) -> None:
        """Report that the node need not write last words for this worker; called before it ends."""
        self._give(state=_State.HAS_SPOKEN)

    def fail(self, run: RunDirectory, error: BaseException) -> int:
        """Leave the last words of this worker and return its exit status."""
        error = allocation_failure(error) or error
        known = error if isinstance(error, HeterpsError) else None
        lost = error.lost if isinstance(error, LostWorkerError) else None
        is_loss = lost is not None or is_loss_of_another(error)
        message = f"{type(error).__name__}: {error}" if known is None else str(error)
        if is_loss and lost is None:
            # A checkpoint that lacks the part of another worker says nothing against the disk.
            message = (
                "another worker, with which it exchanges tensors or writes a checkpoint, ended or is silent"
            )
        failure = _failure(
            self._sign,
            self.place,
            error,
            message=message,
            is_cause=not is_loss and (known is not None or not isinstance(error, RuntimeError)),
            is_mistake=known is not None and not is_loss,
            is_loss=is_loss,
            lost=lost,
        )
        write_failure(run, failure)
        logger.error("%s", failure, exc_info=error if known is None else None)
        return failure.exit_status

    def _beat(self) -> None:
        while True:
            with suppress(TimeoutError):
                if signal.SIGTERM in self._signalled.recv(64):
                    self.has_spoken()
                    os._exit(128 + signal.SIGTERM)
            self._give()

    def _give(self, **changes: int) -> None:
        with self._lock:
            self._sign = self._sign._replace(**changes, beat=self._sign.beat + 1)
            if self._file is not None:
                _SIGN.pack_into(self._file, self._first_byte, *self._sign)


def start_signs() -> SignsOfLife:
    """Return the signs of life of this process, a worker as its environment says, and begin to give them."""
    path, slot = os.environ.get(SIGNS_VARIABLE), int(os.environ["LOCAL_RANK"])
    file = None if path is None else _map(Path(path))
    signs = SignsOfLife(
        int(os.environ["RANK"]), int(os.environ.get(GENERATION_VARIABLE, "1")), file, slot=slot
    )
    if file is not None:
        signs.start()
    return signs


@dataclass
class _Seen:
    """A worker as its node last saw it."""

    sign: _Sign
    num_looks_unchanged: int = 0
    num_bytes: int = 0
    """Its memory at the last look."""


class _WorkerWatch:
    """Looks at the workers of one node, and writes last words for those that can no longer.

    Silence is counted in looks, so that a machine that stood still as a whole finds its workers alive.

    Args:
        run: Where last words go.
        path: The file of signs.
        positions: Stage and replica of each worker, by local rank.
    """

    def __init__(self, run: RunDirectory, path: Path, positions: Sequence[tuple[int, int]]) -> None:
        path.write_bytes(bytes(_SIGN.size * len(positions)))
        self._run = run
        self._file = _map(path)
        self._positions = positions
        self._seen: dict[int, _Seen] = {}
        self._memory = MemoryWatch()

    def look(self) -> None:
        """Look once at every worker."""
        for slot, sign in enumerate(_read_signs(self._file)):
            seen = self._seen.get(slot)
            if sign.state != _State.WORKING:
                self._seen.pop(slot, None)
            elif seen is None or sign.pid != seen.sign.pid:
                self._seen[slot] = _Seen(sign)
            elif not _is_alive(sign.pid):
                self._tell(slot, self._death_of(seen))
                _SIGN.pack_into(self._file, slot * _SIGN.size, *sign._replace(state=_State.HAS_SPOKEN))
            else:
                seen.num_looks_unchanged = seen.num_looks_unchanged + 1 if sign.beat == seen.sign.beat else 0
                seen.sign, seen.num_bytes = sign, process_bytes(sign.pid) or seen.num_bytes
                if seen.num_looks_unchanged * LOOK_INTERVAL_S >= _STILL_LIMIT_S:
                    with suppress(ProcessLookupError):
                        # Its end is seen at the next look.
                        os.kill(sign.pid, signal.SIGKILL)

    def _death_of(self, seen: _Seen) -> TrainingError:
        """Return what to say of a worker that ended without a word."""
        silence_s = seen.num_looks_unchanged * LOOK_INTERVAL_S
        if silence_s >= _NOTED_SILENCE_S:
            return TrainingError(
                f"a worker must give a sign of life every {_STILL_LIMIT_S:.0f} s, but its process stood still for "
                f"{silence_s:.0f} s and was ended"
            )
        shortage = self._memory.shortage(last_bytes=seen.num_bytes)
        if shortage is not None:
            return OutOfMemoryError(shortage)
        return TrainingError(
            "a worker must end by itself, but its process was killed by a signal, and not for lack of memory; "
            "somebody ended it, or compiled code broke off"
        )

    def _tell(self, slot: int, error: TrainingError) -> None:
        sign = self._seen.pop(slot).sign
        is_mistake = isinstance(error, OutOfMemoryError)
        failure = _failure(
            sign, self._positions[slot], error, message=str(error), is_cause=True, is_mistake=is_mistake
        )
        logger.error("%s", failure)
        try:
            write_failure(self._run, failure)
        except OSError as problem:
            logger.warning("what ended worker %d could not be written down: %s", sign.rank, problem)


@contextmanager
def workers_watched(run: RunDirectory, path: Path, positions: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Look at a node's workers from a thread while the block runs; see `_WorkerWatch`."""
    watch = _WorkerWatch(run, path, positions)
    try:
        with repeated(watch.look, interval_s=LOOK_INTERVAL_S, name="worker-watch"):
            yield
    finally:
        # Who died in the last moment.
        watch.look()


def _failure(
    sign: _Sign, place: tuple[int | None, int | None], error: BaseException, **others: Any
) -> WorkerFailure:
    stage, replica = place
    return WorkerFailure(
        rank=sign.rank,
        stage=stage,
        replica=replica,
        step=sign.step,
        attempt=sign.attempt,
        error_type=type(error).__name__,
        exit_status=getattr(error, "exit_status", HeterpsError.exit_status),
        failed_at_s=time.time(),
        **others,
    )


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
