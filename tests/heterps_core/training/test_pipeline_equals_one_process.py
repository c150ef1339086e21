"""However a model is cut and however many replicas share a stage, it learns what one process learns."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.initialization import initial_rows
from heterps_core.embeddings.row_range import RowRange
from heterps_core.models.chain import build_chain
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig
from heterps_core.training.rank_layout import RankLayout
from heterps_core.training.shared_memory_link import SharedMemoryLink
from heterps_core.training.shared_memory_neighbours import connect_neighbours
from heterps_core.training.stage_device import join_by_nccl
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
# 41 rows are shared by no number of replicas and micro-batches evenly; of one row most replicas get nothing.
STEP_ROWS = [48] * 6 + [41, 48, 48, 1, 48, 48]
NUM_HELD_OUT_ROWS = 41


class Case(NamedTuple):
    model: str
    num_replicas: tuple[int, ...]
    first_layers: tuple[int, ...]
    num_microbatches: int = 3
    warmup_per_stage: int = 2
    asks_ahead: bool = False
    """The row numbers of a step are exchanged before the step before has updated the rows."""
    precision: str = "fp32"
    receives_ahead: bool = True
    """The first activations of a step are received while the step before ends."""
    shares_memory: bool = False
    """Replicas of a stage have a link."""
    stages_share_memory: bool = False
    on_cuda: tuple[int, ...] = ()
    """Stages whose replicas compute on CUDA devices, each on one of its own."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        lasts = [*(first - 1 for first in self.first_layers[1:]), len(initial_chain(self.model)) - 1]
        return tuple(
            Stage(first, last, "cpu", replicas)
            for first, last, replicas in zip(self.first_layers, lasts, self.num_replicas, strict=True)
        )

    @property
    def num_cards(self) -> int:
        return max((self.num_replicas[stage] for stage in self.on_cuda), default=0)

    @property
    def can_run(self) -> bool:
        return not self.on_cuda or (torch.cuda.is_available() and self.num_cards <= torch.cuda.device_count())


CASES = [
    Case("ctrdnn", (2,), (0,)),
    Case("ctrdnn", (2,), (0,), shares_memory=True),
    Case("ctrdnn", (2, 1), (0, 1), asks_ahead=True),
    Case("ctrdnn", (1, 2), (0, 1), warmup_per_stage=1, receives_ahead=False),
    Case("ctrdnn", (1, 1), (0, 3), num_microbatches=8, warmup_per_stage=4),
    Case("ctrdnn", (3, 2, 1), (0, 2, 5), num_microbatches=6),
    Case("ctrdnn", (3, 2, 1), (0, 2, 5), num_microbatches=6, shares_memory=True),
    Case("ctrdnn", (1, 1, 1, 1), (0, 1, 3, 5), num_microbatches=8),
    Case("ctrdnn", (1, 1), (0, 3), num_microbatches=8, warmup_per_stage=4, stages_share_memory=True),
    Case("ctrdnn", (1, 2, 1, 2), (0, 1, 3, 5), stages_share_memory=True),
    Case("ctrdnn", (1, 2, 1, 2), (0, 1, 3, 5), num_microbatches=2, warmup_per_stage=3),
    # Two stages with embeddings; the second has replicas that share its table.
    Case("2emb", (1, 2), (0, 4)),
    Case("2emb", (2, 1, 2), (0, 3, 6), num_microbatches=5, asks_ahead=True),
    Case("2emb", (1, 4), (0, 2), shares_memory=True),
    # The user's vector crosses both cuts; the second tower starts in the middle stage.
    Case("matchnet", (1, 2, 1), (0, 5, 9)),
    Case("matchnet", (1, 2, 1), (0, 5, 9), receives_ahead=False, stages_share_memory=True),
    Case("matchnet", (3, 2), (0, 7), num_microbatches=4, warmup_per_stage=1, asks_ahead=True),
    Case("ctrdnn", (1, 1), (0, 3), num_microbatches=1),
    Case("ctrdnn", (2, 1), (0, 3), num_microbatches=4, precision="bf16"),
    Case("2emb", (2, 1, 2), (0, 3, 6), num_microbatches=5, precision="bf16"),
    Case("2emb", (2, 1, 2), (0, 3, 6), num_microbatches=5, shares_memory=True, stages_share_memory=True),
    # Everything on a card; the planned split; embeddings on the card; a card between two stages on the host.
    Case("ctrdnn", (1,), (0,), on_cuda=(0,)),
    Case("2emb", (1,), (0,), precision="bf16", on_cuda=(0,)),
    Case("ctrdnn", (2, 1), (0, 1), num_microbatches=4, on_cuda=(1,)),
    Case("ctrdnn", (1, 2), (0, 3), on_cuda=(0,)),
    Case("matchnet", (1, 1, 2), (0, 5, 9), on_cuda=(1,)),
    # Rows, gradients and losses by NCCL; row numbers ahead of the step, and not.
    Case("ctrdnn", (2,), (0,), asks_ahead=True, on_cuda=(0,)),
    Case("2emb", (1, 2), (0, 4), on_cuda=(1,)),
]


