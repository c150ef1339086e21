"""Nodes whose stage is planned for a GPU: rented ones must have it, those of a dry run need not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from heterps_core.errors import TrainingError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingJob
from heterps_core.training.node.node_life import DRY_RUN_VARIABLE
from heterps_core.training.storage.run_directory import RunDirectory
from tests.heterps_core.training.node_processes import NUM_STEPS, make_job, prepare_clicks, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    dataset = prepare_clicks(tmp_path_factory.mktemp("clicks"))
    return replace(make_job(dataset, (1, 1)), stages=(Stage(0, 0, "cpu-c7i", 1), Stage(1, 2, "gpu-t4", 1)))


@pytest.mark.weekly
def test_a_dry_run_of_a_gpu_stage_trains_on_what_the_machine_has(job: TrainingJob, tmp_path: Path) -> None:
    training_run = train(RunDirectory(str(tmp_path)), job)

    assert len(training_run.steps) == NUM_STEPS
    assert training_run.is_complete


def test_a_rented_node_without_its_gpu_ends_the_run_and_says_so(
    job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DRY_RUN_VARIABLE, "0")
    # Hides the cards of a machine that has some.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    with pytest.raises(TrainingError, match=r"\(stage 1, replica 0\).*gpu-t4 must have a CUDA device"):
        train(RunDirectory(str(tmp_path)), job)
