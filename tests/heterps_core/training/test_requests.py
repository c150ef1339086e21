"""Sequences that are worked out once a request give the losses of those that are worked out row by row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import NO_ID, DynamicIds
from heterps_core.data.preparation import prepare_dataset
from heterps_core.models.chain import build_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.batch_shares import MeasuredShares
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.monitor import submit_job
from heterps_core.training.pipeline.stage_place import ALONE
from heterps_core.training.start_model import begin
from heterps_core.training.storage.run_directory import RunDirectory
from tests.heterps_core.data.requests.request_table import SCHEMA, request_columns, write_requests
from tests.heterps_core.training.worker_parts import training_loop_of
from tests.worker_processes import run_in_processes

CONFIG = TrainingConfig(
    batch_size=96,
    num_microbatches=2,
    num_epochs=1,
    seed=3,
    dense_optimizer="sgd",
    embedding_optimizer="sgd",
    dense_learning_rate=0.1,
    embedding_learning_rate=1.0,
)
ROW_BY_ROW = replace(SCHEMA, request_columns=())


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, PreparedDataset]:
    """The same rows in the same order, by whether sequences are of requests."""
    folder = tmp_path_factory.mktemp("requests")
    source = write_requests(folder / "rows.parquet", request_columns(400, seed=2))
    return {
        schema is SCHEMA: prepare_dataset(
            source, schema=schema, buckets_per_slot=41, out_dir=folder / str(schema is SCHEMA)
        )
        for schema in (SCHEMA, ROW_BY_ROW)
    }


def loop_of(model: str, dataset: PreparedDataset) -> TrainingLoop:
    num_layers = len(build_chain(model, dataset.features, seed=3))
    stages = [Stage(0, num_layers - 1, "cpu", 1)]
    return TrainingLoop.of(model, dataset, CONFIG, stages, ALONE, run=RunDirectory(""))


def train_part(
    rank: int, run_folder: str, shares: tuple[tuple[int, ...], ...] | None
) -> tuple[list[float], list[list[float]]]:
    if shares is not None:
        # As if the third step had shown that the replicas differ in speed.
        MeasuredShares.are_compared_after = lambda *_, **__: _[1] == 3  # type: ignore[method-assign]
        MeasuredShares.following = lambda *_, **__: shares  # type: ignore[method-assign]
    run = RunDirectory(run_folder)
    job, loop = training_loop_of(rank, run)
    losses: list[float] = []
    if loop.metrics is not None:
        loop.metrics.add = lambda metrics: losses.append(metrics.loss)  # type: ignore[method-assign]
    loop.train(begin(run, job, loop.model))
    if loop.config.embedding_memory_bytes is not None:
        assert bool(loop.model.swept_tables) == loop.model.reads_batch
        return losses, []
    num_batches = -(-loop.dataset.num_eval_rows // CONFIG.batch_size)
    held_out = [loop.batches.held_out_batch(index) for index in range(num_batches)]
    return losses, [loop.runner.predict(batch).tolist() for batch in held_out]


def train(
    folder: Path,
    model: str,
    dataset: PreparedDataset,
    replicas: tuple[int, ...],
    shares: tuple[tuple[int, ...], ...] | None = None,
    config: TrainingConfig = CONFIG,
) -> tuple[list[float], list[float]]:
    """Return losses, and logits of held-out rows where the last stage is one replica."""
    run = RunDirectory(str(folder))
    last = len(build_chain(model, dataset.features, seed=0)) - 1
    bounds = [round(stage * (last + 1) / len(replicas)) for stage in range(len(replicas) + 1)]
    # The first stage is the embedding alone, after which packed sequences cross.
    bounds[1] = 1 if len(replicas) > 1 else bounds[1]
    stages = tuple(
        Stage(first, stop - 1, "cpu", count)
        for first, stop, count in zip(bounds, bounds[1:], replicas, strict=False)
    )
    submit_job(
        run,
        TrainingJob(dataset=str(dataset.directory), stages=stages, run_id="r", model=model, config=config),
    )
    *_, (losses, logits) = run_in_processes(train_part, sum(replicas), str(folder), shares)
    return losses, [logit for batch in logits for logit in batch]


@pytest.mark.parametrize("model", ["hstu", "ctrdnn"])
def test_a_batch_has_the_sequence_of_a_request_once_in_each_part(datasets, model):
    microbatches = loop_of(model, datasets[True]).batches.training_batch(TrainingCursor())
    copies = loop_of(model, datasets[False]).batches.training_batch(TrainingCursor())

    columns = datasets[True].features.id_columns[-1]
    for once, each in zip(microbatches, copies, strict=True):
        ids, of_rows = (batch.batch.ids[:, columns.start :] for batch in (once, each))
        is_there = ids[:, 0] != NO_ID
        assert is_there[0]
        assert 0.2 < is_there.float().mean() < 0.45  # four candidates in the mean
        assert ids[is_there].equal(of_rows[is_there])
        heads = torch.cummax(torch.arange(len(ids)).where(is_there, 0), 0).values
        assert of_rows.equal(ids[heads])
        assert once.batch.ids[:, : columns.start].equal(each.batch.ids[:, : columns.start])


def test_a_model_that_averages_sequences_has_all_of_them(datasets):
    batches = [loop_of("dlrm", each).batches.training_batch(TrainingCursor()) for each in datasets.values()]

    for once, each in zip(*batches, strict=True):
        assert once.batch.ids.equal(each.batch.ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dynamic_ids", "memory_bytes"),
    [(DynamicIds(min_sightings=1), None), (None, 400_000)],
    ids=["ids", "disk"],
)
def test_rows_of_their_own_and_rows_on_disk_are_trained_alike(tmp_path, dynamic_ids, memory_bytes):
    source = write_requests(tmp_path / "rows.parquet", request_columns(400, seed=2))
    config = replace(CONFIG, embedding_memory_bytes=memory_bytes)

    once, row_by_row = (
        train(
            tmp_path / f"run-{number}",
            "hstu(embedding_dim=4)",
            prepare_dataset(
                source,
                schema=replace(schema, dynamic_ids=dynamic_ids),
                buckets_per_slot=40_960,
                out_dir=tmp_path / f"out-{number}",
            ),
            (2, 1),
            config=config,
        )
        for number, schema in enumerate((SCHEMA, ROW_BY_ROW))
    )

    np.testing.assert_allclose(once[0], row_by_row[0], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_requests_are_cut_where_replicas_of_another_stage_take_other_shares_from_then_on(datasets, tmp_path):
    model, shares = "hstu(embedding_dim=4)", ((1,), (5, 2), (1,))

    losses, _ = train(tmp_path / "once", model, datasets[True], (1, 2, 1), shares)
    expected_losses, _ = train(tmp_path / "rows", model, datasets[False], (1,))

    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "replicas"),
    [
        ("hstu(embedding_dim=4)", (1,)),
        ("hstu(embedding_dim=4)", (2, 1)),
        ("sasrec(embedding_dim=4)", (1, 2, 1)),
        ("din(embedding_dim=4)", (2, 3, 1)),
        ("ctrdnn(embedding_dim=4)", (1, 1)),
    ],
)
def test_losses_and_logits_are_those_of_rows_one_by_one(datasets, tmp_path, model, replicas):
    losses, logits = train(tmp_path / "once", model, datasets[True], replicas)
    expected_losses, expected_logits = train(tmp_path / "rows", model, datasets[False], (1,))

    assert len(losses) == datasets[True].num_train_rows // 96
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-6)
    assert len(logits) == datasets[True].num_eval_rows
    np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=2e-6)
