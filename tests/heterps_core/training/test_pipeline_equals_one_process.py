"""However a model is cut and however many replicas share a stage, it learns what one process learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.initialization import initial_rows
from heterps_core.embeddings.row_range import RowRange
from heterps_core.models.chain import build_chain
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig
from heterps_core.training.rank_layout import RankLayout
from heterps_core.training.stage_model import StageModel, build_stage_model
from heterps_core.training.stage_runner import MicroBatch, StageRunner
from tests.heterps_core.training.reference import PlainModel, train_plainly
from tests.worker_processes import run_in_processes

FEATURES = FeatureSpec(num_dense=13, slot_rows=(300,) * 26)
CONFIG = TrainingConfig(
    batch_size=48,
    num_microbatches=3,
    num_epochs=1,
    seed=5,
    dense_optimizer="sgd",
    dense_learning_rate=0.2,
    embedding_optimizer="sgd",
    embedding_learning_rate=20.0,
)
NUM_STEPS = 20


def make_batch(step: int, num_rows: int) -> ClickBatch:
    generator = torch.Generator().manual_seed(step)
    return ClickBatch(
        dense=torch.randn(num_rows, FEATURES.num_dense, generator=generator),
        # Cubed: a few rows of each slot are in nearly every batch, so replicas meet on the same rows.
        ids=(torch.rand(num_rows, FEATURES.num_slots, generator=generator) ** 3 * 300).long(),
        labels=torch.randint(0, 2, (num_rows,), generator=generator).float(),
    )


def take(batch: ClickBatch, first: int, stop: int) -> ClickBatch:
    return ClickBatch(
        dense=batch.dense[first:stop], ids=batch.ids[first:stop], labels=batch.labels[first:stop]
    )


def make_replica(rank: int, model: str, stages: tuple[Stage, ...]) -> tuple[StageModel, StageRunner]:
    ranks, next_rank = [], 0
    for stage in stages:
        ranks.append(tuple(range(next_rank, next_rank + stage.num_replicas)))
        next_rank += stage.num_replicas
    layout = RankLayout(tuple(ranks))
    groups = [dist.new_group(list(members)) for members in ranks]
    index, replica = layout.position(rank)
    group = groups[index] if stages[index].num_replicas > 1 else None
    stage_model = build_stage_model(model, FEATURES, CONFIG, stages, index, group)
    runner = StageRunner(
        list(stage_model.layers.values()),
        layout=layout,
        stage=index,
        replica=replica,
        input_width=stage_model.input_width,
        output_width=stage_model.output_width,
        group=group,
    )
    return stage_model, runner


def microbatches_of(runner: StageRunner, batch: ClickBatch) -> list[MicroBatch]:
    slices = runner.row_slices(batch.num_rows, CONFIG.num_microbatches)
    return [MicroBatch(size, take(batch, rows.first, rows.stop)) for size, rows in slices]


def train_replica(rank: int, model: str, stages: tuple[Stage, ...], folder: str) -> None:
    stage_model, runner = make_replica(rank, model, stages)
    losses = []
    for step in range(NUM_STEPS):
        losses.append(runner.train_step(microbatches_of(runner, make_batch(step, CONFIG.batch_size))))
        stage_model.apply_gradients(
            dense_learning_rate=CONFIG.dense_learning_rate,
            embedding_learning_rate=CONFIG.embedding_learning_rate,
        )
    # 41 rows are shared by no number of replicas and micro-batches evenly.
    logits = runner.predict(microbatches_of(runner, make_batch(99, 41)))
    torch.save(
        {
            "dense": {
                f"{name}.{parameter_name}": parameter.detach()
                for name, layer in stage_model.layers.items()
                for parameter_name, parameter in layer.named_parameters()
            },
            "shards": {name: (table.rows, table.weight_RD) for name, table in stage_model.tables.items()},
            "losses": losses if runner.is_last else None,
            "logits": [
                (rows, part)
                for (_, rows), part in zip(
                    runner.row_slices(41, CONFIG.num_microbatches),
                    torch.split(
                        logits, [rows.num_rows for _, rows in runner.row_slices(41, CONFIG.num_microbatches)]
                    )
                    if runner.is_last
                    else [],
                    strict=False,
                )
            ],
        },
        f"{folder}/{rank}.pt",
    )


def cut(model: str, num_replicas: tuple[int, ...], first_layers: tuple[int, ...]) -> tuple[Stage, ...]:
    num_layers = len(build_chain(model, FEATURES, seed=0))
    lasts = [*(first - 1 for first in first_layers[1:]), num_layers - 1]
    return tuple(
        Stage(first, last, "cpu", replicas)
        for first, last, replicas in zip(first_layers, lasts, num_replicas, strict=True)
    )


@pytest.mark.parametrize(
    ("model", "num_replicas", "first_layers"),
    [
        ("ctrdnn", (2, 1), (0, 1)),
        ("ctrdnn", (1, 2), (0, 1)),
        ("ctrdnn", (2,), (0,)),
        # Three stages; the second embedding is in the last of them, with replicas that share its table.
        ("2emb", (2, 1, 2), (0, 3, 6)),
        # The user's vector crosses both cuts; the second tower starts in the middle stage.
        ("matchnet", (1, 2, 1), (0, 5, 9)),
    ],
)
def test_a_cut_model_learns_what_one_process_learns(
    model: str, num_replicas: tuple[int, ...], first_layers: tuple[int, ...], tmp_path: Path
) -> None:
    run_in_processes(
        train_replica, sum(num_replicas), model, cut(model, num_replicas, first_layers), str(tmp_path)
    )
    chain = build_chain(model, FEATURES, seed=CONFIG.seed)
    tables = {
        name: initial_rows(
            RowRange(0, layer.num_rows),
            table=name,
            dimension=layer.dimension,
            seed=CONFIG.seed,
            standard_deviation=layer.dimension**-0.5 / 10,
        )
        for name, layer in chain.named_children()
        if isinstance(layer, SlotEmbedding)
    }
    plain = PlainModel(chain, tables)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    losses = train_plainly(
        plain,
        [make_batch(step, CONFIG.batch_size) for step in range(NUM_STEPS)],
        dense_learning_rate=CONFIG.dense_learning_rate,
        embedding_learning_rate=CONFIG.embedding_learning_rate,
    )
    with torch.no_grad():
        logits = plain(make_batch(99, 41))

    largest_difference, largest_update = 0.0, 0.0
    for rank in range(sum(num_replicas)):
        replica = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for name, parameter in replica["dense"].items():
            expected = plain.state_dict()[f"chain.{name}"]
            largest_difference = max(largest_difference, (parameter - expected).abs().max().item())
            largest_update = max(largest_update, (expected - before[f"chain.{name}"]).abs().max().item())
        for name, (rows, weight) in replica["shards"].items():
            expected = plain.state_dict()[f"chain.{name}.weight"]
            difference = (weight - expected[rows.first : rows.stop]).abs().max().item()
            largest_difference = max(largest_difference, difference)
            largest_update = max(
                largest_update, (expected - before[f"chain.{name}.weight"]).abs().max().item()
            )
        if replica["losses"] is not None:
            assert replica["losses"] == pytest.approx(losses, abs=1e-5)
        for rows, part in replica["logits"]:
            torch.testing.assert_close(part, logits[rows.first : rows.stop], atol=1e-4, rtol=1e-4)
    print(
        f"{model} {num_replicas}: largest difference {largest_difference:.1e} "
        f"of an update of {largest_update:.1e} after {NUM_STEPS} steps"
    )
    assert largest_update > 0.01
    assert largest_difference < 1e-4 * largest_update
