from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pytest

from heterps_core.errors import ProvisioningError, UnknownNameError
from heterps_core.planning.problem.extra_costs import ExtraCosts
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.plans.scheduling_plan import Stage
from infra.prices.price_catalogue import write_refreshed
from infra.prices.region_rates import write_rates
from infra.prices.service_charges import ServiceRate
from infra.workspace import RUN_STORE_VARIABLE, Workspace
from tasks.planning.deadline import PlanningTime, deadline_for
from tasks.planning.extra_costs import NO_CROSSING, Crossing
from tasks.planning.regions import Regions, cheapest_region
from tasks.scheduling import Searches
from tests.infra.builders import offer
from tests.tasks.builders import make_problem, make_result

EAST, WEST, IRELAND, STOCKHOLM = "us-east-1", "us-west-2", "eu-west-1", "eu-north-1"
NOW = datetime(2026, 11, 26, 20, 0, tzinfo=UTC)


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A workspace with prices of three regions beside the bundled one."""
    monkeypatch.delenv(RUN_STORE_VARIABLE, raising=False)
    workspace = Workspace(root=tmp_path).create()
    offers = [offer(region=region) for region in (WEST, IRELAND, STOCKHOLM)]
    write_refreshed(workspace.price_folder, offers, at=NOW)
    return workspace


def rented(workspace, *patterns, provider="local", data=None):
    return Regions.of(workspace, provider, patterns, data=data)


@pytest.mark.parametrize(
    ("patterns", "data", "store", "found"),
    [
        ((), None, None, (EAST,)),
        ((), None, "s3://runs?region=eu-west-1", (IRELAND,)),
        ((), "s3://clicks?region=us-west-2", "s3://runs?region=eu-west-1", (WEST,)),
        # A dry run at the prices that there are.
        ((), "s3://clicks?region=ap-south-1", None, (EAST,)),
        (("eu-*", EAST), None, None, (EAST, STOCKHOLM, IRELAND)),
        (("*",), None, "s3://runs?region=us-west-2", (WEST, STOCKHOLM, IRELAND, EAST)),
        ((IRELAND, "eu-*"), None, None, (IRELAND, STOCKHOLM)),
    ],
)
def test_machines_are_rented_where_names_and_patterns_say_the_region_of_the_rows_first(
    workspace, monkeypatch, patterns, data, store, found
):
    if store:
        monkeypatch.setenv(RUN_STORE_VARIABLE, store)

    assert rented(workspace, *patterns, data=data).rented == found


def test_in_a_dry_run_at_the_prices_that_there_are_nothing_crosses(workspace, monkeypatch):
    monkeypatch.setenv(RUN_STORE_VARIABLE, "s3://runs?region=ap-south-1")

    assert rented(workspace) == Regions(rented=(EAST,), rows=EAST, store=EAST)


def test_rows_and_a_store_that_name_no_region_are_in_the_one_that_is_asked_for(workspace):
    assert rented(workspace, WEST) == Regions(rented=(WEST,), rows=WEST, store=WEST)
    assert rented(workspace, WEST, IRELAND) == Regions(rented=(WEST, IRELAND), rows=EAST, store=EAST)


@pytest.mark.parametrize(
    ("provider", "pattern", "message"),
    [
        (
            "local",
            "ap-south-1",
            r"not a known region with prices; .*heterps refresh-prices --regions ap-south-1",
        ),
        ("local", "ap-*", r"not a known region with prices; .*heterps refresh-prices --regions 'ap-\*'"),
        ("aws", "ap-*", r"not a known region with prices; .*heterps refresh-prices --regions 'ap-\*'"),
        ("aws", "mars", "not a known region of AWS"),
    ],
)
def test_a_region_without_prices_and_an_unknown_one_are_refused(workspace, provider, pattern, message):
    with pytest.raises(UnknownNameError, match=message):
        rented(workspace, EAST, pattern, provider=provider)


def test_prices_of_a_region_by_name_are_asked_for_before_a_launch(workspace):
    assert rented(workspace, "ap-south-1", EAST, provider="aws").rented == (EAST, "ap-south-1")


def crossing(workspace, regions, region):
    return regions.crossing(workspace, region, (30e9, 1e9, 2e9))


def test_rows_and_checkpoints_cross_to_another_region_at_its_rate_and_take_their_time(workspace):
    write_rates(
        workspace.price_folder, {IRELAND: {"traffic to us-east-1": ServiceRate("GB", 0.05, "a list")}}
    )
    regions = rented(workspace, EAST, IRELAND)

    found = crossing(workspace, regions, IRELAND)

    # By hand: 33 GB at 0.05, 6 checkpoints of 2 GB an hour, and 31 and 2 GB at 5 Gbit/s.
    assert found.usd == pytest.approx(1.65)
    assert found.usd_per_hour == pytest.approx(0.6)
    assert (found.seconds_before, found.seconds_after) == (pytest.approx(49.6), pytest.approx(3.2))
    assert crossing(workspace, regions, EAST) == NO_CROSSING
    assert found.text.startswith("33 GB cross between regions for 1.65 USD")


def test_rows_cross_to_the_region_of_the_store_and_checkpoints_to_that_of_the_rows(workspace):
    regions = Regions(rented=(EAST, WEST), rows=EAST, store=WEST)

    to_store, to_rows = (crossing(workspace, regions, region) for region in (WEST, EAST))

    assert (to_store.usd, to_store.usd_per_hour) == (pytest.approx(0.6), 0.0)
    assert (to_rows.usd, to_rows.usd_per_hour) == (pytest.approx(0.06), pytest.approx(0.24))


def test_time_that_bytes_take_to_cross_raises_the_floor():
    deadline = deadline_for("00:00", now=NOW, zone=UTC, num_samples=1e9, num_epochs=1)
    later = deadline.with_crossing(Crossing(seconds_before=1_000.0, seconds_after=100.0))

    assert later.training_seconds == deadline.training_seconds - 1_100
    assert later.seconds_left(NOW) == deadline.seconds_left(NOW) - 100
    assert deadline.with_crossing(Crossing(seconds_before=1e6)).floor_samples_per_s > 1e11


def with_prices(factor, *, crossing_usd=0.0):
    """The problem of a region where all costs the same times a factor."""
    problem = make_problem()
    units = {
        name: replace(unit, price_usd_per_hour=factor * unit.price_usd_per_hour)
        for name, unit in problem.device_types.items()
    }
    return replace(problem, device_types=units, extra_costs=ExtraCosts(crossing_usd=crossing_usd))


@dataclass
class OnePlan:
    """The search of a region with one plan, or none."""

    region: str
    problem: SchedulingProblem | None
    searched: list[str]
    stages: tuple[Stage, ...] | None

    def first_problems(self):
        return [self.problem or make_problem()]

    def found(self):
        self.searched.append(self.region)
        if self.problem is None:
            raise ProvisioningError(f"nothing in {self.region}")
        result = make_result(self.problem, stages=self.stages)
        return "float32", self.problem, Searches(results={"exact": result}, without_plan={}, taken="exact")


def choose(problems, *, stages=None):
    """Choose among regions with one plan each; return the choice with the regions that were searched."""
    searched: list[str] = []
    searches = {region: OnePlan(region, problem, searched, stages) for region, problem in problems.items()}

    search, (_, problem, _), why = cheapest_region(searches, PlanningTime())

    assert problem is search.problem
    return search.region, searched, why


def test_the_cheapest_region_is_taken_and_a_more_expensive_one_is_not_searched():
    region, searched, why = choose(
        {EAST: with_prices(1.0), IRELAND: with_prices(1.1), WEST: with_prices(0.5)}
    )

    assert (region, searched) == (WEST, [EAST, WEST])
    # By hand: 3.6 s at 0.9 USD/hour cost 0.0009 USD in Virginia, and half of it in Oregon.
    assert why.startswith(f"{WEST}, the cheapest of 3; nearest {EAST}: +0.00045 USD")
    assert "(+100.0%)" in why


def test_a_region_that_was_not_searched_is_named_with_the_cost_of_the_same_machines():
    region, searched, why = choose(
        {EAST: with_prices(1.0), IRELAND: with_prices(1.1), WEST: with_prices(1.3)}
    )

    assert (region, searched) == (EAST, [EAST])
    assert why.endswith("(+10.0%)")
    assert "nearest eu-west-1 with the same machines: +" in why


def with_two_cards(*, max_units, crossing_usd=0.0):
    """A problem of two equal cards, with few units of the first: all that a plan may have where it is best."""
    problem = make_problem()
    first = replace(problem.device_types["gpu-t4"], max_units=max_units)
    layers = tuple(
        replace(
            layer,
            compute_seconds=dict.fromkeys(("gpu-t4", "gpu-l4"), layer.compute_seconds["gpu-t4"]),
            communication_seconds={"gpu-t4": 0.0, "gpu-l4": 0.0},
        )
        for layer in problem.layers
    )
    return replace(
        problem,
        layers=layers,
        device_types={"gpu-t4": first, "gpu-l4": replace(first, max_units=8)},
        step_model=StepModel.TRAINER,
        extra_costs=ExtraCosts(crossing_usd=crossing_usd),
    )


def test_a_plan_of_two_types_in_a_stage_is_compared_with_a_region_that_limits_no_units():
    """Problems allow such stages only where units are limited; the same machines have a price elsewhere, too."""
    limited = replace(with_two_cards(max_units=2), mixes_device_types=True)
    elsewhere = with_two_cards(max_units=8, crossing_usd=1.0)
    stages = (Stage(0, 2, "gpu-t4", 4, "gpu-l4", 2),)

    region, searched, why = choose({EAST: limited, WEST: elsewhere}, stages=stages)

    assert (region, searched) == (EAST, [EAST])
    assert "nearest us-west-2 with the same machines: +1.00 USD" in why


def test_what_crosses_decides_against_lower_prices():
    # By hand: 0.0009 USD in Virginia, and 0.00045 with 0.0006 for bytes in Oregon.
    region, searched, _ = choose({EAST: with_prices(1.0), WEST: with_prices(0.5, crossing_usd=0.0006)})

    assert (region, searched) == (EAST, [EAST, WEST])


def test_a_region_is_not_searched_where_what_crosses_costs_as_much_as_a_plan():
    cheap = with_prices(0.5, crossing_usd=1.0)

    assert choose({EAST: with_prices(1.0), WEST: cheap})[1] == [EAST]
    assert choose({EAST: with_prices(1e4), WEST: cheap})[:2] == (WEST, [EAST, WEST])


def test_a_region_without_a_plan_is_left_out_and_without_any_the_first_says_why():
    assert choose({EAST: None, WEST: with_prices(2.0)})[0] == WEST
    with pytest.raises(ProvisioningError, match="nothing in us-east-1"):
        choose({EAST: None, WEST: None})
    with pytest.raises(ProvisioningError, match="nothing in us-west-2"):
        choose({WEST: None})


def test_one_region_alone_needs_no_reason():
    assert choose({EAST: with_prices(1.0)}) == (EAST, [EAST], "")
