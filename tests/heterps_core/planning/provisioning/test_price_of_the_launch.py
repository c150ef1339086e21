"""What a plan costs is what is bought for it: one machine on-demand, whole instances, both markets, every zone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from heterps_core.errors import InfeasiblePlanError, MalformedDocumentError, ProvisioningError
from heterps_core.hardware import InstanceOffer, InstanceType, Market
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.extra_costs import ExtraCosts
from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.planning.provisioning.failover import launch_attempts
from heterps_core.planning.provisioning.offer_choice import (
    choose_instances,
    instance_sizes,
    offers_in_zone,
    on_demand_sizes,
    reserved_of,
    unit_prices,
)
from heterps_core.planning.provisioning.replica_balance import balance_replicas
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.schedulers import get_scheduler
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem
from tests.heterps_core.planning.explain.trying_all import feasible_plans
from tests.tiers import weekly_after

TYPES = ("cpu-c7i", "cpu-c7i-spot", "cpu-r6in", "cpu-r6in-spot")
SPOT_TYPES = tuple(name for name in TYPES if name.endswith("-spot"))
ALL_COSTS = ExtraCosts(
    startup_seconds=300.0,
    teardown_seconds=60.0,
    storage_usd_per_hour=0.05,
    checkpoint_seconds=5.0,
    restart_seconds=120.0,
)


def cpu_offer(name: str, *, cores: int, market: Market, cents: int) -> InstanceOffer:
    machine = InstanceType(
        name=name,
        vcpus=2 * cores,
        memory_bytes=8 * 1024**3,
        accelerator_name=None,
        accelerator_count=0,
        accelerator_memory_bytes_each=0,
        network_bandwidth_bytes_per_s=1e11,
    )
    return InstanceOffer(
        instance_type=machine,
        region="us-east-1",
        zone="us-east-1a" if market is Market.SPOT else None,
        market=market,
        price_usd_per_hour=cents / 100,
        price_as_of="2026-07-20",
        price_source="test",
        interruptions_per_hour=0.05 if market is Market.SPOT else 0.0,
        interruptions_source="test",
    )


def drawn_offers(seed: int) -> list[InstanceOffer]:
    """Two or three sizes of two families in both markets, some in one alone; spot may be dearer than on-demand."""
    random = np.random.default_rng(seed)
    offers = []
    for family in ("c7i", "r6in"):
        for cores in random.choice([1, 2, 3, 4], size=int(random.integers(2, 4)), replace=False).tolist():
            cents = int(random.integers(5, 25)) * cores
            on_spot = max(1, round(cents * float(random.choice([0.2, 0.4, 0.7, 1.3]))))
            name = f"{family}.{cores}x"
            markets = [(Market.ON_DEMAND, cents), (Market.SPOT, on_spot)]
            if random.random() < 0.25:
                markets.pop(int(random.integers(2)))
            offers += [cpu_offer(name, cores=cores, market=market, cents=price) for market, price in markets]
    return offers


def drawn_problem(
    seed, offers, *, names=TYPES, num_layers=2, most=3, step_model=StepModel.PAPERS, extra=None
):
    """A chain on the types that are sold, at the prices of the offers."""
    prices = unit_prices(offers)
    names = [name for name in names if name in prices]
    drawn = make_problem(seed, num_layers=num_layers, num_types=len(names), floor_samples_per_s=2_000.0)
    renamed = dict(zip(drawn.device_types, names, strict=True))
    units = {
        renamed[name]: replace(
            unit,
            max_units=most,
            memory_bytes=1e12,
            price_usd_per_hour=prices[renamed[name]],
            instances=instance_sizes(renamed[name], offers),
            on_demand_instances=on_demand_sizes(renamed[name], offers),
            interruptions_per_hour=0.05 * renamed[name].endswith("-spot"),
        )
        for name, unit in drawn.device_types.items()
    }
    layers = tuple(
        replace(
            layer,
            # A market makes no machine faster.
            compute_seconds={new: layer.compute_seconds[old] for old, new in renamed.items()},
            communication_seconds={new: layer.communication_seconds[old] for old, new in renamed.items()},
        )
        for layer in drawn.layers
    )
    return replace(
        drawn,
        layers=layers,
        device_types=units,
        step_model=step_model,
        extra_costs=ALL_COSTS if extra is None else extra,
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_with_reserved_instances_costs_what_is_bought_beside_them(seed):
    """Two of them have two cores each; both markets of their family share them, and no more than two are launched."""
    own = cpu_offer("c7i.2x", cores=2, market=Market.ON_DEMAND, cents=0)
    offers = [*drawn_offers(seed), replace(own, count=2)]
    problem = drawn_problem(seed, offers, most=4)
    reserved = {name: reserved_of(name, offers) for name in problem.device_types}
    assert {name for name, each in reserved.items() if each} == {n for n in reserved if "c7i" in n}
    units = {
        name: replace(unit, reserved=reserved[name], interruptions_per_hour=0.0)
        for name, unit in problem.device_types.items()
    }
    problem = replace(problem, device_types=units)
    num_plans = 0
    for counts, names in itertools.product(
        itertools.product((1, 3, 4), repeat=2), itertools.permutations(units, 2)
    ):
        stages = [Stage(i, i, name, k) for i, (name, k) in enumerate(zip(names, counts, strict=True))]
        found = evaluate(problem, stages)
        if any(each.constraint == "on-demand machine" for each in found.violations):
            continue
        bought = choose_instances(stages, offers)
        assert bought.price_usd_per_hour == pytest.approx(found.price_usd_per_hour, abs=1e-7)
        assert sum(group.count for group in bought.groups if group.offer.is_reserved) <= 2
        num_plans += 1
    assert num_plans > 10

    best = find_optimum(problem)

    assert choose_instances(best.stages, offers).price_usd_per_hour == pytest.approx(
        evaluate(problem, best.stages).price_usd_per_hour, abs=1e-7
    )


def bills_in_cents(stage: Stage, offers) -> tuple[float, float]:
    """Return the least price of a stage, and that with a machine on-demand, by trying all purchases."""
    family = stage.device_type.split("-")[1]
    is_spot = stage.device_type.endswith("-spot")

    def sold(market):
        return [
            (offer.instance_type.vcpus // 2, round(100 * offer.price_usd_per_hour))
            for offer in offers
            if offer.instance_type.family == family and offer.market is market
        ]

    def least(num_units, sizes):
        if num_units <= 0:
            return 0
        ranges = [range(-(-num_units // units) + 1) for units, _ in sizes]
        return min(
            sum(count * cents for count, (_, cents) in zip(counts, sizes, strict=True))
            for counts in itertools.product(*ranges)
            if sum(count * units for count, (units, _) in zip(counts, sizes, strict=True)) >= num_units
        )

    if not is_spot:
        price = least(stage.num_replicas, sold(Market.ON_DEMAND))
        return price, price
    spot = sold(Market.SPOT)
    steady = min(
        (cents + least(stage.num_replicas - units, spot) for units, cents in sold(Market.ON_DEMAND)),
        default=np.inf,
    )
    return min(least(stage.num_replicas, spot), steady), steady


def bill_in_cents(stages, offers) -> float:
    bills = [bills_in_cents(stage, offers) for stage in stages]
    return min(sum(bill[index == steady] for index, bill in enumerate(bills)) for steady in range(len(bills)))


@pytest.mark.parametrize("seed", weekly_after(10, range(40)))
def test_a_plan_is_charged_what_is_bought_for_it(seed):
    offers = drawn_offers(seed)
    problem = drawn_problem(seed, offers, num_layers=3, most=6)
    names = list(problem.device_types)
    random = np.random.default_rng(seed)
    in_zone = offers_in_zone(offers, "us-east-1a")

    for _ in range(30):
        cuts = sorted(random.choice(3, size=int(random.integers(1, 4)), replace=False).tolist())
        starts = [0, *cuts[1:]]
        types = [names[int(random.integers(len(names)))]]
        for _ in starts[1:]:
            types.append(str(random.choice([name for name in names if name != types[-1]])))
        stages = tuple(
            Stage(start, end - 1, name, int(random.integers(1, 7)))
            for start, end, name in zip(starts, [*starts[1:], 3], types, strict=True)
        )
        expected = bill_in_cents(stages, offers)
        if np.isinf(expected):
            with pytest.raises(ProvisioningError, match="one machine must be on-demand"):
                choose_instances(stages, in_zone)
            continue
        bought = choose_instances(stages, in_zone)
        planned = evaluate(problem, stages)

        assert bought.price_usd_per_hour == pytest.approx(expected / 100, rel=1e-12)
        assert planned.price_usd_per_hour == pytest.approx(bought.price_usd_per_hour, rel=1e-12)
        assert sum(part.price_usd_per_hour for part in planned.stages) == planned.price_usd_per_hour
        assert any(group.offer.market is Market.ON_DEMAND for group in bought.groups)
        assert bought.rounding_usd_per_hour == pytest.approx(
            planned.price_usd_per_hour - bought.planned_price_usd_per_hour - bought.rendezvous_usd_per_hour
        )


@pytest.mark.parametrize("step_model", StepModel)
@pytest.mark.parametrize("extra", [ExtraCosts(), ALL_COSTS], ids=["plain", "all costs"])
@pytest.mark.parametrize("names", [TYPES, SPOT_TYPES], ids=["both markets", "spot"])
@pytest.mark.parametrize("seed", weekly_after(2, range(5)))
def test_the_optimum_and_its_proof_are_those_of_trying_all_plans(seed, names, extra, step_model):
    offers = drawn_offers(seed)
    problem = drawn_problem(seed, offers, names=names, step_model=step_model, extra=extra)
    expected = min(cost for _, _, cost in feasible_plans(problem))

    found = find_optimum(problem)

    assert found.cost_usd == pytest.approx(expected, rel=1e-9)
    assert found.cost_lower_bound_usd == pytest.approx(expected, rel=1e-9)
    bought = launch_attempts(found.stages, offers)[0]
    assert bought.price_usd_per_hour == pytest.approx(evaluate(problem, found.stages).price_usd_per_hour)


@pytest.mark.parametrize("seed", range(3))
def test_scarce_units_are_shared_by_stages_with_and_without_a_machine_on_demand(seed):
    offers = drawn_offers(seed)
    problem = drawn_problem(seed, offers, names=SPOT_TYPES, num_layers=3, most=2)
    problem = replace(problem, throughput_floor_samples_per_s=0.0)
    expected = min(cost for _, _, cost in feasible_plans(problem))

    found = find_optimum(problem)

    assert (found.cost_usd, found.cost_lower_bound_usd) == pytest.approx((expected, expected), rel=1e-9)


@pytest.mark.slow
def test_interruptions_alone_leave_no_gap_where_the_stage_time_is_settled():
    offers = drawn_offers(147)
    problem = replace(drawn_problem(147, offers), throughput_floor_samples_per_s=0.0)
    expected = min(cost for _, _, cost in feasible_plans(problem))

    found = find_optimum(problem)

    assert (found.cost_usd, found.cost_lower_bound_usd) == pytest.approx((expected, expected), rel=1e-9)


@pytest.mark.parametrize("scheduler", ["reinforce", "genetic", "greedy", "bayesian"])
def test_no_search_finds_a_plan_below_the_proof(scheduler):
    offers = drawn_offers(3)
    problem = drawn_problem(3, offers, num_layers=4, names=SPOT_TYPES)

    found = get_scheduler(scheduler).search(problem, budget_evaluations=64, seed=0)

    assert found.plan.optimality_gap >= 0.0
    assert found.plan.price_usd_per_hour == pytest.approx(
        launch_attempts(found.plan.stages, offers)[0].price_usd_per_hour
    )


def test_one_machine_is_planned_on_demand_where_it_is_bought_so():
    # By hand: r6in costs 0.05 on spot and 0.17 on-demand, c7i 0.09; one machine is bought on-demand in any case.
    offers = [
        cpu_offer("c7i.large", cores=1, market=Market.ON_DEMAND, cents=9),
        cpu_offer("r6in.large", cores=1, market=Market.ON_DEMAND, cents=17),
        cpu_offer("r6in.large", cores=1, market=Market.SPOT, cents=5),
    ]
    problem = drawn_problem(0, offers, num_layers=1, extra=ExtraCosts())
    equally_fast = dict.fromkeys(problem.device_types, 0.01)
    layer = replace(problem.layers[0], compute_seconds=equally_fast, communication_seconds=equally_fast)
    problem = replace(problem, layers=(layer,), throughput_floor_samples_per_s=0.0)

    found = find_optimum(problem)

    assert [stage.device_type for stage in found.stages] == ["cpu-c7i"]
    assert evaluate(problem, found.stages).price_usd_per_hour == 0.09


def test_stages_on_spot_that_no_on_demand_machine_can_join_are_refused_with_the_rule():
    offers = [
        cpu_offer("c7i.large", cores=1, market=Market.SPOT, cents=3),
        cpu_offer("r6in.large", cores=1, market=Market.ON_DEMAND, cents=17),
    ]
    problem = drawn_problem(0, offers, num_layers=1)

    with pytest.raises(InfeasiblePlanError, match="one machine of a plan must be on-demand"):
        balance_replicas(problem, [Stage(0, 0, "cpu-c7i-spot", 1)])
    assert find_optimum(problem).stages[0].device_type == "cpu-r6in"
    with pytest.raises(MalformedDocumentError, match="one machine of a plan must be on-demand"):
        drawn_problem(0, offers[:1], num_layers=1)
