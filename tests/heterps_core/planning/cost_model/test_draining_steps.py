"""Steps that drain the pipeline: their promise against the simulation, and planning by it against every plan."""

from dataclasses import replace

import numpy as np
import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.run_tables import segment_table
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.simulate.pipeline_load import pipeline_load
from heterps_core.planning.simulate.pipeline_simulation import simulate
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import with_exchange_work
from tests.heterps_core.planning.cost_model.test_step_model import (
    all_plans,
    cheapest_by_trying_all,
    trainer_problem,
)
from tests.heterps_core.planning.simulate.event_queue import simulate_by_events
from tests.tiers import weekly_after


def test_a_step_that_drains_is_promised_as_it_is_simulated_and_a_lone_worker_has_nothing_to_drain():
    delayed = trainer_problem(3)
    sync = replace(delayed, drains=True)
    first, second = delayed.device_type_names[:2]
    alone = (Stage(0, 3, first, 1),)
    pipeline = (Stage(0, 1, first, 2), Stage(2, 3, second, 1))

    assert evaluate(sync, alone).throughput_samples_per_s == pytest.approx(
        evaluate(delayed, alone).throughput_samples_per_s
    )
    promised = evaluate(sync, pipeline)
    load = pipeline_load(sync, pipeline, num_microbatches=promised.num_microbatches)
    assert load.drains
    assert promised.throughput_samples_per_s == pytest.approx(sync.batch_size / simulate(load).step_seconds)
    assert simulate(load).step_seconds > max(part.seconds for part in promised.stages)


def drained_problem(seed, **sizes):
    """Return a problem of draining steps with caps of three units and fully connected layers among others."""
    problem = trainer_problem(seed, **({"num_layers": 3, "num_types": 2} | sizes))
    units = {name: replace(unit, max_units=3, instances=()) for name, unit in problem.device_types.items()}
    return replace(problem, drains=True, device_types=units, batch_size=(4096, 512, 60)[seed % 3])


@pytest.mark.parametrize("seed", weekly_after(2, [0, 3, 1, 2, 4, 5]))
def test_no_simulated_step_is_shorter_than_its_stages_fill_and_drain(seed):
    problem = replace(drained_problem(seed, num_layers=4), single_replica_communicates=seed > 2)
    if seed % 2:
        problem = with_exchange_work(problem, seed)
    random = np.random.default_rng(seed)
    plans = list(all_plans(problem, 3))
    for index in random.choice(len(plans), 25, replace=False).tolist():
        stages = plans[index]
        promised = evaluate(problem, stages)
        load = pipeline_load(problem, stages, num_microbatches=promised.num_microbatches)

        step_seconds = simulate(load).step_seconds

        filled = max(part.drained_seconds for part in promised.stages)
        assert filled <= step_seconds * (1 + 1e-9)
        assert filled <= simulate_by_events(load, num_steps=1)[0] * (1 + 1e-9)
        if len(stages) == 1:
            # All replicas sum, in the formula as many as would all have the rows of the slowest.
            assert filled == pytest.approx(step_seconds, rel=1e-3)


@pytest.mark.parametrize(("communicates", "most_replicas"), [(False, 3), (True, 3), (False, 60), (True, 60)])
@pytest.mark.parametrize("seed", range(3))
def test_the_least_replicas_that_fill_and_drain_in_time_are_those_that_trying_every_number_finds(
    seed, communicates, most_replicas
):
    problem = replace(drained_problem(seed, num_layers=4), single_replica_communicates=communicates)
    if most_replicas > 3:
        units = {name: replace(unit, max_units=most_replicas) for name, unit in problem.device_types.items()}
        problem = with_exchange_work(replace(problem, device_types=units, batch_size=4096), seed)
    table = segment_table(problem, num_microbatches=4)
    counts = np.arange(1.0, most_replicas + 1.0)
    seconds = np.array([table.seconds(np.full(table.memory_replicas.shape, k)) for k in counts])
    seconds[counts[:, None, None] < table.memory_replicas] = np.inf
    limits = np.unique(seconds[np.isfinite(seconds)])

    found = table.least_replicas(limits)

    is_enough = seconds[None] <= limits[:, None, None, None]
    assert (found == np.where(is_enough.any(axis=1), is_enough.argmax(axis=1) + 1.0, np.inf)).all()


@pytest.mark.parametrize("seed", weekly_after(1, range(6)))
def test_no_plan_whose_steps_drain_costs_less_than_the_bound_and_the_optimum_found_is_near_the_cheapest(seed):
    problem = drained_problem(seed)
    expected = cheapest_by_trying_all(problem)

    found = find_optimum(problem)

    assert found.cost_lower_bound_usd <= expected * (1 + 1e-9)
    assert expected * (1 - 1e-9) <= found.cost_usd <= expected * 1.02
    assert found.cost_usd == pytest.approx(evaluate(problem, found.stages).cost_usd)
    assert not evaluate(problem, found.stages).violations


@pytest.mark.parametrize("seed", weekly_after(1, [1, 0, 2]))
def test_a_plan_whose_steps_drain_keeps_the_floor_when_simulated(seed):
    problem = drained_problem(seed)
    evaluations = [evaluate(problem, plan) for plan in all_plans(problem, 3)]
    feasible = [each for each in evaluations if not each.violations]
    floor = 0.9 * max(each.throughput_samples_per_s for each in feasible)
    expected = min(each.cost_usd for each in feasible if each.throughput_samples_per_s >= floor)
    problem = replace(problem, throughput_floor_samples_per_s=floor)

    found = find_optimum(problem)

    assert not evaluate(problem, found.stages).violations
    assert found.cost_lower_bound_usd <= expected * (1 + 1e-9)
    assert expected * (1 - 1e-9) <= found.cost_usd <= expected * 1.02
