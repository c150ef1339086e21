"""What goes on from an exported model begins with exactly its predictions, whatever the cut and the replicas.

What two nights learn together is in `test_going_on`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import CheckpointError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import ClickPredictor, export_model
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import OptimizerState, StartModel, TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.start_model import _load_start_model, begin, publish_start_model
from heterps_core.training.storage.exported_files import OPTIMIZER_STATE, WEIGHTS
from heterps_core.training.storage.run_directory import JOB, START_MODEL, RunDirectory
from heterps_core.training.storage.verified_files import read_signed_json, write_signed_json
from tests.checkpoints import save_checkpoint
from tests.heterps_core.data.synthetic_rows import all_rows
from tests.heterps_core.training.node_processes import TINY, make_job, train
from tests.s3_server import bucket_location
from tests.worker_processes import run_in_processes

BATCH_SIZE = 64
WHOLE = (Stage(0, 2, "cpu", 1),)


def build(job: TrainingJob, stages=WHOLE, stage: int = 0, group=None) -> StageModel:
    dataset = PreparedDataset.open(job.dataset)
    return build_stage_model(
        job.model, dataset.features, job.config, stages, StagePlace(stage=stage, group=group)
    )


def make_start(folder: Path) -> StartModel:
    description = json.loads((folder / "model.json").read_text())
    return StartModel(
        version="4",
        run_id="before",
        weights_sha256=description["weights_sha256"],
        optimizer_state=OptimizerState(**description["optimizer_state"]),
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> PreparedDataset:
    folder = tmp_path_factory.mktemp("clicks")
    stream = write_click_stream(folder / "clicks.tsv", num_rows=1600, seed=0)
    return prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=50, out_dir=folder / "prepared"
    )


def with_optimizers(job: TrainingJob, dense_optimizer: str, embedding_optimizer: str) -> TrainingJob:
    optimizers = {"dense_optimizer": dense_optimizer, "embedding_optimizer": embedding_optimizer}
    return replace(job, config=replace(job.config, **optimizers))


def save_drawn_tensors(rank: int, dataset_folder: str, run_folder: str) -> None:
    """Write a checkpoint of a model whose weights no seed of a job gives, and whose optimizers are not new."""
    job = with_optimizers(make_job(Path(dataset_folder), (1, 1)), "adam", "rowwise-adagrad")
    model = build(job)
    generator = torch.Generator().manual_seed(99)
    table = model.tables["embedding"]
    with torch.no_grad():
        for layer in model.layers.values():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
                for tensor in model.dense_optimizer.state[parameter].values():
                    tensor.copy_(torch.rand(tensor.shape, generator=generator))
        table.weight_RD.copy_(torch.randn(table.weight_RD.shape, generator=generator) * 0.2)
        table.state["accumulator"].copy_(torch.rand(table.num_rows, generator=generator))
    submit_job(RunDirectory(run_folder), job)
    save_checkpoint(RunDirectory(run_folder), model, TrainingCursor(step=1), group=None)


@pytest.fixture(scope="module")
def exported(dataset, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    run_in_processes(save_drawn_tensors, 1, str(dataset.directory), str(folder / "run"))
    export_model(RunDirectory(str(folder / "run")), dataset.manifest, folder / "model", model=TINY)
    return folder / "model"


def test_an_older_checkpoint_is_not_exported_for_a_damaged_newest_one(dataset, exported, tmp_path):
    shutil.copytree(exported.parent / "run", tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    # Its manifest bears the tag of another place.
    shutil.copytree(checkpoints / "00000001", checkpoints / "00000002")

    with pytest.raises(CheckpointError, match=r"that of step 2 .* is damaged; .* again from step 1$"):
        export_model(RunDirectory(str(tmp_path / "run")), dataset.manifest, tmp_path / "model", model=TINY)
    assert not (tmp_path / "model").exists()


def test_the_name_of_a_model_in_the_run_directory_is_not_imported(dataset, exported, tmp_path):
    """A rented machine has the run's key, and what it names would be called by the flow."""
    shutil.copytree(exported.parent / "run", tmp_path / "run")
    run = RunDirectory(str(tmp_path / "run"))
    (tmp_path / "imported.py").write_text("raise RuntimeError('imported')")
    write_signed_json(run, JOB, {**read_signed_json(run, JOB), "model": "imported:build"})

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        export_model(run, dataset.manifest, tmp_path / "model", model=TINY)

    assert (tmp_path / "model" / "model.json").read_bytes() == (exported / "model.json").read_bytes()


