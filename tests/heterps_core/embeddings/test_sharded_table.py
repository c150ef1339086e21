"""A table gives and learns the same rows however many replicas share it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from heterps_core.embeddings.initial_rows import ROWS_PER_BLOCK, initial_rows
from heterps_core.embeddings.row_optimizers import RowWiseAdagrad
from heterps_core.embeddings.row_range import RowRange, shard_rows
from heterps_core.embeddings.sharded_table import ShardedTable
from tests.worker_processes import connected, run_in_processes

NUM_ROWS, DIMENSION = 101, 4


def make_table(group: dist.ProcessGroup | None) -> ShardedTable:
    return ShardedTable(
        name="t",
        num_rows=NUM_ROWS,
        dimension=DIMENSION,
        optimizer=RowWiseAdagrad(),
        seed=3,
        initial_standard_deviation=1.0,
        peers=connected(group),
    )


def look_up_and_learn(table: ShardedTable, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    found = table.lookup(rows[:, None])
    (found * weights).sum().backward()
    return found.detach()


def rows_of(rank: int) -> torch.Tensor:
    # Replica 1 asks for nothing; the others share rows, with repeats.
    return [torch.tensor([5, 100, 5, 40, 0]), torch.empty(0, dtype=torch.int64), torch.tensor([40, 99, 5])][
        rank
    ]


def learn_in_process(rank: int) -> tuple[RowRange, list[list[float]], list[list[float]]]:
    table = make_table(dist.group.WORLD)
    found = []
    for _ in range(3):
        rows = rows_of(rank)
        found = look_up_and_learn(table, rows, torch.arange(len(rows) * DIMENSION).view(-1, DIMENSION) + 1.0)
        table.apply_gradients(learning_rate=0.1)
    return table.rows, table.weight_RD.tolist(), found.tolist()


def test_three_replicas_find_and_learn_the_rows_of_one_process():
    shards = run_in_processes(learn_in_process, 3)

    table = make_table(None)
    for _ in range(3):
        found = [
            look_up_and_learn(table, rows_of(rank), torch.arange(len(rows_of(rank)) * 4).view(-1, 4) + 1.0)
            for rank in range(3)
        ]
        table.apply_gradients(learning_rate=0.1)
    for rank, (rows, weight, found_there) in enumerate(shards):
        expected = table.weight_RD[rows.first : rows.stop]
        torch.testing.assert_close(torch.tensor(weight), expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(torch.tensor(found_there).view(-1, 4), found[rank], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_initial_rows_do_not_depend_on_the_shards(num_shards):
    num_rows = ROWS_PER_BLOCK + 1000
    options = {"table": "t", "dimension": 2, "seed": 1, "standard_deviation": 0.5}
    whole = initial_rows(RowRange(0, num_rows), **options)

    parts = [initial_rows(shard_rows(num_rows, num_shards, shard), **options) for shard in range(num_shards)]

    assert torch.equal(torch.cat(parts), whole)
    assert whole.std() == pytest.approx(0.5, rel=0.02)


def test_tables_of_other_names_and_seeds_start_otherwise():
    options = {"dimension": 2, "standard_deviation": 1.0}
    first = initial_rows(RowRange(0, 4), table="a", seed=1, **options)

    assert not torch.equal(first, initial_rows(RowRange(0, 4), table="b", seed=1, **options))
    assert not torch.equal(first, initial_rows(RowRange(0, 4), table="a", seed=2, **options))


@pytest.mark.parametrize(("num_rows", "num_shards"), [(10, 4), (3, 5), (8, 2), (1, 1)])
def test_shards_are_cut_as_torch_cuts_chunks(num_rows, num_shards):
    chunks = [len(chunk) for chunk in torch.arange(num_rows).chunk(num_shards)]

    sizes = [shard_rows(num_rows, num_shards, shard).num_rows for shard in range(num_shards)]

    assert [size for size in sizes if size] == chunks
