from dataclasses import replace

import pytest

from heterps_core.planning.explain.binding_constraints import price_of_floor, prices_of_units
from heterps_core.planning.explain.variants import CAP_FACTOR
from tests.heterps_core.planning.explain.trying_all import cheapest_by_trying_all, tiny_problem


def with_unit(problem, name, **changes):
    return replace(
        problem,
        device_types={**problem.device_types, name: replace(problem.device_types[name], **changes)},
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_floor_costs_what_the_cheapest_plan_without_it_saves(seed):
    problem = tiny_problem(seed, floor_samples_per_s=9_000.0)
    cheapest = cheapest_by_trying_all(problem)
    _, stages, unfloored_usd = cheapest_by_trying_all(replace(problem, throughput_floor_samples_per_s=0.0))

    found = price_of_floor(problem, cheapest[2])

    if unfloored_usd == pytest.approx(cheapest[2], rel=1e-9):
        assert found == ()
    else:
        assert found[0].saving_usd == pytest.approx(cheapest[2] - unfloored_usd, rel=1e-9)
        assert found[0].stages == stages


@pytest.mark.parametrize("seed", [0, 2, 3, 5])
def test_caps_and_memory_cost_what_the_cheapest_plan_without_them_saves(seed):
    problem = tiny_problem(seed, num_types=2, max_units=2, floor_samples_per_s=6_000.0)
    cheapest = cheapest_by_trying_all(problem)
    savings = {}
    for name in problem.device_types:
        for constraint, lifted in (
            ("units cap", with_unit(problem, name, max_units=2 * CAP_FACTOR)),
            ("memory", with_unit(problem, name, memory_bytes=1e18)),
        ):
            saving_usd = cheapest[2] - cheapest_by_trying_all(lifted)[2]
            if saving_usd > 1e-9 * cheapest[2]:
                savings[constraint, name] = saving_usd

    found = prices_of_units(problem, cheapest[2])

    assert {(limit.constraint, limit.device_type): limit.saving_usd for limit in found} == pytest.approx(
        savings, rel=1e-9
    )
    assert [limit.saving_usd for limit in found] == sorted(savings.values(), reverse=True)


def test_no_floor_costs_nothing():
    problem = tiny_problem(1, floor_samples_per_s=0.0)

    assert price_of_floor(problem, cheapest_by_trying_all(problem)[2]) == ()
