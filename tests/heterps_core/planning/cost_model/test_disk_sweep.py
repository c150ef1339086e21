"""Stages whose rows lie on disk: the time of a sweep worked out by hand, and plans against trying every one."""

from dataclasses import replace
from itertools import product
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest

from heterps_core.errors import InfeasiblePlanError, MalformedDocumentError
from heterps_core.planning.cost_model import evaluation
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.run_tables import segment_row, segment_table
from heterps_core.planning.problem.scheduling_problem import (
    LayerCosts,
    SchedulingProblem,
    StepModel,
    UnitType,
)
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.schedulers import get_scheduler
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem, with_disks
from tests.heterps_core.planning.plain_stage import plain_stage
from tests.partitions import all_partitions
from tests.tiers import weekly_after


def one_table(**changes):
    """Return a problem of one table of 1,000 bytes on units of 100 bytes, of which 20 are hot at a fifth."""
    unit = UnitType(
        price_usd_per_hour=1.0,
        max_units=50,
        memory_bytes=100.0,
        bandwidth_bytes_per_s=1e9,
        communication_parallel_fraction=1.0,
        **({"compute_parallel_fraction": 1.0, "disk_bytes": 600.0, "disk_bytes_per_s": 50.0} | changes),
    )
    return SchedulingProblem(
        model="one table",
        batch_size=10,
        profile_batch_size=10,
        num_samples=100,
        num_epochs=1,
        throughput_floor_samples_per_s=0.0,
        hot_shares=(0.0, 0.1),
        layers=(
            LayerCosts(
                name="table",
                kind="embedding",
                is_sharded=True,
                state_bytes=1_000.0,
                output_bytes_per_sample=4.0,
                compute_seconds={"cpu": 0.001},
                communication_seconds={"cpu": 0.0},
                cold_bytes_per_sample=(2.0, 0.3),
            ),
        ),
        device_types={"cpu": unit},
    )


def test_the_time_of_a_sweep_worked_by_hand():
    # Two replicas have 200 bytes, 7.35 of them for 4 bits of each row; a row in memory takes 1.5790 times its bytes.
    # All cold: 192.65 / (1.25 * 1.5790 * 20) = 4.88 steps a sweep, which moves 2 * 500 bytes at 50 a second in 20 s.
    # A tenth hot leaves 34.75 bytes: 34.75 / (1.25 * 1.5790 * 3) = 5.87 steps.
    sweep = evaluate(one_table(), [Stage(0, 0, "cpu", 2)]).stages[0].sweep

    assert sweep.hot_share == 0.1
    assert sweep.steps_per_sweep == pytest.approx(5.868, rel=1e-3)
    assert sweep.seconds == pytest.approx(20 / 5.868, rel=1e-3)
    assert sweep.disk_bytes == 500
    found = evaluate(one_table(), (Stage(0, 0, "cpu", 2),))
    assert found.throughput_samples_per_s == pytest.approx(10 / (20 / 5.868), rel=1e-3)


def test_what_sweeping_computes_is_added_to_the_work_of_its_replicas():
    # 3 bytes of cold rows a batch, 0.3 s for each, on two replicas that compute 0.0005 s each.
    part = evaluate(one_table(sweep_seconds_per_byte=0.3), [Stage(0, 0, "cpu", 2)]).stages[0]

    assert part.sweep.worker_seconds == pytest.approx(0.9)
    assert part.compute_seconds == pytest.approx(0.4505)
    # More of it than the disk takes decides.
    slower = evaluate(one_table(sweep_seconds_per_byte=3.0), [Stage(0, 0, "cpu", 2)]).stages[0]
    assert slower.seconds == pytest.approx(4.5005)


def test_a_stage_whose_rows_fit_into_memory_does_not_sweep():
    part = evaluate(one_table(), [Stage(0, 0, "cpu", 10)]).stages[0]

    assert part.sweep is None
    assert part.seconds == pytest.approx(0.0001)


@pytest.mark.parametrize(
    ("problem", "replicas"),
    [
        (one_table(), 1),  # 1,000 bytes on a disk of 600
        (one_table(disk_bytes=0.0, disk_bytes_per_s=0.0), 9),
        (replace(one_table(), batch_size=10_000), 9),  # not even one batch's rows fit
    ],
)
def test_what_neither_memory_nor_disk_holds_is_no_plan(problem, replicas):
    violations = evaluate(problem, (Stage(0, 0, "cpu", replicas),)).violations

    assert {violation.constraint for violation in violations} == {"memory"}


def test_fewer_units_sweep_where_more_would_not_compute_faster():
    # A batch of 6 s on any number of units: two sweep in 3.4 s, ten, with all in memory, have five times the price.
    problem = one_table(compute_parallel_fraction=0.0)
    problem = replace(problem, layers=(replace(problem.layers[0], compute_seconds={"cpu": 6.0}),))

    found = find_optimum(problem)

    assert [stage.num_replicas for stage in found.stages] == [2]
    assert found.cost_usd == pytest.approx(2 * 10 * 6.0 / 3600)


def test_a_stage_that_sweeps_pays_for_room_and_speed_of_its_disks():
    # 1,000 bytes at 1e6 USD for 1e9 bytes and hour, and two units at 0.25 USD.
    problem = one_table(disk_usd_per_hour=0.25, disk_usd_per_gb_hour=1e6)

    swept = evaluate(problem, [Stage(0, 0, "cpu", 2)])
    in_memory = evaluate(problem, [Stage(0, 0, "cpu", 10)])

    assert swept.price_usd_per_hour == pytest.approx(2 * 1.0 + 1.0 + 2 * 0.25)
    assert dict(swept.cost_lines)["disks for tables"] == pytest.approx(swept.run_seconds / 3600 * 1.5)
    assert in_memory.price_usd_per_hour == 10


