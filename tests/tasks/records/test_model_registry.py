"""What is registered is usable: by MLflow's own loader, in another process, whatever a table of raw columns holds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import boto3
import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist

import heterps
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import CheckpointError, UnknownNameError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import export_model
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.storage.exported_files import OPTIMIZER_STATE, WEIGHTS, exported_sha256
from heterps_core.training.storage.run_directory import RunDirectory
from infra.workspace import Workspace
from tasks.records import model_registry
from tasks.running import run_lifecycle
from tests.checkpoints import save_checkpoint
from tests.heterps_core.data.synthetic_rows import held_out
from tests.heterps_core.serving.builders import raw_columns
from tests.one_step import train_one_step
from tests.s3_server import bucket_location
from tests.worker_processes import run_in_processes

NUM_ROWS = 500
NUM_EVAL_ROWS = NUM_ROWS // 5
BATCH_SIZE = 40


def train_and_save(rank: int, dataset_folder: str, run_folder: str) -> list[float]:
    """Train a whole model for some steps in one process, save it, and predict the held-out rows."""
    dataset = PreparedDataset.open(dataset_folder)
    job = TrainingJob(
        run_id="r",
        model="ctrdnn",
        dataset=dataset_folder,
        stages=(Stage(0, 7, "cpu", 1),),
        config=TrainingConfig(batch_size=BATCH_SIZE, num_microbatches=1, num_epochs=1, seed=0),
    )
    model = build_stage_model(job.model, dataset.features, job.config, job.stages)
    runner = StageRunner(model, job.config)
    for index in range(dataset.num_batches(BATCH_SIZE)):
        rows = dataset.batch_rows(0, index, batch_size=BATCH_SIZE, seed=0)
        batch = MicroBatch(BATCH_SIZE, dataset.batch(rows))
        train_one_step(model, runner, [batch], dense_learning_rate=1e-2, embedding_learning_rate=0.1)
    run = RunDirectory(run_folder)
    submit_job(run, job)
    save_checkpoint(run, model, TrainingCursor(step=1), group=dist.group.WORLD)
    return runner.predict([MicroBatch(dataset.num_eval_rows, dataset.batch(held_out(dataset)))]).tolist()


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("registered") / "clicks.tsv"
    write_click_stream(path, num_rows=NUM_ROWS, seed=1)
    return path


@pytest.fixture(scope="module")
def trained(clicks) -> tuple[Path, np.ndarray]:
    """An exported model, and the probabilities that its own stage predicted for the held-out rows as prepared."""
    folder = clicks.parent
    dataset = prepare_dataset(clicks, schema=CRITEO_SCHEMA, buckets_per_slot=97, out_dir=folder / "prepared")
    (logits,) = run_in_processes(train_and_save, 1, str(dataset.directory), str(folder / "run"))
    export_model(RunDirectory(str(folder / "run")), dataset.manifest, folder / "exported", model="ctrdnn")
    return folder / "exported", torch.tensor(logits).double().sigmoid().numpy()


@pytest.fixture(scope="module")
def registered(trained, tmp_path_factory) -> Workspace:
    """A workspace whose champion is the trained model."""
    workspace = Workspace(root=tmp_path_factory.mktemp("home")).create()
    run = run_lifecycle.open_run(workspace, run_id="night-1", run_name="night-1", tags={})
    version = model_registry.register_model(
        workspace, run, trained[0], model="ctrdnn", data="clicks", day="2026-11-20"
    )
    model_registry.call_version(workspace, version, "champion")
    return workspace


@pytest.fixture(scope="module")
def loaded(registered) -> mlflow.pyfunc.PyFuncModel:
    folder = model_registry.verified_folder(registered, model_registry.find_version(registered, "1"))
    return mlflow.pyfunc.load_model(str(folder.parents[1]))


@pytest.fixture(scope="module")
def frame(clicks) -> pd.DataFrame:
    """The held-out rows as raw columns, all texts."""
    return pd.DataFrame(raw_columns(clicks, slice(-NUM_EVAL_ROWS, None)))


ALONE = """
import json, sys
import cloudpickle, joblib, mlflow, pandas, pickle, torch, _pickle

def refuse(*arguments, **keywords):
    raise RuntimeError("something was unpickled")

