"""What is exported predicts from raw columns what the trained model predicted from the prepared data set."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import CheckpointError, ConfigurationError, DataError
from heterps_core.models.chain import build_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import ClickPredictor, export_model
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace, connect_neighbours
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.storage.exported_files import OPTIMIZER_STATE, WEIGHTS, exported_sha256
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.transport.rank_layout import RankLayout
from tests.checkpoints import save_checkpoint
from tests.heterps_core.data.synthetic_rows import all_rows, held_out
from tests.one_step import train_one_step
from tests.worker_processes import run_in_processes

NUM_ROWS = 400


def make_job(dataset: PreparedDataset, model: str) -> TrainingJob:
    num_layers = len(build_chain(model, dataset.features, seed=0))
    return TrainingJob(
        run_id="r",
        model=model,
        dataset=str(dataset.directory),
        stages=(Stage(0, 1, "cpu", 2), Stage(2, num_layers - 1, "cpu", 1)),
        config=TrainingConfig(batch_size=32, num_microbatches=1, num_epochs=1, seed=0),
    )


def train_one_step_and_save(rank: int, dataset_folder: str, run_folder: str, model_name: str) -> list[float]:
    dataset = PreparedDataset.open(dataset_folder)
    job = make_job(dataset, model_name)
    layout = RankLayout(((0, 1), (2,)))
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    stage, replica = layout.position(rank)
    group = groups[0] if stage == 0 else None
    neighbours = connect_neighbours(layout, rank=rank, shares_memory=False)
    place = StagePlace(layout=layout, stage=stage, replica=replica, group=group, neighbours=neighbours)
    model = build_stage_model(job.model, dataset.features, job.config, job.stages, place)
    runner = StageRunner(model, job.config, place)
    batch_rows = dataset.batch_rows(0, 0, batch_size=32, seed=0)
    ((size, mine),) = runner.row_slices(32, 1)
    batch = MicroBatch(size, dataset.batch(batch_rows[mine.first : mine.stop]))
    train_one_step(model, runner, [batch], dense_learning_rate=1e-2, embedding_learning_rate=0.1)
    save_checkpoint(RunDirectory(run_folder), model, TrainingCursor(step=1), group=group)
    ((size, mine),) = runner.row_slices(dataset.num_eval_rows, 1)
    return runner.predict(
        [MicroBatch(size, dataset.batch(held_out(dataset)[mine.first : mine.stop]))]
    ).tolist()


@pytest.fixture(scope="module", params=["ctrdnn", "deepfm"])
def exported(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, Path, np.ndarray]:
    folder = tmp_path_factory.mktemp("exported")
    stream = write_click_stream(folder / "clicks.tsv", num_rows=NUM_ROWS, seed=1)
    dataset = prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=97, out_dir=folder / "prepared"
    )
    logits = run_in_processes(
        train_one_step_and_save, 3, str(dataset.directory), str(folder / "run"), request.param
    )[2]
    job = make_job(dataset, request.param)
    submit_job(RunDirectory(str(folder / "run")), job)
    export_model(RunDirectory(str(folder / "run")), dataset.manifest, folder / "model", model=job.model)
    return folder / "model", stream.path, torch.tensor(logits).double().sigmoid().numpy()


def raw_columns(path: Path) -> dict[str, list[str]]:
    with path.open() as file:
        rows = list(csv.reader(file, delimiter="\t"))[-NUM_ROWS // 5 :]
    return {name: [row[index] for row in rows] for index, name in enumerate(CRITEO_SCHEMA.column_names)}


def test_raw_columns_give_the_probabilities_of_training(exported):
    folder, clicks, probabilities = exported

    predicted = ClickPredictor(folder).predict(raw_columns(clicks))

    np.testing.assert_allclose(predicted, probabilities, atol=1e-6)
    assert predicted.std() > 0.001


def test_prepared_rows_give_the_probabilities_of_training(exported):
    folder, clicks, probabilities = exported
    dataset = PreparedDataset.open(clicks.with_name("prepared"))

    held_out = slice(dataset.num_train_rows, None)
    logits = ClickPredictor(folder).logits(all_rows(dataset).dense[held_out], all_rows(dataset).ids[held_out])

    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), probabilities, atol=1e-6)


def test_missing_and_unseen_values_get_a_sensible_answer(exported):
    folder, _, _ = exported
    columns = {name: [None, ""] for name in CRITEO_SCHEMA.numeric_columns}
    columns |= {name: ["never seen", None] for name in CRITEO_SCHEMA.categorical_columns}

    first, second = ClickPredictor(folder).predict(columns)

    assert 0 < first < 1
    assert 0 < second < 1


def test_no_rows_give_no_predictions(exported):
    columns = {name: [] for name in CRITEO_SCHEMA.column_names}

    assert ClickPredictor(exported[0]).predict(columns).shape == (0,)


def test_a_missing_column_is_named(exported):
    with pytest.raises(DataError, match="must have the columns C7"):
        ClickPredictor(exported[0]).predict({n: [1] for n in CRITEO_SCHEMA.column_names if n != "C7"})


def test_a_text_among_numbers_is_named(exported):
    columns = {name: ["1"] for name in CRITEO_SCHEMA.column_names} | {"I3": ["many"]}

    with pytest.raises(DataError, match="column I3 must hold numbers"):
        ClickPredictor(exported[0]).predict(columns)


def test_changed_weights_are_refused(exported, tmp_path):
    for path in exported[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damaged = bytearray((tmp_path / WEIGHTS).read_bytes())
    damaged[-1] ^= 1
    (tmp_path / WEIGHTS).write_bytes(damaged)

    with pytest.raises(CheckpointError, match="was changed or damaged"):
        ClickPredictor(tmp_path)


@pytest.mark.parametrize("model", ["lr", "dcnv2"])
def test_a_model_whose_code_has_other_layers_today_is_refused_in_a_line(model, exported, tmp_path):
    for path in exported[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    description = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(description | {"model": model}))

    with pytest.raises(ConfigurationError, match=f"{model} must have the layers .* train it again"):
        ClickPredictor(tmp_path)


def test_the_hash_of_a_model_is_that_of_the_sums_that_a_shell_prints(exported):
    command = "sha256sum model.json model.safetensors | sha256sum"
    printed = subprocess.run(
        ["bash", "-c", command], cwd=exported[0], capture_output=True, text=True, check=True
    ).stdout

    assert exported_sha256(exported[0]) == printed.split()[0]


@pytest.mark.parametrize("content", [b"damaged", None], ids=["damaged", "missing"])
def test_predictions_need_no_optimizer_state(exported, tmp_path, content):
    folder, clicks, probabilities = exported
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / OPTIMIZER_STATE).unlink()
    if content is not None:
        (tmp_path / OPTIMIZER_STATE).write_bytes(content)

    np.testing.assert_allclose(
        ClickPredictor(tmp_path).predict(raw_columns(clicks)), probabilities, atol=1e-6
    )


def test_the_optimizer_state_stands_beside_the_weights_with_its_hash(exported):
    described = json.loads((exported[0] / "model.json").read_text())["optimizer_state"]
    printed = subprocess.run(
        ["sha256sum", OPTIMIZER_STATE], cwd=exported[0], capture_output=True, text=True, check=True
    ).stdout

    assert described == {
        "sha256": printed.split()[0],
        "dense_optimizer": "adam",
        "embedding_optimizer": "rowwise-adagrad",
    }


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_a_missing_file_is_named(exported, tmp_path, name):
    for path in exported[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).unlink()

    with pytest.raises(CheckpointError, match=f"must have the file .*{name}"):
        ClickPredictor(tmp_path)
