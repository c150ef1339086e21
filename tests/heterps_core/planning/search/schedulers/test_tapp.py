import numpy as np

from heterps_core.planning.search.plan_rater import PlanRater, Ratings
from heterps_core.planning.search.schedulers.tapp import TappScheduler, TappSettings
from tests.builders import make_problem


def test_learns_from_whatever_ratings_it_is_sent():
    """Rewards may come from anywhere, a cost model or a run; here a plan costs more with each layer on type 0."""
    problem = make_problem(0, num_layers=6, num_types=3)
    proposals = TappScheduler().propose(problem, budget_evaluations=10**6, seed=0)
    shares = []

    plans = next(proposals)
    for _ in range(25):
        num_dear = (plans == 0).sum(axis=1)
        shares.append(num_dear.mean() / 6)
        plans = proposals.send(
            Ratings(cost_usd=np.exp(num_dear.astype(np.float64)), shortfalls=np.zeros(len(plans)))
        )

    assert shares[0] > 0.2
    assert np.mean(shares[-5:]) < 0.1


def test_a_round_holds_several_placements_of_each_grouping():
    problem = make_problem(0, num_layers=6, num_types=3)
    settings = TappSettings(groupings_per_round=5, placements_per_grouping=3)

    plans = next(TappScheduler(settings).propose(problem, budget_evaluations=100, seed=0))

    assert plans.shape == (15, 6)
    assert plans.min() >= 0
    assert plans.max() < 3


def test_later_rounds_are_better_than_the_first_ones():
    problem = make_problem(1_002, num_layers=10, num_types=3, max_units=400)
    rater = PlanRater(problem, budget_evaluations=1_000)
    proposals = TappScheduler().propose(problem, budget_evaluations=1_000, seed=0)
    means = []

    plans = next(proposals)
    for _ in range(1_000 // len(plans)):
        ratings = rater.rate(plans)
        means.append(np.mean(np.log(ratings.cost_usd) + 5 * ratings.shortfalls))
        plans = proposals.send(ratings)

    assert np.mean(means[-5:]) < np.mean(means[:5])
