"""However a model is cut and however many replicas share a stage, it learns what one process learns.

With delayed updates, what one process learns that delays them alike.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from heterps_core.compute_device import CPU
from heterps_core.data.batch import ClickBatch
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import DELAYED, SYNC, TrainingConfig
from heterps_core.training.pipeline.stage_device import join_by_nccl
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace, connect_neighbours
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.transport.rank_layout import RankLayout
from heterps_core.transport.shared_memory_link import SharedMemoryLink
from tests.heterps_core.training.cut_models import (
    DENSE_LEARNING_RATE,
    EMBEDDING_LEARNING_RATE,
    FEATURES,
    HELD_OUT,
    NUM_HELD_OUT_ROWS,
    RATES_OF_MODELS,
    SEED,
    STEP_ROWS,
    Delay,
    can_run,
    check_learned,
    initial_chain,
    learned_part,
    make_batch,
    numbers_of,
)
from tests.one_step import announced_microbatches, train_one_step
from tests.worker_processes import run_in_processes

pytestmark = pytest.mark.slow

CONFIG = TrainingConfig(
    batch_size=48,
    num_microbatches=3,
    num_epochs=1,
    seed=SEED,
    dense_optimizer="sgd",
    dense_learning_rate=DENSE_LEARNING_RATE,
    embedding_optimizer="sgd",
    embedding_learning_rate=EMBEDDING_LEARNING_RATE,
)


class Case(NamedTuple):
    model: str
    num_replicas: tuple[int, ...]
    first_layers: tuple[int, ...]
    num_microbatches: int = 3
    warmup_per_stage: int = 2
    asks_ahead: bool = False
    """Replicas request the rows of a step once, before the step before has updated the rows."""
    precision: str = "float32"
    receives_ahead: bool = True
    """The first activations of a step are received while the step before ends."""
    shares_memory: bool = False
    """Replicas of a stage have a link."""
    stages_share_memory: bool = False
    delays_updates: bool = False
    on_cuda: tuple[int, ...] = ()
    """Stages whose replicas compute on CUDA devices, each on one of its own."""
    shares: tuple[tuple[int, ...], ...] = ()

    @property
    def stages(self) -> tuple[Stage, ...]:
        lasts = [*(first - 1 for first in self.first_layers[1:]), len(initial_chain(self.model)) - 1]
        return tuple(
            Stage(first, last, "cpu", replicas)
            for first, last, replicas in zip(self.first_layers, lasts, self.num_replicas, strict=True)
        )

    @property
    def delay(self) -> Delay | None:
        if not self.delays_updates:
            return None
        names = [name for name, _ in initial_chain(self.model).named_children()]
        layers = dict(initial_chain(self.model).named_children())
        num_behind = {
            name: sum(first > index for first in self.first_layers)
            for index, name in enumerate(names)
            if isinstance(layers[name], SlotEmbedding)
        }
        return Delay(
            self.num_microbatches,
            tuple(
                (name, min(self.warmup_per_stage * behind, self.num_microbatches))
                for name, behind in num_behind.items()
            ),
            (0, *(DRAINED if self.receives_ahead else range(len(STEP_ROWS)))),
        )

    @property
    def num_cards(self) -> int:
        return max((self.num_replicas[stage] for stage in self.on_cuda), default=0)


DRAINED = (4, 5)
"""Steps before which the pipeline is empty, as after a checkpoint."""

CASES = [
    Case("ctrdnn", (2,), (0,)),
    Case("ctrdnn", (1, 1), (0, 3), num_microbatches=1),
    Case("ctrdnn", (1, 2), (0, 1), warmup_per_stage=1, receives_ahead=False),
    Case("ctrdnn", (3, 2, 1), (0, 2, 5), num_microbatches=6, shares_memory=True),
    Case("ctrdnn", (1, 2, 1, 2), (0, 1, 3, 5), stages_share_memory=True),
    # One replica has three times as many rows as the other; some have one row of a micro-batch, or none.
    Case("ctrdnn", (2,), (0,), asks_ahead=True, shares=((3, 1),)),
    Case("2emb", (2, 1, 2), (0, 3, 6), asks_ahead=True, shares=((1, 3), (1,), (2, 1))),
    Case(
        "deepfm",
        (2, 1, 2),
        (0, 2, 8),
        num_microbatches=6,
        delays_updates=True,
        stages_share_memory=True,
        shares=((15, 1), (1,), (1, 31)),
    ),
    Case("cross-deep", (2, 2, 1), (0, 2, 4), shares_memory=True, shares=((1, 3), (3, 1), (1,))),
    # Its sums of labels, in the second stage or in that of the vectors.
    Case("cross-deep", (2, 2, 1), (0, 2, 4), asks_ahead=True),
    Case("cross-deep", (2, 1), (0, 4), shares_memory=True),
    # Two stages with embeddings; the second has replicas that share its table.
    Case("2emb", (2, 1, 2), (0, 3, 6), num_microbatches=5, asks_ahead=True),
    Case("2emb", (2, 1, 2), (0, 3, 6), num_microbatches=5, precision="bfloat16"),
    Case("2emb", (2,), (0,), delays_updates=True, asks_ahead=True),
    # Some passes of each batch run ahead of the update before it, and the others do not.
    Case("2emb", (2, 2), (0, 5), num_microbatches=5, delays_updates=True, asks_ahead=True),
    Case(
        "deepfm",
        (2, 1, 2),
        (0, 2, 8),
        num_microbatches=6,
        warmup_per_stage=1,
        delays_updates=True,
        asks_ahead=True,
    ),
    Case(
        "2emb",
        (2, 1, 2),
        (0, 3, 6),
        num_microbatches=5,
        delays_updates=True,
        shares_memory=True,
        stages_share_memory=True,
    ),
    # The user's vector crosses both cuts; the second tower starts in the middle stage.
    Case("matchnet", (1, 2, 1), (0, 5, 9)),
    Case(
        "matchnet", (1, 2, 1), (0, 5, 9), delays_updates=True, receives_ahead=False, stages_share_memory=True
    ),
    # Its linear logit, and the factorised one, cross every cut; both tables in two stages.
    Case("deepfm", (2, 1, 2), (0, 2, 8), delays_updates=True, shares_memory=True),
    # Everything on a card; the planned split; embeddings on the card; a card between two stages on the host.
    Case("ctrdnn", (1,), (0,), on_cuda=(0,)),
    Case("2emb", (1,), (0,), precision="bfloat16", on_cuda=(0,)),
    Case("ctrdnn", (2, 1), (0, 1), num_microbatches=4, on_cuda=(1,)),
    Case("ctrdnn", (1, 2), (0, 3), on_cuda=(0,)),
    Case("matchnet", (1, 1, 2), (0, 5, 9), on_cuda=(1,)),
    # Rows, gradients and losses by NCCL; row indices ahead of the step, and not.
    Case("ctrdnn", (2,), (0,), asks_ahead=True, on_cuda=(0,)),
    Case("2emb", (1, 2), (0, 4), on_cuda=(1,)),
]


def make_replica(rank: int, case: Case) -> tuple[StageModel, StageRunner] | None:
    """Return this rank's part in a case, or None where the case has fewer processes."""
    ranks, next_rank = [], 0
    for num_replicas in case.num_replicas:
        ranks.append(tuple(range(next_rank, next_rank + num_replicas)))
        next_rank += num_replicas
    layout = RankLayout(tuple(ranks), case.shares)
    groups, sum_groups = ([dist.new_group(list(members)) for members in ranks] for _ in range(2))
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
    neighbours = connect_neighbours(
        layout, rank=rank, device=device, group=everyone, shares_memory=case.stages_share_memory
    )
    is_last = index == layout.num_stages - 1
    assert len(neighbours) == int(index > 0) + int(not is_last)
    place = StagePlace(
        layout=layout,
        stage=index,
        replica=replica,
        device=device,
        group=group,
        cards_group=device_group,
        sum_group=sum_groups[index] if group is not None and device == CPU else None,
        link=link,
        neighbours=neighbours,
    )
    stage_model = build_stage_model(case.model, FEATURES, CONFIG, case.stages, place)
    config = replace(CONFIG, precision=case.precision, update_mode=DELAYED if case.delays_updates else SYNC)
    runner = StageRunner(stage_model, config, place, warmup_per_stage=case.warmup_per_stage)
    return stage_model, runner


