"""The compiled kernels do what torch does, and nothing breaks where they cannot be built."""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from heterps_core.embeddings import row_kernels
from heterps_core.embeddings.row_kernels import RowKernels, build
from heterps_core.embeddings.row_optimizers import ROW_OPTIMIZERS, get_row_optimizer
from heterps_core.embeddings.row_range import RowRange
from heterps_core.embeddings.sharded_table import ShardedTable

NUM_ROWS = 40


@pytest.fixture
def kernels() -> RowKernels:
    found = row_kernels.row_kernels()
    if found is None:
        pytest.skip("no C++ compiler here")
    return found


def make_part(seed: int, num_samples: int, num_slots: int, width: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, NUM_ROWS, (num_samples, num_slots), generator=generator)
    wide = torch.randn(num_samples, num_slots * width + 3, generator=generator).to(dtype)
    # Columns of a wider tensor, as they come out of the layer behind.
    return rows, wide[:, 2 : 2 + num_slots * width]


@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 16])
@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_an_update_is_the_one_that_torch_makes(kernels, monkeypatch, name, width, dtype, l2):
    optimizer = get_row_optimizer(name)(l2=l2)
    start = torch.randn(NUM_ROWS, width)
    tables = {"kernel": start.clone(), "torch": start.clone()}
    states = {which: optimizer.new_state(NUM_ROWS, width) for which in tables}
    for which in tables:
        monkeypatch.setattr(
            row_kernels, "row_kernels", lambda which=which: kernels if which == "kernel" else None
        )
        for step in range(5):
            # 71 occurrences of 40 rows, in two look-ups of unlike shape; most rows occur in both.
            parts = [make_part(2 * step, 20, 3, width, dtype), make_part(2 * step + 1, 11, 1, width, dtype)]
            optimizer.update_repeated(tables[which], states[which], parts, learning_rate=0.1)

    torch.testing.assert_close(tables["kernel"], tables["torch"], rtol=1e-5, atol=1e-5)
    for key, value in states["torch"].items():
        torch.testing.assert_close(states["kernel"][key], value, rtol=1e-5, atol=1e-6)
    assert not torch.equal(tables["torch"], start)


@pytest.mark.parametrize("which", ["kernel", "torch"])
@pytest.mark.parametrize("cut", [0, 13, NUM_ROWS])
def test_shards_pass_over_the_rows_of_others_and_learn_together_what_one_table_learns(
    kernels, monkeypatch, which, cut
):
    optimizer = get_row_optimizer("rowwise-adagrad")()
    monkeypatch.setattr(row_kernels, "row_kernels", lambda: kernels if which == "kernel" else None)
    start = torch.randn(NUM_ROWS, 16)
    whole, state = start.clone(), optimizer.new_state(NUM_ROWS, 16)
    shards = [RowRange(0, cut), RowRange(cut, NUM_ROWS)]
    cuts = [start[shard.first : shard.stop].clone() for shard in shards]
    states = [optimizer.new_state(shard.num_rows, 16) for shard in shards]
    for step in range(3):
        parts = [
            make_part(2 * step, 20, 3, 16, torch.float32),
            make_part(2 * step + 1, 11, 1, 16, torch.float32),
        ]
        optimizer.update_repeated(whole, state, parts, learning_rate=0.1)
        for shard, weight, own_state in zip(shards, cuts, states, strict=True):
            optimizer.update_repeated(weight, own_state, parts, learning_rate=0.1, shard=shard)

    torch.testing.assert_close(torch.cat(cuts), whole, rtol=1e-5, atol=1e-6)
    assert not torch.equal(whole, start)


def test_the_number_of_threads_does_not_change_a_bit(kernels):
    found = []
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            weight = torch.zeros(NUM_ROWS, 16)
            parts = [make_part(7, 200, 3, 16, torch.float32)]
            kernels.update("sgd", weight, [], parts, learning_rate=1.0)
            found.append(weight)
    finally:
        torch.set_num_threads(num_threads)

    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_copied_into_the_columns_of_a_wider_tensor(kernels, dtype):
    weight = torch.randn(NUM_ROWS, 4)
    rows, _ = make_part(1, 9, 3, 4, dtype)
    wide = torch.full((9, 15), 7.0, dtype=dtype)

    kernels.gather(weight, rows, wide[:, 2:14])

    assert torch.equal(wide[:, 2:14], weight[rows].to(dtype).view(9, 12))
    assert torch.equal(wide[:, [0, 1, 14]], torch.full((9, 3), 7.0, dtype=dtype))


@pytest.mark.parametrize("row", [-1, NUM_ROWS, 2**40])
def test_a_row_outside_the_table_is_refused_and_nothing_is_updated(kernels, row):
    weight = torch.zeros(NUM_ROWS, 4)
    rows = torch.tensor([[3], [row], [5]])

    with pytest.raises(IndexError, match=f"row {row} is out of range for a table shard of 40 rows"):
        kernels.update("sgd", weight, [], [(rows, torch.ones(3, 4))], learning_rate=1.0)
    with pytest.raises(IndexError, match=f"row {row} is out of range"):
        kernels.gather(weight, rows, torch.empty(3, 4))

    assert not weight.any()


def test_a_table_learns_the_same_without_kernels(kernels, monkeypatch):
    weights = []
    for found in (kernels, None):
        monkeypatch.setattr(row_kernels, "row_kernels", lambda found=found: found)
        table = ShardedTable(
            name="t",
            num_rows=NUM_ROWS,
            dimension=4,
            optimizer=get_row_optimizer("rowwise-adam")(),
            seed=1,
            initial_standard_deviation=1.0,
        )
        for step in range(3):
            rows, weight = make_part(step, 30, 2, 4, torch.float32)
            before = torch.ones(30, 2, requires_grad=True)
            leaving = table.lookup(rows, before, torch.ones(30, 3))
            (leaving[:, 2:10] * weight + leaving[:, :2].repeat(1, 4)).sum().backward()
            table.apply_gradients(learning_rate=0.1)
            assert torch.equal(before.grad, torch.full((30, 2), 4.0))
        weights.append(table.weight_RD)

    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


@pytest.mark.weekly
def test_processes_may_build_into_one_folder_at_the_same_time(kernels, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        libraries = list(pool.map(lambda _: build(tmp_path), range(2)))

    assert libraries[0] == libraries[1]
    assert [path.name for path in tmp_path.iterdir()] == [libraries[0].name]
    RowKernels(libraries[0])


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "", "PATH": ""}, "no C.. compiler"),
        ({"CXX": "/nonexistent/g++"}, "/nonexistent/g++"),
        ({"CXX": "false"}, "non-zero exit status 1"),
    ],
)
def test_without_a_working_compiler_one_line_is_logged(monkeypatch, tmp_path, caplog, environment, reason):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path))
    row_kernels.row_kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert row_kernels.row_kernels() is None
            assert row_kernels.row_kernels() is None
    finally:
        row_kernels.row_kernels.cache_clear()

    assert len(caplog.records) == 1
    assert "updated by torch" in caplog.text
    assert re.search(reason, caplog.text)


def test_a_folder_that_cannot_be_written_is_replaced_by_a_temporary_one(kernels, monkeypatch, tmp_path):
    occupied = tmp_path / "home"
    occupied.write_text("a file")
    monkeypatch.setenv("HETERPS_HOME", str(occupied))

    folder = row_kernels._cache_folder()

    assert folder.is_dir()
    folder.rmdir()
