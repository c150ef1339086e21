import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.simulate.pipeline_load import PipelineLoad, StageLoad, pipeline_load
from heterps_core.planning.simulate.pipeline_simulation import pass_order, simulate
from heterps_core.training.pipeline.pipeline_schedule import one_forward_one_backward
from tests.builders import make_problem
from tests.heterps_core.planning.simulate.builders import balanced_plan, random_plan
from tests.heterps_core.planning.simulate.event_queue import simulate_by_events


def stage_load(num_replicas=1, forward_seconds=1.0, backward_seconds=2.0, **others):
    values = {"compute_row_share": 1.0, "input_seconds": 0.0, "output_seconds": 0.0, "exchange_seconds": 0.0}
    values |= {"all_reduce_seconds": 0.0, "weight_gradient_seconds": 0.0} | others
    return StageLoad(
        num_replicas=num_replicas,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        **values,
    )


def pipeline(*stages, num_microbatches=4, batch_size=64):
    return PipelineLoad(batch_size=batch_size, num_microbatches=num_microbatches, stages=stages)


def draw_case(seed):
    """Return a small pipeline with everything that can be unlike, and how it is run."""
    random = np.random.default_rng(seed)

    def maybe(scale):
        return float(random.uniform(0, scale)) if random.random() < 0.6 else 0.0

    num_stages = int(random.integers(1, 5))
    num_microbatches = int(random.integers(1, 6))
    stages = tuple(
        StageLoad(
            num_replicas=int(random.integers(1, 6)),
            forward_seconds=float(random.uniform(0.1, 1)),
            backward_seconds=float(random.uniform(0.1, 2)),
            weight_gradient_seconds=maybe(1),
            compute_row_share=float(random.uniform(0, 1)),
            input_seconds=maybe(1) if stage else 0.0,
            output_seconds=maybe(1) if stage < num_stages - 1 else 0.0,
            exchange_seconds=maybe(0.5),
            all_reduce_seconds=maybe(2),
        )
        for stage in range(num_stages)
    )
    load = pipeline(
        *stages, num_microbatches=num_microbatches, batch_size=int(random.integers(num_microbatches, 60))
    )
    return load, {"num_steps": int(random.integers(1, 5))}


def step_seconds(run):
    """Between the ends of neighbouring steps, the first from 0."""
    return np.diff(run.step_end_seconds, prepend=0.0)


