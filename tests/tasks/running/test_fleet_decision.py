"""How a fleet goes on that lost a machine, by hand: four machines at 1 USD an hour, each trains a sample a second.

Four hours of work are left for one machine. Three need 4,800 s and 10 s to go on; four 3,600 s, twice 10 s, and a
quarter of the 120 s in which the new one starts; 30 s pass at the end of either. Who waits for a new machine waits
for 120 s; another plan is made in 60 s more, and starts all of its machines.
"""

from dataclasses import replace

import pytest

from heterps_core.hardware import Market
from heterps_core.plans.scheduling_plan import Stage
from tasks.running.fleet_decision import Rest, Way, decide_on_growth, decide_on_loss, decide_on_prices
from tasks.running.replacement import smaller
from tests.infra.builders import offer
from tests.tasks.builders import SPOT_PROBLEM_TYPES, bought, cluster_of, make_spot_problem, without_spot

STEADY = without_spot(make_spot_problem(hours=8))


FLEET = bought(4)


def decided(
    *lost_ids, fleet=FLEET, at_prices_of_now=None, problem=STEADY, refused=None, without=(), **limits
):
    return decide_on_loss(
        Rest.of(problem, share_left=0.5, **limits),
        at_prices_of_now or fleet,
        cluster_of(fleet),
        lost_ids or ("stage0-node3",),
        refused=refused or {},
        without=without,
    )


def option(decision, way):
    [found] = [each for each in decision.options if each.way is way]
    return found


def test_without_hurry_the_others_go_on_alone_as_that_is_cheapest():
    decision = decided()

    assert decision.chosen.way is Way.SHRINK
    assert decision.chosen.seconds == pytest.approx(4_810)
    assert decision.chosen.usd == pytest.approx(3 * 4_840 / 3_600)
    grown = option(decision, Way.GROW)
    assert (grown.seconds, grown.usd) == pytest.approx((3_650, 4 * 3_680 / 3_600))
    # One machine for four hours, which starts once more.
    planned = option(decision, Way.REPLAN)
    assert (planned.seconds, planned.usd) == pytest.approx((14_580, 14_520 / 3_600))
    assert decision.reason == (
        "shrink, of shrink 4.033 USD and 80.2 min, grow 4.089 USD and 60.8 min, re-plan 4.033 USD and 243.0 min"
    )


def test_what_would_be_late_is_not_taken_however_cheap():
    decision = decided(seconds_left=4_000)

    assert decision.chosen.way is Way.GROW
    assert option(decision, Way.SHRINK).seconds > 4_000


def test_where_what_is_lost_cannot_be_had_another_plan_is_in_time():
    decision = decided(refused={Way.GROW: "none can be had"}, seconds_left=4_000)

    assert decision.chosen.way is Way.REPLAN
    # Four machines again, as 4,000 s leave 3,820 s to train.
    assert (decision.chosen.seconds, decision.chosen.usd) == pytest.approx((3_780, 4 * 3_720 / 3_600))
    assert decision.reason.endswith("grow: none can be had")


def test_where_all_would_be_late_the_first_to_be_done_goes_on():
    decision = decided(seconds_left=1_000)

    assert decision.chosen.way is Way.GROW
    assert "throughput floor" in option(decision, Way.REPLAN).refusal


def test_a_cap_is_kept_before_the_deadline_is_asked():
    decision = decided(seconds_left=4_000, usd_left=4.05)

    # Nothing is both: what is done first stops at the cap, with a checkpoint.
    assert decision.chosen.way is Way.GROW
    assert decided(usd_left=4.05).chosen.way is Way.SHRINK


def test_a_price_that_rose_since_the_launch_counts_for_what_is_bought_alone():
    rose = bought(4, price_usd_per_hour=2.0)

    assert option(decided(at_prices_of_now=rose), Way.GROW).usd == pytest.approx(5 * 3_680 / 3_600)


def test_a_run_that_is_slower_than_its_plan_is_rated_by_its_own_speed():
    assert option(decided(slowness=2.0), Way.SHRINK).seconds == pytest.approx(9_610)


def test_another_plan_is_taken_where_it_saves_more_than_moving_may_cost():
    # A tenth of the price, on machines that were not sold when the fleet was launched.
    problem = make_spot_problem(hours=8, spot_price_share=0.1, interruptions_per_hour=0.0)

    assert decided(problem=problem).chosen.way is Way.REPLAN
    assert decided(problem=problem, without=["cpu-c7i-spot"]).chosen.way is Way.SHRINK


def test_without_any_device_type_that_can_be_had_nothing_is_planned_again():
    assert "no device type is left" in option(decided(without=["cpu-c7i"]), Way.REPLAN).refusal


