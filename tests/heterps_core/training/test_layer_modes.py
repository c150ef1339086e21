"""Dropout and batch normalization train in a pipeline with replicas, and predict alike wherever they predict."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.judging.held_out import HeldOutJudgement, judge_held_out
from heterps_core.models.chain import build_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import ClickPredictor, export_model
from heterps_core.serving.held_out_predictions import held_out_rows, held_out_scores, predicted_parts
from heterps_core.training.checkpoint import complete_checkpoints
from heterps_core.training.evaluation import judge_trained, predict_held_out
from heterps_core.training.job import UPDATE_MODES, StartModel, TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.start_model import begin
from heterps_core.training.storage.run_directory import CHECKPOINTS, RunDirectory
from tests.contracts.own_models import WITH_BATCH_NORM, build_with_dropout
from tests.heterps_core.data.synthetic_rows import all_rows, held_out
from tests.heterps_core.training.reference import plain_model, train_plainly
from tests.heterps_core.training.test_start_model import make_start
from tests.heterps_core.training.worker_parts import predicted_rows, training_loop_of
from tests.tiers import weekly_after
from tests.worker_processes import run_in_processes

pytestmark = pytest.mark.slow

SEEN_DROPOUT = f"{__name__}:build_with_seen_dropout"
CHECKPOINT_INTERVAL_STEPS = 6
PIPELINE = (Stage(0, 1, "cpu", 1), Stage(2, 6, "cpu", 2))
"""Its second stage begins with dropout, or with batch normalization."""

ALONE = (Stage(0, 6, "cpu", 1),)


class SeenDropout(nn.Dropout):
    """Dropout that keeps what it dropped."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.dropped: list[bytes] = []
        """A bit for each value, in the order of forward passes."""

    def forward(self, activation: Tensor) -> Tensor:
        mask = super().forward(torch.ones_like(activation))
        if self.training:
            self.dropped.append(np.packbits((mask == 0).numpy()).tobytes())
        return activation * mask


def build_with_seen_dropout(features: FeatureSpec) -> nn.Sequential:
    chain = build_with_dropout(features)
    chain.dropout = SeenDropout()
    return chain


def make_job(
    dataset: PreparedDataset,
    model: str,
    stages: tuple[Stage, ...] = PIPELINE,
    *,
    start_model: StartModel | None = None,
    num_microbatches: int = 2,
    update_mode: str = "sync",
    l2: float = 0.0,
) -> TrainingJob:
    return TrainingJob(
        run_id="r",
        model=model,
        dataset=str(dataset.directory),
        stages=stages,
        config=TrainingConfig(
            batch_size=64,
            num_microbatches=num_microbatches,
            num_epochs=1,
            seed=3,
            dense_optimizer="sgd",
            embedding_optimizer="sgd",
            dense_learning_rate=0.1,
            embedding_learning_rate=1.0,
            checkpoint_interval_steps=CHECKPOINT_INTERVAL_STEPS,
            update_mode=update_mode,
            dense_l2=l2,
            embedding_l2=l2,
        ),
        start_model=start_model,
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    folder = tmp_path_factory.mktemp("modes")
    stream = write_click_stream(folder / "clicks.tsv", num_rows=1100, seed=1)
    return prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=97, out_dir=folder / "prepared"
    )


def train_part(rank: int, run_folder: str) -> dict[str, Any]:
    """Train one worker's part of a job to its end; returns what it predicts, its buffers, and what it dropped."""
    run = RunDirectory(run_folder)
    job, loop = training_loop_of(rank, run)
    cursor = begin(run, job, loop.model)
    buffers_at_start = buffers_of(loop.model.layers)
    loop.train(cursor)
    logits = [logits for _, logits in predict_held_out(loop)]
    dropout = loop.model.layers.get("dropout")
    return {
        "first_step": cursor.step,
        "logits": dict(zip(predicted_rows(loop), np.concatenate(logits).tolist(), strict=True))
        if logits
        else {},
        "buffers_at_start": buffers_at_start,
        "buffers": buffers_of(loop.model.layers),
        "dropped": dropout.dropped if isinstance(dropout, SeenDropout) else [],
    }


def logits_of(parts: list[dict[str, Any]]) -> np.ndarray:
    """Return the logits of all held-out rows in their order."""
    by_row = {row: logit for part in parts for row, logit in part["logits"].items()}
    return np.array([by_row[row] for row in sorted(by_row)])


def buffers_of(layers: dict[str, nn.Module]) -> dict[str, list[float]]:
    layer = layers.get("batch_norm")
    return {} if layer is None else {name: value.tolist() for name, value in layer.named_buffers()}


