"""Worker failures, written where the flow's host can read them, and their root cause."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from heterps_core.errors import TrainingError
from heterps_core.json_codec import from_json
from heterps_core.training.storage.run_directory import FAILURES, RunDirectory


class OutOfMemoryError(TrainingError):
    """A worker did not fit into the memory of its machine."""


class SpoiledGradientsError(TrainingError):
    """Parameters or gradients of a stage are not finite; perhaps for what the last stage sees in the loss."""


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
    """Number of the generation."""

    error_type: str
    message: str
    exit_status: int
    """Exit status for the command line."""

    is_cause: bool
    """The worker's own error, rather than the loss of a neighbour that died before."""

    lost: tuple[int, int, int] | None = None
    """Rank, stage and replica of the neighbour that it misses, where it knows which."""

    is_mistake: bool
    """The message says all: it is about something that the user gave."""

    is_loss: bool = False
    """It misses another worker, whether it knows which or not."""

    failed_at_s: float
    """Seconds since 1970, by the clock of its node."""

    @property
    def signature(self) -> str | None:
        """Text that is equal for equal errors; None where another worker is to blame."""
        if self.is_loss:
            return None
        first_line = self.message.partition("\n")[0]
        return f"{self.error_type} at stage {self.stage} after step {self.step}: {first_line}"

    def __str__(self) -> str:
        place = f"stage {self.stage}, replica {self.replica}" if self.stage is not None else "starting"
        return f"worker {self.rank} ({place}) failed after step {self.step}: {self.message}"


def write_failure(run: RunDirectory, failure: WorkerFailure) -> None:
    """Leave last words; one file per worker and attempt."""
    run.write_last_words(f"{FAILURES}/{failure.attempt:03d}-rank-{failure.rank:04d}.json", asdict(failure))


def root_cause(run: RunDirectory, *, attempt: int | None = None) -> WorkerFailure | None:
    """Return the failure of an attempt that most likely caused the others, or None where none is known.

    A worker's own error comes before the loss of a neighbour. A neighbour that left last words itself was no more
    than the next in a row of waiting workers, so those who miss one that left none come before the others. A loss
    that is no number comes before the gradients that it spoils on other stages.

    Args:
        attempt: By default the last in which any worker failed.
    """
    failures = read_failures(run, attempt=attempt)
    speaking = {failure.rank for failure in failures}

    def doubt(failure: WorkerFailure) -> tuple[bool, bool, bool, float]:
        misses_a_silent_one = failure.lost is not None and failure.lost[0] not in speaking
        is_spoiled = failure.error_type == SpoiledGradientsError.__name__
        return not failure.is_cause, is_spoiled, not misses_a_silent_one, failure.failed_at_s

    return min(failures, key=doubt, default=None)


def read_failures(run: RunDirectory, *, attempt: int | None = None) -> list[WorkerFailure]:
    """Return the last words of all workers in one attempt, by default the last in which any failed."""
    names = run.names(FAILURES)
    wanted = (
        max((name.partition("-")[0] for name in names), default="") if attempt is None else f"{attempt:03d}"
    )
    documents = [run.read_json(f"{FAILURES}/{name}") for name in names if name.startswith(f"{wanted}-")]
    return [from_json(WorkerFailure, document) for document in documents if document is not None]