def test_a_stage_whose_only_machine_is_lost_is_not_left_empty():
    problem = make_spot_problem(hours=8)
    two_layers = replace(problem, layers=(problem.layers[0], replace(problem.layers[0], name="second")))

    decision = decided("stage1-node0", fleet=bought(2, 1), problem=two_layers, without=SPOT_PROBLEM_TYPES)

    assert option(decision, Way.SHRINK).refusal == (
        "each of 2 stages needs a machine, but stage 1 would have none"
    )
    assert decision.chosen.way is Way.REPLACE


def test_a_fleet_whose_workers_would_meet_on_spot_is_refused():
    mixed = bought(4, markets=(Market.ON_DEMAND, Market.SPOT))

    assert (
        "workers must meet at a machine on-demand"
        in option(decided("stage0-node0", fleet=mixed), Way.SHRINK).refusal
    )
    assert not option(decided("stage0-node3", fleet=mixed), Way.SHRINK).refusal


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
    assert option(decided(fleet=on_spot), Way.SHRINK).seconds == pytest.approx(10 + 4_800 * stretch)


def test_where_the_rest_of_the_fleet_lacks_memory_it_waits_for_the_lost_machine():
    layer = replace(STEADY.layers[0], is_sharded=True, state_bytes=3.9e9)

    decision = decided(problem=replace(STEADY, layers=(layer,)))

    assert "memory" in option(decision, Way.SHRINK).refusal
    assert decision.chosen.way is Way.REPLACE
    assert decision.chosen.seconds == pytest.approx(120 + 3_600)


def grows(*, refused=None, without=(), **limits):
    """Whether three machines of four, each of which trains a sample a second, get the fourth again."""
    whole = cluster_of(FLEET)
    return decide_on_growth(
        Rest.of(STEADY, share_left=0.5, **limits),
        now=smaller(FLEET, whole, ["stage0-node3"]),
        cluster=whole.next_generation(without=["stage0-node3"]),
        planned=FLEET,
        whole=whole,
        refused=refused or {},
        without=without,
    )


def test_a_fleet_that_shrank_grows_where_it_would_be_late_and_not_where_that_only_costs():
    assert grows().chosen.way is Way.STAY
    assert option(grows(), Way.STAY).seconds == pytest.approx(4_800)
    late = grows(seconds_left=4_000)
    assert late.chosen.way is Way.GROW
    # 10 s to take it in, and a quarter of 120 s.
    assert late.chosen.seconds == pytest.approx(3_640)


def test_a_fleet_that_cannot_grow_and_would_be_late_is_planned_again():
    refused = {Way.GROW: "none can be had"}

    assert grows(seconds_left=4_000, refused=refused).chosen.way is Way.REPLAN
    assert grows(seconds_left=4_000, refused=refused, without=["cpu-c7i"]).chosen.way is Way.STAY


def priced(spot_price_share, *, fleet=FLEET, share_left=0.5, extra_usd_per_hour=0.0, planned=None, **limits):
    """Whether four machines, all at hand, go on or end for others on spot, which are never interrupted here."""
    problem = make_spot_problem(hours=8, spot_price_share=spot_price_share, interruptions_per_hour=0.0)
    return decide_on_prices(
        Rest.of(problem, share_left=share_left, **limits),
        fleet,
        usd_per_hour=float(len(cluster_of(fleet).nodes)),
        extra_usd_per_hour=lambda stages: extra_usd_per_hour,
        planned=planned,
    )


def test_a_price_that_falls_by_enough_pays_the_move():
    decision = priced(0.1)

    assert decision.chosen.way is Way.REPLAN
    # Four at 1 USD for an hour and 30 s, or one at 0.1 USD for four hours and 120 s behind the 30 s of the four.
    assert option(decision, Way.STAY).usd == pytest.approx(4 * 3_630 / 3_600)
    assert decision.chosen.usd == pytest.approx(0.1 * 14_520 / 3_600 + 4 * 30 / 3_600)
    assert option(decision, Way.STAY).usd - decision.chosen.usd == pytest.approx(3.5967, abs=1e-4)


def moved(usd_per_hour, *, share_left=0.5, share_beside=1.0, extra_usd_per_hour=0.0, refused=None, **limits):
    """Whether four machines that were bought in place of four at 1 USD an hour move to those."""
    return decide_on_prices(
        Rest.of(STEADY, share_left=share_left, **limits),
        FLEET,
        usd_per_hour=usd_per_hour,
        extra_usd_per_hour=lambda stages: extra_usd_per_hour,
        share_beside=share_beside,
        refused=refused or {},
        planned=FLEET.launch_stages,
    )


def test_a_fleet_of_other_machines_moves_to_those_that_were_planned_where_both_at_once_are_paid_back():
    decision = moved(8.0)

    assert decision.chosen.way is Way.MOVE
    assert option(decision, Way.STAY).usd == pytest.approx(8 * 3_630 / 3_600)
    # 120 s beside the others, 10 s to go on, an hour, and the end of either.
    assert decision.chosen.usd == pytest.approx(4 * (120 + 10 + 3_600 + 30) / 3_600 + 8 * 30 / 3_600)
    assert decision.chosen.seconds == pytest.approx(3_610)
    # What both are billed besides counts in the same way.
    extra = moved(8.0, extra_usd_per_hour=2.0)
    assert extra.chosen.usd - decision.chosen.usd == pytest.approx(2 * (120 + 3_610) / 3_600)
    # Where one of the four is of another kind, only that one is paid twice.
    one = moved(8.0, share_beside=0.25)
    assert decision.chosen.usd - one.chosen.usd == pytest.approx(3 * 120 / 3_600)


