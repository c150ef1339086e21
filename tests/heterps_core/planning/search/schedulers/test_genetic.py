from itertools import groupby

import numpy as np
import pytest

from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.plan_rater import PlanRater
from heterps_core.planning.search.schedulers.genetic import (
    GeneticScheduler,
    _crossed,
    _mutated,
    _random_run_plans,
    _run_around,
    _single_run_plans,
    _two_run_plans,
    _unseen,
)
from tests.builders import make_problem


@pytest.mark.parametrize("seed", range(3))
def test_finds_the_optimum_of_16_layers_and_4_types_in_10000_evaluations(seed):
    problem = make_problem(1_000 + seed, num_layers=16, num_types=4, max_units=400)

    plan = GeneticScheduler().search(problem, budget_evaluations=10_000, seed=seed).plan

    assert plan.cost_usd == pytest.approx(find_optimum(problem).cost_usd, rel=1e-3)


def test_no_assignment_is_rated_twice_also_by_later_populations():
    problem = make_problem(1, num_layers=8, num_types=3)  # 6,561 assignments
    rater = PlanRater(problem, budget_evaluations=4_000)
    proposals = GeneticScheduler().propose(problem, budget_evaluations=4_000, seed=0)
    rated = []

    batch = next(proposals)
    try:
        while rater.num_evaluations_left > 0:
            rated.extend(plan.tobytes() for plan in batch[: rater.num_evaluations_left])
            batch = proposals.send(rater.rate(batch))
    except StopIteration:
        pass

    assert len(rated) == len(set(rated)) == rater.num_evaluations


def test_ends_by_itself_when_nothing_new_is_left():
    problem = make_problem(4, num_layers=5, num_types=2, floor_samples_per_s=1_000)

    result = GeneticScheduler().search(problem, budget_evaluations=10**6, seed=0)

    assert result.plan.num_evaluations <= 2**5
    assert result.plan.optimality_gap == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("num_layers", "num_types"), [(1, 1), (1, 3), (6, 1)])
def test_works_where_there_is_nothing_to_cross_or_change(num_layers, num_types):
    problem = make_problem(0, num_layers=num_layers, num_types=num_types, floor_samples_per_s=100)

    plan = GeneticScheduler().search(problem, budget_evaluations=50, seed=0).plan

    assert plan.num_evaluations == num_types
    assert plan.optimality_gap == pytest.approx(0, abs=1e-9)


def test_first_plans_are_all_those_of_one_run_and_of_two():
    def num_runs(plan):
        return len(list(groupby(plan)))

    ones = _single_run_plans(5, 3).tolist()
    twos = _two_run_plans(5, 3, 100, np.random.default_rng(0)).tolist()

    assert sorted(ones) == [[index] * 5 for index in range(3)]
    assert len({tuple(plan) for plan in twos}) == len(twos) == 3 * 2 * 4  # types x other types x borders
    assert {num_runs(plan) for plan in twos} == {2}
    assert len(_two_run_plans(5, 3, 7, np.random.default_rng(0))) == 7


def test_a_mutation_paints_one_stretch_with_one_type():
    random = np.random.default_rng(0)
    plans = _random_run_plans(2_000, 12, 4, random)

    changed = plans != _mutated(plans, 4, np.random.default_rng(1))
    after = _mutated(plans, 4, np.random.default_rng(1))

    assert 0.3 < changed.any(axis=1).mean() < 1
    for plan, is_changed in zip(after[changed.any(axis=1)], changed[changed.any(axis=1)], strict=True):
        first, last = np.flatnonzero(is_changed)[[0, -1]]
        assert len(set(plan[first : last + 1].tolist())) == 1  # layers of that type already may lie between


def test_mutations_move_borders_join_runs_and_split_them():
    plan = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    children = {
        tuple(child)
        for child in _mutated(np.repeat(plan[None], 5_000, axis=0), 3, np.random.default_rng(0)).tolist()
    }

    assert (0, 0, 0, 0, 1, 2, 2, 2) in children  # a border moved
    assert (0, 0, 0, 2, 2, 2, 2, 2) in children  # a run joined its neighbour
    assert (1, 1, 1, 1, 1, 2, 2, 2) in children  # a run changed its type
    assert (0, 1, 0, 1, 1, 2, 2, 2) in children  # a run was split


def test_a_crossed_plan_takes_one_stretch_from_its_partner():
    zeros, ones = np.zeros((500, 9), dtype=np.int64), np.ones((500, 9), dtype=np.int64)

    children = _crossed(zeros, ones, np.random.default_rng(0))

    assert ((np.diff(children, prepend=0, append=0) != 0).sum(axis=1) <= 2).all()
    assert set(children.sum(axis=1).tolist()) == set(range(10))


def test_the_run_around_a_layer_is_the_longest_of_its_type():
    plans = np.random.default_rng(0).integers(2, size=(200, 7))
    layer = np.random.default_rng(1).integers(7, size=200)

    first, last = _run_around(plans, layer)

    for plan, middle, low, high in zip(plans.tolist(), layer, first, last, strict=True):
        assert low <= middle <= high
        assert set(plan[low : high + 1]) == {plan[middle]}
        assert low == 0 or plan[low - 1] != plan[middle]
        assert high == 6 or plan[high + 1] != plan[middle]


def test_repeats_are_dropped_in_order():
    seen = {np.array([1, 1]).tobytes()}

    kept = _unseen(np.array([[0, 1], [1, 1], [0, 1], [1, 0]]), seen)

    assert kept.tolist() == [[0, 1], [1, 0]]
    assert _unseen(kept, seen).tolist() == []
