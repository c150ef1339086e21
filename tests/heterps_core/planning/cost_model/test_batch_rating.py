from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.batch_rating import stages_of
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.run_tables import segment_layers
from heterps_core.planning.problem.extra_costs import ExtraCosts
from heterps_core.planning.provisioning.replica_balance import balance_replicas
from heterps_core.planning.search.plan_rater import PlanRater
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem


def runs_of(assignment, names):
    changes = [
        0,
        *(i for i in range(1, len(assignment)) if assignment[i] != assignment[i - 1]),
        len(assignment),
    ]
    return [Stage(a, b - 1, names[assignment[a]], 1) for a, b in pairwise(changes)]


def test_equal_neighbours_make_one_stage():
    stages = stages_of(np.array([[0, 0, 1], [2, 1, 1], [1, 1, 1]]), num_types=3)

    found = [[(*segment_layers(row // 3), row % 3) for row in stages.of_plan(plan)] for plan in range(3)]

    assert found == [[(0, 1, 0), (2, 2, 1)], [(0, 0, 2), (1, 2, 1)], [(0, 2, 1)]]


@pytest.mark.parametrize("scarce", [False, True])
def test_ratings_bracket_the_exact_cost_of_every_plan(scarce):
    problem = make_problem(11, num_layers=6, num_types=3, scarce=scarce, floor_samples_per_s=5_000)
    plans = np.random.default_rng(0).integers(3, size=(300, 6))
    rater = PlanRater(problem, budget_evaluations=1_000)
    rating = rater.grid(1).rate(stages_of(plans, 3))
    usd = problem.num_steps / 3600

    num_feasible = 0
    for plan, product, bound, shortfall in zip(
        plans, rating.products, rating.lower_bounds, rating.shortfalls, strict=True
    ):
        try:
            stages = balance_replicas(problem, runs_of(plan, problem.device_type_names))
        except InfeasiblePlanError:
            assert shortfall > 0
            continue
        num_feasible += 1
        cost_usd = evaluate(problem, stages).cost_usd
        assert shortfall == 0
        assert bound * usd <= cost_usd
        assert cost_usd * (1 - 1e-6) <= product * usd <= cost_usd * 1.05
    assert num_feasible > 30


def test_a_plan_further_below_the_floor_falls_further_short():
    slow = make_problem(11, num_layers=6, num_types=3, floor_samples_per_s=1e6)
    slower = make_problem(11, num_layers=6, num_types=3, floor_samples_per_s=1e7)
    plan = np.zeros((1, 6), dtype=np.int64)

    shortfalls = [PlanRater(p, budget_evaluations=1).rate(plan).shortfalls[0] for p in (slow, slower)]

    assert 0 < shortfalls[0] < shortfalls[1]


@pytest.mark.filterwarnings("error")
def test_numbers_beyond_single_precision_are_rated_without_a_warning():
    problem = make_problem(4, num_layers=4, num_types=2, floor_samples_per_s=0.0)
    slow_links = {
        name: replace(unit, bandwidth_bytes_per_s=1e-18) for name, unit in problem.device_types.items()
    }
    for extreme in (
        replace(problem, batch_size=10**18, device_types=slow_links),
        replace(problem, num_samples=1e-18, extra_costs=ExtraCosts(startup_seconds=1e18)),
    ):
        rater = PlanRater(extreme, budget_evaluations=10)

        ratings = rater.rate(np.zeros((8, 4), dtype=np.int64))

        assert np.isfinite(ratings.cost_usd).all()
        assert (ratings.shortfalls == 0).all()
