from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from infra.ledger.ledger import EndReason, EntryState, Ledger
from infra.ledger.ledger_entry import Instance
from infra.machines.sweeper import providers_in_use, reason_to_end, sweep
from infra.providers.local import LocalProvider
from tests.infra.builders import offer, plan

NOW = datetime(2026, 7, 21, tzinfo=UTC)
LIVE = Instance(
    provider_instance_id="i",
    run_id="r",
    node_id="n",
    instance_type="c7i.large",
    launched_at=NOW,
    is_ended=False,
    ended_at=None,
    lease_until=NOW + timedelta(seconds=1),
    is_owner_dead=False,
    terms=None,
)


@pytest.mark.parametrize(
    ("instance", "reason"),
    [
        (LIVE, None),
        (replace(LIVE, lease_until=NOW), None),
        (replace(LIVE, lease_until=NOW - timedelta(seconds=1)), EndReason.LEASE_EXPIRED),
        (replace(LIVE, lease_until=None), None),
        (replace(LIVE, lease_until=None, launched_at=NOW - timedelta(seconds=299)), None),
        (
            replace(LIVE, lease_until=None, launched_at=NOW - timedelta(seconds=300)),
            EndReason.LEASE_UNREADABLE,
        ),
        # By a clock that is two hours behind EC2's it would never be old.
        (replace(LIVE, lease_until=None, launched_at=NOW + timedelta(hours=2)), EndReason.LEASE_UNREADABLE),
        (replace(LIVE, is_owner_dead=True), EndReason.OWNER_DEAD),
    ],
)
def test_why_a_machine_should_end(instance, reason):
    assert reason_to_end(instance, now=NOW, tags_grace_s=300.0) == reason


def test_a_provider_that_shows_leases_at_once_gives_no_grace():
    unreadable = replace(LIVE, lease_until=None)

    assert reason_to_end(unreadable, now=NOW, tags_grace_s=0.0) is EndReason.LEASE_UNREADABLE


@pytest.fixture
def provider(tmp_path):
    return LocalProvider(tmp_path / "leases")


@pytest.fixture
def ledger(tmp_path):
    """Machines that the provider does not have: one launched, one only intended, one of another provider."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    request = plan(offer()).node_requests()[0]
    for run_id, provider in [("gone", "local"), ("never", "local"), ("cloud", "aws")]:
        ledger.intend(run_id, provider, request, at=NOW)
    for run_id in ("gone", "cloud"):
        ledger.launched(run_id, request.node_id, provider_instance_id=f"i-{run_id}", at=NOW)
    return ledger


def states(ledger):
    return {entry.run_id: entry.state for entry in ledger.entries()}


def test_entries_without_a_machine_are_closed_when_they_are_old(provider, ledger):
    swept = sweep(provider, now=NOW + timedelta(seconds=provider.lease_s + 1), ledger=ledger)

    assert [(m.run_id, m.provider_instance_id, m.reason) for m in swept] == [
        ("gone", "i-gone", EndReason.GONE)
    ]
    assert states(ledger) == {
        "gone": EntryState.ENDED,
        "never": EntryState.FAILED,
        "cloud": EntryState.LAUNCHED,
    }


def test_young_entries_are_left_to_the_launch_that_may_be_under_way(provider, ledger):
    assert sweep(provider, now=NOW + timedelta(seconds=1), ledger=ledger) == []
    assert EntryState.FAILED not in states(ledger).values()


def test_providers_with_open_entries_are_swept_by_default(ledger):
    assert providers_in_use(ledger) == ["aws", "here", "local"]
    ledger.close_run("cloud", reason=EndReason.RUN_ENDED, at=NOW)
    assert providers_in_use(ledger) == ["here", "local"]
