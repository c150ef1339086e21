"""How a fleet goes on that lost a machine, by hand: four machines at 1 USD an hour, each trains a sample a second.

Four hours of work are left for one machine. Three need 4,800 s and 10 s to go on; four 3,600 s, twice 10 s, and a
quarter of the 70 s in which the new one starts; 30 s pass at the end of either. Who waits for a new machine waits
for 70 s; another plan is made in 60 s more, and starts all of its machines.
"""

from dataclasses import replace

import pytest

from heterps_core.hardware import Market
from tasks.running.fleet_decision import Rest, Way, decide
from tests.infra.builders import offer
from tests.tasks.builders import (
    SPOT_PROBLEM_TYPES,
    bought,
    fleet_of,
    make_spot_problem,
    slowed,
    without_spot,
)

STEADY = without_spot(make_spot_problem(hours=8))


FLEET = bought(4)


def decided(
    *lost_ids,
    fleet=FLEET,
    purchase=None,
    problem=STEADY,
    slowness=1.0,
    refused=None,
    without=(),
    is_training=False,
    **limits,
):
    rest = slowed(replace(problem, num_samples=problem.num_samples / 2), slowness)
    return decide(
        Rest(problem=rest, **limits),
        replace(fleet_of(fleet), bought=purchase or fleet),
        lost_ids or ("stage0-node3",),
        is_training=is_training,
        refused=refused or {},
        without=without,
    )


def option(decision, way):
    [found] = [each for each in decision.options if each.way is way]
    return found


def test_without_hurry_the_others_go_on_alone_as_that_is_cheapest():
    decision = decided()

    assert decision.way is Way.KEEP
    assert decision.options[0].seconds == pytest.approx(4_810)
    assert decision.options[0].usd == pytest.approx(3 * 4_840 / 3_600)
    grown = option(decision, Way.REPLACE)
    assert (grown.seconds, grown.usd) == pytest.approx((3_637.5, 4 * 3_667.5 / 3_600))
    # One machine for four hours, which starts once more.
    planned = option(decision, Way.REPLAN)
    assert (planned.seconds, planned.usd) == pytest.approx((14_530, 14_520 / 3_600))
    assert decision.reason == (
        "keep, of keep 4.033 USD and 80.2 min, replace 4.075 USD and 60.6 min, re-plan 4.033 USD and 242.2 min"
    )


def test_what_would_be_late_is_not_taken_however_cheap():
    decision = decided(seconds_left=4_000)

    assert decision.way is Way.REPLACE
    assert option(decision, Way.KEEP).seconds > 4_000


def test_where_what_is_lost_is_not_available_another_plan_is_in_time():
    decision = decided(refused={Way.REPLACE: "none is available"}, seconds_left=4_000)

    assert decision.way is Way.REPLAN
    # Four machines again, as 4,000 s leave 3,870 s to train.
    assert (decision.options[0].seconds, decision.options[0].usd) == pytest.approx((3_730, 4 * 3_720 / 3_600))
    assert decision.reason.endswith("replace: none is available")


def test_where_all_would_be_late_the_first_to_be_done_goes_on():
    decision = decided(seconds_left=1_000)

    assert decision.way is Way.REPLACE
    assert "throughput floor" in option(decision, Way.REPLAN).refusal


def test_a_cap_is_kept_before_the_deadline_is_asked():
    decision = decided(seconds_left=4_000, usd_left=4.05)

    # Nothing is both: what is done first stops at the cap, with a checkpoint.
    assert decision.way is Way.REPLACE
    assert decided(usd_left=4.05).way is Way.KEEP


def test_a_price_that_rose_since_the_launch_counts_for_what_is_bought_alone():
    rose = bought(4, price_usd_per_hour=2.0)

    assert option(decided(purchase=rose), Way.REPLACE).usd == pytest.approx(5 * 3_667.5 / 3_600)


