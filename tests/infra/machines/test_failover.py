from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from heterps_core.errors import BudgetExceededError, ProvisioningError
from heterps_core.hardware import Market
from infra.billing.caps import Caps
from infra.ledger.ledger import EntryState, Ledger
from infra.machines.failover import first_running_cluster
from infra.providers.aws.quotas import asks_less
from infra.providers.base import EndedAtStartError, InsufficientCapacityError, QuotaExceededError
from infra.providers.local import LocalProvider
from tests.infra.builders import bootstrap, offer, plan

SCARCE, EXPENSIVE, MOST_EXPENSIVE = (plan(offer(price_usd_per_hour=usd)) for usd in (0.1, 0.2, 0.4))


class PickyProvider(LocalProvider):
    """Has no machines at some prices, as a cloud has none in some zones; its quotas are those of AWS."""

    asks_less = staticmethod(asks_less)

    def __init__(self, *args, refused=(), error=InsufficientCapacityError, **named) -> None:
        super().__init__(*args, **named)
        self.refused, self.error = refused, error

    def launch(self, plan, **named):
        if plan.price_usd_per_hour in self.refused:
            raise self.error("none left here")
        return super().launch(plan, **named)


def tried(tmp_path, plans, *, caps=None, cost_usd=1.0, kind=PickyProvider, **provider):
    numbers = count(1)
    return first_running_cluster(
        kind(tmp_path / "leases", **provider),
        plans,
        new_launch_id=lambda: f"run-1.{next(numbers)}",
        bootstrap=bootstrap(tmp_path / "run"),
        ledger=Ledger(tmp_path / "ledger.sqlite"),
        caps=caps or Caps(),
        predicted_cost_usd=cost_usd,
    )


def test_the_next_purchase_is_tried_where_the_first_is_not_available(tmp_path):
    with tried(tmp_path, [SCARCE, EXPENSIVE], refused=[0.1]) as cluster:
        assert cluster.run_id == "run-1.2"
        assert cluster.price_usd_per_hour == pytest.approx(0.2)

    [entry] = Ledger(tmp_path / "ledger.sqlite").entries(run_id="run-1.2")
    assert (entry.state, entry.price_usd_per_hour) == (EntryState.ENDED, 0.2)
    assert entry.ended_at <= datetime.now(UTC)


class ScarceSpotProvider(PickyProvider):
    """Has no spot machines for the first so many launches of them."""

    def __init__(self, *args, times, **named) -> None:
        super().__init__(*args, **named)
        self.times = times

    def launch(self, plan, **named):
        if plan.groups[0].offer.market is Market.SPOT:
            self.times -= 1
            if self.times >= 0:
                raise InsufficientCapacityError("no spot here")
        return super().launch(plan, **named)


@pytest.mark.parametrize(
    ("times", "seconds", "market", "num_tries"),
    [(3, 60.0, Market.SPOT, 4), (3, 0.0, Market.ON_DEMAND, 2), (1_000, 0.3, Market.ON_DEMAND, None)],
)
def test_spot_is_waited_for_until_the_time_is_needed(tmp_path, times, seconds, market, num_tries):
    on_spot, steady = plan(offer(market=Market.SPOT, price_usd_per_hour=0.1)), EXPENSIVE
    numbers = count(1)

    with first_running_cluster(
        ScarceSpotProvider(tmp_path / "leases", times=times),
        [on_spot, steady],
        new_launch_id=lambda: f"run-1.{next(numbers)}",
        bootstrap=bootstrap(tmp_path / "run"),
        ledger=Ledger(tmp_path / "ledger.sqlite"),
        caps=Caps(),
        predicted_cost_usd=1.0,
        spot_until=datetime.now(UTC) + timedelta(seconds=seconds),
        retry_s=0.02,
    ) as cluster:
        assert {node.market for node in cluster.nodes} == {market}
        assert num_tries is None or cluster.run_id == f"run-1.{num_tries}"


def test_all_that_were_tried_are_counted_when_none_is_available(tmp_path):
    with (
        pytest.raises(ProvisioningError, match=r"2 of 2 purchases were tried .* none left here"),
        tried(tmp_path, [SCARCE, EXPENSIVE], refused=[0.1, 0.2]),
    ):
        pass


def test_an_exhausted_spot_quota_sends_to_on_demand_past_the_other_zones_on_spot(tmp_path):
    spot, spot_elsewhere = (
        plan(replace(offer(price_usd_per_hour=usd, market=Market.SPOT), zone=zone))
        for usd, zone in ((0.03, "us-east-1a"), (0.04, "us-east-1b"))
    )
    quotas = ("All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",)

    def no_quota(message):
        return QuotaExceededError(message, quotas=quotas)

    with tried(
        tmp_path, [spot, spot_elsewhere, EXPENSIVE], refused=[0.03, 0.04], error=no_quota, cost_usd=0.03
    ) as cluster:
        assert (cluster.run_id, cluster.price_usd_per_hour) == ("run-1.2", pytest.approx(0.2))

    with (
        pytest.raises(ProvisioningError, match=r"1 of 2 purchases were tried .* none left here"),
        tried(tmp_path / "again", [spot, spot_elsewhere], refused=[0.03], error=no_quota),
    ):
        pass


def test_another_refusal_is_not_tried_elsewhere(tmp_path):
    with (
        pytest.raises(ProvisioningError, match=r"^none left here"),
        tried(tmp_path, [SCARCE, EXPENSIVE], refused=[0.1], error=ProvisioningError),
    ):
        pass


def test_a_dearer_purchase_is_held_against_the_cap_of_the_run(tmp_path):
    # By hand: four times the price of the first is four times its cost.
    with (
        pytest.raises(BudgetExceededError, match="takes 4"),
        tried(tmp_path, [SCARCE, MOST_EXPENSIVE], refused=[0.1], caps=Caps(max_usd_per_run=3.0)),
    ):
        pass


def test_an_error_in_the_block_is_not_a_launch_that_failed(tmp_path):
    with (
        pytest.raises(InsufficientCapacityError, match="lost later"),
        tried(tmp_path, [SCARCE, EXPENSIVE]),
    ):
        raise InsufficientCapacityError("lost later")

    assert Ledger(tmp_path / "ledger.sqlite").entries(run_id="run-1.2") == ()


class EndingProvider(PickyProvider):
    """Ends the machines of the first so many launches while they start."""

    def __init__(self, *args, times, **named) -> None:
        super().__init__(*args, **named)
        self.times = times

    def wait_until_ready(self, cluster, **named):
        self.times -= 1
        if self.times >= 0:
            raise EndedAtStartError("Server.InternalError")
        super().wait_until_ready(cluster, **named)


@pytest.mark.parametrize(("times", "usd", "number"), [(1, 0.1, 2), (2, 0.2, 3)])
def test_machines_that_end_while_they_start_are_bought_again_and_then_others(tmp_path, times, usd, number):
    with tried(tmp_path, [SCARCE, EXPENSIVE], kind=EndingProvider, times=times) as cluster:
        assert cluster.run_id == f"run-1.{number}"
        assert cluster.price_usd_per_hour == pytest.approx(usd)

    assert all(entry.state is EntryState.ENDED for entry in Ledger(tmp_path / "ledger.sqlite").entries())
