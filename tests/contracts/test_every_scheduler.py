"""What every scheduler promises; a new one is held to it the moment it is listed."""

import subprocess
import sys
from dataclasses import replace

import pytest

from heterps_core.errors import ConfigurationError, InfeasiblePlanError, UnknownNameError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.schedulers import SCHEDULERS, get_scheduler
from heterps_core.plans.scheduling_plan import SchedulingPlan
from tests.builders import make_problem
from tests.independent_planner import CandidateStages

BUDGET = 400

# Small enough for brute force (3^5 = 243 assignments); a floor that one type alone meets, as all searches need.
PROBLEM = make_problem(4, num_layers=5, num_types=3, floor_samples_per_s=5_000)


@pytest.fixture(scope="module", params=sorted(SCHEDULERS))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def result(name):
    return get_scheduler(name).search(PROBLEM, budget_evaluations=BUDGET, seed=3)


def test_the_name_is_the_one_it_is_listed_under(name):
    assert get_scheduler(name).name == name
    assert get_scheduler(name).default_budget_evaluations >= 1


def test_the_plan_is_feasible_and_its_figures_are_those_of_the_cost_model(name, result):
    evaluation = evaluate(PROBLEM, result.plan.stages)

    assert not evaluation.violations
    assert result.evaluation == evaluation
    assert result.plan.scheduler == name
    assert result.plan.seed == 3
    assert result.plan.cost_usd == evaluation.cost_usd
    assert result.plan.throughput_samples_per_s == evaluation.throughput_samples_per_s
    assert result.plan.price_usd_per_hour == evaluation.price_usd_per_hour


def test_no_plan_is_better_than_brute_force_and_the_bound_is_its_cost(result):
    best = get_scheduler("brute-force").search(PROBLEM, budget_evaluations=BUDGET, seed=0)

    assert result.plan.cost_usd >= best.plan.cost_usd * (1 - 1e-12)
    assert result.plan.cost_lower_bound_usd == pytest.approx(best.plan.cost_usd, rel=1e-12)
    assert result.plan.cost_lower_bound_usd <= result.plan.cost_usd
    gap = result.plan.cost_usd / result.plan.cost_lower_bound_usd - 1
    assert result.plan.optimality_gap == pytest.approx(gap, abs=1e-12)


def test_a_bound_that_is_proven_already_is_taken_as_it_is(name, result):
    known_usd = result.plan.cost_lower_bound_usd / 2

    again = get_scheduler(name).search(PROBLEM, budget_evaluations=BUDGET, seed=3, proven_usd=known_usd)

    assert again.plan.stages == result.plan.stages
    own = result.plan.cost_lower_bound_usd  # the proving method needs none
    assert again.plan.cost_lower_bound_usd == (own if name == "exact" else known_usd)


def test_a_proof_that_may_take_no_time_gives_a_bound_that_holds(name, result):
    again = get_scheduler(name).search(PROBLEM, budget_evaluations=BUDGET, seed=3, max_seconds=0.0)

    assert again.plan.cost_lower_bound_usd <= result.plan.cost_lower_bound_usd * (1 + 1e-12)
    assert again.plan.cost_usd >= result.plan.cost_lower_bound_usd * (1 - 1e-12)


def test_the_budget_is_kept(name, result):
    assert 1 <= result.plan.num_evaluations <= BUDGET
    if name not in {"brute-force"}:
        small = get_scheduler(name).search(PROBLEM, budget_evaluations=3, seed=3)
        assert small.plan.num_evaluations <= 3


def test_the_same_seed_gives_the_same_plan(name, result):
    again = get_scheduler(name).search(PROBLEM, budget_evaluations=BUDGET, seed=3)

    assert again.plan == replace(result.plan, search_seconds=again.plan.search_seconds)


def test_the_history_ends_with_the_plan(result):
    costs = [point.best_cost_usd for point in result.history]
    counts = [point.num_evaluations for point in result.history]

    assert costs == sorted(costs, reverse=True)
    assert counts == sorted(counts)
    assert costs[-1] == pytest.approx(result.plan.cost_usd, rel=1e-12)
    assert counts[-1] <= result.plan.num_evaluations


def test_the_plan_survives_its_json_form(result):
    assert SchedulingPlan.from_json(result.plan.to_json()) == result.plan


def test_a_floor_that_nothing_meets_names_the_highest_throughput(name):
    impossible = replace(PROBLEM, throughput_floor_samples_per_s=1e9)

    with pytest.raises(
        InfeasiblePlanError, match=r"throughput floor: .*highest reachable throughput"
    ) as raised:
        get_scheduler(name).search(impossible, budget_evaluations=BUDGET, seed=0)

    assert raised.value.exit_status == 3


def test_a_budget_of_nothing_is_refused(name):
    with pytest.raises(ConfigurationError, match=r"at least 1 evaluation, got 0"):
        get_scheduler(name).search(PROBLEM, budget_evaluations=0, seed=0)


def test_scarce_units_are_respected(name):
    scarce = make_problem(2, num_layers=5, num_types=3, scarce=True, floor_samples_per_s=1_000)
    optimum = find_optimum(scarce)

    try:
        plan = get_scheduler(name).search(scarce, budget_evaluations=BUDGET, seed=0).plan
    except InfeasiblePlanError:
        assert name in {"cpu-only", "gpu-only"}  # one type alone may not do
        return

    assert not evaluate(scarce, plan.stages).violations
    assert plan.cost_usd >= optimum.cost_usd * (1 - 1e-12)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(
        UnknownNameError, match=r"known are: bayesian, brute-force.* Did you mean 'reinforce'"
    ):
        get_scheduler("reenforce")


@pytest.mark.weekly
def test_plans_do_not_depend_on_the_process_or_its_threads():
    code = (
        "import sys, torch\n"
        "torch.set_num_threads(int(sys.argv[1]))\n"
        "from heterps_core.planning.search.schedulers import get_scheduler\n"
        "from tests.builders import make_problem\n"
        "problem = make_problem(9, num_layers=12, num_types=4)\n"
        "for name in ('reinforce', 'reinforce-paper'):\n"
        "    plan = get_scheduler(name).search(problem, budget_evaluations=1500, seed=1).plan\n"
        "    print(plan.cost_usd, plan.stages)\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, threads], check=True, capture_output=True, text=True
        ).stdout
        for threads in ("1", "2")
    }

    assert len(outputs) == 1


def test_a_single_replica_that_does_not_communicate_is_planned_as_it_is_evaluated(name):
    # Slow links: what one replica saves decides. A floor that one type alone meets, as all searches need.
    layers = tuple(
        replace(
            layer,
            communication_seconds={key: 20 * value for key, value in layer.communication_seconds.items()},
        )
        for layer in PROBLEM.layers
    )
    problem = replace(
        PROBLEM, layers=layers, single_replica_communicates=False, throughput_floor_samples_per_s=100.0
    )
    best_usd = CandidateStages.of(problem).brute_force_usd()

    plan = get_scheduler(name).search(problem, budget_evaluations=BUDGET, seed=3).plan

    assert best_usd < find_optimum(replace(problem, single_replica_communicates=True)).cost_usd
    assert plan.cost_usd == evaluate(problem, plan.stages).cost_usd >= best_usd * (1 - 1e-12)
    assert plan.cost_lower_bound_usd == pytest.approx(best_usd, rel=1e-12)