def test_a_run_that_is_slower_than_its_plan_is_rated_by_its_own_speed():
    assert option(decided(slowness=2.0), Way.KEEP).seconds == pytest.approx(9_610)


def test_another_plan_is_taken_where_it_saves_more_than_moving_may_cost():
    # A tenth of the price, on machines that were not sold when the fleet was launched.
    problem = make_spot_problem(hours=8, spot_price_share=0.1, interruptions_per_hour=0.0)

    assert decided(problem=problem).way is Way.REPLAN
    assert decided(problem=problem, without=["cpu-c7i-spot"]).way is Way.KEEP


def test_without_any_device_type_that_is_available_nothing_is_planned_again():
    assert "no device type is left" in option(decided(without=["cpu-c7i"]), Way.REPLAN).refusal


def test_a_stage_whose_only_machine_is_lost_is_not_left_empty():
    problem = make_spot_problem(hours=8)
    two_layers = replace(problem, layers=(problem.layers[0], replace(problem.layers[0], name="second")))

    decision = decided("stage1-node0", fleet=bought(2, 1), problem=two_layers, without=SPOT_PROBLEM_TYPES)

    assert option(decision, Way.KEEP).refusal == (
        "each of 2 stages needs a machine, but stage 1 would have none"
    )
    assert decision.way is Way.REPLACE


def test_a_fleet_whose_workers_would_meet_on_spot_is_refused():
    mixed = bought(4, markets=(Market.ON_DEMAND, Market.SPOT))

    assert (
        "workers must meet at a machine on-demand"
        in option(decided("stage0-node0", fleet=mixed), Way.KEEP).refusal
    )
    assert not option(decided("stage0-node3", fleet=mixed), Way.KEEP).refusal


def test_interruptions_that_are_expected_lengthen_the_rest():
    on_spot = bought(4, markets=(Market.ON_DEMAND, Market.SPOT))
    hourly = replace(offer(market=Market.SPOT, price_usd_per_hour=1.0), interruptions_per_hour=0.5)
    groups = tuple(
        replace(group, offer=hourly) if group.offer.market is Market.SPOT else group
        for group in on_spot.launch_plan.groups
    )
    on_spot = replace(on_spot, launch_plan=replace(on_spot.launch_plan, groups=groups))

    # Two of the three that stay: one interruption an hour, 1 + sqrt(2 * 5 s / 1 h) + 130 s / 1 h.
    stretch = 1 + (10 / 3_600) ** 0.5 + 130 / 3_600
    assert option(decided(fleet=on_spot), Way.KEEP).seconds == pytest.approx(10 + 4_800 * stretch)


def test_where_the_rest_of_the_fleet_lacks_memory_it_waits_for_the_lost_machine():
    layer = replace(STEADY.layers[0], is_sharded=True, state_bytes=3.9e9)

    decision = decided(problem=replace(STEADY, layers=(layer,)))

    assert "memory" in option(decision, Way.KEEP).refusal
    assert decision.way is Way.REPLACE
    assert decision.options[0].seconds == pytest.approx(70 + 3_600)


def grows(**others):
    """Whether three machines of four, each of which trains a sample a second, get the fourth again."""
    return decided(is_training=True, **others)


def test_a_fleet_that_shrank_grows_where_it_would_be_late_and_not_where_that_only_costs():
    assert grows().way is Way.KEEP
    assert option(grows(), Way.KEEP).seconds == pytest.approx(4_800)
    late = grows(seconds_left=4_000)
    assert late.way is Way.REPLACE
    # 10 s to take it in, and a quarter of 70 s.
    assert late.options[0].seconds == pytest.approx(3_627.5)


def test_a_fleet_that_cannot_grow_and_would_be_late_is_planned_again():
    refused = {Way.REPLACE: "none is available"}

    assert grows(seconds_left=4_000, refused=refused).way is Way.REPLAN
    assert grows(seconds_left=4_000, refused=refused, without=["cpu-c7i"]).way is Way.KEEP
