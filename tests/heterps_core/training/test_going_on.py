"""Two nights with an export between them learn what one process learns that trains on both without a break.

The second night has another plan than the first: what optimizers have accumulated must find its way to other stages,
other replicas, as weights do.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file
from torch import Tensor

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.models.graph_block import tensor_name
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import export_model
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.start_model import begin
from heterps_core.training.storage.run_directory import RunDirectory
from tests.heterps_core.training.test_start_model import make_start
from tests.heterps_core.training.worker_parts import training_loop_of
from tests.one_step import train_one_step
from tests.worker_processes import run_in_processes

pytestmark = pytest.mark.slow

BATCH_SIZE = 64
NUM_MICROBATCHES = 2
LAST_LAYER = 9
"""2emb: a table at the front, and one behind seven layers."""


class Plan(NamedTuple):
    num_replicas: tuple[int, ...]
    first_layers: tuple[int, ...]

    def job(self, night: int, folder: Path) -> TrainingJob:
        lasts = (*(first - 1 for first in self.first_layers[1:]), LAST_LAYER)
        config = TrainingConfig(
            batch_size=BATCH_SIZE,
            num_microbatches=NUM_MICROBATCHES,
            num_epochs=1,
            seed=night,
        )
        return TrainingJob(
            run_id=f"night-{night}",
            model="2emb",
            dataset=str(folder / f"prepared-{night}"),
            stages=tuple(
                Stage(first, last, "cpu", replicas)
                for first, last, replicas in zip(self.first_layers, lasts, self.num_replicas, strict=True)
            ),
            config=config,
        )


ALONE = Plan((1,), (0,))
CASES = [
    (Plan((2, 1), (0, 2)), Plan((1, 2), (0, 7))),
    (Plan((2, 1), (0, 1)), Plan((1, 1, 1), (0, 4, 8))),
    (Plan((3,), (0,)), Plan((2, 1), (0, 1))),
]
"""Plans of the first and the second night, all of three processes."""

NUMBERS = range(len(CASES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prepared days; the second with the numeric transform of the first, as a night has it."""
    folder = tmp_path_factory.mktemp("nights")
    transform = None
    for night in (1, 2):
        stream = write_click_stream(folder / f"{night}.tsv", num_rows=1000, seed=night)
        dataset = prepare_dataset(
            stream.path,
            schema=CRITEO_SCHEMA,
            buckets_per_slot=50,
            numeric_transform=transform,
            out_dir=folder / f"prepared-{night}",
        )
        transform = dataset.manifest.numeric_transform
    return folder


def train_parts(rank: int, run_folders: list[str]) -> None:
    """Train one worker's part of each job, from its start model where it has one, to a checkpoint."""
    for run_folder in run_folders:
        run = RunDirectory(run_folder)
        job, loop = training_loop_of(rank, run)
        loop.train(begin(run, job, loop.model))


def train_night(jobs: dict[Path, TrainingJob], starts: list[Path] | None = None) -> list[Path]:
    """Train jobs of one world size in their run folders, one after the other; returns the exported models."""
    for run_folder, job, start in zip(jobs, jobs.values(), starts or [None] * len(jobs), strict=True):
        submit_job(RunDirectory(str(run_folder)), job, start_folder=start)
    (world_size,) = {sum(job.replicas_per_stage) for job in jobs.values()}
    run_in_processes(train_parts, world_size, [str(run_folder) for run_folder in jobs])
    for run_folder, job in jobs.items():
        manifest = PreparedDataset.open(job.dataset).manifest
        export_model(RunDirectory(str(run_folder)), manifest, run_folder / "exported", model=job.model)
    return [run_folder / "exported" for run_folder in jobs]


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[Path]:
    """Train all cases in one group of processes each night; starting one for each would take most of the time."""
    firsts = train_night({folder / f"first-{number}": CASES[number][0].job(1, folder) for number in NUMBERS})
    seconds = {
        folder / f"second-{number}": replace(
            CASES[number][1].job(2, folder), start_model=make_start(firsts[number])
        )
        for number in NUMBERS
    }
    return train_night(seconds, firsts)


@pytest.fixture(scope="module")
def trained_alone(folder: Path) -> list[Path]:
    """Train the second night in one process from weights with optimizer state, and from weights alone."""
    (first,) = train_night({folder / "first": ALONE.job(1, folder)})
    start, job = make_start(first), ALONE.job(2, folder)
    seconds = {
        folder / "going-on": replace(job, start_model=start),
        folder / "from-scratch": replace(job, start_model=replace(start, optimizer_state=None)),
    }
    return train_night(seconds, [first, first])


@cache
def trained_without_a_break(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights and optimizer state before and after one process has trained on both days."""
    job = ALONE.job(1, folder)
    config = job.config
    features = PreparedDataset.open(job.dataset).features
    model = build_stage_model(job.model, features, config, job.stages)
    before = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    runner = StageRunner(model, config)
    for night in (1, 2):
        dataset = PreparedDataset.open(folder / f"prepared-{night}")
        num_steps = dataset.num_batches(BATCH_SIZE)
        for step in range(num_steps):
            rows = dataset.batch_rows(0, step, batch_size=BATCH_SIZE, seed=night)
            size = BATCH_SIZE // NUM_MICROBATCHES
            share = (num_steps - step) / num_steps
            train_one_step(
                model,
                runner,
                [
                    MicroBatch(size, dataset.batch(rows[number::NUM_MICROBATCHES]))
                    for number in range(NUM_MICROBATCHES)
                ],
                dense_learning_rate=config.dense_learning_rate * share,
                embedding_learning_rate=config.embedding_learning_rate * share,
            )
    return before, tensors_of(model)


def tensors_of(model: StageModel) -> dict[str, Tensor]:
    """Return the tensors of a whole model with adam and row-wise Adagrad, put together one by one."""
    found = {}
    for name in ("main_embedding", "second_embedding"):
        found[f"{name}.weight"] = model.tables[name].weight_RD
        found[f"{name}.accumulator"] = model.tables[name].state["accumulator"]
    for name, layer in model.layers.items():
        for key, parameter in layer.named_parameters():
            full_name = tensor_name(name, layer, key)
            found[full_name] = parameter.detach()
            for part in ("exp_avg", "exp_avg_sq", "step"):
                found[f"{full_name}.{part}"] = model.dense_optimizer.state[parameter][part]
    return found


def largest_share(found: dict[str, Tensor], folder: Path) -> float:
    """Return the largest difference from the unbroken run, as a share of the largest update of its tensor."""
    before, after = trained_without_a_break(folder)
    return max(
        ((found[name] - after[name]).abs().max() / (after[name] - before[name]).abs().max()).item()
        for name in found
    )


def assert_unbroken(exported: Path, folder: Path, *, most: float) -> None:
    found = load_file(exported / "model.safetensors") | load_file(exported / "optimizer.safetensors")

    share = largest_share(found, folder)

    print(f"largest difference {share:.1e} of the largest update of its tensor")
    assert set(found) == set(trained_without_a_break(folder)[0])
    assert share <= most


def test_two_nights_in_one_process_learn_bit_for_bit_what_one_learns_without_a_break(trained_alone, folder):
    assert_unbroken(trained_alone[0], folder, most=0.0)


def test_with_new_optimizers_they_would_not(trained_alone, folder):
    weights = load_file(trained_alone[1] / "model.safetensors")

    assert largest_share(weights, folder) > 0.1


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: str(CASES[number]))
def test_two_nights_with_other_plans_learn_what_one_process_learns(number, trained, folder):
    assert_unbroken(trained[number], folder, most=1e-4)
