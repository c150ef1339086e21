"""Writes to MLflow that wait on disk, in order, while its store does not answer.

A night must not fail because a tracking server is being restarted or a database is locked.
`tasks/records/buffered_client.py` keeps here what it cannot write; the next write after the store is back delivers
all of it, or the sweeper does. A write may be delivered twice (a process killed in between) and changes nothing the
second time.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from heterps_core.json_file import replace_json

RETRY_AFTER_S = 30.0
"""Between two attempts to reach a store that did not answer; each may take its time-out."""

GIVE_UP_AFTER_S = 7 * 86_400.0
"""A write that no store took for so long is set aside, so that it does not keep those behind it for ever."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """One write to MLflow, in a form that can be kept."""

    call: str
    run_id: str
    """Of MLflow, or of an experiment; of a run that waits to be created, what stands for it until then."""

    arguments: dict[str, Any] = field(default_factory=dict)
    path: str | None = None
    """A file or folder that is handed over; one in the outbox belongs to it."""

    written_at: float = field(default_factory=time.time)


class Outbox:
    """Writes that wait, in one folder that several processes may use at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting = folder / "waiting.jsonl"
        self._refused = folder / "refused.jsonl"
        self._tried = folder / "tried"
        self._created = folder / "created.json"

    def waiting(self) -> list[Write]:
        """Return the writes that wait, in order; a line that a kill has cut short is left out."""
        try:
            lines = self._waiting.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [write for line in lines if (write := _read(line)) is not None]

    def num_refused(self) -> int:
        """Return how many writes no store would take; they stay in refused.jsonl with the reason."""
        try:
            return len(self._refused.read_text().splitlines())
        except FileNotFoundError:
            return 0

    @property
    def is_empty(self) -> bool:
        """Nothing waits."""
        return not self._waiting.exists()

    @property
    def is_due(self) -> bool:
        """The last attempt to reach the store is long enough ago for another."""
        try:
            return time.time() - self._tried.stat().st_mtime > RETRY_AFTER_S
        except FileNotFoundError:
            return True

    def keep(self, write: Write) -> None:
        """Append a write; a file that it hands over is copied, as the original may be gone by then."""
        with self._locked():
            if write.path is not None:
                source = Path(write.path)
                copy = self.folder / "files" / uuid.uuid4().hex / source.name
                copy.parent.mkdir(parents=True)
                shutil.copytree(source, copy) if source.is_dir() else shutil.copy2(source, copy)
                write = replace(write, path=str(copy))
            with self._waiting.open("a") as lines:
                # On a line of its own, also behind one that was cut short.
                lines.write(f"\n{json.dumps(asdict(write))}\n")

    def deliver(self, perform: Callable[[Write], object], *, is_passing: Callable[[Exception], bool]) -> int:
        """Do the waiting writes in order until one meets a store that does not answer; return how many were done."""
        with self._locked():
            waiting, done = self.waiting(), 0
            for write in waiting:
                problem = _attempt(perform, write)
                if (
                    problem is not None
                    and is_passing(problem)
                    and time.time() - write.written_at <= GIVE_UP_AFTER_S
                ):
                    self._tried.touch()
                    logger.info(
                        "%d records still wait for MLflow: %s", len(waiting) - done, first_line(problem)
                    )
                    break
                if problem is not None:
                    self._set_aside(write, problem)
                done += 1
            self._drop(waiting, done)
        return done

    def note_failure(self) -> None:
        """Remember that the store did not answer just now."""
        with self._locked():
            self._tried.touch()

    def created_runs(self) -> dict[str, str]:
        """Return the runs that were created late: what stood for each, and its id."""
        try:
            created: dict[str, str] = json.loads(self._created.read_text())
            return created
        except FileNotFoundError:
            return {}

    def note_created(self, stand_in: str, run_id: str) -> None:
        """Write down which run was created for what stood for it."""
        replace_json(self._created, {**self.created_runs(), stand_in: run_id})

    def _drop(self, waiting: Sequence[Write], done: int) -> None:
        left = waiting[done:]
        if left:
            draft = self._waiting.with_suffix(".tmp")
            draft.write_text("".join(json.dumps(asdict(write)) + "\n" for write in left))
            draft.replace(self._waiting)
        else:
            self._waiting.unlink(missing_ok=True)
        for write in waiting[:done]:
            if write.path is not None:
                shutil.rmtree(Path(write.path).parent, ignore_errors=True)

    def _set_aside(self, write: Write, problem: Exception) -> None:
        logger.warning("MLflow does not take a record, which is set aside in %s: %s", self._refused, problem)
        with self._refused.open("a") as lines:
            lines.write(json.dumps({**asdict(write), "problem": str(problem)}) + "\n")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _read(line: str) -> Write | None:
    try:
        return Write(**json.loads(line))
    except (ValueError, TypeError):
        return None


def _attempt(perform: Callable[[Write], object], write: Write) -> Exception | None:
    try:
        perform(write)
    except Exception as problem:
        return problem
    return None


def first_line(problem: Exception) -> str:
    """Return what an error says, in one line; of what the network says below it the request is enough."""
    return (str(problem).partition(" with exception HTTP")[0].splitlines() or [type(problem).__name__])[0][
        :200
    ]
