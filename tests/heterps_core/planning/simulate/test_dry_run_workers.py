"""Schedules worked out by hand, and a second program that moves a clock on in small ticks."""

import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.simulate.dry_run_workers import simulate_workers
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig, TrainingJob
from tests.heterps_core.profiling.builders import make_stage_costs, make_worker_costs

BATCH_SIZE = 40


def step_seconds(*stages, replicas=None, num_microbatches=1, num_cores=64):
    counts = replicas or [1] * len(stages)
    job = TrainingJob(
        run_id="none",
        model="ctrdnn",
        dataset="none",
        stages=tuple(Stage(index, index, "cpu", count) for index, count in enumerate(counts)),
        config=TrainingConfig(batch_size=BATCH_SIZE, num_microbatches=num_microbatches, num_epochs=1, seed=0),
    )
    return simulate_workers(
        make_worker_costs(*stages), job, num_cores=num_cores, wake_seconds=0.0, balance_seconds=0.0
    )


def make_stage(forward=0.0, backward=0.0, weight_gradients=0.0, num_weight_gradients=1, **seconds):
    return make_stage_costs(
        forward_seconds=forward,
        backward_seconds=backward,
        weight_gradient_seconds=weight_gradients,
        num_weight_gradients=num_weight_gradients,
        **seconds,
    )


def test_one_worker_does_all_work_one_after_the_other():
    stage = make_stage(1.0, 2.0, 1.0, update_seconds=0.5, gradient_sum_seconds=0.25)

    assert step_seconds(stage, num_microbatches=4) == pytest.approx(4 * (1 + 2 + 1) + 0.75)


def test_weight_gradients_fill_the_time_of_waiting():
    stage = make_stage(1.0, 1.0, 1.0)

    #   first  f0 f1 .  b0 w0 b1 w1
    #   last   .  f0 b0 f1 b1 w0 w1   (nothing is waited for, so w0 stays behind)
    assert step_seconds(stage, stage, num_microbatches=2) == pytest.approx(7.0)


def test_the_weight_gradients_of_a_micro_batch_come_in_parts():
    first, last = make_stage(1.0, 1.0, 2.0, 2), make_stage(1.0, 2.0)

    #   first  f0 f1 .  .  b0 u0 v0 b1 u1 v1     (u and v are parts of w)
    #   last   .  f0 b0 b0 f1 b1 b1 .  .  .
    assert step_seconds(first, last, num_microbatches=2) == pytest.approx(10.0)
    # The answer to the second comes at 10 s, after the first of three parts, which began at 6 s.
    thirds, slow = make_stage(1.0, 1.0, 9.0, 3), make_stage(1.0, 3.0)
    #   first  f0 f1 .  .  .  b0 u0 u0 u0 b1 ...
    #   last   .  f0 b0 b0 b0 f1 b1 b1 b1
    assert step_seconds(thirds, slow, num_microbatches=2) == pytest.approx(6.0 + 3.0 + 1.0 + 6.0 + 9.0)


def test_without_weight_gradients_the_first_stage_waits():
    stage = make_stage(1.0, 2.0)

    #   first  f0 f1 .  .  b0 b0 .  b1 b1
    #   last   .  f0 b0 b0 f1 b1 b1
    assert step_seconds(stage, stage, num_microbatches=2) == pytest.approx(9.0)


def test_workers_that_share_a_core_take_the_sum_of_their_work():
    stage = make_stage(1.0, 2.0, update_seconds=0.25)

    found = step_seconds(stage, stage, num_microbatches=4, num_cores=1)

    assert found == pytest.approx(2 * (4 * 3.0 + 0.25))


def test_a_replica_waits_for_those_that_have_its_rows():
    slow, quick = make_stage(3.0), make_stage(1.0, 2.0)

    # Each of the two replicas behind gets half of the first one's rows at 3 s, and answers at 6 s.
    assert step_seconds(slow, quick, replicas=[1, 2]) == pytest.approx(6.0)
    # All on one core.
    assert step_seconds(slow, quick, replicas=[1, 2], num_cores=1) == pytest.approx(9.0)


def test_replicas_begin_together_to_sum_gradients_and_to_update():
    stage = make_stage(
        1.0, 2.0, gradient_sum_seconds=0.5, update_seconds=0.25, reading_seconds=4.0, updates_together=True
    )

    assert step_seconds(stage, replicas=[2]) == pytest.approx(4.0)
    # Six seconds each on one core, and both must be through.
    assert step_seconds(stage, replicas=[2], num_cores=1) == pytest.approx(2 * (3.0 + 0.75 + 4.0))


def test_a_worker_waits_for_batches_that_are_read_more_slowly_than_trained():
    stage = make_stage(2.0, reading_seconds=3.0)

    assert step_seconds(stage) == pytest.approx(3.0)
    assert step_seconds(stage, num_cores=1) == pytest.approx(5.0)


@pytest.mark.parametrize("num_cores", [1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_agrees_with_a_clock_that_ticks(num_cores, num_microbatches):
    stages = [(0.5, 0.75, 1.2), (0.75, 1.25, 0.4)]

    found = step_seconds(
        *(make_stage(forward, backward, update_seconds=update) for forward, backward, update in stages),
        num_microbatches=num_microbatches,
        num_cores=num_cores,
    )

    assert found == pytest.approx(ticked_step_seconds(stages, num_microbatches, num_cores), rel=0.005)


def ticked_step_seconds(stages, num_microbatches, num_cores, num_steps=6, tick=0.005):
    """Return the seconds of a step of two stages, each (forward, backward, update)."""
    programs = []
    for number, (forward, backward, update) in enumerate(stages):
        ahead = min(num_microbatches, 4) if number == 0 else 0
        program = []
        for step in range(num_steps):
            for count in range(-ahead, num_microbatches):
                if count + ahead < num_microbatches:
                    at = (step, count + ahead)
                    program.append((forward, ("f", *at) if number else None, ("f", *at)))
                if count >= 0:
                    at = (step, count)
                    program.append((backward, None if number else ("b", *at), ("b", *at)))
            program.append((update, None, ("end", step, number)))
        programs.append(program)
    done, left, positions, now = {}, [None, None], [0, 0], 0.0
    while any(at < len(program) for at, program in zip(positions, programs, strict=True)):
        running = []
        for number, program in enumerate(programs):
            if positions[number] < len(program):
                seconds, needed, _ = program[positions[number]]
                if needed is None or ("out", 1 - number, needed) in done:
                    left[number] = seconds if left[number] is None else left[number]
                    running.append(number)
        now += tick
        for number in running:
            left[number] -= tick * min(1.0, num_cores / len(running))
            if left[number] <= tick / 2:
                done["out", number, programs[number][positions[number]][2]] = now
                positions[number] += 1
                left[number] = None
    last = num_steps - 1
    return (done["out", 1, ("end", last, 1)] - done["out", 1, ("end", 2, 1)]) / (last - 2)


def test_refuses_the_costs_of_another_plan():
    with pytest.raises(ConfigurationError, match="got 1 stages for 2"):
        step_seconds(make_stage(1.0), replicas=[1, 1])
