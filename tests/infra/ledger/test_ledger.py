import multiprocessing
import sqlite3
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from heterps_core.errors import ConfigurationError, LedgerError
from heterps_core.hardware import Market
from infra.billing.bill import charged_seconds
from infra.ledger.ledger import EndReason, EntryState, Ledger
from infra.ledger.ledger_entry import Instance, LaunchTerms
from infra.providers import get_provider
from tests.infra.builders import offer, plan

NOW = datetime(2026, 7, 21, tzinfo=UTC)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "new" / "ledger.sqlite")


def request_of(name: str = "c7i.large", *, price_usd_per_hour: float = 0.09):
    return plan(offer(name, price_usd_per_hour=price_usd_per_hour)).node_requests()[0]


def test_an_entry_goes_from_intent_to_launch_to_end(ledger):
    states = []
    ledger.intend("r", "local", request_of(), at=NOW)
    states.append(ledger.entries()[0].state)
    ledger.launched("r", "stage0-node0", provider_instance_id="i-1", at=NOW + timedelta(seconds=5))
    states.append(ledger.entries()[0].state)
    ledger.ended("r", "stage0-node0", reason=EndReason.RUN_ENDED, at=NOW + timedelta(seconds=65))

    (entry,) = ledger.entries(run_id="r")
    assert [*states, entry.state] == [EntryState.INTENDED, EntryState.LAUNCHED, EntryState.ENDED]
    assert entry.launched_at == NOW + timedelta(seconds=5)
    assert entry.ended_at == NOW + timedelta(seconds=65)
    assert (entry.price_usd_per_hour, entry.price_as_of, entry.price_source) == (0.09, "2026-07-20", "test")
    assert entry.provider_instance_id == "i-1"


def test_the_first_price_stays(ledger):
    ledger.intend("r", "local", request_of(price_usd_per_hour=0.09), at=NOW)
    ledger.intend("r", "local", request_of(price_usd_per_hour=0.50), at=NOW)

    assert [entry.price_usd_per_hour for entry in ledger.entries()] == [0.09]


def test_repeated_records_change_nothing(ledger):
    ledger.intend("r", "local", request_of(), at=NOW)
    ledger.launched("r", "stage0-node0", provider_instance_id="i-1", at=NOW)
    ledger.ended("r", "stage0-node0", reason=EndReason.RUN_ENDED, at=NOW)
    before = ledger.entries()

    ledger.launched("r", "stage0-node0", provider_instance_id="i-2", at=NOW + timedelta(days=1))
    ledger.failed("r", "stage0-node0", reason="late", at=NOW + timedelta(days=1))
    ledger.close_run("r", reason=EndReason.GONE, at=NOW + timedelta(days=1))

    assert ledger.entries() == before


def test_closing_a_run_ends_what_was_launched_and_fails_what_was_only_intended(ledger):
    for request in plan(offer(), offer()).node_requests():
        ledger.intend("r", "local", request, at=NOW)
    ledger.intend("other", "local", request_of(), at=NOW)
    ledger.launched("r", "stage0-node0", provider_instance_id="i-1", at=NOW)

    ledger.close_run("r", reason=EndReason.RUN_ENDED, at=NOW)

    assert [entry.state for entry in ledger.entries(run_id="r")] == [EntryState.ENDED, EntryState.FAILED]
    assert [entry.state for entry in ledger.entries(run_id="other")] == [EntryState.INTENDED]


def test_one_run_id_cannot_stand_for_two_plans(ledger):
    ledger.intend("r", "local", request_of("c7i.large"), at=NOW)

    with pytest.raises(
        ConfigurationError, match=r"launched as c7i\.large and is now asked for as g4dn\.xlarge"
    ):
        ledger.intend("r", "local", request_of("g4dn.xlarge"), at=NOW)


def test_a_run_that_is_over_cannot_be_launched_again(ledger):
    ledger.intend("r", "local", request_of(), at=NOW)
    ledger.launched("r", "stage0-node0", provider_instance_id="i-1", at=NOW)
    ledger.close_run("r", reason=EndReason.RUN_ENDED, at=NOW)

    with pytest.raises(ConfigurationError, match=r"stage0-node0 of run r is ended already .* new run id"):
        ledger.intend("r", "local", request_of(), at=NOW)


def _intend_many(path: Path, writer: int) -> None:
    ledger = Ledger(path)
    for number in range(20):
        ledger.intend(f"r{writer}-{number}", "local", request_of(), at=NOW)


def test_several_processes_write_at_once_and_nothing_is_lost(ledger):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_intend_many, args=(ledger.path, i)) for i in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(ledger.entries()) == 40


def instance(instance_id="i-1", *, run_id="r", stage=0, price_usd_per_hour=0.09, **changes):
    """A machine as EC2 gives it: without a node id, with its terms."""
    terms = LaunchTerms(
        attempt=1,
        stage=stage,
        device_type="cpu-c7i",
        market=Market.SPOT,
        region="us-east-1",
        price_usd_per_hour=price_usd_per_hour,
        price_as_of="2026-07-20",
        price_source="tags",
        intended_at=NOW,
    )
    found = Instance(
        provider_instance_id=instance_id,
        run_id=run_id,
        node_id=None,
        instance_type="c7i.large",
        launched_at=NOW + timedelta(seconds=3),
        is_ended=False,
        ended_at=None,
        lease_until=None,
        is_owner_dead=False,
        terms=terms,
    )
    return replace(found, **changes)


