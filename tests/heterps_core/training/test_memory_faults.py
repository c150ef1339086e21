"""Whole runs whose workers find no memory: an oversized job is refused before its start, a killed worker is named."""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from heterps_core.data.dataset import PreparedDataset
from heterps_core.errors import ConfigurationError, TrainingError
from heterps_core.models.model_graph import ROW_BUFFER_BYTES_PER_SAMPLE, WORKER_BYTES
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.memory_need import WorkerMemory, worker_memory
from heterps_core.training.monitor import follow_training
from heterps_core.training.node.failures import OutOfMemoryError, root_cause
from heterps_core.training.node.host_memory import check_workers_fit
from heterps_core.training.node.node_life import DRY_RUN_VARIABLE
from heterps_core.training.outcome import Failed
from heterps_core.training.storage.run_directory import RunDirectory
from tests.heterps_core.training.node_processes import (
    NUM_MICROBATCHES,
    TINY,
    make_job,
    prepare_clicks,
    running_nodes,
    train,
)
from tests.memory_group import memory_group

pytestmark = pytest.mark.slow

HUNGRY_STEP = 13
LIMIT_BYTES = 1_500_000_000
BLOCK_BYTES = 32 * 2**20


class Hungry(nn.Module):
    """Takes ever more memory in step 13, a block at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.blocks: list[bytes] = []

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        while self.num_calls > (HUNGRY_STEP - 1) * NUM_MICROBATCHES:
            self.blocks.append(b"x" * BLOCK_BYTES)
            # Its node looks at it meanwhile.
            time.sleep(0.02)
        return activation


class Greedy(Hungry):
    """Asks in step 13 for more memory than any machine has."""

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        if self.num_calls > (HUNGRY_STEP - 1) * NUM_MICROBATCHES:
            torch.zeros(2**44)
        return activation


def build(features, layer):
    embedding = SlotEmbedding(features, dimension=4)
    return nn.Sequential(
        OrderedDict(embedding=embedding, layer=layer(), output=nn.Linear(embedding.output_width, 1))
    )


def build_hungry(features):
    return build(features, Hungry)


def build_greedy(features):
    return build(features, Greedy)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_clicks(tmp_path_factory.mktemp("clicks"))


@pytest.mark.weekly
@pytest.mark.root
def test_a_worker_that_the_kernel_kills_for_memory_is_reported_with_figures_and_not_tried_again(
    dataset, tmp_path
):
    run = RunDirectory(str(tmp_path))
    job = make_job(dataset, (1, 1), model=f"{__name__}:build_hungry")

    with memory_group(LIMIT_BYTES) as group, running_nodes(run, job) as (cluster, nodes):
        (group / "cgroup.procs").write_text(str(nodes[1].pid))
        outcome = follow_training(run, cluster, on_progress=lambda progress: None)

    assert isinstance(outcome, Failed)
    message = str(outcome.error)
    reported = re.match(
        r"worker \d \(stage 1, replica 0\) failed after step 12: .*the kernel killed its process for lack of it: it "
        r"used ([0-9.]+) GB when last seen, of 1.50 GB",
        message,
    )
    assert reported, message
    assert 0.7 < float(reported.group(1)) <= 1.5, "what was used just before the limit is reported as 1.50"
    assert "use smaller tables, more replicas, or a machine with more memory" in message


def test_a_node_whose_workers_cannot_fit_starts_none_and_says_what_they_need(dataset, tmp_path, monkeypatch):
    """As on a rented machine; its own memory is what it asks for."""
    monkeypatch.setenv(DRY_RUN_VARIABLE, "0")
    run = RunDirectory(str(tmp_path))
    job = replace(make_job(dataset, (2, 1)), worker_bytes=(3 * 10**12, 10**8))

    with pytest.raises(TrainingError) as failure:
        train(run, job)

    assert re.match(
        r"node stage0 could not train: the workers of stage0 \(local\) must fit into its free memory, but need "
        r"6,000.00 GB \(2 of stage 0 3,000.00 GB each\), and of [0-9.]+ GB [0-9.]+ GB are free; use smaller tables",
        str(failure.value),
    ), str(failure.value)
    assert not run.exists("nodes/stage0/workers.log")


def test_a_worker_needs_its_shard_its_dense_layers_and_its_row_groups(dataset):
    """By hand: 26 slots of 50 rows, each 4 floats and an accumulator; 104 + 13 weights and a bias, times four.

    For checkpoints a shard of this size is copied whole, with a byte for each row; of weights, what the first replica
    writes: themselves and two moments.
    """
    features = PreparedDataset.open(dataset).features
    config = replace(
        make_job(dataset, (1, 1)).config, dense_optimizer="adam", embedding_optimizer="rowwise-adagrad"
    )
    stages = (Stage(0, 0, "cpu", 3), Stage(1, 2, "gpu-t4", 2))
    process_and_rows = round(WORKER_BYTES + ROW_BUFFER_BYTES_PER_SAMPLE * 1_280) + 1_400 * 1_600

    def needed(*, is_dry_run):
        needs = worker_memory(
            TINY,
            features,
            config,
            stages,
            num_train_rows=1_280,
            largest_group_rows=1_600,
            is_dry_run=is_dry_run,
        )
        return tuple(need.num_bytes for need in needs)

    shard_bytes = math.ceil(features.num_slots * 50 * (4 + 1) * 4 / 3)
    embedding_bytes = 2 * shard_bytes + math.ceil(features.num_slots * 50 / 3)
    dense_bytes = 4 * (features.num_slots * 4 + features.num_dense + 1) * 4
    copied_bytes = dense_bytes * 3 // 4
    assert needed(is_dry_run=True) == (
        process_and_rows + embedding_bytes,
        process_and_rows + dense_bytes + copied_bytes,
    )
    config = replace(config, embedding_memory_bytes=5_000)
    # Copies of changed rows for checkpoints come beside it; their marks are within it.
    assert needed(is_dry_run=True) == (
        process_and_rows + 5_000 + shard_bytes,
        process_and_rows + dense_bytes + copied_bytes,
    )
    config = replace(config, embedding_memory_bytes=None)
    # A rented card has memory of its own for what its stage trains; copies for checkpoints are on the host.
    assert needed(is_dry_run=False) == (process_and_rows + embedding_bytes, process_and_rows + copied_bytes)


@pytest.mark.weekly
def test_a_worker_that_is_given_no_memory_says_so(dataset, tmp_path):
    run = RunDirectory(str(tmp_path))

    with pytest.raises(TrainingError) as failure:
        train(run, make_job(dataset, (1, 1), model=f"{__name__}:build_greedy"))

    assert "(stage 1, replica 0) failed after step 12: a worker must fit into memory" in str(failure.value)
    assert "you tried to allocate" in str(failure.value)
    cause = root_cause(run)
    assert cause is not None
    assert cause.error_type == OutOfMemoryError.__name__


def test_a_job_that_does_not_fit_here_is_refused_with_the_sum_in_words():
    need = WorkerMemory(
        process_bytes=450_000_000,
        row_group_bytes=250_000_000,
        state_bytes=3 * 10**12,
        checkpoint_bytes=300_000_000,
    )

    with pytest.raises(ConfigurationError) as failure:
        check_workers_fit({"stage 0": [need.num_bytes] * 2}, where="this machine", made_of={"stage 0": need})

    assert (
        "need 6,002.00 GB (2 of stage 0 3,001.00 GB each: 0.45 GB for the process, 0.25 GB for row groups, "
        "3,000.00 GB for tables, weights and optimizers and 0.30 GB for checkpoints), and of "
        in str(failure.value)
    )


def test_a_worker_tells_the_most_memory_that_it_had_which_was_counted_for_it(dataset, tmp_path):
    run = RunDirectory(str(tmp_path))
    job = replace(make_job(dataset, (1, 1)), worker_bytes=(int(WORKER_BYTES),) * 2)

    training = train(run, job)

    for counted, peak in training.memory_bytes.values():
        assert 0.5 * counted < peak < counted
    assert list(training.memory_bytes) == [0, 1]