def test_memory_holds_all_rows_where_disks_cost_more_than_the_units_that_they_save():
    # Any number of units computes for 6 s: ten have enough memory, two sweep.
    layer = replace(one_table().layers[0], compute_seconds={"cpu": 6.0})
    cheap, dear = (
        replace(one_table(compute_parallel_fraction=0.0, disk_usd_per_gb_hour=price), layers=(layer,))
        for price in (7.9e6, 8.1e6)
    )

    assert [stage.num_replicas for stage in find_optimum(cheap).stages] == [2]
    assert [stage.num_replicas for stage in find_optimum(dear).stages] == [10]
    assert find_optimum(dear).cost_lower_bound_usd == pytest.approx(10 * 10 * 6.0 / 3600)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("device_types.cpu.disk_bytes_per_s", lambda problem: one_table(disk_bytes_per_s=0.0)),
        ("layers[0].cold_bytes_per_sample", lambda problem: replace(problem, hot_shares=(0.5,))),
        (
            "layers[0].cold_bytes_per_sample",
            lambda problem: replace(problem, layers=(replace(problem.layers[0], is_sharded=False),)),
        ),
        ("hot_shares", lambda problem: replace(problem, hot_shares=(0.5, 1.5))),
    ],
)
def test_a_problem_whose_disks_cannot_be_understood_names_the_field(field, change):
    with pytest.raises(MalformedDocumentError) as caught:
        change(one_table())

    assert field in str(caught.value)


def drawn_problem(seed, *, step_model, usd_per_gb_hour=0.0, **sizes):
    problem = make_problem(seed, **({"num_layers": 4, "num_types": 2, "floor_samples_per_s": 0.0} | sizes))
    table = replace(problem.layers[0], is_sharded=True, state_bytes=15e9)
    problem = replace(problem, layers=(table, *problem.layers[1:]))
    problem = with_disks(
        problem,
        bytes_per_unit=20e9,
        bytes_per_s=1e9,
        usd_per_hour=usd_per_gb_hour,
        usd_per_gb_hour=usd_per_gb_hour,
    )
    units = {
        name: replace(unit, max_units=5, memory_bytes=2e9) for name, unit in problem.device_types.items()
    }
    return replace(problem, device_types=units, step_model=step_model)


@pytest.mark.parametrize("step_model", StepModel)
@pytest.mark.parametrize("seed", range(4))
def test_the_least_replicas_are_those_that_trying_every_number_finds(seed, step_model):
    problem = drawn_problem(seed, step_model=step_model)
    table = segment_table(problem, num_microbatches=4 if step_model is StepModel.TRAINER else 1)
    num_microbatches = 4 if step_model is StepModel.TRAINER else 1
    limits = np.geomspace(1e-3, 1e3, 80)
    found = table.least_replicas(limits)
    swept = 0
    for first, last, (index, (name, unit)) in product(
        range(4), range(4), enumerate(problem.device_types.items())
    ):
        if first > last:
            continue
        parts = [
            plain_stage(problem, Stage(first, last, name, k), num_microbatches=num_microbatches)
            for k in range(1, 6)
        ]
        swept += sum(part.sweep_seconds is not None for part in parts)
        seconds = [part.seconds if part.memory_bytes <= unit.usable_bytes else inf for part in parts]
        row = segment_row(first, last)
        assert table.fewest_replicas[row, index] <= 5 or not any(np.isfinite(seconds))
        for limit, replicas in zip(limits, found[:, row, index], strict=True):
            assert replicas == next((k for k, taken in enumerate(seconds, 1) if taken <= limit), inf)
    assert swept > 0


@pytest.mark.parametrize("usd_per_gb_hour", [0.0, 3e-3, 0.1])
@pytest.mark.parametrize("step_model", StepModel)
@pytest.mark.parametrize("seed", weekly_after(3, range(8)))
def test_the_optimum_is_what_trying_every_plan_finds(seed, step_model, usd_per_gb_hour, monkeypatch):
    # The formula alone: what stages wait for one another is the simulation's.
    monkeypatch.setattr(evaluation, "simulate", lambda load: SimpleNamespace(step_seconds=0.0))
    problem = drawn_problem(seed, step_model=step_model, num_layers=3, usd_per_gb_hour=usd_per_gb_hour)
    expected = inf
    for runs in all_partitions(problem):
        for counts in product(range(1, 6), repeat=len(runs)):
            plan = [Stage(*run, count) for run, count in zip(runs, counts, strict=True)]
            evaluated = evaluate(problem, plan)
            if not evaluated.violations:
                expected = min(expected, evaluated.cost_usd)

    if expected == inf:
        with pytest.raises(InfeasiblePlanError):
            find_optimum(problem)
        return
    found = find_optimum(problem)

    assert found.cost_lower_bound_usd <= expected * (1 + 1e-9)
    assert found.cost_usd == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scheduler", ["reinforce", "genetic", "greedy", "exact"])
def test_searches_find_plans_that_only_disks_make_possible(scheduler):
    problem = drawn_problem(1, step_model=StepModel.TRAINER, num_layers=6)
    in_memory = replace(problem, hot_shares=(), layers=tuple(map(without_disk, problem.layers)))
    with pytest.raises(InfeasiblePlanError):
        find_optimum(in_memory)

    plan = get_scheduler(scheduler).search(problem, budget_evaluations=400, seed=0).plan

    assert evaluate(problem, plan.stages).sweeps
    assert plan.cost_usd >= plan.cost_lower_bound_usd * (1 - 1e-12)


def without_disk(layer):
    return replace(layer, cold_bytes_per_sample=())