def test_a_fleet_of_other_machines_stays_where_the_rest_is_short_or_they_cost_no_more():
    assert moved(4.0).chosen.way is Way.STAY
    assert moved(8.0, share_left=0.01).chosen.way is Way.STAY
    late = moved(8.0, seconds_left=3_605)
    assert late.chosen.way is Way.STAY
    assert option(late, Way.MOVE).refusal.endswith("is late or beyond the cap")
    rising = moved(4.0, usd_left=4.1)
    assert option(rising, Way.MOVE).refusal.endswith("is late or beyond the cap")


def test_a_fleet_of_other_machines_that_is_late_or_beyond_its_cap_moves_to_cheaper_ones():
    assert moved(8.0, seconds_left=3_000).chosen.way is Way.MOVE
    assert moved(8.0, usd_left=4.0).chosen.way is Way.MOVE


def test_machines_that_cannot_be_had_leave_the_fleet_as_it_is():
    decision = moved(8.0, refused={Way.MOVE: "none can be had"})

    assert decision.chosen.way is Way.STAY
    assert "move: none can be had" in decision.reason


def test_a_saving_below_the_margin_is_left():
    decision = priced(0.97)

    assert option(decision, Way.REPLAN).usd == pytest.approx(3.9457, abs=1e-4)
    assert decision.chosen.way is Way.STAY
    assert decision.chosen.usd == pytest.approx(4.0333, abs=1e-4)


def test_a_start_that_costs_more_than_is_saved_is_left():
    # 400 s for one machine: 100 s for the four. The others would save 0.02 USD, and cost 0.03 to start.
    decision = priced(0.8, share_left=400 / (8 * 3_600))

    assert option(decision, Way.STAY).usd == pytest.approx(4 * 130 / 3_600)
    assert option(decision, Way.REPLAN).usd == pytest.approx(0.8 * 520 / 3_600 + 4 * 30 / 3_600)
    assert decision.chosen.way is Way.STAY


def test_what_a_plan_is_billed_besides_its_price_counts_against_the_move():
    assert priced(0.1, extra_usd_per_hour=0.8).chosen.way is Way.REPLAN
    # 14,580 s of 0.9 USD an hour.
    decision = priced(0.1, extra_usd_per_hour=0.9)

    assert option(decision, Way.REPLAN).usd == pytest.approx(0.4367 + 3.645, abs=1e-4)
    assert decision.chosen.way is Way.STAY


def test_a_move_keeps_the_deadline_and_the_cap():
    in_time = priced(0.1, seconds_left=4_000)
    # Four others for an hour: 3,820 s are left to train.
    assert in_time.chosen.way is Way.REPLAN
    assert in_time.chosen.seconds == pytest.approx(3_780)

    assert "no time is left to launch" in option(priced(0.1, seconds_left=100), Way.REPLAN).refusal
    assert priced(0.1, usd_left=0.44).chosen.way is Way.REPLAN
    beyond = priced(0.1, usd_left=0.43)
    assert beyond.chosen.way is Way.STAY
    assert option(beyond, Way.REPLAN).refusal.endswith("is late or beyond the cap")


def test_a_whole_fleet_that_is_late_does_not_move_to_one_that_costs_more():
    decision = priced(1.5, seconds_left=3_000)

    assert option(decision, Way.STAY).seconds > 3_000 > option(decision, Way.REPLAN).seconds
    assert decision.chosen.way is Way.STAY


def test_the_plan_that_trains_is_not_launched_once_more():
    decision = priced(2.0, fleet=bought(1))

    assert decision.reason == (
        "stay, of stay 4.008 USD and 240.0 min, re-plan: the plan that trains is the cheapest one"
    )


def test_the_plan_for_the_whole_run_that_would_be_launched_is_held_to_the_same_margin():
    # Two on spot: two hours, behind 180 s of planning and start, and 30 s at either fleet's end.
    two = priced(0.1, planned=(Stage(0, 0, "cpu-c7i-spot", 2),))

    assert two.chosen.way is Way.REPLAN
    assert two.chosen.usd == pytest.approx(0.2 * (7_200 + 180 + 30) / 3_600 + 4 * 30 / 3_600)
    assert priced(0.97, planned=(Stage(0, 0, "cpu-c7i-spot", 2),)).chosen.way is Way.STAY
    same = priced(0.1, planned=FLEET.launch_stages)
    assert option(same, Way.REPLAN).refusal == "the plan that trains is the cheapest one"