def test_a_job_that_was_changed_in_the_run_directory_is_refused(dataset, exported, tmp_path):
    shutil.copytree(exported.parent / "run", tmp_path / "run")
    job = tmp_path / "run" / "job.json"
    job.write_text(job.read_text().replace(TINY, "imported:build"))

    with pytest.raises(CheckpointError, match=r"job\.json in .* must bear the tag that the run's key gives"):
        export_model(RunDirectory(str(tmp_path / "run")), dataset.manifest, tmp_path / "model", model=TINY)


def start_job(dataset: PreparedDataset, exported: Path, replicas: tuple[int, int]) -> TrainingJob:
    job = make_job(dataset.directory, replicas)
    return replace(job, start_model=make_start(exported))


def first_loss_of_predictor(dataset: PreparedDataset, exported: Path, job: TrainingJob) -> float:
    """Mean log-loss of the exported model on the rows of the first batch, by NumPy."""
    rows = dataset.batch_rows(0, 0, batch_size=job.config.batch_size, seed=job.config.seed)
    labels = all_rows(dataset).labels[rows]
    logits = ClickPredictor(exported).logits(all_rows(dataset).dense[rows], all_rows(dataset).ids[rows])
    return float(np.mean(np.log1p(np.exp(logits)) - labels * logits))


@pytest.mark.slow
def test_the_loss_of_the_first_step_is_that_of_the_exported_model(dataset, exported, tmp_path):
    run = RunDirectory(str(tmp_path))
    job = start_job(dataset, exported, (2, 1))
    submit_job(run, job, start_folder=exported)

    training = train(run, job)

    assert training.steps[0].loss == pytest.approx(first_loss_of_predictor(dataset, exported, job), abs=1e-6)
    assert training.is_complete


