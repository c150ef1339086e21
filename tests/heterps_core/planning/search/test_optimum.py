import json
from dataclasses import replace

import pytest

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.planning.provisioning.replica_balance import balance_replicas
from heterps_core.planning.search.capped import capped_search
from heterps_core.planning.search.capped.capped_search import CappedSearch
from heterps_core.planning.search.optimum import find_optimum, highest_throughput
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem
from tests.independent_planner import CandidateStages
from tests.partitions import all_partitions
from tests.paths import TESTS
from tests.tiers import weekly_after

PROBLEMS = TESTS / "golden" / "problems"
EXPECTED = json.loads((PROBLEMS / "expected.json").read_text())


@pytest.mark.parametrize("name", [name for name, optimum in EXPECTED.items() if optimum is not None])
def test_finds_the_optimum_that_an_independent_program_found(name):
    problem = SchedulingProblem.load(PROBLEMS / f"{name}.json")

    found = find_optimum(problem)

    assert found.cost_usd == pytest.approx(EXPECTED[name]["cost_usd"], rel=1e-12)
    assert found.cost_lower_bound_usd == found.cost_usd
    assert not evaluate(problem, found.stages).violations


def cheapest_by_trying_all(problem):
    costs = []
    for runs in all_partitions(problem):
        try:
            stages = balance_replicas(problem, [Stage(*run, 1) for run in runs])
            costs.append(evaluate(problem, stages).cost_usd)
        except InfeasiblePlanError:
            continue
    return min(costs, default=None)


@pytest.mark.parametrize("scarce", [False, True])
@pytest.mark.parametrize("seed", weekly_after(4, range(8)))
def test_equals_trying_all_assignments(seed, scarce):
    problem = make_problem(
        seed, num_layers=4, num_types=3, scarce=scarce, floor_samples_per_s=[20_000, 100_000][seed % 2]
    )
    expected = cheapest_by_trying_all(problem)

    if expected is None:
        with pytest.raises(InfeasiblePlanError):
            find_optimum(problem)
    else:
        found = find_optimum(problem)
        assert found.cost_usd == pytest.approx(expected, rel=1e-12)
        assert found.cost_lower_bound_usd == found.cost_usd


@pytest.mark.parametrize("step_model", StepModel)
@pytest.mark.parametrize("most_steps", [16, 40])
def test_the_bound_holds_wherever_the_search_over_caps_ends(most_steps, step_model):
    problems = [
        replace(
            make_problem(seed, num_layers=8, num_types=3, scarce=True, floor_samples_per_s=20_000),
            step_model=step_model,
        )
        for seed in range(5)
    ]
    proven = [CappedSearch(problem).run().product for problem in problems]

    found = [CappedSearch(each, most_steps=most_steps).run() for each in problems]

    for optimum, least in zip(found, proven, strict=True):
        assert optimum.lower_bound <= least * (1 + 1e-12)
        assert optimum.product >= least * (1 - 1e-12)
    assert any(optimum.lower_bound < optimum.product for optimum in found)


def nearly_out_of_reach(seed):
    problem = make_problem(seed, num_layers=8, num_types=3, scarce=True, floor_samples_per_s=0)
    return replace(problem, throughput_floor_samples_per_s=0.97 * highest_throughput(problem))


def test_a_capped_search_that_ends_early_still_finds_a_plan():
    problems = [nearly_out_of_reach(seed) for seed in range(3, 11)]
    proven = [find_optimum(problem).cost_usd for problem in problems]

    found = [CappedSearch(each, most_steps=100).run().stages for each in problems]

    costs = [evaluate(each, stages).cost_usd for each, stages in zip(problems, found, strict=True)]
    assert costs == pytest.approx(proven, rel=0.01)


def test_a_proof_that_is_far_after_many_steps_begins_again_with_a_proposed_plan(monkeypatch):
    problem = nearly_out_of_reach(4)
    best = find_optimum(problem)
    monkeypatch.setattr(capped_search, "_STEPS_BEFORE_PROPOSAL", 1)
    monkeypatch.setattr(capped_search, "_SWEEPS", 0)

    found = CappedSearch(problem, most_steps=1, propose=lambda: best.stages).run()

    assert evaluate(problem, found.stages).cost_usd == pytest.approx(best.cost_usd)
    assert found.lower_bound < found.product


