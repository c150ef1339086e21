"""Replicas of a stage send rows once a step, whatever the number of its tables and micro-batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch.distributed as dist

from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import DELAYED, TrainingConfig
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace, connect_neighbours
from heterps_core.training.pipeline.stage_runner import StageRunner
from heterps_core.training.replica_batches import request_rows
from heterps_core.transport.peer_sockets import PeerSockets
from heterps_core.transport.rank_layout import RankLayout
from tests.heterps_core.training.cut_models import FEATURES, make_batch
from tests.one_step import announced_microbatches, train_one_step
from tests.worker_processes import run_in_processes

pytestmark = pytest.mark.slow

CONFIG = TrainingConfig(batch_size=40, num_microbatches=1, num_epochs=1, seed=1)
RATES = {"dense_learning_rate": 0.1, "embedding_learning_rate": 0.1}
NUM_STEPS, WARMUP_PER_STAGE = 3, 2
TWO_TABLES = "2emb"
ALL_LAYERS = (Stage(0, 9, "cpu", 2),)


def counted(counts: Counter[str], name: str) -> None:
    method = getattr(PeerSockets, name)

    @wraps(method)
    def counting(*arguments: Any, **options: Any) -> Any:
        counts[name] += 1
        return method(*arguments, **options)

    setattr(PeerSockets, name, counting)


def count_messages(rank: int, num_microbatches: int, is_delayed: bool) -> dict[str, float]:
    """Return how many messages of each kind this worker sent in a step, on average."""
    stages = (Stage(0, 7, "cpu", 2), Stage(8, 9, "cpu", 1)) if is_delayed else ALL_LAYERS
    layout = RankLayout(((0, 1), (2,)) if is_delayed else ((0, 1),))
    replicas = dist.new_group([0, 1])
    stage, replica = layout.position(rank)
    place = StagePlace(
        layout=layout,
        stage=stage,
        replica=replica,
        group=replicas if stage == 0 else None,
        neighbours=connect_neighbours(layout, rank=rank, shares_memory=False),
    )
    config = replace(CONFIG, update_mode=DELAYED) if is_delayed else CONFIG
    counts: Counter[str] = Counter()
    model = build_stage_model(TWO_TABLES, FEATURES, config, stages, place)
    runner = StageRunner(model, config, place, warmup_per_stage=WARMUP_PER_STAGE)
    for name in ("exchange_sized", "exchange_rows"):
        counted(counts, name)
    coming = announced_microbatches(model, runner, make_batch(0, 40), num_microbatches=num_microbatches)
    for step in range(NUM_STEPS):
        batch, coming = coming, []
        if step + 1 < NUM_STEPS:
            coming = announced_microbatches(
                model, runner, make_batch(step + 1, 40), num_microbatches=num_microbatches
            )
        train_one_step(model, runner, batch, following=coming, **RATES)
    return {name: count / NUM_STEPS for name, count in counts.items()}


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_rows_and_gradients_of_two_tables_are_a_message_each(num_microbatches):
    for found in run_in_processes(count_messages, 2, num_microbatches, False):
        assert found == {"exchange_sized": 1, "exchange_rows": 2}


def test_rows_come_twice_where_passes_run_ahead_of_an_update_and_others_do_not():
    *replicas, last = run_in_processes(count_messages, 3, 5, True)

    # The first batch, which no update interrupts, gets its rows at once.
    assert replicas == [{"exchange_sized": 1, "exchange_rows": (2 + 3 + 3) / 3}] * 2
    assert last == {}


def request_together_and_alone(rank: int) -> tuple[dict[str, int], list[bool]]:
    """Return the messages for the requests of four batches at once, and whether each is what it is alone."""
    place = StagePlace(layout=RankLayout(((0, 1),)), replica=rank, group=dist.group.WORLD)
    model = build_stage_model(TWO_TABLES, FEATURES, CONFIG, ALL_LAYERS, place)
    batch = make_batch(rank, 40)
    counts: Counter[str] = Counter()
    counted(counts, "exchange_sized")
    together = request_rows(batch, model, num_batches=4)
    messages, same = dict(counts), []
    for number, of_batch in enumerate(together):
        (alone,) = request_rows(batch.rows(10 * number, 10 * number + 10), model)
        same.append([table for table, _ in of_batch] == [table for table, _ in alone])
        for (_, found), (_, expected) in zip(of_batch, alone, strict=True):
            assert found.exchange is not None
            assert expected.exchange is not None
            same.append(found.rows_BS.equal(expected.rows_BS))
            same.append(found.exchange.local_rows.equal(expected.exchange.local_rows))
            same.append(found.exchange.sent_counts == expected.exchange.sent_counts)
            same.append(found.exchange.received_counts == expected.exchange.received_counts)
            same.append(len(found.exchange.of_batch) == len(of_batch))
    return messages, same


def test_requests_of_batches_that_are_read_together_are_one_message_and_as_they_are_alone():
    for messages, same in run_in_processes(request_together_and_alone, 2):
        assert messages == {"exchange_sized": 1}
        assert len(same) == 4 * (1 + 2 * 5)
        assert all(same)
