"""Pooled look-ups give and learn what torch's `nn.EmbeddingBag` does, however many replicas share the table."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from heterps_core.data.features import NO_ID
from heterps_core.embeddings import row_kernels
from heterps_core.embeddings.bags import Bags
from heterps_core.embeddings.row_optimizers import RowWiseSGD
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.embeddings.shared_memory_table import SharedMemoryTable
from heterps_core.transport.rank_layout import RankLayout
from heterps_core.transport.shared_memory_link import SharedMemoryLink
from tests.worker_processes import connected, run_in_processes

NUM_ROWS, NUM_SAMPLES = 60, 30
LENGTHS, POOLINGS = (1, 7, 4, 1), ("sum", "mean", "sum", "mean")
LEARNING_RATE = 0.5
BEFORE, BEHIND = 2, 3


def draw_rows(num_samples: int, *, seed: int) -> Tensor:
    """Rows of bags of all lengths from 1 to the largest, some of them twice in a bag."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for length in LENGTHS:
        rows = torch.randint(0, NUM_ROWS, (num_samples, length), generator=generator)
        counts = torch.randint(1, length + 1, (num_samples, 1), generator=generator)
        parts.append(rows.where(torch.arange(length) < counts, NO_ID))
    return torch.cat(parts, 1)


def make_table(width: int, **others) -> ShardedTable:
    table_class = partial(SharedMemoryTable, link=others.pop("link")) if "link" in others else ShardedTable
    return table_class(
        name="t",
        num_rows=NUM_ROWS,
        dimension=width,
        optimizer=RowWiseSGD(),
        seed=3,
        initial_standard_deviation=1.0,
        bags=Bags(LENGTHS, POOLINGS),
        **others,
    )


def factors(num_samples: int, width: int) -> Tensor:
    """What the loss weighs each output with."""
    return torch.randn(
        num_samples, BEFORE + len(LENGTHS) * width + BEHIND, generator=torch.Generator().manual_seed(9)
    )


def look_up(table: ShardedTable, rows: Tensor, weights: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """One step of a loss that is linear in the output."""
    before = torch.ones(len(rows), BEFORE, requires_grad=True)
    found = table.lookup(rows, before, torch.full((len(rows), BEHIND), 7.0), dtype=dtype)
    (found.float() * weights).sum().backward()
    torch.testing.assert_close(before.grad, weights[:, :BEFORE], rtol=1e-2, atol=1e-2)
    table.apply_gradients(learning_rate=LEARNING_RATE)
    return found.detach().float()


def by_embedding_bag(start: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the table after a step, by one `nn.EmbeddingBag` for each bag."""
    table = nn.Parameter(start.clone())
    width, parts, first = start.shape[1], [torch.ones(len(rows), BEFORE)], 0
    for length, pooling in zip(LENGTHS, POOLINGS, strict=True):
        bag = nn.EmbeddingBag(NUM_ROWS, width, mode=pooling, include_last_offset=False)
        bag.weight = table
        lists = [
            [row for row in of_sample if row != NO_ID]
            for of_sample in rows[:, first : first + length].tolist()
        ]
        offsets = [sum(map(len, lists[:number])) for number in range(len(lists))]
        parts.append(bag(torch.tensor([row for each in lists for row in each]), torch.tensor(offsets)))
        first += length
    found = torch.cat([*parts, torch.full((len(rows), BEHIND), 7.0)], 1)
    (found * weights).sum().backward()
    return found.detach(), (table - LEARNING_RATE * table.grad).detach()


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 16])
def test_pooling_is_that_of_embedding_bag_forward_and_backward(monkeypatch, width, dtype, has_kernels):
    if not has_kernels:
        monkeypatch.setattr(row_kernels, "row_kernels", lambda: None)
    elif row_kernels.row_kernels() is None:
        pytest.skip("no C++ compiler here")
    table = make_table(width)
    rows, weights = draw_rows(NUM_SAMPLES, seed=1), factors(NUM_SAMPLES, width)
    found, learned = by_embedding_bag(table.weight_RD, rows, weights)

    pooled = look_up(table, rows, weights, dtype)

    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(pooled, found, **tolerance)
    torch.testing.assert_close(table.weight_RD, learned, **tolerance)


@pytest.mark.parametrize("row", [-2, NUM_ROWS])
def test_a_row_outside_the_table_is_refused(row):
    rows = draw_rows(4, seed=1)
    rows[2, 1] = row

    with pytest.raises((IndexError, RuntimeError)):
        make_table(16).lookup(rows)


def learn_in_process(rank: int, shares_memory: bool) -> tuple[int, list[list[float]], list[list[float]]]:
    group = dist.group.WORLD
    others = {}
    if shares_memory:
        others["link"] = SharedMemoryLink.connect(
            group, layout=RankLayout(((0, 1, 2),)), silence_limit_s=60.0
        )
    else:
        others["peers"] = connected(group)
    table = make_table(16, **others)
    # The second replica has no sample.
    mine = [slice(0, 20), slice(20, 20), slice(20, 30)][rank]
    rows, weights = draw_rows(NUM_SAMPLES, seed=1)[mine], factors(NUM_SAMPLES, 16)[mine]
    found = look_up(table, rows, weights)
    return table.rows.first, table.weight_RD.tolist(), found.tolist()


@pytest.mark.parametrize("shares_memory", [False, True])
def test_three_replicas_find_and_learn_what_embedding_bag_does(shares_memory):
    shards = run_in_processes(learn_in_process, 3, shares_memory)

    found, learned = by_embedding_bag(
        make_table(16).weight_RD, draw_rows(NUM_SAMPLES, seed=1), factors(NUM_SAMPLES, 16)
    )
    assert [first for first, _, _ in shards] == [0, 20, 40]
    weight = torch.tensor([row for _, rows, _ in shards for row in rows])
    torch.testing.assert_close(weight, learned, rtol=1e-5, atol=1e-5)
    output = torch.tensor([row for _, _, rows in shards for row in rows])
    torch.testing.assert_close(output, found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_number_of_threads_does_not_change_a_bit(num_threads):
    before = torch.get_num_threads()
    weights = []
    try:
        for threads in (2, num_threads):
            torch.set_num_threads(threads)
            table = make_table(16)
            look_up(table, draw_rows(500, seed=2), factors(500, 16))
            weights.append(table.weight_RD)
    finally:
        torch.set_num_threads(before)

    assert torch.equal(*weights)
