"""A model has one quality: trained without a break, resumed under another cut, and exported."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.judging.quality import ClickQuality, measure_quality
from heterps_core.models.chain import build_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import ClickPredictor, export_model
from heterps_core.training.checkpoint import complete_checkpoints
from heterps_core.training.evaluation import judge_trained
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.start_model import begin
from heterps_core.training.storage.run_directory import RunDirectory
from tests.heterps_core.data.synthetic_rows import all_rows, held_out, held_out_labels
from tests.heterps_core.training.worker_parts import training_loop_of
from tests.worker_processes import run_in_processes

pytestmark = pytest.mark.slow

MODELS = ("ctrdnn", "matchnet", "dcnv2")
"""A chain, two towers, and a graph whose tensors cross every cut; `test_every_ctr_model.py` cuts all."""

NUM_ROWS, BATCH_SIZE, STEPS_BETWEEN = 500, 40, 5
LOG_LOSS_TOLERANCE = 1e-5


class Found(NamedTuple):
    """What a training came to, and where it began."""

    first_step: int
    quality: ClickQuality


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> PreparedDataset:
    folder = tmp_path_factory.mktemp("alike")
    stream = write_click_stream(folder / "clicks.tsv", num_rows=NUM_ROWS, seed=4)
    return prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=60, out_dir=folder / "prepared"
    )


def make_job(dataset: PreparedDataset, model: str) -> TrainingJob:
    """Return a job that is cut in the middle."""
    num_layers = len(build_chain(model, dataset.features, seed=0))
    first = max(1, num_layers // 2)
    return TrainingJob(
        run_id="r",
        model=model,
        dataset=str(dataset.directory),
        stages=(Stage(0, first - 1, "cpu", 1), Stage(first, num_layers - 1, "cpu", 1)),
        config=TrainingConfig(
            batch_size=BATCH_SIZE,
            num_microbatches=2,
            num_epochs=1,
            seed=3,
            dense_optimizer="sgd",
            embedding_optimizer="sgd",
            dense_learning_rate=0.02,
            embedding_learning_rate=1.0,
            checkpoint_interval_steps=STEPS_BETWEEN,
            clip_norm=0.05,
            warmup_steps=3,
        ),
    )


def train_parts(rank: int, folders: list[str]) -> list[Found | None]:
    """Train one worker's part of each job to its end, and judge it."""
    found: list[Found | None] = []
    for folder in folders:
        run = RunDirectory(folder)
        job, loop = training_loop_of(rank, run)
        cursor = begin(run, job, loop.model)
        loop.train(cursor)
        judgements = list(judge_trained(loop, None).values())
        found.append(Found(cursor.step, judgements[0].click_quality()) if judgements else None)
    return found


def train_together(folders: list[Path]) -> list[Found]:
    """Train jobs of two workers one after the other, in one pair of processes."""
    parts = run_in_processes(train_parts, 2, [str(folder) for folder in folders])
    return [next(part for part in of_job if part is not None) for of_job in zip(*parts, strict=True)]


@pytest.fixture(scope="module")
def undisturbed(dataset, tmp_path_factory) -> dict[str, tuple[Path, Found]]:
    root = tmp_path_factory.mktemp("undisturbed")
    for model in MODELS:
        submit_job(RunDirectory(str(root / model)), make_job(dataset, model))
    folders = [root / model for model in MODELS]
    return dict(zip(MODELS, zip(folders, train_together(folders), strict=True), strict=True))


@pytest.fixture(scope="module")
def resumed(dataset, undisturbed, tmp_path_factory) -> dict[str, tuple[Path, Found]]:
    """The same jobs from their checkpoint in the middle, uncut, with two replicas."""
    root = tmp_path_factory.mktemp("resumed")
    for model, (folder, _) in undisturbed.items():
        shutil.copytree(folder, root / model)
        last = complete_checkpoints(RunDirectory(str(folder)))[-1]
        (root / model / "checkpoints" / last / "manifest.json").unlink()
        job = make_job(dataset, model)
        whole = Stage(0, job.stages[-1].last_layer, "cpu", 2)
        submit_job(RunDirectory(str(root / model)), replace(job, stages=(whole,)))
    folders = [root / model for model in MODELS]
    return dict(zip(MODELS, zip(folders, train_together(folders), strict=True), strict=True))


def assert_alike(found: ClickQuality, expected: ClickQuality, labels: np.ndarray) -> None:
    """Two rows whose predictions are equal but for rounding may change places."""
    of_one_pair = 1 / (labels.sum() * (len(labels) - labels.sum()))
    assert found.log_loss == pytest.approx(expected.log_loss, abs=LOG_LOSS_TOLERANCE)
    assert found.auc == pytest.approx(expected.auc, abs=2 * of_one_pair)


@pytest.mark.parametrize("model", MODELS)
def test_a_run_resumed_under_another_cut_has_the_quality_of_one_without_a_break(
    model, dataset, undisturbed, resumed
):
    _, expected = undisturbed[model]
    _, found = resumed[model]

    assert (expected.first_step, found.first_step) == (0, STEPS_BETWEEN)
    assert_alike(found.quality, expected.quality, held_out_labels(dataset))


@pytest.mark.parametrize("model", MODELS)
def test_what_is_exported_predicts_with_the_quality_that_the_workers_found(model, dataset, resumed, tmp_path):
    folder, found = resumed[model]

    export_model(RunDirectory(str(folder)), dataset.manifest, tmp_path / "exported", model=model)
    rows, mine = all_rows(dataset), held_out(dataset)
    logits = ClickPredictor(tmp_path / "exported").logits(rows.dense[mine], rows.ids[mine])

    assert_alike(measure_quality(rows.labels[mine], logits), found.quality, held_out_labels(dataset))