for module in (pickle, _pickle, cloudpickle, joblib, torch):
    for name in ("load", "loads", "Unpickler"):
        if hasattr(module, name):
            setattr(module, name, refuse)

model = mlflow.pyfunc.load_model("models:/ctr@champion")
frame = pandas.read_csv(sys.argv[1], dtype=str)
print(json.dumps(model.predict(frame).tolist()))
"""


@pytest.mark.slow
def test_a_fresh_process_with_a_tracking_address_gets_the_probabilities_of_training_and_unpickles_nothing(
    registered, trained, frame, tmp_path
):
    frame.to_csv(tmp_path / "rows.csv", index=False)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HETERPS_")}

    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "rows.csv")],
        cwd=tmp_path,
        env={**environment, "MLFLOW_TRACKING_URI": registered.tracking_uri, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout.splitlines()[-1]), trained[1], atol=1e-6)
    assert trained[1].std() > 0.01


def test_the_version_tells_where_it_comes_from_and_what_it_takes(registered, trained, loaded):
    version = model_registry.find_version(registered, "1")

    assert (version.run_id, version.model, version.day) == ("night-1", "ctrdnn", "2026-11-20")
    assert version.sha256 == exported_sha256(trained[0])
    assert model_registry.version_called(registered, "challenger") == version
    names = [*CRITEO_SCHEMA.numeric_columns, *CRITEO_SCHEMA.categorical_columns]
    columns = {column["name"]: column["holds"] for column in loaded.metadata.metadata["columns"]}
    assert list(columns) == names
    assert columns["I3"] == "number or missing"
    assert [str(spec.type) for spec in loaded.metadata.get_output_schema().inputs] == ["float64"]
    assert loaded.metadata.flavors["python_function"]["loader_module"] == "tasks.click_model"
    assert not list(registered.artifacts_directory.glob("**/*.pkl"))


def test_the_tensors_of_a_version_are_the_exported_files_themselves(registered, trained):
    """Weights may be larger than memory, and a copy of them takes as long as a night of few rows."""
    folder = model_registry.verified_folder(registered, model_registry.find_version(registered, "1"))

    for name in (WEIGHTS, OPTIMIZER_STATE):
        assert (folder / name).samefile(trained[0] / name)
    model = mlflow.models.Model.load(str(folder.parents[1]))
    assert model.model_size_bytes > (folder / WEIGHTS).stat().st_size


def test_the_input_example_can_be_predicted(loaded):
    example = loaded.input_example

    assert list(example.columns) == [column["name"] for column in loaded.metadata.metadata["columns"]]
    predicted = loaded.predict(example)
    assert predicted.shape == (2,)
    assert ((predicted > 0) & (predicted < 1)).all()


def test_the_optimizer_state_is_part_of_the_version_and_no_answer_needs_it(
    registered, trained, frame, tmp_path
):
    folder = model_registry.verified_folder(registered, model_registry.find_version(registered, "1"))
    kept = (folder / "optimizer.safetensors").read_bytes()
    root = shutil.copytree(folder.parents[1], tmp_path / "version")
    (root / folder.relative_to(folder.parents[1]) / "optimizer.safetensors").unlink()

    without = mlflow.pyfunc.load_model(str(root))

    assert kept == (trained[0] / "optimizer.safetensors").read_bytes()
    np.testing.assert_allclose(without.predict(frame), trained[1], atol=1e-6)


def with_numbers(frame):
    """Numeric columns as pandas reads them from a file: whole numbers, or floating ones where some are missing."""
    numbers = frame[list(CRITEO_SCHEMA.numeric_columns)].apply(pd.to_numeric)
    return frame.assign(**numbers)


@pytest.mark.parametrize(
    "change",
    [
        with_numbers,
        lambda frame: with_numbers(frame).convert_dtypes(),
        lambda frame: with_numbers(frame).astype(
            dict.fromkeys(CRITEO_SCHEMA.categorical_columns, "category")
        ),
        lambda frame: frame[frame.columns[::-1]],
        lambda frame: frame.assign(campaign="spring", price=1.5),
        lambda frame: frame.drop(columns="label"),
        lambda frame: frame.replace("", None),
        lambda frame: frame.replace("", np.nan).astype(object),
        lambda frame: frame.set_index(frame.index[::-1]),
    ],
    ids=[
        "numbers as numbers",
        "nullable types",
        "categories",
        "reversed columns",
        "extra columns",
        "no label",
        "None for missing",
        "NaN for missing",
        "another index",
    ],
)
def test_the_same_rows_in_another_form_get_the_same_answer(loaded, trained, frame, change):
    np.testing.assert_allclose(loaded.predict(change(frame)), trained[1], atol=1e-6)


def test_one_row_gets_its_answer_and_an_empty_frame_an_empty_one(loaded, trained, frame):
    assert loaded.predict(frame.iloc[[7]]) == pytest.approx([trained[1][7]], abs=1e-6)
    assert loaded.predict(frame.iloc[:0]).shape == (0,)


def test_what_was_never_seen_or_is_missing_gets_a_probability(loaded, frame):
    unseen = frame.iloc[:3].copy()
    for name in CRITEO_SCHEMA.categorical_columns:
        unseen[name] = ["never seen", None, ""]
    for name in CRITEO_SCHEMA.numeric_columns:
        unseen[name] = [None, "", np.nan]

    never, none, empty = loaded.predict(unseen)

    assert 0 < never < 1
    assert none == pytest.approx(empty, abs=1e-6)
    assert never != none


def test_a_missing_column_and_a_text_among_numbers_are_named(loaded, frame):
    with pytest.raises(Exception, match="must have the columns C7"):
        loaded.predict(frame.drop(columns="C7"))
    with pytest.raises(Exception, match="column I3 must hold numbers, got 'many'"):
        loaded.predict(frame.assign(I3="many"))


def test_the_champion_is_loaded_from_python_after_its_files_are_checked(
    registered, trained, frame, tmp_path, monkeypatch
):
    monkeypatch.setenv("HETERPS_HOME", str(registered.root))
    np.testing.assert_allclose(heterps.load_champion().predict(frame), trained[1], rtol=1e-6)

    folder = model_registry.verified_folder(registered, model_registry.find_version(registered, "1"))
    description = folder.parents[1] / "MLmodel"
    honest = description.read_text()
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'has run')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    description.write_text(honest.replace("tasks.click_model", "evil"))
    try:
        with pytest.raises(CheckpointError, match="MLmodel names the loader 'evil'"):
            heterps.load_champion()
    finally:
        description.write_text(honest)

    assert not (tmp_path / "has run").exists()


def test_an_unknown_version_is_reported_with_the_known_ones(registered):
    with pytest.raises(UnknownNameError, match="'9' is not a known version of ctr; known are: 1"):
        model_registry.find_version(registered, "9")


def test_nothing_is_registered_of_a_folder_that_lacks_a_file(registered, trained, tmp_path):
    (tmp_path / "model.json").write_bytes((trained[0] / "model.json").read_bytes())
    before = model_registry.registered_versions(registered)
    run = run_lifecycle.open_run(registered, run_id="night-2", run_name="night-2", tags={})

    with pytest.raises(CheckpointError, match=r"must have the file .*model.safetensors"):
        model_registry.register_model(registered, run, tmp_path, model="ctrdnn", data="clicks", day=None)

    assert model_registry.registered_versions(registered) == before


def test_files_that_a_team_keeps_in_a_bucket_are_fetched_once_and_checked(registered, monkeypatch):
    first = model_registry.find_version(registered, "1")
    folder = model_registry.verified_folder(registered, first)
    with bucket_location(monkeypatch):
        s3 = boto3.client("s3")
        root = folder.parents[1]
        for path in root.rglob("*"):
            if path.is_file():
                s3.upload_file(str(path), "runs", f"models/night-1/{path.relative_to(root)}")
        client = mlflow.MlflowClient(registered.tracking_uri, registered.tracking_uri)
        created = client.create_model_version(
            "ctr", "s3://runs/models/night-1", first.mlflow_run_id, tags=dict(first.tags)
        )
        kept = model_registry.find_version(registered, str(created.version))

        fetched = model_registry.verified_folder(registered, kept)

    assert fetched != folder
    assert fetched.is_relative_to(registered.root)
    assert exported_sha256(fetched) == exported_sha256(folder)
    # The bucket is gone by now.
    assert model_registry.verified_folder(registered, kept) == fetched


def test_a_store_that_does_not_answer_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("HETERPS_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    with pytest.raises(Exception, match=r"runs are recorded in http://127.0.0.1:9, which must answer"):
        model_registry.version_called(Workspace(root=tmp_path), "champion")
