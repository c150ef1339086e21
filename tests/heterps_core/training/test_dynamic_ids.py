"""Models with dynamic ids: trained by any plan, resumed, exported, and gone on with the night after."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import DynamicIds
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.embeddings.id_index import HAS_ROW
from heterps_core.errors import ConfigurationError
from heterps_core.models.chain import build_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import ClickPredictor, export_model
from heterps_core.training import checkpoint_writer
from heterps_core.training.checkpoint import complete_checkpoints
from heterps_core.training.evaluation import predict_held_out
from heterps_core.training.job import StartModel, TrainingConfig, TrainingJob
from heterps_core.training.memory_need import worker_memory
from heterps_core.training.monitor import submit_job
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.start_model import begin
from heterps_core.training.storage.exported_files import OPTIMIZER_STATE, WEIGHTS
from heterps_core.training.storage.run_directory import CHECKPOINTS, JOB, RunDirectory
from heterps_core.training.storage.verified_files import read_signed_json, write_signed_json
from tests.heterps_core.training.test_start_model import make_start
from tests.heterps_core.training.worker_parts import predicted_rows, training_loop_of
from tests.worker_processes import run_in_processes

MODEL = "ctrdnn(hidden_widths=16, embedding_dim=4)"
SCHEMA = replace(CRITEO_SCHEMA, dynamic_ids=DynamicIds(min_sightings=2, time_to_live_days=2))
CONFIG = TrainingConfig(
    batch_size=32,
    num_microbatches=2,
    num_epochs=1,
    seed=3,
    checkpoint_interval_steps=40,
    embedding_learning_rate=0.3,
    day_number=700_000,
)
ALONE = (Stage(0, 3, "cpu", 1),)
REPLICAS = (Stage(0, 3, "cpu", 2),)
PIPELINE = (Stage(0, 0, "cpu", 2), Stage(1, 3, "cpu", 1))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return prepare(tmp_path_factory.mktemp("clicks"), seed=1)


def prepare(folder: Path, *, seed: int, slot_rows: Any = 512) -> PreparedDataset:
    stream = write_click_stream(folder / "clicks.tsv", num_rows=3_200, seed=seed)
    return prepare_dataset(
        stream.path, schema=SCHEMA, buckets_per_slot=slot_rows, out_dir=folder / "prepared"
    )


def train_part(rank: int, run_folder: str, small_bytes: int) -> dict[int, float]:
    """Train, and return the logits of held-out rows by the row."""
    checkpoint_writer.SMALL_BYTES = small_bytes
    run = RunDirectory(run_folder)
    job, loop = training_loop_of(rank, run)
    loop.train(begin(run, job, loop.model))
    logits = [logits for _, logits in predict_held_out(loop)]
    if not logits:
        return {}
    return dict(zip(predicted_rows(loop), np.concatenate(logits).tolist(), strict=True))


class Night:
    """What comes out of a run."""

    def __init__(
        self,
        dataset: PreparedDataset,
        folder: Path,
        *,
        stages: tuple[Stage, ...] = ALONE,
        config: TrainingConfig = CONFIG,
        start: Path | None = None,
        start_model: StartModel | None = None,
    ) -> None:
        self.folder = folder
        job = TrainingJob(
            run_id="r",
            model=MODEL,
            dataset=str(dataset.directory),
            stages=stages,
            config=config,
            start_model=start_model,
        )
        submit_job(RunDirectory(str(folder)), job, start_folder=start)
        self.finish(dataset)

    def finish(self, dataset: PreparedDataset, *, small_bytes: int = checkpoint_writer.SMALL_BYTES) -> None:
        """Train to the end from where the run is; shards of up to so many bytes are copied whole."""
        run = RunDirectory(str(self.folder))
        num_workers = sum(TrainingJob.from_json(read_signed_json(run, JOB)).replicas_per_stage)
        parts = run_in_processes(train_part, num_workers, str(self.folder), small_bytes)
        self.logits = {row: logit for part in parts for row, logit in part.items()}
        self.exported = self.folder / "exported"
        self.turnover = export_model(run, dataset.manifest, self.exported, model=MODEL)
        self.tensors = {
            name: tensor.clone()
            for file in (WEIGHTS, OPTIMIZER_STATE)
            for name, tensor in load_file(self.exported / file).items()
        }

    @property
    def ids(self) -> set[int]:
        """Of all columns."""
        keys = self.tensors["embedding.id_keys"]
        return set(((keys[keys > 0] & ~HAS_ROW) - 1).tolist())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "change"),
    [
        pytest.param(REPLICAS, {}, id="replicas"),
        pytest.param(PIPELINE, {"update_mode": "delayed"}, id="pipeline", marks=pytest.mark.weekly),
    ],
)
def test_ids_have_the_same_rows_by_any_plan(stages, change, dataset, tmp_path):
    config = replace(CONFIG, **change)
    # With delayed updates a pipeline's stages see weights of other steps: its ids are compared alone.
    alone = Night(dataset, tmp_path / "alone", config=replace(config, update_mode="sync"))

    found = Night(dataset, tmp_path / "found", stages=stages, config=config)

    for name in ("id_keys", "id_sightings", "id_last_seen_day"):
        assert torch.equal(found.tensors[f"embedding.{name}"], alone.tensors[f"embedding.{name}"]), name
    if config.update_mode == "sync":
        for name, tensor in alone.tensors.items():
            torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-3, atol=1e-3)
        assert found.logits == pytest.approx(alone.logits, abs=1e-3)
    assert found.turnover == alone.turnover


@pytest.mark.slow
@pytest.mark.parametrize(
    "small_bytes",
    [
        pytest.param(checkpoint_writer.SMALL_BYTES, id="whole rows", marks=pytest.mark.weekly),
        pytest.param(0, id="changed rows"),
    ],
)
def test_a_resumed_run_ends_with_the_same_ids_and_weights(small_bytes, dataset, tmp_path):
    night = Night(dataset, tmp_path / "run")
    expected = night.tensors
    run = RunDirectory(str(tmp_path / "run"))
    run.delete_folder(CHECKPOINTS)
    night.finish(dataset, small_bytes=small_bytes)
    shutil.rmtree(run.path(f"{CHECKPOINTS}/{complete_checkpoints(run)[-1]}"))

    night.finish(dataset, small_bytes=small_bytes)

    assert int(complete_checkpoints(run)[0]) == CONFIG.checkpoint_interval_steps
    assert all(torch.equal(night.tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.weekly
def test_a_run_of_two_replicas_resumed_by_one_gives_ids_the_same_rows(dataset, tmp_path):
    night = Night(dataset, tmp_path / "run", stages=REPLICAS)
    expected = night.tensors
    run = RunDirectory(str(tmp_path / "run"))
    shutil.rmtree(run.path(f"{CHECKPOINTS}/{complete_checkpoints(run)[-1]}"))
    job = TrainingJob.from_json(read_signed_json(run, JOB))
    write_signed_json(run, JOB, replace(job, stages=ALONE).to_json())

    night.finish(dataset)

    for name in ("id_keys", "id_sightings", "id_last_seen_day"):
        assert torch.equal(night.tensors[f"embedding.{name}"], expected[f"embedding.{name}"]), name
    torch.testing.assert_close(
        night.tensors["embedding.weight"], expected["embedding.weight"], rtol=1e-3, atol=1e-3
    )


@pytest.mark.slow
def test_nights_forget_ids_that_do_not_come_again_and_grow_where_they_come(dataset, tmp_path):
    first = Night(dataset, tmp_path / "first")

    # Exported, columns with more than 383 ids have twice the rows, and predict what the trained model did.
    predictor = ClickPredictor(first.exported)
    assert {512, 1024} == set(predictor.features.slot_rows)
    assert [each.table_rows for each in first.turnover] == list(predictor.features.slot_rows)
    rows = next(dataset.parts(dataset.num_train_rows, dataset.manifest.num_rows, features=predictor.features))
    logits = predictor.logits(rows.dense, rows.ids)
    assert [first.logits[dataset.num_train_rows + row] for row in range(len(logits))] == pytest.approx(
        logits.tolist(), abs=1e-5
    )
    assert sum(each.num_evicted for each in first.turnover) == 0
    assert len(first.ids) == sum(each.num_ids for each in first.turnover)
    # An unknown id has a prediction, too.
    assert (
        len(
            predictor.predict(
                {name: ["never seen"] for name in SCHEMA.used_columns if name[0] == "C"}
                | {name: [1.0] for name in SCHEMA.numeric_columns}
            )
        )
        == 1
    )

    # Two days later, with the values of another stream: of those before only what both have stays.
    other = prepare(tmp_path / "other", seed=9, slot_rows=predictor.features.slot_rows)
    second = Night(
        other,
        tmp_path / "second",
        config=replace(CONFIG, day_number=CONFIG.day_number + 2),
        start=first.exported,
        start_model=make_start(first.exported),
    )

    seen = set(np.unique(next(other.parts(0, other.num_train_rows)).ids).tolist())
    assert second.ids <= seen
    # What has no room is of columns that were full, since those of before stay until the night's end.
    without_room = {id_ >> other.features.hash_bits for id_ in seen - second.ids}
    for slot, each in enumerate(second.turnover):
        num_rows = other.features.slot_rows[slot]
        assert (each.num_ids + each.num_evicted > 0.9 * num_rows) or slot not in without_room
    assert sum(each.num_evicted for each in second.turnover) == len(first.ids - second.ids) > 1_000
    assert sum(each.num_admitted for each in second.turnover) > 0
    common = first.ids & second.ids
    assert len(common) > 20


def test_a_table_with_dynamic_ids_is_refused_on_disk_and_on_a_card(dataset):
    config = replace(CONFIG, embedding_memory_bytes=100_000)

    with pytest.raises(ConfigurationError, match="must be in memory, got embedding_memory_bytes 100000"):
        build_stage_model(MODEL, dataset.features, config, ALONE)
    with pytest.raises(
        ConfigurationError, match="must lie in the host's memory, but the plan has some on gpu-t4"
    ):
        worker_memory(
            MODEL,
            dataset.features,
            CONFIG,
            (Stage(0, 3, "gpu-t4", 1),),
            num_train_rows=100,
            largest_group_rows=100,
            is_dry_run=False,
        )


def test_a_model_that_folds_its_slots_is_refused(dataset):
    with pytest.raises(
        ConfigurationError, match="with dynamic ids the number of values gives a table its rows"
    ):
        build_chain("2emb", dataset.features, seed=0)