@cache
def initial_chain(model: str) -> torch.nn.Sequential:
    return build_chain(model, FEATURES, seed=CONFIG.seed)


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


def make_replica(rank: int, case: Case) -> tuple[StageModel, StageRunner] | None:
    """Return this rank's part in a case, or None where the case has fewer processes."""
    ranks, next_rank = [], 0
    for num_replicas in case.num_replicas:
        ranks.append(tuple(range(next_rank, next_rank + num_replicas)))
        next_rank += num_replicas
    layout = RankLayout(tuple(ranks))
    groups = [dist.new_group(list(members)) for members in ranks]
    everyone = dist.new_group(list(range(next_rank)))
    device = CPU
    if rank < next_rank and layout.position(rank)[0] in case.on_cuda:
        device = torch.device("cuda", layout.position(rank)[1])
        torch.cuda.set_device(device)
    device_group = join_by_nccl(layout, device, limit=timedelta(seconds=60))
    if rank >= next_rank:
        return None
    index, replica = layout.position(rank)
    group = groups[index] if case.num_replicas[index] > 1 else None
    link = None
    if group is not None and case.shares_memory:
        link = SharedMemoryLink.connect(group, layout=layout, silence_limit_s=60.0)
        assert link is not None
    neighbours = connect_neighbours(layout, rank=rank, group=everyone) if case.stages_share_memory else {}
    is_last = index == layout.num_stages - 1
    assert len(neighbours) == (int(index > 0) + int(not is_last) if case.stages_share_memory else 0)
    stage_model = build_stage_model(
        case.model,
        FEATURES,
        CONFIG,
        case.stages,
        index,
        group,
        link,
        device=device,
        device_group=device_group or group,
    )
    runner = StageRunner(
        list(stage_model.layers.values()),
        layout=layout,
        stage=index,
        replica=replica,
        input_width=stage_model.input_width,
        output_width=stage_model.output_width,
        group=device_group or group,
        precision=case.precision,
        warmup_per_stage=case.warmup_per_stage,
        link=link,
        neighbours=neighbours,
        device=device,
    )
    return stage_model, runner


def microbatches_of(
    stage_model: StageModel, runner: StageRunner, batch: ClickBatch, case: Case
) -> list[MicroBatch]:
    microbatches = []
    for size, rows in runner.row_slices(batch.num_rows, case.num_microbatches):
        part = take(batch, rows.first, rows.stop)
        exchanges = [
            (layer.table, layer.table.exchange_row_numbers(layer.row_numbers(part)))
            for layer in stage_model.layers.values()
            if isinstance(layer, SlotEmbedding) and case.asks_ahead and layer.table.group is not None
        ]
        microbatches.append(MicroBatch(size, part.to(stage_model.device), exchanges))
    return microbatches


def train_all(rank: int, folder: str) -> None:
    for number, case in enumerate(CASES):
        if not case.can_run:
            continue
        part = make_replica(rank, case)
        if part is not None:
            torch.save(train_replica(*part, case), f"{folder}/{number}-{rank}.pt")


