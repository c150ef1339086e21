"""Training without most rows that have no click: the model of the rows that stay, corrected by a constant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.judging.held_out import HeldOutJudgement
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import ClickPredictor, export_model
from heterps_core.serving.held_out_predictions import held_out_scores
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.storage.run_directory import RunDirectory
from tests.heterps_core.data.synthetic_rows import all_rows, held_out_labels
from tests.heterps_core.training.test_rich_rows import train_part
from tests.worker_processes import run_in_processes

pytestmark = pytest.mark.slow

NUM_ROWS, NUM_TRAIN_ROWS, GROUP_ROWS = 20_000, 16_000, 1_500
SHARE = 0.2
MODEL = "ctrdnn(hidden_widths=16, embedding_dim=4)"
CONFIG = TrainingConfig(batch_size=64, num_microbatches=2, num_epochs=2, seed=3)
"""The first stage, of two replicas, reads features and sees no label."""


def prepare(source: Any, folder: Path, **changes: Any) -> PreparedDataset:
    return prepare_dataset(source, buckets_per_slot=256, out_dir=folder / "prepared", **changes)


def train(dataset: PreparedDataset, folder: Path) -> dict[str, Any]:
    """Train a pipeline and export its model; returns the held-out logits in order, and the judgement."""
    run = RunDirectory(str(folder))
    stages = (Stage(0, 0, "cpu", 2), Stage(1, 3, "cpu", 1))
    job = TrainingJob(run_id="r", model=MODEL, stages=stages, config=CONFIG, dataset=str(dataset.directory))
    submit_job(run, job)
    found = run_in_processes(train_part, 3, str(folder))[2]
    export_model(run, dataset.manifest, folder / "exported", model=MODEL)
    judgement = HeldOutJudgement.from_json(found["judgements"]["label"])
    return {"logits": found["logits"][np.argsort(found["rows"])], "judgement": judgement}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    stream = write_click_stream(folder / "clicks.tsv", num_rows=NUM_ROWS, seed=1)
    names = pa_csv.ReadOptions(column_names=list(CRITEO_SCHEMA.column_names))
    table = pa_csv.read_csv(stream.path, names, pa_csv.ParseOptions(delimiter="\t"))
    pq.write_table(table, folder / "clicks.parquet", row_group_size=GROUP_ROWS)
    return folder / "clicks.parquet"


@pytest.fixture(scope="module")
def sampled(source: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    schema = replace(CRITEO_SCHEMA, negative_share=SHARE)
    return prepare(source, tmp_path_factory.mktemp("sampled"), schema=schema)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def trained(sampled: PreparedDataset, run_folder: Path) -> dict[str, Any]:
    return train(sampled, run_folder)


def test_it_is_the_model_of_a_file_that_holds_only_the_rows_that_stay(source, sampled, trained, tmp_path):
    """Written by hand with the same row groups; its logits are lower by the logarithm of the share."""
    places = {row.tobytes(): n for n, row in enumerate(all_rows(whole(source, tmp_path)).ids)}
    assert len(places) == NUM_ROWS
    kept = np.array([places[row.tobytes()] for row in all_rows(sampled).ids[: sampled.num_train_rows]])
    table = pq.read_table(source)
    with pq.ParquetWriter(tmp_path / "kept.parquet", table.schema) as writer:
        for first in range(0, NUM_TRAIN_ROWS, GROUP_ROWS):
            writer.write_table(table.take(kept[(kept >= first) & (kept < first + GROUP_ROWS)]))
    pq.write_table(table.slice(NUM_TRAIN_ROWS), tmp_path / "held_out.parquet")

    dataset = prepare(
        tmp_path / "kept.parquet", tmp_path, schema=CRITEO_SCHEMA, eval_source=tmp_path / "held_out.parquet"
    )
    expected = train(dataset, tmp_path / "run")

    np.testing.assert_allclose(trained["logits"], expected["logits"] + np.log(SHARE), atol=2e-5)


def whole(source: Path, folder: Path) -> PreparedDataset:
    return prepare(source, folder / "whole", schema=CRITEO_SCHEMA)


def test_its_probabilities_are_those_of_all_rows(sampled, trained):
    """Without the correction it would promise 1 / (p + (1 - p) s) times the clicks, here about 2.5 times."""
    probabilities = 1 / (1 + np.exp(-trained["logits"]))

    assert probabilities.mean() == pytest.approx(held_out_labels(sampled).mean(), rel=0.15)
    assert trained["judgement"].quality.calibration_ratio == pytest.approx(1.0, abs=0.15)
    uncorrected = 1 / (1 + np.exp(-trained["logits"] + np.log(SHARE)))
    assert uncorrected.mean() > 1.8 * held_out_labels(sampled).mean()


def test_the_exported_model_is_corrected_alike(source, sampled, trained, run_folder):
    predictor = ClickPredictor(run_folder / "exported")

    columns = pq.read_table(source).slice(NUM_TRAIN_ROWS).to_pydict()

    expected = 1 / (1 + np.exp(-trained["logits"]))
    np.testing.assert_allclose(predictor.predict(columns), expected, atol=1e-5)
    logits = held_out_scores(predictor, sampled).rows["logit"]
    np.testing.assert_allclose(logits, trained["logits"], atol=1e-4)
