"""The seconds that the proofs of one planning share."""

from heterps_core.planning.search.optimum import find_optimum
from tasks.planning.deadline import PlanningTime
from tests.benchmarks.planner_proofs import draw_tight


def test_the_next_proof_has_its_share_of_what_is_left():
    time = PlanningTime(600.0)

    assert 140.0 < time.share(4) <= 150.0
    assert time.share(4) < time.share(2) < time.share(1) <= 600.0


def test_where_no_time_is_left_a_proof_still_gives_a_plan_with_its_bound():
    problem = next(draw_tight(32, 4, seed=7))

    found = find_optimum(problem, seconds=PlanningTime(0.0).share(3))

    best = find_optimum(problem)
    assert 0 < found.cost_lower_bound_usd <= best.cost_usd <= found.cost_usd
