"""Whole runs with parameter servers on real nodes: processes are killed or stand still, and training goes on.

Without staleness a hybrid run must have the losses of a synchronous one step by step, so a sample lost or doubled on
the way would show.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from heterps_core.training.job import TrainingJob
from heterps_core.training.node.failures import WorkerFailure, root_cause
from heterps_core.training.step_metrics import Progress, read_progress
from heterps_core.training.storage.run_directory import STALENESS, RunDirectory
from heterps_core.training.submission import request_stop
from heterps_core.training.training_run import TrainingRun
from tests.heterps_core.training.node_processes import (
    CHECKPOINT_INTERVAL_STEPS,
    GO_ON_VARIABLE,
    HELD,
    HELD_STEP,
    NUM_STEPS,
    TINY,
    make_job,
    prepare_clicks,
    running_nodes,
    train,
    worker_processes,
)
from tests.heterps_core.training.reference import PlainRun, run_plainly
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

STEPS_BEFORE_A_FAULT = HELD_STEP - 1


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_clicks(tmp_path_factory.mktemp("clicks"))


@pytest.fixture(scope="module")
def plain(dataset: Path) -> PlainRun:
    return run_plainly(make_job(dataset, (1, 1)))


def hybrid_job(dataset: Path, replicas: tuple[int, int], *, bound: int, model: str = TINY) -> TrainingJob:
    """Return a job whose first stage is as many parameter servers."""
    job = make_job(dataset, replicas, model=model)
    return replace(job, config=replace(job.config, update_mode="hybrid", staleness_bound_steps=bound))


def losses(training_run: TrainingRun) -> list[float]:
    return [metrics.loss for metrics in training_run.steps]


class Fault:
    """Sends a signal to one process of a stage after some steps."""

    def __init__(self, signal_number: int, *, stage: int) -> None:
        self._signal = signal_number
        self._stage = stage

    def __call__(self, progress: Progress, nodes: list[psutil.Process]) -> bool:
        if progress.step < STEPS_BEFORE_A_FAULT:
            return False
        worker_processes(nodes[self._stage : self._stage + 1])[0].send_signal(self._signal)
        return True


def cause_of_a_freeze(run: RunDirectory, dataset: Path, *, stage: int) -> WorkerFailure:
    """Let a process of a stage stand still; return what its node says of it, a moment after its neighbour."""
    freeze = Fault(signal.SIGSTOP, stage=stage)
    with running_nodes(run, hybrid_job(dataset, (1, 1), bound=2)) as (_, nodes):
        wait_for(
            lambda: (progress := read_progress(run)) is not None and freeze(progress, nodes),
            timeout_s=120,
            what="the step of the fault",
        )
        wait_for(
            lambda: (cause := root_cause(run)) is not None and cause.is_cause,
            timeout_s=120,
            what="the word of the node",
        )
    failure = root_cause(run)
    assert failure is not None
    return failure


def named_by(failure: WorkerFailure) -> tuple[int | None, int | None]:
    """Return stage and replica of who is said to be gone, by its node or by the neighbour that waited for it."""
    return (failure.stage, failure.replica) if failure.lost is None else failure.lost[1:]


@pytest.fixture(scope="module", autouse=True)
def frozen(
    dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[int, Future[WorkerFailure]]]:
    """By stage, a run in which it stands still; the other waits for 20 s then, in which other tests run."""
    with ThreadPoolExecutor(1) as beside:
        yield {
            stage: beside.submit(
                cause_of_a_freeze,
                RunDirectory(str(tmp_path_factory.mktemp("frozen"))),
                dataset,
                stage=stage,
            )
            for stage in (0, 1)
        }


@pytest.mark.parametrize(
    ("stage", "replicas"), [(0, (2, 1)), (1, (1, 2))], ids=["a parameter server", "a worker"]
)
def test_what_is_killed_comes_back_and_no_sample_is_lost_or_doubled(
    stage: int,
    replicas: tuple[int, int],
    plain: PlainRun,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    monkeypatch.setenv(GO_ON_VARIABLE, str(tmp_path / "go on"))
    fault = Fault(signal.SIGKILL, stage=stage)

    def kill(progress: Progress, nodes: list[psutil.Process]) -> bool:
        if is_done := fault(progress, nodes):
            (tmp_path / "go on").touch()
        return is_done

    training_run = train(run, hybrid_job(dataset, replicas, bound=0, model=HELD), kill)

    failure = root_cause(run)
    assert failure is not None
    assert named_by(failure)[0] == stage
    assert training_run.num_attempts == 2
    assert training_run.num_repeated_steps >= STEPS_BEFORE_A_FAULT - CHECKPOINT_INTERVAL_STEPS
    assert losses(training_run) == pytest.approx(plain.losses, abs=1e-6)
    assert training_run.quality.auc == pytest.approx(plain.quality.auc, abs=1e-5)


def test_a_stopped_run_goes_on_with_other_servers_and_then_without(
    plain: PlainRun, dataset: Path, tmp_path: Path
) -> None:
    run = RunDirectory(str(tmp_path))

    def stop(progress: Progress, nodes: list[psutil.Process]) -> bool:
        request_stop(run)
        return True

    stopped = train(run, hybrid_job(dataset, (2, 1), bound=0), stop)
    assert not stopped.is_complete
    assert len(stopped.steps) == 20

    resumed = train(run, make_job(dataset, (1, 1)))

    assert resumed.is_complete
    assert resumed.num_repeated_steps == 0
    assert losses(resumed) == pytest.approx(plain.losses, abs=1e-6)


def test_a_synchronous_run_goes_on_with_servers_and_tells_how_stale_rows_were(
    plain: PlainRun, dataset: Path, tmp_path: Path
) -> None:
    run = RunDirectory(str(tmp_path))

    def stop(progress: Progress, nodes: list[psutil.Process]) -> bool:
        request_stop(run)
        return True

    train(run, make_job(dataset, (2, 1)), stop)
    resumed = train(run, hybrid_job(dataset, (1, 2), bound=2))

    seen = run.read_json(f"{STALENESS}/0000.json")
    assert resumed.is_complete
    assert losses(resumed)[:20] == pytest.approx(plain.losses[:20], abs=1e-6)
    assert losses(resumed)[20:] == pytest.approx(plain.losses[20:], abs=0.1)
    # Each of two workers asks once for the rows of each of the last 20 steps.
    assert seen["num_pulls"] == 2 * (NUM_STEPS - 20)
    assert 0 < seen["mean_steps"] <= seen["max_steps"] <= 2


@pytest.mark.parametrize("stage", [0, 1], ids=["a parameter server", "a worker"])
def test_what_stands_still_is_named_by_the_limit_of_silence(
    stage: int, frozen: Mapping[int, Future[WorkerFailure]]
) -> None:
    failure = frozen[stage].result()

    assert (failure.stage, failure.replica) == (stage, 0)
    assert "its process stood still for" in failure.message
