"""Windows end where memory is full."""

from __future__ import annotations

import numpy as np
import pytest

from heterps_core.embeddings.swept.row_windows import BATCHES_AHEAD, RowWindow, WindowLength, WindowPlan
from heterps_core.embeddings.swept.sweep_memory import NUM_PARTS

NUM_ROWS, NUM_SLOTS = 4_000, 700
PARTS = np.array([0, 1_000, 2_000, 3_000, NUM_ROWS])


def drawn_batches() -> list[np.ndarray]:
    """Return batches of up to 100 rows, which drift through the table so that parts fill at unlike times."""
    generator = np.random.default_rng(0)
    return [
        np.unique(
            np.concatenate([generator.integers(0, 150, 50), generator.integers(0, 900, 50) + 40 * number])
        )
        for number in range(60)
    ]


def planned(batches: list[np.ndarray]) -> list[tuple[RowWindow, list[np.ndarray]]]:
    plan, windows, own = WindowPlan(PARTS, NUM_SLOTS), [], []
    for rows in batches:
        while not plan.fits(rows):
            windows.append((plan.end_window(), own))
            own = []
        plan.add(rows)
        own.append(rows)
    return [*windows, (plan.end_window(), own)]


def test_a_window_has_the_distinct_rows_of_its_batches():
    batches = drawn_batches()
    windows = planned(batches)

    assert [rows.tolist() for _, own in windows for rows in own] == [rows.tolist() for rows in batches]
    for window, own in windows:
        expected = np.unique(np.concatenate(own)) if own else []
        assert window.rows.tolist() == list(expected)
        assert window.num_asked == sum(map(len, own))


def test_what_visits_bring_into_memory_always_fits():
    """Each part holds what the windows from its last visit on have, counted with sets."""
    windows = [set(window.rows.tolist()) for window, _ in planned(drawn_batches())]
    held = [set()] * NUM_PARTS
    most = 0
    for turn in range(-NUM_PARTS, len(windows)):
        part = turn % NUM_PARTS
        wanted = set().union(*windows[max(turn, 0) : turn + NUM_PARTS + 1])
        held[part] = {row for row in wanted if PARTS[part] <= row < PARTS[part + 1]}
        most = max(most, sum(map(len, held)))

    assert 0.8 * NUM_SLOTS < most <= NUM_SLOTS


@pytest.mark.parametrize(("num_following", "fits"), [(200, True), (201, False)])
def test_a_window_leaves_room_for_the_batches_that_follow(num_following, fits):
    """By hand: the next window would have all three batches, as rows of the window before stay."""
    plan = WindowPlan(PARTS, NUM_SLOTS)
    plan.add(np.arange(300))
    assert plan.fits(np.arange(300, 500), [np.arange(500, 500 + num_following)]) == fits


def test_a_batch_of_as_many_rows_as_there_are_slots_fits_after_empty_windows():
    plan = WindowPlan(PARTS, NUM_SLOTS)
    plan.add(np.arange(NUM_SLOTS))
    num_empty = -1
    while not plan.fits(np.arange(NUM_ROWS - NUM_SLOTS, NUM_ROWS)):
        plan.end_window()
        num_empty += 1

    assert num_empty < 2 * NUM_PARTS


@pytest.mark.parametrize("exponent", [0.5, 1.2])
@pytest.mark.parametrize("times", [1, 4])
def test_no_window_is_empty_where_memory_holds_the_rows_of_any_eight_batches(times, exponent):
    """Which would stop the training; with more memory windows become longer."""
    generator = np.random.default_rng(0)
    use = generator.permutation(np.arange(1, NUM_ROWS + 1) ** -exponent)
    batches = [np.unique(generator.choice(NUM_ROWS, 30, p=use / use.sum())) for _ in range(400)]
    num_needed = max(len(np.unique(np.concatenate(batches[first : first + 8]))) for first in range(393))
    plan, length, lengths, num_own = WindowPlan(PARTS, int(times * num_needed)), WindowLength(), [], 0
    for index, rows in enumerate(batches):
        following = batches[index + 1 : index + 1 + BATCHES_AHEAD]
        while not (fits := plan.fits(rows, following)) or num_own == length.most_batches:
            assert num_own > 0
            length.end_window(num_own, is_full=not fits)
            plan.end_window()
            lengths.append(num_own)
            num_own = 0
        plan.add(rows)
        num_own += 1

    assert np.mean(lengths) >= times


def test_windows_become_as_long_as_the_last_ones_were_on_average():
    length = WindowLength()
    found = []
    for _ in range(6):
        found.append(length.most_batches)
        length.end_window(length.most_batches, is_full=False)
    length.end_window(1, is_full=True)

    assert found == [1, 2, 3, 4, 6, 9]
    assert length.most_batches == (3 + 4 + 6 + 9 + 1) // 5
