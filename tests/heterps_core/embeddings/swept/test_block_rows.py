"""What windows make of a block, in C++ and by NumPy, is what Python's sets and dictionaries make of it."""

from __future__ import annotations

import numpy as np
import pytest

from heterps_core.embeddings.swept.block_rows import NOTHING, change_of, move_marks, write_slots

pytestmark = pytest.mark.usefixtures("compiled_or_numpy")

FIRST, NUM_ROWS = 3_072, 1_024


@pytest.mark.parametrize(
    ("num_in_memory", "sizes"),
    [
        (300, (200, 0, 350)),
        (0, (5, 5)),
        (NUM_ROWS, (NUM_ROWS,)),
        (NUM_ROWS, ()),
        (1, (1, 1, 1, 1, 1)),
        (0, ()),
    ],
)
def test_rows_stay_leave_and_come_as_windows_have_them(num_in_memory, sizes):
    generator = np.random.default_rng(num_in_memory)
    before = np.sort(generator.permutation(NUM_ROWS)[:num_in_memory]).astype(np.int32)
    slots = generator.permutation(5_000)[:num_in_memory].astype(np.int32)
    windows = [(FIRST + np.sort(generator.permutation(NUM_ROWS)[:size])).astype(np.uint32) for size in sizes]
    slot_of_row = dict(zip(before.tolist(), slots.tolist(), strict=True))
    wanted = {row - FIRST for own in windows for row in own.tolist()}

    change = change_of((before, slots), windows, first=FIRST, num_rows=NUM_ROWS)

    assert change.staying[0].tolist() == sorted(wanted & set(slot_of_row))
    assert change.leaving[0].tolist() == sorted(set(slot_of_row) - wanted)
    assert change.coming.tolist() == sorted(wanted - set(slot_of_row))
    for rows, own in (change.staying, change.leaving):
        assert own.tolist() == [slot_of_row[row] for row in rows.tolist()]

    taken = 5_000 + generator.permutation(len(change.coming)).astype(np.int32)
    slot_of_row |= dict(zip(change.coming.tolist(), taken.tolist(), strict=True))
    rows, own = change.entered(taken)
    assert rows.tolist() == sorted(wanted)
    assert own.tolist() == [slot_of_row[row] for row in sorted(wanted)]

    found = [np.empty(size, dtype=np.int32) for size in sizes]
    write_slots((rows, own), windows, found, first=FIRST, num_rows=NUM_ROWS)
    assert [each.tolist() for each in found] == [
        [slot_of_row[row - FIRST] for row in each.tolist()] for each in windows
    ]


def test_a_block_that_no_window_needs_stays_empty():
    change = change_of(NOTHING, [np.empty(0, dtype=np.uint32)], first=0, num_rows=NUM_ROWS)

    assert [len(rows) for rows in (change.staying[0], change.leaving[0], change.coming)] == [0, 0, 0]


def test_marks_of_slots_become_bits_of_rows_that_leave():
    generator = np.random.default_rng(5)
    rows = np.sort(generator.permutation(NUM_ROWS)[:300]).astype(np.int32)
    slots = generator.permutation(2_000)[:300].astype(np.int32)
    is_changed = generator.random(2_000) < 0.5
    had_changed = generator.random(NUM_ROWS) < 0.1
    bits = np.packbits(had_changed)
    expected = had_changed.copy()
    expected[rows[is_changed[slots]]] = True
    others = np.delete(np.arange(2_000), slots)
    untouched = is_changed[others].copy()

    move_marks(is_changed, (rows, slots), bits)

    assert (np.unpackbits(bits).astype(bool) == expected).all()
    assert not is_changed[slots].any()
    assert (is_changed[others] == untouched).all()