def train_and_export(
    dataset: PreparedDataset, run_folder: Path, job: TrainingJob, start_folder: Path | None = None
) -> list[dict[str, Any]]:
    """Train all parts of a job and export the model beside the run; returns what the workers say."""
    run = RunDirectory(str(run_folder))
    submit_job(run, job, start_folder=start_folder)
    parts = run_in_processes(train_part, sum(job.replicas_per_stage), str(run_folder))
    export_model(run, dataset.manifest, run_folder / "exported", model=job.model)
    return parts


class Trained:
    """A model that a pipeline has trained and exported."""

    def __init__(self, dataset: PreparedDataset, folder: Path, model: str, update_mode: str = "sync") -> None:
        self.folder = folder
        self.parts = train_and_export(dataset, folder, make_job(dataset, model, update_mode=update_mode))
        self.exported = folder / "exported"
        self.logits = logits_of(self.parts)


@pytest.fixture(scope="module")
def trained(dataset: PreparedDataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return {
        model: Trained(dataset, tmp_path_factory.mktemp("run"), model)
        for model in (SEEN_DROPOUT, WITH_BATCH_NORM)
    }


@pytest.mark.parametrize("model", [SEEN_DROPOUT, WITH_BATCH_NORM])
def test_an_exported_model_predicts_what_the_trained_one_predicted(model, trained, dataset):
    exported, expected = trained[model].exported, trained[model].logits
    predictor = ClickPredictor(exported)

    parts = [list(predicted_parts(predictor, dataset, *held_out_rows(dataset))) for _ in range(2)]
    first, again = (np.concatenate([logits for _, logits in each]) for each in parts)
    row_by_row = [
        predictor.logits(all_rows(dataset).dense[row : row + 1], all_rows(dataset).ids[row : row + 1])[0]
        for row in range(dataset.num_train_rows, dataset.manifest.num_rows)
    ]

    np.testing.assert_allclose(first, expected, atol=1e-5)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(row_by_row, expected, atol=1e-5)
    assert expected.std() > 0.01


def judge_part(rank: int, run_folder: str) -> dict[str, Any]:
    """Judge what one worker holds of a trained model; returns what this worker knows.

    Held-out rows are read beside the predictions, as those of a training step are read beside the step before.
    """
    run = RunDirectory(run_folder)
    job, loop = training_loop_of(rank, run)
    begin(run, job, loop.model)
    readers = set()

    def reading(read: Callable[..., ClickBatch]) -> Callable[..., ClickBatch]:
        return lambda rows, **cut: readers.add(threading.current_thread().name) or read(rows, **cut)

    loop.dataset.batch, loop.dataset.target_batch = (
        reading(loop.dataset.batch),
        reading(loop.dataset.target_batch),
    )
    judgements = judge_trained(loop, job.start_model)
    assert readers
    assert all(name.startswith("batches") for name in readers)
    return {name: found.to_json() for name, found in judgements.items()}


def test_workers_judge_the_trained_model_and_the_one_it_began_with_as_the_exported_ones_are(
    trained, dataset, tmp_path
):
    started = trained[WITH_BATCH_NORM].exported
    job = make_job(dataset, WITH_BATCH_NORM, start_model=make_start(started))
    train_and_export(dataset, tmp_path, job, started)

    before, first, second = run_in_processes(judge_part, 3, str(tmp_path))

    folders = (tmp_path / "exported", started)
    expected = judge_held_out(*(held_out_scores(ClickPredictor(folder), dataset) for folder in folders))
    assert before == {}
    assert first == second
    found = HeldOutJudgement.from_json(first["label"])
    assert (found.num_rows, found.num_clicks) == (expected.num_rows, expected.num_clicks)
    assert found.quality.auc == pytest.approx(expected.quality.auc, abs=1e-4)
    assert found.other.auc == pytest.approx(expected.other.auc, abs=1e-4)
    assert found.quality.auc != found.other.auc
    assert found.auc_difference.variance == pytest.approx(expected.auc_difference.variance, rel=0.02)
    assert found.log_loss_difference.value == pytest.approx(expected.log_loss_difference.value, abs=1e-6)


def test_replicas_of_a_stage_predict_with_the_same_running_statistics(trained):
    alone, first, second = (part["buffers"] for part in trained[WITH_BATCH_NORM].parts)
    exported = load_file(trained[WITH_BATCH_NORM].exported / "model.safetensors")

    assert alone == {}
    assert first == second
    assert {name: exported[f"batch_norm.{name}"].tolist() for name in first} == first


@pytest.mark.weekly
def test_the_next_run_begins_with_the_running_statistics_of_the_last(trained, dataset, tmp_path):
    last = trained[WITH_BATCH_NORM]

    job = make_job(dataset, WITH_BATCH_NORM, start_model=make_start(last.exported))
    parts = train_and_export(dataset, tmp_path, job, last.exported)

    for part in parts[1:]:
        assert part["buffers_at_start"] == last.parts[1]["buffers"]
        assert part["buffers"]["num_batches_tracked"] == 2 * last.parts[1]["buffers"]["num_batches_tracked"]


@pytest.mark.weekly
def test_dropout_and_penalties_teach_any_cut_what_they_teach_one_process(dataset, tmp_path):
    model = "deepfm(hidden_widths=32-16, embedding_dim=4, dropout=0.5)"
    last = len(build_chain(model, dataset.features, seed=0)) - 1
    cuts = {
        "alone": (Stage(0, last, "cpu", 1),),
        "cut": (Stage(0, 1, "cpu", 2), Stage(2, 4, "cpu", 1), Stage(5, last, "cpu", 2)),
        "unequal": (Stage(0, 1, "cpu", 2, (3, 1)), Stage(2, 4, "cpu", 1), Stage(5, last, "cpu", 2, (1, 7))),
    }
    logits = {}
    for name, stages in cuts.items():
        job = make_job(dataset, model, stages, num_microbatches=4, l2=0.05)
        logits[name] = logits_of(train_and_export(dataset, tmp_path / name, job))
    weaker = make_job(dataset, model.replace("0.5", "0.2"), cuts["alone"], num_microbatches=4, l2=0.05)
    unpenalised = make_job(dataset, model, cuts["alone"], num_microbatches=4)
    others = [
        logits_of(train_and_export(dataset, tmp_path / f"other{number}", job))
        for number, job in enumerate((weaker, unpenalised))
    ]

    for name in ("cut", "unequal"):
        np.testing.assert_allclose(logits["alone"], logits[name], atol=2e-6)
    for other in others:
        assert np.abs(logits["alone"] - other).max() > 1e-3


def test_batch_normalization_in_one_process_learns_and_predicts_what_plain_torch_does(dataset, tmp_path):
    job = make_job(dataset, WITH_BATCH_NORM, ALONE, num_microbatches=1)
    config = job.config
    plain = plain_model(WITH_BATCH_NORM, dataset.features, seed=config.seed)
    batches = [
        dataset.batch(dataset.batch_rows(0, index, batch_size=config.batch_size, seed=config.seed))
        for index in range(dataset.num_batches(config.batch_size))
    ]
    train_plainly(
        plain,
        batches,
        dense_learning_rate=config.dense_learning_rate,
        embedding_learning_rate=config.embedding_learning_rate,
        last_share=1 / len(batches),
    )
    with torch.no_grad():
        expected = plain.eval()(dataset.batch(held_out(dataset))).numpy()

    parts = train_and_export(dataset, tmp_path, job)

    np.testing.assert_allclose(logits_of(parts), expected, atol=1e-4)


@pytest.mark.parametrize("update_mode", weekly_after(1, UPDATE_MODES))
@pytest.mark.parametrize("model", [SEEN_DROPOUT, WITH_BATCH_NORM])
def test_a_run_resumed_at_a_checkpoint_learns_bit_for_bit_what_the_unbroken_one_learned(
    model, update_mode, trained, dataset, tmp_path
):
    unbroken = trained[model]
    if update_mode != "sync":
        synchronous, unbroken = unbroken, Trained(dataset, tmp_path / "unbroken", model, update_mode)
        assert unbroken.logits.tolist() != synchronous.logits.tolist()
    shutil.copytree(unbroken.folder, tmp_path / "run")
    run = RunDirectory(str(tmp_path / "run"))
    shutil.rmtree(run.path(f"{CHECKPOINTS}/{complete_checkpoints(run)[-1]}"))

    parts = run_in_processes(train_part, 3, str(tmp_path / "run"))
    export_model(run, dataset.manifest, tmp_path / "exported", model=model)

    assert {part["first_step"] for part in parts} == {2 * CHECKPOINT_INTERVAL_STEPS}
    expected = load_file(unbroken.exported / "model.safetensors")
    found = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert logits_of(parts).tolist() == unbroken.logits.tolist()


def test_dropout_draws_other_masks_for_each_step_microbatch_and_replica(trained):
    dropped = [mask for part in trained[SEEN_DROPOUT].parts for mask in part["dropped"]]

    num_steps = 880 // 64
    assert len(dropped) == 2 * 2 * num_steps
    assert len(set(dropped)) == len(dropped)
    assert np.unpackbits(np.frombuffer(b"".join(dropped), dtype=np.uint8)).mean() == pytest.approx(
        0.5, abs=0.01
    )
