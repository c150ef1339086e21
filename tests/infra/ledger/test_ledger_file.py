"""A ledger whose file is damaged: really truncated, overwritten, emptied."""

import threading
from datetime import UTC, datetime

import pytest

from heterps_core.errors import LedgerError
from infra.ledger.ledger import Ledger
from infra.ledger.ledger_file import _damage_of, readable_entries
from infra.machines.sweeper import usable_ledger
from infra.workspace import Workspace
from tests.infra.builders import offer, plan

NOW = datetime(2026, 7, 21, tzinfo=UTC)
NUM_ENTRIES = 300


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path).create()


@pytest.fixture
def path(workspace):
    """A ledger of many pages."""
    ledger = Ledger(workspace.ledger_path)
    (request,) = plan(offer()).node_requests()
    for number in range(NUM_ENTRIES):
        ledger.intend(f"run-{number:03}", "aws", request, at=NOW)
    return workspace.ledger_path


def truncate(path, share):
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))


DAMAGES = {
    "truncated": lambda path: truncate(path, 0.6),
    "one page left": lambda path: truncate(path, 0.01),
    "emptied": lambda path: truncate(path, 0.0),
    "overwritten": lambda path: path.write_text(
        "this is no database, though it is long enough to be one" * 20
    ),
}


def test_a_whole_ledger_and_none_at_all_are_left_alone(workspace, path):
    assert _damage_of(path) is None
    assert usable_ledger(workspace)[1] is None
    path.unlink()
    assert _damage_of(path) is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_ledger_is_refused_until_it_is_set_aside_and_kept(workspace, path, damage):
    DAMAGES[damage](path)
    content = path.read_bytes()
    with pytest.raises(LedgerError, match="heterps sweep sets"):
        Ledger(path).entries()

    ledger, note = usable_ledger(workspace)

    (aside,) = path.parent.glob("ledger.sqlite.damaged-*")
    assert aside.read_bytes() == content
    assert str(aside) in note
    assert _damage_of(path) is None
    assert len(ledger.entries()) == len(readable_entries(aside))


def test_what_can_still_be_read_of_a_truncated_ledger_is_taken_over(workspace, path):
    before = set(Ledger(path).entries())
    DAMAGES["truncated"](path)

    after = set(usable_ledger(workspace)[0].entries())

    assert after < before
    assert len(after) > 0.25 * NUM_ENTRIES


def test_of_two_that_find_the_damage_one_sets_it_aside(workspace, path):
    DAMAGES["truncated"](path)
    both_are_here = threading.Barrier(2)

    def repair():
        both_are_here.wait()
        usable_ledger(workspace)

    others = [threading.Thread(target=repair) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()

    assert len(list(path.parent.glob("ledger.sqlite.damaged-*"))) == 1
    assert Ledger(path).entries()
