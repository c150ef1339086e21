"""Attempts to launch that fail are paid, a minute at least, and count against the caps before the next one."""

from pathlib import Path

import pytest

from heterps_core.errors import BudgetExceededError
from heterps_core.hardware import Market
from infra.billing.caps import Caps, Spent
from infra.ledger.ledger import EndReason
from infra.machines.lifecycle import running_cluster
from tasks.clusters import spent_before_launch
from tests.infra.builders import bootstrap
from tests.infra.faults import unlike_plan
from tests.infra.moto_ec2 import Wire

CARDS_USD = 2 * (0.526 + 40 * 0.08 / 730 + 0.005) / 60
"""A minute of the two cards, with disks and addresses: what an attempt costs whose processors cannot be had."""


@pytest.fixture
def wire(client):
    """Each zone has the cards, and none the processors."""
    wire = Wire(refused_fleets=dict.fromkeys(range(1, 40, 2), "UnfulfillableCapacity"))
    wire.attach(client)
    return wire


def launch(provider, ledger, caps, *, spent):
    with running_cluster(
        provider,
        unlike_plan(Market.ON_DEMAND),
        run_id="r1",
        bootstrap=bootstrap(Path("/srv/heterps/run")),
        ledger=ledger,
        caps=caps,
        predicted_cost_usd=0.02,
        spent=spent,
    ):
        pytest.fail("there are no processors")


@pytest.mark.parametrize("cap", ["max_usd_per_run", "max_usd_per_month"])
def test_no_further_attempt_is_made_that_the_cap_could_not_pay(provider, ledger, wire, server, cap):
    # By hand: 0.02 USD of the run and attempts of 0.0179 USD: after three of them 0.0737 USD would be needed.
    caps = Caps(**{cap: 0.06})

    with pytest.raises(BudgetExceededError, match=r"within 0\.06 USD"):
        launch(provider, ledger, caps, spent=lambda: spent_before_launch(provider, ledger, "r1"))

    assert len(wire.of("CreateFleet")) == 6
    assert [instance["State"]["Name"] for instance in server.instances()] == ["terminated"] * 6
    assert {entry.reason for entry in ledger.entries() if entry.launched_at} == {EndReason.LAUNCH_FAILED}
    spent = spent_before_launch(provider, ledger, "r1")
    assert spent.failed_launches_usd == pytest.approx(3 * CARDS_USD, rel=0.05)
    assert spent.month_usd == pytest.approx(spent.failed_launches_usd)


def test_what_a_run_before_has_spent_counts_for_the_month_and_not_for_this_run(provider, ledger, wire):
    with pytest.raises(BudgetExceededError, match=r"within 0\.06 USD per month, but takes 1\.02"):
        launch(provider, ledger, Caps(max_usd_per_month=0.06), spent=lambda: Spent(month_usd=1.0))

    assert not wire.of("CreateFleet")
    assert not ledger.entries()
