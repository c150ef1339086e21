"""A table of which some rows are in memory gives, learns and stores what one gives that is in memory whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from heterps_core.data.features import NO_ID
from heterps_core.embeddings.bags import Bags
from heterps_core.embeddings.row_optimizers import ROW_OPTIMIZERS, RowWiseAdagrad
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.embeddings.swept import cold_rows
from heterps_core.embeddings.swept.row_windows import RowWindow, WindowLength
from heterps_core.embeddings.swept.sweep_memory import NUM_PARTS
from heterps_core.embeddings.swept.swept_table import ColdRowsPlace, SweptTable
from heterps_core.errors import TrainingError

NUM_ROWS, DIMENSION, NUM_COLUMNS, MOST_ROWS = 9_001, 4, 6, 300
NUM_SLOTS = 700


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine blocks of 1,024 rows, the last of them not full; the first part has two of them."""
    monkeypatch.setattr(cold_rows, "BLOCK_BYTES", 1)


def make_tables(folder: Path, optimizer: str = "rowwise-adagrad", bags: Bags | None = None):
    """Return the same table in memory and not."""
    options = {
        "name": "t",
        "num_rows": NUM_ROWS,
        "dimension": DIMENSION,
        "optimizer": ROW_OPTIMIZERS[optimizer](),
        "seed": 1,
        "initial_standard_deviation": 0.1,
        "bags": bags,
    }
    place = ColdRowsPlace(folders=[folder], num_slots=NUM_SLOTS)
    return ShardedTable(**options), SweptTable(place=place, **options)


