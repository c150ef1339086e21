"""Rows of all kinds of columns train a pipeline whose replicas share two tables, and its export serves them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.errors import DataError
from heterps_core.judging.held_out import HeldOutJudgement
from heterps_core.judging.quality import measure_quality
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import ClickPredictor, export_model
from heterps_core.serving.held_out_predictions import held_out_rows, predicted_parts
from heterps_core.training.evaluation import judge_trained, predict_held_out
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.start_model import begin
from heterps_core.training.storage.run_directory import RunDirectory
from tasks.records.model_registry import _save_for_mlflow
from tests.heterps_core.data.rich_clicks import RICH_SCHEMA, write_rich_rows
from tests.heterps_core.data.synthetic_rows import held_out, held_out_labels
from tests.heterps_core.training.reference import plain_model, train_plainly
from tests.heterps_core.training.worker_parts import predicted_rows, training_loop_of
from tests.worker_processes import run_in_processes

pytestmark = pytest.mark.slow

MODEL = "ctrdnn(hidden_widths=16, embedding_dim=4)"
SCHEMA = replace(RICH_SCHEMA, table_rows={"site": 30}, dimensions={"site": 6})
"""The vectors of one column are wider than the others, so there are two tables."""

NUM_ROWS = 1_500
JOB = {
    "run_id": "r",
    "model": MODEL,
    "stages": (Stage(0, 1, "cpu", 2), Stage(2, 5, "cpu", 1)),
    "config": TrainingConfig(
        batch_size=64,
        num_microbatches=2,
        num_epochs=2,
        seed=3,
        dense_optimizer="sgd",
        embedding_optimizer="sgd",
        dense_learning_rate=0.5,
        embedding_learning_rate=30.0,
        clip_norm=0.05,
        warmup_steps=7,
        label_weights=(1.0, 3.0),
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rich") / "rows.parquet"
    write_rich_rows(path, num_rows=NUM_ROWS, seed=1)
    return path


@pytest.fixture(scope="module")
def dataset(source: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return prepare_dataset(
        source, schema=SCHEMA, buckets_per_slot=40, out_dir=tmp_path_factory.mktemp("out") / "prepared"
    )


def train_part(rank: int, run_folder: str) -> dict[str, Any]:
    run = RunDirectory(run_folder)
    job, loop = training_loop_of(rank, run)
    loop.train(begin(run, job, loop.model))
    logits = [logits for _, logits in predict_held_out(loop)]
    judgements = {name: found.to_json() for name, found in judge_trained(loop, None).items()}
    return (
        {"rows": predicted_rows(loop), "logits": np.concatenate(logits), "judgements": judgements}
        if logits
        else {}
    )


@pytest.fixture(scope="module")
def trained(dataset: PreparedDataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The logits of the held-out rows as the pipeline predicts them, and the exported model."""
    folder = tmp_path_factory.mktemp("run")
    run = RunDirectory(str(folder))
    submit_job(run, TrainingJob(dataset=str(dataset.directory), **JOB))
    parts = run_in_processes(train_part, 3, str(folder))
    export_model(run, dataset.manifest, folder / "exported", model=MODEL)
    _save_for_mlflow(folder / "exported", folder / "saved")
    return {
        "logits": parts[2]["logits"][np.argsort(parts[2]["rows"])],
        "judgements": parts[2]["judgements"],
        "predictor": ClickPredictor(folder / "exported"),
        "pyfunc": mlflow.pyfunc.load_model(str(folder / "saved")),
    }


def held_out_columns(source: Path, dataset: PreparedDataset) -> dict[str, Any]:
    return pq.read_table(source).slice(dataset.num_train_rows).to_pydict()


