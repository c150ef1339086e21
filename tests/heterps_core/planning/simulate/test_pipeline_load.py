from dataclasses import replace

import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.planning.simulate.pipeline_load import pipeline_load
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem
from tests.heterps_core.planning.plain_stage import plain_stage
from tests.heterps_core.planning.simulate.builders import random_plan

NUM_MICROBATCHES = 8


@pytest.mark.parametrize("seed", range(5))
def test_the_parts_add_up_to_the_times_of_the_cost_model(seed):
    problem = make_problem(seed, num_layers=10, num_types=3)
    stages = random_plan(problem, np.random.default_rng(seed))

    load = pipeline_load(problem, stages, num_microbatches=NUM_MICROBATCHES)

    for stage, part in zip(stages, load.stages, strict=True):
        evaluation = plain_stage(problem, stage)
        computing = NUM_MICROBATCHES * (
            part.forward_seconds + part.backward_seconds + part.weight_gradient_seconds
        )
        on_each_lane = NUM_MICROBATCHES * (part.input_seconds + part.output_seconds + part.exchange_seconds)
        assert computing == pytest.approx(evaluation.compute_seconds)
        assert on_each_lane + part.all_reduce_seconds == pytest.approx(evaluation.communication_seconds)


def test_only_sharded_layers_exchange_and_only_others_all_reduce():
    problem = make_problem(1, num_layers=6, num_types=2)
    first, *others = problem.layers
    problem = replace(
        problem,
        layers=(
            replace(first, is_sharded=True, communication_seconds={"cpu": 0.01, "gpu_a": 0.01}),
            *(replace(layer, is_sharded=False) for layer in others),
        ),
    )

    embedding, dense = pipeline_load(
        problem, (Stage(0, 0, "cpu", 4), Stage(1, 5, "gpu_a", 2)), num_microbatches=2
    ).stages

    assert embedding.exchange_seconds > 0 == embedding.all_reduce_seconds
    assert dense.all_reduce_seconds > 0 == dense.exchange_seconds
    assert embedding.input_seconds == 0 < embedding.output_seconds
    assert dense.output_seconds == 0 < dense.input_seconds


def test_rows_matter_only_for_what_replicas_share():
    problem = make_problem(0, num_layers=4, num_types=2)
    alpha = problem.device_types["cpu"].compute_parallel_fraction

    (stage,) = pipeline_load(problem, (Stage(0, 3, "cpu", 10),), num_microbatches=1).stages

    # T(k) = (1 - alpha) + alpha / k, and the second part belongs to rows.
    assert stage.compute_row_share == pytest.approx(alpha / 10 / (1 - alpha + alpha / 10))


@pytest.mark.parametrize("count", [0, 5000])
def test_refuses_numbers_out_of_range(count):
    with pytest.raises(ConfigurationError, match=f"1 to 4096 micro-batches, got {count}"):
        pipeline_load(
            make_problem(0, num_layers=2, num_types=2), (Stage(0, 1, "cpu", 1),), num_microbatches=count
        )


def test_refuses_a_plan_that_leaves_layers_out():
    with pytest.raises(ConfigurationError, match="end at 0"):
        pipeline_load(
            make_problem(0, num_layers=2, num_types=2), (Stage(0, 0, "cpu", 1),), num_microbatches=1
        )


def test_a_third_of_fully_connected_layers_is_put_off():
    problem = make_problem(2, num_layers=4, num_types=2)
    kinds = ("embedding", "fully_connected", "elementwise", "fully_connected")
    problem = replace(
        problem,
        layers=tuple(
            replace(layer, kind=kind, compute_seconds={"cpu": seconds, "gpu_a": seconds})
            for layer, kind, seconds in zip(problem.layers, kinds, (0.5, 0.2, 0.1, 0.4), strict=True)
        ),
    )

    embedding, dense = pipeline_load(
        problem, (Stage(0, 0, "cpu", 2), Stage(1, 3, "gpu_a", 3)), num_microbatches=4
    ).stages

    assert embedding.weight_gradient_seconds == 0
    total_seconds = dense.forward_seconds + dense.backward_seconds + dense.weight_gradient_seconds
    assert dense.weight_gradient_seconds / total_seconds == pytest.approx((0.2 + 0.4) / 0.7 / 3)


def test_one_replica_that_does_not_communicate_has_its_boundaries_alone():
    problem = replace(make_problem(1, num_layers=6, num_types=2), single_replica_communicates=False)

    alone, two = pipeline_load(
        problem, (Stage(0, 2, "cpu", 1), Stage(3, 5, "gpu_a", 2)), num_microbatches=2
    ).stages

    assert alone.exchange_seconds == alone.all_reduce_seconds == 0
    assert 2 * alone.output_seconds == pytest.approx(
        plain_stage(problem, Stage(0, 2, "cpu", 1)).communication_seconds
    )
    assert two.exchange_seconds + two.all_reduce_seconds > 0


def test_a_draining_step_of_replicas_that_exchange_has_the_parts_of_the_trainers():
    problem = replace(make_problem(3, num_layers=6, num_types=2), single_replica_communicates=False)
    stages = (Stage(0, 2, "cpu", 3), Stage(3, 5, "gpu_a", 2))
    delayed = replace(problem, step_model=StepModel.TRAINER)

    drains = pipeline_load(problem, stages, num_microbatches=4)

    assert drains.drains
    assert replace(drains, drains=False) == pipeline_load(delayed, stages, num_microbatches=4)
