"""Plans over blocks of known duration, in real processes with real messages.

Blocks sleep, so no step can be faster than by hand, however busy the machine is. That none is slower is no test's:
what makes a plan fast, that stages run side by side and replicas share the rows, is read from the blocks' own record.
"""

import json

import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.measurement.placed_plan import Device, MeasuredModel, PlacedStage, stages_of_assignment
from heterps_core.measurement.plan_measurer import MeasurementError, PlanMeasurer

BATCH_SIZE = 8
NUM_MICROBATCHES = 4
SECONDS_PER_ROW = [0.002, 0.004, 0.006]
DEVICES = {"one": Device(cores=(0,)), "two": Device(cores=(0,))}
WHOLE_STEP_S = 2 * BATCH_SIZE * sum(SECONDS_PER_ROW)
"""Forward and backward of all rows: 0.192 s."""


def new_measurer(*, processes_per_device=2, limit_s=60.0, **arguments):
    model = MeasuredModel(
        builder="tests.heterps_core.measurement.timed_layers:build",
        arguments={"seconds_per_row": SECONDS_PER_ROW, **arguments},
        input_shape=(4,),
    )
    return PlanMeasurer(
        model,
        DEVICES,
        batch_size=BATCH_SIZE,
        num_microbatches=NUM_MICROBATCHES,
        processes_per_device=processes_per_device,
        limit_s=limit_s,
    )


@pytest.fixture(scope="module")
def events_path(tmp_path_factory):
    return tmp_path_factory.mktemp("events") / "events.jsonl"


@pytest.fixture(scope="module")
def measurer(events_path):
    with new_measurer(events=str(events_path)) as running:
        yield running


@pytest.fixture
def turns(events_path):
    """Returns, in order, each turn that a block took in the last of the two steps that a measurement runs."""
    events_path.write_text("")

    def read():
        found = [json.loads(line) for line in events_path.read_text().splitlines()]
        return found[len(found) // 2 :]

    return read


def placed(*assignment):
    return stages_of_assignment(assignment, list(DEVICES))


def whole(*devices, row_shares=None):
    return (PlacedStage(first_block=0, last_block=2, devices=devices, row_shares=row_shares),)


def test_one_device_runs_all_blocks_on_all_rows_in_a_row(measurer, turns):
    measured = measurer.measure(whole("two"), num_steps=1)

    assert measured.step_seconds >= WHOLE_STEP_S
    # Sleeping is not computing.
    assert set(measured.computed_seconds) == {"two"}
    assert measured.communication_share > 0.5
    assert [(turn["turn"], turn["block"], turn["num_rows"]) for turn in turns()] == [
        *(("forward", block, BATCH_SIZE) for block in (0, 1, 2)),
        *(("backward", block, BATCH_SIZE) for block in (2, 1, 0)),
    ]


def test_the_stages_of_a_pipeline_run_side_by_side(measurer, turns, events_path):
    """The first stage begins its last micro-batch when the second has begun; one after the other never would."""
    hold = events_path.with_suffix(".hold")
    hold.write_text(str(NUM_MICROBATCHES))
    try:
        measured = measurer.measure(placed(0, 0, 1), num_steps=1)
    finally:
        hold.unlink()

    # Both stages take 12 ms a micro-batch, forward and again backward. The first begins the second's work after
    # one forward pass and ends it after one backward pass: 5 turns of 24 ms at least.
    by_hand_s = 2 * 0.012 * (NUM_MICROBATCHES + 1)
    assert by_hand_s == pytest.approx(0.12)
    assert measured.step_seconds >= by_hand_s
    found = turns()
    assert {turn["num_rows"] for turn in found} == {BATCH_SIZE // NUM_MICROBATCHES}
    assert len({turn["process"] for turn in found}) == 2
    assert len(found) == 2 * len(SECONDS_PER_ROW) * NUM_MICROBATCHES


def test_a_device_may_hold_two_stages_of_a_plan(measurer):
    measured = measurer.measure(placed(0, 1, 0), num_steps=1)

    assert set(measured.computed_seconds) == {"one", "two"}
    # The slowest of three stages takes half the work, 96 ms of 192.
    assert measured.step_seconds >= WHOLE_STEP_S / 2


@pytest.mark.parametrize(
    ("row_shares", "rows"), [(None, [4, 4]), ((0.75, 0.25), [2, 6])], ids=["equal", "three to one"]
)
def test_replicas_share_the_rows(measurer, turns, row_shares, rows):
    measured = measurer.measure(whole("one", "two", row_shares=row_shares), num_steps=1)

    found = turns()
    assert len({turn["process"] for turn in found}) == 2
    for turn in ("forward", "backward"):
        for block in range(3):
            of_block = [t["num_rows"] for t in found if (t["turn"], t["block"]) == (turn, block)]
            assert sorted(of_block) == rows
    # No faster than the replica with the most rows.
    assert measured.step_seconds >= WHOLE_STEP_S * max(rows) / BATCH_SIZE


def test_a_plan_with_more_stages_than_a_device_holds_is_refused_at_once():
    measurer = new_measurer(processes_per_device=1)

    with pytest.raises(MeasurementError, match=r"a device can hold 1 stages.*has more on one"):
        measurer.measure(placed(0, 1, 0), num_steps=1)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (whole("three"), "at least one of the devices one, two"),
        (placed(0, 1)[1:], "where block 0 is due"),
        (whole("one", "two", row_shares=(0.5, 0.6)), "add up to 1"),
    ],
)
def test_stages_that_are_no_plan_are_refused(stages, message):
    with pytest.raises(ConfigurationError, match=message):
        new_measurer().measure(stages, num_steps=1)


def test_a_plan_that_fails_leaves_the_next_one_unharmed():
    with new_measurer(processes_per_device=1, fails_on_few_rows=True) as measurer:
        with pytest.raises(MeasurementError, match=r"0..0 on one \| 1..2 on two.*too few rows"):
            measurer.measure(placed(0, 1, 1), num_steps=1)
        measured = measurer.measure(whole("two"), num_steps=1)

    assert measured.step_seconds >= WHOLE_STEP_S


def test_a_plan_that_takes_too_long_is_ended():
    with (
        new_measurer(processes_per_device=1, limit_s=0.1) as measurer,
        pytest.raises(MeasurementError, match="longer than 0 s"),
    ):
        measurer.measure(whole("one"), num_steps=1)