def test_a_pipeline_learns_what_plain_torch_learns(trained, dataset):
    config = JOB["config"]
    expected = learned_plainly(dataset, config)
    unclipped, unwarmed, unweighted = (
        learned_plainly(dataset, replace(config, **changed))
        for changed in ({"clip_norm": None}, {"warmup_steps": None}, {"label_weights": ()})
    )

    np.testing.assert_allclose(trained["logits"], expected, atol=1e-4)
    assert expected.std() > 0.1
    for other in (unclipped, unwarmed, unweighted):
        assert np.abs(other - expected).max() > 1e-2


def learned_plainly(dataset: PreparedDataset, config: TrainingConfig) -> np.ndarray:
    """Return the logits of the held-out rows after a training in plain torch."""
    plain = plain_model(MODEL, dataset.features, seed=config.seed)
    batches = [
        dataset.batch(dataset.batch_rows(epoch, index, batch_size=config.batch_size, seed=config.seed))
        for epoch in range(config.num_epochs)
        for index in range(dataset.num_batches(config.batch_size))
    ]
    train_plainly(
        plain,
        batches,
        dense_learning_rate=config.dense_learning_rate,
        embedding_learning_rate=config.embedding_learning_rate,
        last_share=1 / (len(batches) - (config.warmup_steps or 0)),
        clip_norm=config.clip_norm,
        warmup_steps=config.warmup_steps or 0,
        label_weights=config.label_weights,
    )
    with torch.no_grad():
        return plain(dataset.batch(held_out(dataset))).numpy()


def test_an_exported_model_predicts_raw_columns_as_in_training(trained, source, dataset):
    predictor = trained["predictor"]
    columns = held_out_columns(source, dataset)
    without_targets = {name: columns[name] for name in columns if name not in ("click", "buy", "weight")}

    probabilities = predictor.predict(without_targets)

    expected = 1 / (1 + np.exp(-trained["logits"]))
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)
    parts = predicted_parts(predictor, dataset, *held_out_rows(dataset))
    np.testing.assert_allclose(np.concatenate([each for _, each in parts]), trained["logits"], atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred")
def test_the_registered_model_takes_lists_as_lists_arrays_or_texts(trained, source, dataset):
    rows = pd.DataFrame(held_out_columns(source, dataset)).drop(columns=["click", "buy", "weight"])
    expected = trained["predictor"].predict(rows.to_dict("list"))
    tags = rows["tags"]

    for changed in (tags, tags.map(np.array), tags.map("|".join), tags.map(lambda each: each or None)):
        found = trained["pyfunc"].predict(rows.assign(tags=changed))

        np.testing.assert_array_equal(found, expected)
    longer = rows.assign(tags=tags.map(lambda each: [*each, "more"] if len(each) >= 8 else each))
    np.testing.assert_array_equal(trained["pyfunc"].predict(longer), expected)
    other = rows.assign(tags=tags.map(lambda each: [*each, "more"] if len(each) < 8 else each))
    assert (trained["pyfunc"].predict(other) != expected).mean() > 0.5


def test_a_list_of_lists_cannot_be_predicted(trained, source, dataset):
    columns = held_out_columns(source, dataset)

    with pytest.raises(DataError, match="column tags must hold texts or numbers, got values of type list"):
        trained["predictor"].predict({**columns, "tags": [[["a"]]] * len(columns["tags"])})


def test_quality_is_measured_by_weights_for_each_label(trained, source, dataset):
    columns, logits = held_out_columns(source, dataset), trained["logits"]

    found = {
        name: HeldOutJudgement.from_json(judgement).click_quality()
        for name, judgement in trained["judgements"].items()
    }

    for number, name in enumerate(("click", "buy")):
        expected = [
            measure(columns[name], 1 / (1 + np.exp(-logits[:, number])), sample_weight=columns["weight"])
            for measure in (roc_auc_score, log_loss)
        ]
        assert [found[name].auc, found[name].log_loss] == pytest.approx(expected, abs=1e-5)
        assert found[name].num_rows == 300
    unweighted = measure_quality(held_out_labels(dataset), logits[:, 0])
    assert found["click"].log_loss != pytest.approx(unweighted.log_loss, abs=0.01)