def draw_batches(count: int, *, seed: int = 0, fill: bool = False) -> list[torch.Tensor]:
    """Return batches of which frequent rows are in many, and all together in nearly half the table."""
    generator = np.random.default_rng(seed)
    batches = (NUM_ROWS * generator.random((count, MOST_ROWS // NUM_COLUMNS, NUM_COLUMNS)) ** 4).astype(int)
    if fill:
        batches[:, :, 1:][generator.random((*batches.shape[:2], NUM_COLUMNS - 1)) < 0.3] = NO_ID
        # After an end no row follows.
        batches = -np.sort(-batches, axis=2)
    return list(torch.from_numpy(batches))


def windows_of(table: SweptTable, batches: list[torch.Tensor]) -> list[tuple[RowWindow, list[torch.Tensor]]]:
    plan, length, windows, own = table.new_plan(), WindowLength(), [], []
    for batch in batches:
        rows = np.unique(batch[batch != NO_ID])
        while not plan.fits(rows) or len(own) == length.most_batches:
            length.end_window(len(own), is_full=not plan.fits(rows))
            windows.append((plan.end_window(), own))
            own = []
        plan.add(rows)
        own.append(batch)
    return [*windows, (plan.end_window(), own)]


def swept_in_turn(table: SweptTable, batches: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield batches for a look-up each, whose rows are in memory; a part is visited before each window's batches."""
    nothing = [(RowWindow(), [])] * NUM_PARTS
    windows = [*nothing, *windows_of(table, batches), *nothing]
    for number in range(len(windows) - NUM_PARTS):
        table.visit(number % NUM_PARTS, [window for window, _ in windows[number : number + NUM_PARTS + 1]])
        window, own = windows[number]
        for batch in own:
            table.expect(table.with_slots(table.exchange_row_numbers(batch), window))
            yield batch


def learn(table: ShardedTable, batch: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    found = table.lookup(batch, packs=True)
    (found * weights[:, : found.shape[1]]).sum().backward()
    table.apply_gradients(learning_rate=0.1)
    return found.detach()


def assert_rows_alike(table: SweptTable, expected: ShardedTable) -> None:
    stop = 0
    for rows, tensors in table.row_blocks():
        assert rows.first == stop
        stop = rows.stop
        for name, tensor in expected.tensors().items():
            assert torch.equal(tensors[name], tensor[rows.first : rows.stop])
    assert stop == NUM_ROWS


LISTS = Bags([3, 1, 2], ["mean", "sum", "sum"])
SEQUENCES = Bags([2, 1], ["mean", "sum"])
"""Three columns of values after them."""


@pytest.mark.parametrize("bags", [None, LISTS, SEQUENCES], ids=["rows", "lists", "sequences"])
@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_rows_learn_bit_for_bit_what_they_learn_in_memory(optimizer, bags, tmp_path):
    expected, table = make_tables(tmp_path, optimizer, bags)
    batches = draw_batches(40, fill=bags is not None)
    generator = torch.Generator().manual_seed(0)

    for number, batch in enumerate(swept_in_turn(table, batches)):
        weights = torch.randn(len(batch), NUM_COLUMNS * DIMENSION, generator=generator)
        assert torch.equal(learn(table, batch, weights), learn(expected, batch, weights))
        if number % 10 == 5:
            assert_rows_alike(table, expected)

    table.empty()
    assert_rows_alike(table, expected)
    assert len(windows_of(table, batches)) > 10
    assert 0 < table.counts.rows_fetched < table.counts.rows_asked


def put_rows(tensors: dict[str, torch.Tensor], changes: Iterator) -> int:
    """Write changed rows over older ones; returns how many there were."""
    count = 0
    for rows_U, changed in changes:
        assert (rows_U[1:] > rows_U[:-1]).all()
        for name, tensor in changed.items():
            tensors[name][rows_U] = tensor
        count += len(rows_U)
    return count


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise-adam"])
def test_changed_rows_that_are_read_while_the_training_goes_on_are_those_of_their_step(optimizer, tmp_path):
    """Sweeps wait for blocks whose changed rows are not read yet: else two would have ended before they are."""
    expected, table = make_tables(tmp_path, optimizer)
    num_visits, visit = threading.Semaphore(0), table.visit

    def visit_and_tell(part: int, windows: list[RowWindow]) -> None:
        visit(part, windows)
        num_visits.release()

    table.visit = visit_and_tell

    def read_late() -> int:
        count = 0
        while num_visits.acquire(timeout=0.2):
            count += 1
            if count == 2 * NUM_PARTS:
                break
        return put_rows(kept, table.remaining_changes())

    table.forget_changes()
    kept = {name: tensor.clone() for name, tensor in expected.tensors().items()}
    generator = torch.Generator().manual_seed(0)
    counts: list[tuple[int, int]] = []
    of_step: dict[str, torch.Tensor] = {}
    batches = draw_batches(90)
    with ThreadPoolExecutor(1) as beside:
        reading = None
        for number, batch in enumerate(swept_in_turn(table, batches)):
            weights = torch.randn(len(batch), NUM_COLUMNS * DIMENSION, generator=generator)
            learn(table, batch, weights)
            learn(expected, batch, weights)
            if number % 30 == 29:
                if reading is not None:
                    counts[-1] = (counts[-1][0], reading.result())
                    assert all(torch.equal(kept[name], tensor) for name, tensor in of_step.items())
                of_step = {name: tensor.clone() for name, tensor in expected.tensors().items()}
                counts.append((put_rows(kept, table.take_changes(2_000)), 0))
                while num_visits.acquire(blocking=False):
                    pass
                reading = beside.submit(read_late)

        counts[-1] = (counts[-1][0], reading.result())
        assert all(torch.equal(kept[name], tensor) for name, tensor in of_step.items())

    for number, (in_memory, on_disk) in enumerate(counts):
        changed = np.unique(torch.stack(batches[30 * number : 30 * number + 30]))
        assert in_memory + on_disk == len(changed)
        assert in_memory > 0
        assert on_disk > 0


def test_sweeps_go_on_where_changed_rows_cannot_be_read(tmp_path):
    _, table = make_tables(tmp_path)
    for batch in swept_in_turn(table, draw_batches(20)):
        learn(table, batch, torch.ones(len(batch), NUM_COLUMNS * DIMENSION))
    list(table.take_changes(2_000))
    size = os.fstat(table.cold._files[0]._file).st_size
    os.ftruncate(table.cold._files[0]._file, 0)
    with pytest.raises(TrainingError, match="could not be read"):
        list(table.remaining_changes())
    os.ftruncate(table.cold._files[0]._file, size)

    table.empty()


def visit_all(table: SweptTable, *rows: range, writes: bool = True) -> list[RowWindow]:
    windows = [RowWindow(np.array(own, dtype=np.uint32), num_asked=len(own)) for own in rows]
    for part in range(NUM_PARTS):
        table.visit(part, windows, writes=writes)
    return windows


def test_only_rows_that_are_not_in_memory_are_fetched(tmp_path):
    """Counted by hand; all of these rows are in one block."""
    _, table = make_tables(tmp_path)

    visit_all(table, range(10), range(5, 15))
    visit_all(table, range(5, 15), range(5, 10))
    visit_all(table, range(5, 10))
    visit_all(table, range(3), range(5, 10))

    assert table.counts.rows_fetched == 15 + 0 + 0 + 3
    # Rows 0 to 4 left with the second sweep, 10 to 14 with the third; the first and the last only fetched.
    assert table.counts.bytes_written == 2 * table.cold.block_bytes
    assert table.counts.bytes_read == 4 * table.cold.block_bytes


def test_rows_that_find_no_room_at_first_come_once_others_have_left(tmp_path):
    """What leaves stands in the part behind all that comes, so no block has room in the first pass."""
    expected, table = make_tables(tmp_path)
    table.visit(0, [RowWindow(np.arange(1_030, 1_730, dtype=np.uint32))])
    assert table._num_free == 0

    window = RowWindow(np.arange(500, dtype=np.uint32))
    table.visit(0, [window])

    assert len(np.unique(window.slots)) == 500
    assert torch.equal(table.weight_RD[window.slots], expected.weight_RD[:500])


def test_rows_that_are_only_read_are_not_written(tmp_path):
    _, table = make_tables(tmp_path)
    written = table.cold.write
    table.cold.write = lambda *args: pytest.fail("a block was written")

    visit_all(table, range(100), writes=False)
    table.empty(writes=False)

    table.cold.write = written
    assert table.counts.rows_fetched == 0
    assert table._num_free == NUM_SLOTS


def test_what_is_written_to_row_blocks_is_kept(tmp_path):
    expected, table = make_tables(tmp_path)
    for _, tensors in table.row_blocks(writes=True):
        tensors["weight"].mul_(2.0)
    expected.weight_RD.mul_(2.0)

    assert_rows_alike(table, expected)


def test_a_look_up_that_was_not_announced_is_refused(tmp_path):
    _, table = make_tables(tmp_path)

    with pytest.raises(RuntimeError, match="must be announced"):
        table.lookup(torch.zeros(2, 3, dtype=torch.int64))


def test_a_row_that_is_not_in_the_table_is_refused_ahead(tmp_path):
    _, table = make_tables(tmp_path)

    with pytest.raises(IndexError, match=r"must lie in 0\.\.9000"):
        table.exchange_row_numbers(torch.tensor([[NUM_ROWS]]))


def test_a_file_that_became_shorter_ends_the_sweep_with_its_place(tmp_path):
    _, table = make_tables(tmp_path)
    os.ftruncate(table.cold._files[0]._file, 3 * table.cold.block_bytes)

    with pytest.raises(TrainingError) as failure:
        visit_all(table, range(10, 4_011, 4_000))

    block_bytes = table.cold.block_bytes
    assert f"bytes {3 * block_bytes:,} to {4 * block_bytes:,} of the file with the rows of table 't'" in str(
        failure.value
    )
    assert "could not be read: the file ends before" in str(failure.value)


def test_the_state_of_rows_that_were_never_touched_is_that_of_a_new_table(tmp_path):
    _, table = make_tables(tmp_path)

    found = [tensors["accumulator"] for _, tensors in table.row_blocks()]

    assert torch.equal(torch.cat(found), torch.full((NUM_ROWS,), RowWiseAdagrad.INITIAL_ACCUMULATOR))
