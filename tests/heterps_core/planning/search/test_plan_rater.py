import numpy as np
import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.search.plan_rater import PlanRater, Ratings, log_cost_rewards
from tests.builders import make_problem


def test_stops_at_the_budget_and_rates_the_first_plans():
    rater = PlanRater(make_problem(2, num_layers=5, num_types=3), budget_evaluations=7)
    plans = np.random.default_rng(0).integers(3, size=(5, 5))

    sizes = [rater.rate(plans).cost_usd.size for _ in range(2)]

    assert sizes == [5, 2]
    assert rater.num_evaluations_left == 0


def test_the_best_plan_has_exact_replica_counts_and_the_last_cost_of_the_history():
    problem = make_problem(2, num_layers=6, num_types=3)
    rater = PlanRater(problem, budget_evaluations=1_000)

    rater.rate(np.random.default_rng(0).integers(3, size=(900, 6)))

    evaluation = evaluate(problem, rater.best_stages)
    assert not evaluation.violations
    assert rater.history[-1].best_cost_usd == pytest.approx(evaluation.cost_usd, rel=1e-12)
    costs = [point.best_cost_usd for point in rater.history]
    assert costs == sorted(costs, reverse=True)


def test_rewards_rank_by_cost_and_then_by_distance_to_feasibility():
    ratings = Ratings(
        cost_usd=np.array([2.0, 30.0, 1.0, 1.0, np.inf]),
        shortfalls=np.array([0.0, 0.0, 1.0, 2.0, 21.0]),
    )

    rewards = log_cost_rewards(ratings)

    assert np.argsort(-rewards).tolist() == [0, 1, 2, 3, 4]
    assert rewards[0] == pytest.approx(-np.log(2))
    assert np.isfinite(rewards).all()