@pytest.mark.parametrize("last_layers", [(2,), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_the_stages_of_every_cut_begin_with_their_own_layers(dataset, exported, tmp_path, last_layers):
    run = RunDirectory(str(tmp_path))
    publish_start_model(run, make_start(exported), exported)
    job = make_job(dataset.directory, (1, 1))
    first_layers = (0, *(last + 1 for last in last_layers[:-1]))
    stages = [Stage(first, last, "cpu", 1) for first, last in zip(first_layers, last_layers, strict=True)]

    found = {}
    for number in range(len(stages)):
        model = build(job, stages, number)
        _load_start_model(run, make_start(exported), model, config=job.config)
        found |= {f"{name}.weight": table.weight_RD for name, table in model.tables.items()}
        for name, layer in model.layers.items():
            found |= {f"{name}.{key}": tensor for key, tensor in layer.state_dict().items()}

    weights = load_file(exported / WEIGHTS)
    assert set(found) == set(weights)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def shard_of(rank: int, dataset_folder: str, run_folder: str, exported: str) -> list[list[float]]:
    job = make_job(Path(dataset_folder), (3, 1))
    model = build(job, job.stages, 0, dist.group.WORLD)
    _load_start_model(RunDirectory(run_folder), make_start(Path(exported)), model, config=job.config)
    return model.tables["embedding"].weight_RD.tolist()


@pytest.mark.slow
def test_replicas_hold_their_own_rows_of_the_same_table(dataset, exported, tmp_path):
    run = RunDirectory(str(tmp_path))
    submit_job(run, start_job(dataset, exported, (3, 1)), start_folder=exported)

    shards = run_in_processes(shard_of, 3, str(dataset.directory), str(tmp_path), str(exported))

    whole = load_file(exported / WEIGHTS)["embedding.weight"]
    assert torch.equal(torch.tensor([row for shard in shards for row in shard]), whole)


def test_a_checkpoint_of_the_run_itself_comes_before_the_start_model(dataset, exported, tmp_path):
    run = RunDirectory(str(tmp_path))
    job = start_job(dataset, exported, (1, 1))
    submit_job(run, job, start_folder=exported)
    drawn, from_start, from_checkpoint = build(job), build(job), build(job)

    assert begin(run, job, from_start) == TrainingCursor()
    run_in_processes(save_fresh_weights, 1, str(dataset.directory), str(tmp_path))
    assert begin(run, job, from_checkpoint) == TrainingCursor(step=7)

    biases = [model.layers["output"].bias for model in (drawn, from_start, from_checkpoint)]
    assert torch.equal(biases[0], biases[2])
    assert not torch.equal(biases[0], biases[1])


def save_fresh_weights(rank: int, dataset_folder: str, run_folder: str) -> None:
    job = make_job(Path(dataset_folder), (1, 1))
    save_checkpoint(RunDirectory(run_folder), build(job), TrainingCursor(step=7), group=None)


def test_weights_and_optimizer_state_are_read_alike_from_a_bucket(dataset, exported, monkeypatch):
    job = with_optimizers(make_job(dataset.directory, (1, 1)), "adam", "rowwise-adagrad")
    model = build(job)

    with bucket_location(monkeypatch) as location:
        run = RunDirectory(location, secret=b"key")
        publish_start_model(run, make_start(exported), exported)
        _load_start_model(run, make_start(exported), model, config=job.config)

    weights = load_file(exported / WEIGHTS)
    assert torch.equal(model.tables["embedding"].weight_RD, weights["embedding.weight"])
    assert torch.equal(model.layers["output"].bias.detach(), weights["output.bias"])
    state = load_file(exported / OPTIMIZER_STATE)
    moments = model.dense_optimizer.state[model.layers["output"].bias]
    assert torch.equal(model.tables["embedding"].state["accumulator"], state["embedding.accumulator"])
    assert all(torch.equal(moments[key], state[f"output.bias.{key}"]) for key in moments)


@pytest.mark.parametrize(
    ("optimizers", "said", "kept"),
    [
        (("adam", "rowwise-adagrad"), [], ["adam", "rowwise-adagrad"]),
        (
            ("sgd", "rowwise-adagrad"),
            ["the dense optimizer starts again, as it is sgd and not adam any more"],
            ["rowwise-adagrad"],
        ),
        (
            ("adam", "rowwise-adam"),
            ["the embedding optimizer starts again, as it is rowwise-adam and not rowwise-adagrad any more"],
            ["adam"],
        ),
    ],
    ids=str,
)
def test_the_state_of_another_optimizer_is_left_aside_and_said(
    dataset, exported, tmp_path, caplog, optimizers, said, kept
):
    run = RunDirectory(str(tmp_path))
    publish_start_model(run, make_start(exported), exported)
    job = with_optimizers(make_job(dataset.directory, (1, 1)), *optimizers)
    model, fresh = build(job), build(job)

    with caplog.at_level("INFO"):
        _load_start_model(run, make_start(exported), model, config=job.config)

    assert [line for line in caplog.messages if "again" in line] == said
    assert has_changed(model.tables["embedding"].state, fresh.tables["embedding"].state) == (
        "rowwise-adagrad" in kept
    )
    assert has_changed(dense_state(model), dense_state(fresh)) == ("adam" in kept)


def has_changed(state, fresh) -> bool:
    assert set(state) == set(fresh)
    return any(not torch.equal(tensor, fresh[name]) for name, tensor in state.items())


def dense_state(model: StageModel):
    return model.dense_optimizer.state[model.layers["output"].weight]


def test_a_learning_rate_may_change_between_nights(dataset, exported, tmp_path):
    run = RunDirectory(str(tmp_path))
    publish_start_model(run, make_start(exported), exported)
    job = with_optimizers(make_job(dataset.directory, (1, 1)), "adam", "rowwise-adagrad")
    job = replace(job, config=replace(job.config, dense_learning_rate=0.5, embedding_learning_rate=7.0))
    model = build(job)

    _load_start_model(run, make_start(exported), model, config=job.config)

    accumulator = load_file(exported / OPTIMIZER_STATE)["embedding.accumulator"]
    assert torch.equal(model.tables["embedding"].state["accumulator"], accumulator)


def test_adagrad_forgets_a_share_between_nights_and_adam_forgets_by_itself(dataset, exported, tmp_path):
    run = RunDirectory(str(tmp_path))
    publish_start_model(run, make_start(exported), exported)
    job = with_optimizers(make_job(dataset.directory, (1, 1)), "adam", "rowwise-adagrad")
    model = build(job)

    _load_start_model(run, replace(make_start(exported), accumulators_kept=0.25), model, config=job.config)

    state = load_file(exported / OPTIMIZER_STATE)
    assert torch.equal(model.tables["embedding"].state["accumulator"], 0.25 * state["embedding.accumulator"])
    moments = dense_state(model)
    assert all(torch.equal(moments[key], state[f"output.weight.{key}"]) for key in moments)


def test_a_model_that_was_exported_without_state_goes_on_with_new_optimizers_and_says_so(
    dataset, exported, tmp_path, caplog
):
    run = RunDirectory(str(tmp_path))
    start = replace(make_start(exported), optimizer_state=None)
    publish_start_model(run, start, exported)
    job = with_optimizers(make_job(dataset.directory, (1, 1)), "adam", "rowwise-adagrad")
    model, fresh = build(job), build(job)

    with caplog.at_level("INFO"):
        _load_start_model(run, start, model, config=job.config)

    assert "the optimizers start again: version 4 holds no state of theirs" in caplog.messages
    assert not has_changed(model.tables["embedding"].state, fresh.tables["embedding"].state)
    assert not has_changed(dense_state(model), dense_state(fresh))
    assert torch.equal(model.tables["embedding"].weight_RD, load_file(exported / WEIGHTS)["embedding.weight"])


def test_a_flipped_byte_of_the_optimizer_state_is_refused(dataset, exported, tmp_path):
    run = RunDirectory(str(tmp_path))
    publish_start_model(run, make_start(exported), exported)
    flip_last_byte(run.path(f"{START_MODEL}/{OPTIMIZER_STATE}"))
    job = with_optimizers(make_job(dataset.directory, (1, 1)), "adam", "rowwise-adagrad")

    with pytest.raises(
        CheckpointError,
        match=r"^start_model/optimizer.safetensors .* has other bytes .* were written; start a new run$",
    ):
        _load_start_model(run, make_start(exported), build(job), config=job.config)


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_job_names_its_start_model_and_one_without_is_read_as_before(dataset, exported):
    job = start_job(dataset, exported, (1, 1))
    older = {name: value for name, value in job.to_json().items() if name != "start_model"}

    assert TrainingJob.from_json(json.loads(json.dumps(job.to_json()))) == job
    assert TrainingJob.from_json(older).start_model is None


def test_a_start_model_of_an_older_job_has_no_optimizer_state(dataset, exported):
    document = start_job(dataset, exported, (1, 1)).to_json()
    del document["start_model"]["optimizer_state"]

    assert TrainingJob.from_json(document).start_model.optimizer_state is None


def test_weights_that_are_not_the_registered_ones_are_refused_before_anything_is_rented(
    dataset, exported, tmp_path
):
    start = replace(make_start(exported), weights_sha256="0" * 64)

    with pytest.raises(CheckpointError, match="changed or damaged: train from scratch, or go back"):
        publish_start_model(RunDirectory(str(tmp_path)), start, exported)


def test_the_start_model_of_another_job_is_refused(dataset, exported, tmp_path):
    run = RunDirectory(str(tmp_path))
    publish_start_model(run, make_start(exported), exported)
    start = replace(make_start(exported), weights_sha256="0" * 64)
    job = make_job(dataset.directory, (1, 1))

    with pytest.raises(CheckpointError, match=r"must be that of the job's start model, .* start a new run"):
        _load_start_model(run, start, build(job), config=job.config)


def test_a_missing_start_model_is_reported(dataset, exported, tmp_path):
    job = make_job(dataset.directory, (1, 1))

    with pytest.raises(CheckpointError, match=r"^start_model/manifest.json .* is missing; start a new run$"):
        _load_start_model(RunDirectory(str(tmp_path)), make_start(exported), build(job), config=job.config)


def test_another_model_is_refused_with_the_layer_that_differs(dataset, exported, tmp_path):
    run = RunDirectory(str(tmp_path))
    publish_start_model(run, make_start(exported), exported)
    config = TrainingConfig(batch_size=BATCH_SIZE, num_microbatches=1, num_epochs=1, seed=0)
    wider = build_stage_model("ctrdnn", dataset.features, config, (Stage(0, 7, "cpu", 1),))

    with pytest.raises(
        CheckpointError,
        match=r"embedding.weight must be stored as F32 with the sizes \[1300, \d+\] .* got F32 \[1300, 4\]",
    ):
        _load_start_model(run, make_start(exported), wider, config=config)


def test_the_model_of_these_tests_is_the_tiny_one(dataset, exported):
    assert json.loads((exported / "model.json").read_text())["model"] == TINY
