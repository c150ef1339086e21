import multiprocessing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from heterps_core.errors import ConfigurationError
from infra.ledger import EndReason, EntryState, Ledger
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
