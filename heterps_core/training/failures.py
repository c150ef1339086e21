"""What a worker died of, written where the flow's host can read it, and which death came first."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from heterps_core.training.run_directory import FAILURES, RunDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailure:
    """The last words of one worker."""

    rank: int
    stage: int | None
    """None where it died before it knew its stage."""

    replica: int | None
    step: int
    """The last step that it finished."""

    attempt: int
    error_type: str
    message: str
    exit_status: int
    """What the command line should exit with."""

    is_cause: bool
    """The worker's own error, rather than the loss of a neighbour that died before."""

    failed_at_s: float
    """Seconds since 1970, by the clock of its node."""

    def __str__(self) -> str:
        place = f"stage {self.stage}, replica {self.replica}" if self.stage is not None else "starting"
        return f"worker {self.rank} ({place}) failed after step {self.step}: {self.message}"


def write_failure(run: RunDirectory, failure: WorkerFailure) -> None:
    """Leave last words; one file per worker and attempt."""
    run.write_last_words(f"{FAILURES}/{failure.attempt:03d}-rank-{failure.rank:04d}.json", asdict(failure))


def root_cause(run: RunDirectory) -> WorkerFailure | None:
    """Return the failure of the last attempt that most likely caused the others, or None where none is known."""
    names = run.names(FAILURES)
    last_attempt = names[-1].partition("-")[0] if names else ""
    failures = []
    for name in names:
        document = run.read_json(f"{FAILURES}/{name}")
        if name.startswith(last_attempt) and document is not None:
            failures.append(WorkerFailure(**document))
    return min(failures, key=lambda failure: (not failure.is_cause, failure.failed_at_s), default=None)


def now_s() -> float:
    """Return seconds since 1970."""
    return time.time()