def train_replica(stage_model: StageModel, runner: StageRunner, case: Case) -> dict[str, object]:
    losses = []
    following = microbatches_of(stage_model, runner, make_batch(0, STEP_ROWS[0]), case)
    for step in range(len(STEP_ROWS)):
        microbatches = following
        if step + 1 < len(STEP_ROWS):
            following = microbatches_of(stage_model, runner, make_batch(step + 1, STEP_ROWS[step + 1]), case)
        is_followed = case.receives_ahead and step + 1 < len(STEP_ROWS)
        next_row_counts = [microbatch.num_rows for microbatch in following] if is_followed else []
        losses.append(sum(runner.train_step(microbatches, next_row_counts=next_row_counts)))
        stage_model.apply_gradients(
            dense_learning_rate=CONFIG.dense_learning_rate,
            embedding_learning_rate=CONFIG.embedding_learning_rate,
        )
    logits = runner.predict(microbatches_of(stage_model, runner, make_batch(99, NUM_HELD_OUT_ROWS), case))
    slices = [rows for _, rows in runner.row_slices(NUM_HELD_OUT_ROWS, case.num_microbatches)]
    return {
        "dense": {
            f"{name}.{parameter_name}": parameter.detach().cpu()
            for name, layer in stage_model.layers.items()
            for parameter_name, parameter in layer.named_parameters()
        },
        "shards": {name: (table.rows, table.weight_RD.cpu()) for name, table in stage_model.tables.items()},
        "losses": losses if runner.is_last else None,
        "logits": list(zip(slices, torch.split(logits, [rows.num_rows for rows in slices]), strict=True))
        if runner.is_last
        else [],
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all cases in one group of processes; starting one for each would take most of the time."""
    folder = tmp_path_factory.mktemp("trained")
    run_in_processes(train_all, max(sum(case.num_replicas) for case in CASES if case.can_run), str(folder))
    return folder


@cache
def trained_plainly(model: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], Tensor]:
    """Return parameters before and after, losses, and held-out logits of one process."""
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
        [make_batch(step, num_rows) for step, num_rows in enumerate(STEP_ROWS)],
        dense_learning_rate=CONFIG.dense_learning_rate,
        embedding_learning_rate=CONFIG.embedding_learning_rate,
    )
    with torch.no_grad():
        logits = plain(make_batch(99, NUM_HELD_OUT_ROWS))
    return before, plain.state_dict(), losses, logits


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number,
            id=str(case),
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not case.can_run, reason=f"needs CUDA devices: {case.num_cards}"),
            ]
            if case.on_cuda
            else [],
        )
        for number, case in enumerate(CASES)
    ],
)
def test_a_cut_model_learns_what_one_process_learns(number: int, trained: Path) -> None:
    case = CASES[number]
    before, after, losses, logits = trained_plainly(case.model)

    largest_difference, largest_update, num_logits = 0.0, 0.0, 0
    for rank in range(sum(case.num_replicas)):
        replica = torch.load(trained / f"{number}-{rank}.pt", weights_only=False)
        found = {f"chain.{name}": (slice(None), value) for name, value in replica["dense"].items()}
        for name, (rows, weight) in replica["shards"].items():
            found[f"chain.{name}.weight"] = (slice(rows.first, rows.stop), weight)
        for name, (rows, value) in found.items():
            largest_difference = max(largest_difference, (value - after[name][rows]).abs().max().item())
            largest_update = max(largest_update, (after[name] - before[name]).abs().max().item())
        if replica["losses"] is not None:
            assert replica["losses"] == pytest.approx(losses, abs=1e-5 if case.precision == "fp32" else 2e-2)
        for rows, part in replica["logits"]:
            num_logits += len(part)
            tolerance = 1e-4 if case.precision == "fp32" else 2e-2
            torch.testing.assert_close(part, logits[rows.first : rows.stop], atol=tolerance, rtol=tolerance)
    print(f"{case}: largest difference {largest_difference:.1e} of an update of {largest_update:.1e}")
    assert num_logits == NUM_HELD_OUT_ROWS
    assert largest_update > 0.01
    # A bfloat16 has eight bits.
    assert largest_difference < (1e-4 if case.precision == "fp32" else 0.05) * largest_update
