from dataclasses import replace

import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import (
    LayerCosts,
    SchedulingProblem,
    StepModel,
    UnitType,
)
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem


@pytest.fixture
def problem() -> SchedulingProblem:
    """Two layers and two types with numbers small enough to work by hand."""
    cpu = UnitType(
        price_usd_per_hour=0.5,
        max_units=4,
        memory_bytes=100,
        bandwidth_bytes_per_s=1000,
        compute_parallel_fraction=0.5,
        communication_parallel_fraction=1.0,
    )
    embedding = LayerCosts(
        name="embedding",
        kind="embedding",
        is_sharded=True,
        state_bytes=120,
        output_bytes_per_sample=50,
        compute_seconds={"cpu": 1.0, "gpu": 1.0},
        communication_seconds={"cpu": 2.0, "gpu": 3.0},
    )
    dense = replace(embedding, name="dense", is_sharded=False, state_bytes=30, output_bytes_per_sample=7)
    return SchedulingProblem(
        model="by hand",
        batch_size=20,
        profile_batch_size=10,
        num_samples=1000,
        num_epochs=3,
        throughput_floor_samples_per_s=2,
        layers=(embedding, dense),
        device_types={"cpu": cpu, "gpu": replace(cpu, price_usd_per_hour=4.0)},
    )


def test_stage_times_follow_the_contract_worked_by_hand(problem):
    evaluation = evaluate(problem, [Stage(0, 0, "cpu", 2), Stage(1, 1, "gpu", 1)])

    first, last = evaluation.stages
    # OCT = 1, CT(2) = 1 * 20/10 * (0.5 + 0.5/2); ODT = 2 + 2 * 10 * 50 / 1000 = 3, DT(2) = 3 * 2 / 2
    assert (first.compute_seconds, first.communication_seconds, first.seconds) == (1.5, 3.0, 3.0)
    # ODT = 3 + 1 for the input cut; the last layer's own output crosses no boundary
    assert (last.compute_seconds, last.communication_seconds, last.seconds) == (2.0, 8.0, 8.0)
    assert (first.memory_bytes, last.memory_bytes) == (60, 30)


def test_totals_follow_from_the_slowest_stage(problem):
    evaluation = evaluate(problem, [Stage(0, 0, "cpu", 2), Stage(1, 1, "gpu", 1)])

    assert evaluation.bottleneck is evaluation.stages[1]
    assert evaluation.throughput_samples_per_s == 20 / 8
    assert evaluation.price_usd_per_hour == 2 * 0.5 + 4
    assert evaluation.run_seconds == 3 * 1000 / 2.5
    assert evaluation.cost_usd == pytest.approx(1200 / 3600 * 5, rel=1e-15)
    assert not evaluation.violations


def test_a_single_stage_crosses_no_boundary(problem):
    evaluation = evaluate(problem, [Stage(0, 1, "cpu", 1)])

    assert evaluation.stages[0].communication_seconds == (2 + 2) * 2


@pytest.mark.parametrize(
    ("stages", "constraint", "required", "reached"),
    [
        ([Stage(0, 1, "gpu", 1)], "throughput floor", 2, 20 / 12),
        ([Stage(0, 0, "cpu", 1), Stage(1, 1, "gpu", 2)], "memory", 100, 120),
        ([Stage(0, 1, "cpu", 5)], "units cap", 4, 5),
    ],
)
def test_says_which_constraint_is_broken_and_by_how_far(problem, stages, constraint, required, reached):
    violations = {v.constraint: v for v in evaluate(problem, stages).violations}

    assert violations[constraint].required == required
    assert violations[constraint].reached == pytest.approx(reached)
    assert constraint in str(violations[constraint])


def test_units_are_counted_over_the_whole_plan(problem):
    three_stages = replace(problem, layers=(*problem.layers, problem.layers[1]))

    stages = [Stage(0, 0, "cpu", 3), Stage(1, 1, "gpu", 1), Stage(2, 2, "cpu", 2)]

    assert "units cap" in [violation.constraint for violation in evaluate(three_stages, stages).violations]


def test_two_neighbouring_stages_of_the_trainers_step_may_stand_on_one_type_and_share_its_cap(problem):
    problem = replace(problem, step_model=StepModel.TRAINER)

    found = evaluate(problem, [Stage(0, 0, "cpu", 3), Stage(1, 1, "cpu", 1)])
    too_many = evaluate(problem, [Stage(0, 0, "cpu", 3), Stage(1, 1, "cpu", 2)])

    assert found.price_usd_per_hour == 4 * 0.5
    assert "units cap" not in [violation.constraint for violation in found.violations]
    assert "units cap" in [violation.constraint for violation in too_many.violations]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([Stage(0, 0, "cpu", 1), Stage(1, 1, "cpu", 1)], "must differ in device type"),
        ([Stage(0, 1, "tpu", 1)], "unknown device type 'tpu'"),
        ([Stage(0, 0, "cpu", 1)], "end at 0"),
    ],
)
def test_rejects_stages_that_are_no_plan(problem, stages, message):
    with pytest.raises(ConfigurationError, match=message):
        evaluate(problem, stages)


def test_one_replica_that_does_not_communicate_only_moves_what_crosses_its_boundaries(problem):
    problem = replace(problem, single_replica_communicates=False)

    alone = evaluate(problem, [Stage(0, 1, "cpu", 1)]).stages[0]
    first, last = evaluate(problem, [Stage(0, 0, "cpu", 2), Stage(1, 1, "gpu", 1)]).stages

    assert (alone.compute_seconds, alone.communication_seconds) == (4.0, 0.0)
    # Two replicas as ever; one: 2 * 10 * 50 / 1000 of the input cut, times 20/10.
    assert (first.communication_seconds, last.communication_seconds) == (3.0, 2.0)


def test_pauses_lengthen_the_run_and_cost_by_the_hour():
    problem = make_problem(3, num_layers=4, num_types=2)
    stages = find_optimum(problem).stages
    plain, paused = (evaluate(replace(problem, pause_share=share), stages) for share in (0.0, 0.25))

    assert paused.run_seconds == pytest.approx(1.25 * plain.run_seconds)
    assert paused.cost_usd == pytest.approx(1.25 * plain.cost_usd)
    assert paused.throughput_samples_per_s == plain.throughput_samples_per_s
    assert find_optimum(replace(problem, pause_share=0.25)).cost_usd == pytest.approx(paused.cost_usd)