def microbatches_of(
    stage_model: StageModel, runner: StageRunner, batch: ClickBatch, case: Case
) -> list[MicroBatch]:
    if case.asks_ahead:
        return announced_microbatches(stage_model, runner, batch, num_microbatches=case.num_microbatches)
    return [
        MicroBatch(size, batch.rows(rows.first, rows.stop).to(stage_model.device))
        for size, rows in runner.row_slices(batch.num_rows, case.num_microbatches)
    ]


def train_all(rank: int, folder: str) -> None:
    for number, case in enumerate(CASES):
        if not can_run(case):
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
        is_followed = case.receives_ahead and step + 1 < len(STEP_ROWS) and step + 1 not in DRAINED
        losses += train_one_step(
            stage_model,
            runner,
            microbatches,
            following=following if is_followed else [],
            dense_learning_rate=CONFIG.dense_learning_rate,
            embedding_learning_rate=RATES_OF_MODELS.get(case.model, CONFIG.embedding_learning_rate),
        )
    held_out = make_batch(HELD_OUT, NUM_HELD_OUT_ROWS)
    logits = runner.predict(microbatches_of(stage_model, runner, held_out, case))
    return learned_part(stage_model, runner, losses, logits, num_microbatches=case.num_microbatches)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all cases in one group of processes; starting one for each would take most of the time."""
    folder = tmp_path_factory.mktemp("trained")
    run_in_processes(train_all, max(sum(case.num_replicas) for case in CASES if can_run(case)), str(folder))
    return folder


@pytest.mark.parametrize("number", numbers_of(CASES))
def test_a_cut_model_learns_what_one_process_learns(number: int, trained: Path) -> None:
    case = CASES[number]
    parts = [
        torch.load(trained / f"{number}-{rank}.pt", weights_only=False)
        for rank in range(sum(case.num_replicas))
    ]

    if case.precision == "float32":
        check_learned(parts, case.model, delay=case.delay)
    else:
        # A bfloat16 has eight bits.
        check_learned(parts, case.model, loss_tolerance=2e-2, logit_tolerance=2e-2, weight_tolerance=0.05)
