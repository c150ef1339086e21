from dataclasses import replace

import pytest

from heterps_core.planning.explain.cost_range import find_cost_range, find_doubts
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.scheduling_plan import Stage
from tests.heterps_core.planning.explain.trying_all import feasible_plans, placement_of, tiny_problem
from tests.tasks import builders


def with_spread(problem, spreads):
    return replace(
        problem,
        layers=tuple(replace(layer, compute_relative_spread=spreads) for layer in problem.layers),
    )


def with_times(problem, factors):
    """The problem with compute times of some device types times a factor."""
    layers = tuple(
        replace(
            layer,
            compute_seconds={
                name: seconds * factors.get(name, 1.0) for name, seconds in layer.compute_seconds.items()
            },
        )
        for layer in problem.layers
    )
    return replace(problem, layers=layers)


def test_the_range_by_hand():
    # The embedding's 4 units take 10 ms for 100 samples at 0.9 USD/hour: 36,000 samples cost 0.0009 USD.
    problem = with_spread(builders.make_problem(), {"cpu-c7i": 0.2, "gpu-t4": 0.5})
    stages = (Stage(0, 0, "cpu-c7i", 4), Stage(1, 2, "gpu-t4", 1))

    found = find_cost_range(problem, stages)

    # Slow: the cpu takes 12 ms, the gpu 1.5 * 8 = 12 ms. Fast: 8 ms and 4 ms.
    assert found.low_usd == pytest.approx(0.0009 * 0.8)
    assert found.high_usd == pytest.approx(0.0009 * 1.2)
    assert found.lowest_throughput_samples_per_s == pytest.approx(100 / 0.012)
    assert not found.misses_floor


def test_a_floor_that_is_missed_at_the_slow_end_is_told():
    problem = with_spread(builders.make_problem(throughput_floor_samples_per_s=9_000.0), {"cpu-c7i": 0.2})

    found = find_cost_range(problem, (Stage(0, 0, "cpu-c7i", 4), Stage(1, 2, "gpu-t4", 1)))

    assert found.misses_floor


def test_a_spread_wider_than_the_time_itself_leaves_a_tenth():
    problem = with_spread(builders.make_problem(), {"cpu-c7i": 3.0, "gpu-t4": 3.0})

    found = find_cost_range(problem, (Stage(0, 0, "cpu-c7i", 4), Stage(1, 2, "gpu-t4", 1)))

    assert found.low_usd == pytest.approx(0.0009 * 0.1)
    assert found.high_usd == pytest.approx(0.0009 * 4)


def test_without_a_spread_there_is_no_range_and_no_doubt():
    problem = builders.make_problem()
    stages = find_optimum(problem).stages

    assert find_cost_range(problem, stages) is None
    assert find_doubts(problem, stages) == ()


@pytest.mark.parametrize("seed", range(6))
def test_regret_is_what_the_placement_costs_more_than_the_best_of_all_plans(seed):
    problem = tiny_problem(seed, floor_samples_per_s=0.0)
    spreads = dict.fromkeys(problem.device_types, 0.5)
    stages = find_optimum(problem).stages
    mine = placement_of(stages)

    doubts = find_doubts(with_spread(problem, spreads), stages)

    found = {(doubt.slow_types, doubt.fast_types): doubt for doubt in doubts}
    types = tuple(sorted(problem.device_types))
    used = tuple(sorted(set(mine)))
    cases = [(types, ()), ((), types), (used, tuple(sorted(set(types) - set(used))))]
    cases += [((name,), ()) for name in types] + [((), (name,)) for name in types]
    for slow, fast in cases:
        factors = {**dict.fromkeys(slow, 1.5), **dict.fromkeys(fast, 0.5)}
        plans = feasible_plans(with_times(problem, factors))
        best_usd = min(cost for _, _, cost in plans)
        regret_usd = min(cost for placement, _, cost in plans if placement == mine) - best_usd
        if regret_usd > 1e-5 * best_usd:
            assert found[slow, fast].regret_usd == pytest.approx(regret_usd, rel=1e-6)
        elif regret_usd < 1e-7 * best_usd:
            assert (slow, fast) not in found
    regrets = [doubt.regret_usd for doubt in doubts]
    assert regrets == sorted(regrets, reverse=True)


def test_a_placement_that_breaks_a_limit_has_no_regret_in_usd():
    # At 2.5 times the time the embedding takes 12.5 ms on all 8 cpu units; the floor allows 11.1, and the gpu's 8
    # units do all layers in 11.
    problem = with_spread(builders.make_problem(throughput_floor_samples_per_s=9_000.0), {"cpu-c7i": 1.5})

    worst = find_doubts(problem, (Stage(0, 0, "cpu-c7i", 4), Stage(1, 2, "gpu-t4", 1)))[0]

    assert (worst.slow_types, worst.fast_types, worst.regret_usd) == (("cpu-c7i",), (), None)
    assert worst.stages == (Stage(0, 2, "gpu-t4", 8),)