def test_a_search_that_met_no_plan_does_not_say_that_there_is_none(monkeypatch):
    monkeypatch.setattr(capped_search, "_NUM_FIRST_INTERVALS", 1)
    monkeypatch.setattr(capped_search, "_SWEEPS", 0)
    problems = [nearly_out_of_reach(seed) for seed in range(8)]

    messages = []
    for problem in problems:
        try:
            find_optimum(problem, seconds=0.0)
        except InfeasiblePlanError as error:
            messages.append(str(error))

    assert messages
    assert all("none is proven impossible" in message for message in messages)


def test_without_a_floor_the_cheapest_plan_may_be_slow():
    problem = make_problem(5, num_layers=6, num_types=3, floor_samples_per_s=20_000)
    free = find_optimum(replace(problem, throughput_floor_samples_per_s=0))

    assert free.cost_usd <= find_optimum(problem).cost_usd


def test_a_floor_that_is_exactly_reached_is_kept():
    problem = make_problem(5, num_layers=6, num_types=3, floor_samples_per_s=20_000)
    reached = evaluate(problem, find_optimum(problem).stages).throughput_samples_per_s

    tightened = find_optimum(replace(problem, throughput_floor_samples_per_s=reached))

    assert tightened.cost_usd == pytest.approx(find_optimum(problem).cost_usd)


def test_names_the_highest_reachable_throughput():
    problem = make_problem(5, num_layers=4, num_types=2, floor_samples_per_s=1e9, scarce=True)
    with pytest.raises(InfeasiblePlanError, match="throughput floor") as raised:
        find_optimum(problem)
    reachable = float(str(raised.value).split("throughput is ")[1].split(" ")[0])

    find_optimum(replace(problem, throughput_floor_samples_per_s=reachable * 0.9999))
    with pytest.raises(InfeasiblePlanError):
        find_optimum(replace(problem, throughput_floor_samples_per_s=reachable * 1.0001))


def test_the_search_for_the_reason_why_there_is_no_plan_ends_with_the_seconds():
    problem = make_problem(5, num_layers=4, num_types=2, floor_samples_per_s=1e9, scarce=True)

    with pytest.raises(InfeasiblePlanError, match=r"proven that no plan .* ended with its seconds"):
        find_optimum(problem, seconds=0.0)


def with_device_types(problem, **changes):
    return replace(
        problem,
        device_types={name: replace(unit, **changes) for name, unit in problem.device_types.items()},
    )


def test_names_memory_and_how_much_would_do():
    problem = with_device_types(make_problem(5, num_layers=4, num_types=2), memory_bytes=1e6)
    dense = tuple(replace(layer, is_sharded=False, state_bytes=4e6) for layer in problem.layers)
    problem = replace(problem, layers=dense)

    with pytest.raises(
        InfeasiblePlanError, match=r"memory: .* 4 times the memory_bytes .* layer 0"
    ) as raised:
        find_optimum(problem)

    # Two types, one layer each in turn: with 4 MB a unit every layer fits alone.
    assert raised.value.constraint == "memory"


def test_names_the_caps_that_memory_breaks():
    problem = with_device_types(make_problem(5, num_layers=2, num_types=1), memory_bytes=1e9, max_units=10)
    tables = tuple(replace(layer, is_sharded=True, state_bytes=10e9) for layer in problem.layers)
    problem = replace(problem, layers=tables)

    with pytest.raises(InfeasiblePlanError, match=r"units cap: .* 2 times as many units"):
        find_optimum(problem)


def test_one_layer_on_one_type_is_a_plan():
    problem = make_problem(0, num_layers=1, num_types=1, floor_samples_per_s=1_000)

    assert len(find_optimum(problem).stages) == 1


@pytest.mark.parametrize("scarce", [False, True])
@pytest.mark.parametrize("seed", weekly_after(2, range(6)))
def test_equals_trying_all_plans_where_a_single_replica_does_not_communicate(seed, scarce):
    problem = make_problem(
        seed, num_layers=4, num_types=3, scarce=scarce, floor_samples_per_s=[0, 30_000][seed % 2]
    )
    problem = replace(problem, single_replica_communicates=False)

    found = find_optimum(problem)

    assert found.cost_usd == pytest.approx(CandidateStages.of(problem).brute_force_usd(), rel=1e-12)
    assert found.cost_lower_bound_usd == found.cost_usd