@pytest.mark.parametrize(("drains", "stops_to_exchange"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_single_events_from_a_heap(seed, drains, stops_to_exchange):
    load, options = draw_case(seed)
    load = replace(load, drains=drains, stops_to_exchange=stops_to_exchange)

    found = simulate(load, **options).step_end_seconds

    assert found == pytest.approx(simulate_by_events(load, **options), rel=1e-9)


def test_equal_stages_lose_the_bubble_in_every_step():
    run = simulate(pipeline(stage_load(), stage_load(), stage_load()), num_steps=3)

    # Three seconds a micro-batch and stage: 4 + 3 - 1 slots of 3 s, of which a stage uses 4.
    assert step_seconds(run) == pytest.approx([18.0] * 3)
    assert 1 - run.stages[0].computing == pytest.approx((3 - 1) / (4 + 3 - 1))


def test_a_pipeline_whose_last_stage_is_slowest_fills_and_drains_by_the_formula():
    stages = [stage_load(forward_seconds=f, backward_seconds=2 * f) for f in (1.0, 0.5, 3.0)]

    run = simulate(pipeline(*stages, num_microbatches=5, batch_size=60), num_steps=1)

    assert run.total_seconds == pytest.approx((3 + 1.5 + 9) + 4 * 9)


THIRDS = {"forward_seconds": 1.0, "backward_seconds": 1.0, "weight_gradient_seconds": 1.0}


def test_weight_gradients_close_the_gaps_of_two_equal_stages():
    # First:  f0 f1 f2 b0 f3 b1 w0 b2 w1 b3 w2 w3 | f0 ...
    # Last:    . f0 b0 f1 b1 f2 b2 f3 b3 w0 w1 w2 w3 | f0 ...
    load = pipeline(stage_load(**THIRDS), stage_load(**THIRDS))

    run = simulate(load, num_steps=3)

    assert run.step_end_seconds == pytest.approx([13.0, 25.0, 37.0])
    assert [1 - stage.computing for stage in run.stages] == pytest.approx([0.0, 1 / 37])


def test_delayed_updates_leave_no_gap_between_steps():
    def seconds_with_sum_of(all_reduce_seconds):
        first = stage_load(**THIRDS, all_reduce_seconds=all_reduce_seconds)
        stages = pipeline(first, stage_load(**THIRDS), stage_load(**THIRDS), num_microbatches=8)
        return step_seconds(simulate(replace(stages, drains=False), num_steps=6))[2:-1]

    assert seconds_with_sum_of(20.0) == pytest.approx([24.0] * 3)
    assert seconds_with_sum_of(30.0) == pytest.approx([30.0] * 3)


def test_too_few_micro_batches_leave_a_gap_that_weight_gradients_cannot_fill():
    # First:  f0 . b0 w0 | f0 . b0 w0     Last:  . f0 b0 w0 . | f0 b0 w0
    load = pipeline(stage_load(**THIRDS), stage_load(**THIRDS), num_microbatches=1)

    run = simulate(load, num_steps=2)

    # First: f0 0-1, gradient at 3, b0 3-4, w0 4-5, next f0 5-6; last: w0 3-4, next f0 6-7, b0 7-8.
    assert run.step_end_seconds == pytest.approx([5.0, 10.0])


def test_messages_of_the_next_step_come_while_the_last_one_ends():
    load = pipeline(
        stage_load(forward_seconds=1.0, backward_seconds=0.0, output_seconds=1.0),
        stage_load(forward_seconds=1.0, backward_seconds=1.0, weight_gradient_seconds=4.0, input_seconds=1.0),
        num_microbatches=1,
    )

    run = simulate(load, num_steps=2)

    # First: f 0-1, message 1-2, gradient 4-5, b at 5, next f 5-6, message 6-7. Last: f 2-3, b 3-4, w 4-8, f 8-9.
    assert run.step_end_seconds == pytest.approx([8.0, 14.0])


def test_shares_of_time_are_those_of_a_schedule_worked_out_by_hand():
    # Two micro-batches on two stages. First:  f0 f1 . b0 b0 . b1 b1   Last: . f0 b0 b0 f1 b1 b1
    load = pipeline(stage_load(), stage_load(), num_microbatches=2)

    run = simulate(load, num_steps=1)

    first, last = run.stages
    assert (first.computing, first.waiting_for_data) == pytest.approx((6 / 9, 3 / 9))
    assert (last.computing, last.waiting_for_data, 1 - last.computing) == pytest.approx((6 / 7, 1 / 7, 1 / 7))


def test_a_message_is_waited_for_as_link_time_and_a_late_sender_as_data():
    # The message of 4 s leaves at 1 s; the receiver waits 1 s for data, then 4 s for the link.
    load = pipeline(stage_load(output_seconds=4.0), stage_load(input_seconds=2.0), num_microbatches=1)

    run = simulate(load, num_steps=1)

    last = run.stages[1]
    # Its step ends when the gradient, 2 s on its own lane, is sent.
    total_seconds = 1 + 4 + 3 + 2
    assert last.waiting_for_data == pytest.approx(1 / total_seconds)
    assert last.waiting_for_link == pytest.approx((4 + 2) / total_seconds)


def test_replicas_wait_at_the_barrier_for_the_one_with_most_rows():
    load = pipeline(stage_load(num_replicas=2, all_reduce_seconds=1.0), num_microbatches=1, batch_size=3)

    run = simulate(load, num_steps=1)

    # One row and two of 1.5 in the mean: 2 s and 4 s of passes, then the all-reduce.
    assert run.total_seconds == pytest.approx(5.0)
    assert run.stages[0].waiting_at_barrier == pytest.approx(2 / 2 / 5)


@pytest.mark.parametrize("make_plan", [random_plan, balanced_plan])
@pytest.mark.parametrize("seed", range(8))
def test_is_the_closed_form_with_the_all_reduce_and_the_way_of_a_micro_batch(seed, make_plan):
    # Slices of hundreds of rows, so that no replica has visibly more of them than another.
    problem = dataclasses.replace(make_problem(seed, num_layers=10, num_types=3), batch_size=2**20)
    stages = make_plan(problem, np.random.default_rng(seed))
    load = pipeline_load(problem, stages, num_microbatches=64)
    closed_form_seconds = problem.batch_size / evaluate(problem, stages).throughput_samples_per_s
    filling_seconds = sum(
        stage.forward_seconds
        + stage.backward_seconds
        + stage.weight_gradient_seconds
        + 2 * (stage.input_seconds + stage.output_seconds + stage.exchange_seconds)
        for stage in load.stages
    )
    all_reduce_seconds = max(stage.all_reduce_seconds for stage in load.stages)

    found = simulate(load, num_steps=6).step_seconds

    # The slowest stage is never idle but at both ends of a step; its own all-reduce is in the closed form.
    assert 0.98 * (closed_form_seconds - all_reduce_seconds) <= found
    assert found <= 1.02 * (closed_form_seconds + all_reduce_seconds + filling_seconds)


def test_slices_of_unequal_rows_are_as_slow_as_the_largest():
    load = pipeline(stage_load(num_replicas=3), num_microbatches=1, batch_size=4)

    # One of three replicas has two rows, the mean is 4/3.
    assert simulate(load, num_steps=1).total_seconds == pytest.approx(3 * 1.5)


def test_every_stage_keeps_its_own_order():
    order = list(pass_order(num_microbatches=7, num_stages=3))

    for stage in range(3):
        expected = one_forward_one_backward(num_microbatches=7, num_stages=3, stage=stage)
        assert [action for at, action in order if at == stage] == list(expected)