def test_a_found_machine_takes_the_intent_that_it_was_launched_for_at_its_own_price(ledger):
    ledger.intend("r", "aws", request_of(), at=NOW)

    entry = ledger.recover("aws", instance(price_usd_per_hour=0.08))

    assert (entry.node_id, entry.state, entry.price_usd_per_hour) == (
        "stage0-node0",
        EntryState.LAUNCHED,
        0.08,
    )
    assert entry.launched_at == NOW + timedelta(seconds=3)
    assert ledger.entries() == (entry,)


def test_a_machine_that_nobody_intended_gets_an_entry_from_its_tags(ledger):
    entry = ledger.recover("aws", instance())

    assert (entry.run_id, entry.node_id, entry.provider) == ("r", "i-1", "aws")
    assert (entry.price_usd_per_hour, entry.price_source, entry.market) == (0.09, "tags", Market.SPOT)
    ledger.ended("r", "i-1", reason=EndReason.LEASE_EXPIRED, at=NOW + timedelta(seconds=63))
    assert ledger.recover("aws", instance(is_ended=True)).state is EntryState.ENDED
    assert len(ledger.entries()) == 1


def test_a_machine_that_lives_after_its_entry_was_closed_is_launched_again_and_its_bill_counts_on(ledger):
    ledger.recover("aws", instance())
    ledger.ended("r", "i-1", reason=EndReason.GONE, at=NOW + timedelta(seconds=63))

    again = ledger.recover("aws", instance())

    assert ledger.entries() == (again,)
    assert (again.state, again.ended_at, again.reason) == (EntryState.LAUNCHED, None, None)
    # By hand: since the launch, three seconds after NOW, without a gap.
    assert charged_seconds(again, get_provider("aws"), now=NOW + timedelta(seconds=3_603)) == 3_600


def test_an_end_before_the_launch_by_a_clock_that_is_behind_is_as_long_after_it_as_the_clock_counted(ledger):
    behind = NOW - timedelta(hours=2)
    ledger.intend("r", "aws", request_of(), at=behind)
    ledger.launched("r", "stage0-node0", provider_instance_id="i-1", at=NOW)
    ledger.ended("r", "stage0-node0", reason=EndReason.RUN_ENDED, at=behind + timedelta(seconds=480))

    (entry,) = ledger.entries()
    assert entry.ended_at == NOW + timedelta(seconds=480)


@pytest.mark.parametrize(
    "move",
    [
        lambda ledger: ledger.launched("r", "stage0-node0", provider_instance_id="i-1", at=NOW),
        lambda ledger: ledger.ended("r", "stage0-node0", reason=EndReason.RUN_ENDED, at=NOW),
        lambda ledger: ledger.failed("r", "stage0-node0", reason="no capacity", at=NOW),
    ],
)
def test_a_machine_whose_line_was_lost_cannot_be_moved_without_a_word(ledger, move):
    ledger.intend("r", "aws", request_of(), at=NOW)
    with sqlite3.connect(ledger.path) as database:
        database.execute("DELETE FROM machines")

    with pytest.raises(LedgerError, match="knows no stage0-node0 of run r"):
        move(ledger)


@pytest.mark.parametrize("other", [{"stage": 1}, {"run_id": "another"}])
def test_a_machine_of_another_stage_or_run_leaves_an_intent_alone(ledger, other):
    ledger.intend("r", "aws", request_of(), at=NOW)

    ledger.recover("aws", instance(**other))

    assert sorted(entry.state for entry in ledger.entries()) == [EntryState.INTENDED, EntryState.LAUNCHED]


def test_a_machine_found_after_its_launch_was_given_up_is_charged_all_the_same(ledger):
    """EC2 may show an instance only after the call that looked for it."""
    ledger.intend("r", "aws", request_of(), at=NOW)
    ledger.close_run("r", reason=EndReason.LAUNCH_FAILED, at=NOW)

    ledger.recover("aws", instance())

    assert [entry.state for entry in ledger.entries()] == [EntryState.LAUNCHED, EntryState.FAILED]


def test_a_machine_without_terms_and_entry_cannot_be_charged(ledger):
    assert ledger.recover("aws", instance(terms=None)) is None
    assert ledger.entries() == ()


def test_the_price_of_what_was_had_replaces_that_of_the_first_offer(ledger):
    ledger.intend("r", "aws", request_of(), at=NOW)
    had = offer("m7i.large", price_usd_per_hour=0.1)

    ledger.launched("r", "stage0-node0", provider_instance_id="i-1", at=NOW, offer=had)

    (entry,) = ledger.entries()
    assert (entry.instance_type, entry.price_usd_per_hour) == ("m7i.large", 0.1)


def test_a_second_attempt_has_entries_of_its_own(ledger):
    ledger.intend("r", "aws", request_of(), at=NOW)
    ledger.launched("r", "stage0-node0", provider_instance_id="i-1", at=NOW)
    ledger.close_run("r", reason=EndReason.LAUNCH_FAILED, at=NOW + timedelta(seconds=5))
    ledger.intend("r", "aws", request_of(), at=NOW + timedelta(seconds=6), attempt=2)
    ledger.launched("r", "stage0-node0", provider_instance_id="i-2", at=NOW + timedelta(seconds=7))

    assert ledger.last_attempt("r") == 2
    assert [(e.attempt, e.provider_instance_id, e.state) for e in ledger.entries()] == [
        (1, "i-1", EntryState.ENDED),
        (2, "i-2", EntryState.LAUNCHED),
    ]
