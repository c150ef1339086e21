"""Workers send bfloat16 by themselves where a slow link makes the plan cheaper with it."""

from dataclasses import replace

import pytest

from heterps_core.planning.search.schedulers.exact import ExactScheduler
from tasks.planning.wire_format import search_with_wire_dtype
from tasks.scheduling import Searches
from tests.tasks.builders import make_problem


def searched(*, gbit_per_s, exchange_seconds, max_units=8, asked=None, longest_list=256):
    """Return the format that is chosen, those that were searched, and the plan, on units with such links."""
    formats = []

    def search(wire_dtype):
        formats.append(wire_dtype)
        problem = make_problem(throughput_floor_samples_per_s=0.0)
        share = 1 if wire_dtype == "float32" else 0.5
        embedding, *others = problem.layers
        exchanged = dict.fromkeys(problem.device_types, share * exchange_seconds)
        problem = replace(
            problem,
            layers=(replace(embedding, communication_seconds=exchanged), *others),
            device_types={
                # A problem counts both directions, of which tensors get 97 %.
                name: replace(
                    unit, max_units=max_units, bandwidth_bytes_per_s=2 * 0.97 * gbit_per_s * 1e9 / 8
                )
                for name, unit in problem.device_types.items()
            },
        )
        found = ExactScheduler().search(problem, budget_evaluations=64, seed=0)
        return problem, Searches(results={"exact": found}, without_plan={}, taken="exact")

    wire_dtype, _, searches = search_with_wire_dtype(asked, search, longest_list=longest_list)
    return wire_dtype, formats, searches.chosen.plan


def test_over_a_slow_link_half_the_bytes_are_taken_where_the_plan_costs_less():
    # By hand: the exchange takes 200 ms / k beside 80 ms / k of computing, then 100 ms / k, for half the cost.
    full = searched(gbit_per_s=2, exchange_seconds=0.2, asked="float32")[-1]

    wire_dtype, formats, plan = searched(gbit_per_s=2, exchange_seconds=0.2)

    assert (wire_dtype, formats) == ("bfloat16", ["float32", "bfloat16"])
    assert plan.cost_usd == pytest.approx(full.cost_usd / 2)


@pytest.mark.parametrize(("gbit_per_s", "formats"), [(9.9, ["float32", "bfloat16"]), (10.1, ["float32"])])
def test_what_costs_the_same_stays_in_float32(gbit_per_s, formats):
    """The exchange takes less than the layers compute; behind a fast link it is not even asked."""
    assert searched(gbit_per_s=gbit_per_s, exchange_seconds=0.02)[:2] == ("float32", formats)


def test_one_worker_sends_nothing():
    # One cpu unit has all layers in 80 ms for 0.1 USD/h; a gpu unit beside it would cost five times that.
    wire_dtype, formats, plan = searched(gbit_per_s=1, exchange_seconds=0.0, max_units=1)

    assert [stage.num_replicas for stage in plan.stages] == [1]
    assert (wire_dtype, formats) == ("float32", ["float32"])


def test_lengths_that_bfloat16_would_round_travel_in_float32():
    assert searched(gbit_per_s=2, exchange_seconds=0.2, longest_list=257)[:2] == ("float32", ["float32"])


@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_a_format_that_is_asked_for_is_taken(asked):
    assert searched(gbit_per_s=1, exchange_seconds=0.2, asked=asked)[:2] == (asked, [asked])
