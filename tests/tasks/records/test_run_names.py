import os
from datetime import UTC, datetime
from itertools import permutations

import pytest

from heterps_core.errors import ConfigurationError, UnknownNameError
from infra.ledger.ledger import Ledger
from infra.workspace import Workspace
from tasks.clusters import providers_of_run
from tasks.records.run_ids import find_run, known_runs
from tests.infra.builders import offer, plan

IDS = ["20261120-0430-1a2b3c4d", "20261121-0430-5e6f7a8b", "20261121-0930-5e6f0000"]


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ("latest", IDS[2]),
        ("20261120", IDS[0]),
        ("20261121-04", IDS[1]),
        (IDS[2], IDS[2]),
    ],
)
def test_an_id_its_beginning_or_latest_means_a_run(named, meant):
    assert find_run(named, IDS) == meant


def test_a_whole_id_wins_over_longer_ones_that_begin_with_it():
    assert find_run("r1", ["r1", "r12"]) == "r1"


def test_a_beginning_of_several_is_refused_with_them():
    with pytest.raises(
        ConfigurationError, match=r"'20261121' fits 2; write more of it: .*-5e6f7a8b, .*-5e6f0000"
    ):
        find_run("20261121", IDS)


@pytest.mark.parametrize("named", ["20251121", "", "5e6f7a8b"])
def test_what_fits_none_is_refused_with_the_newest(named):
    with pytest.raises(UnknownNameError, match="20261121-0930-5e6f0000"):
        find_run(named, IDS)


def test_latest_of_none_says_so():
    with pytest.raises(ConfigurationError, match="there is none yet"):
        find_run("latest", [])


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path).create()


def begin(workspace, run_id, *, at_s, ended_at_s=None):
    """A run's folder, with what was written when it began and when it ended."""
    folder = workspace.run_folder(run_id)
    folder.mkdir()
    for name, stamp_s in (("parameters.json", at_s), ("flow.log", ended_at_s or at_s)):
        (folder / name).touch()
        os.utime(folder / name, (stamp_s, stamp_s))


@pytest.mark.parametrize("tails", list(permutations(["000000aa", "777777bb", "ffffffcc"])))
def test_runs_of_one_minute_are_ordered_by_their_start_and_not_by_the_random_end_of_their_ids(
    workspace, tails
):
    in_order = [f"20261121-0430-{tail}" for tail in tails]
    for second, run_id in reversed(list(enumerate(in_order))):
        # The first one ends last.
        begin(workspace, run_id, at_s=1_795_235_400 + second, ended_at_s=1_795_235_500 - second)

    assert known_runs(workspace) == in_order
    assert find_run("latest", known_runs(workspace)) == in_order[-1]


def test_runs_of_other_minutes_are_ordered_by_their_ids_whatever_was_done_to_their_files(workspace):
    begin(workspace, "20261121-0431-000000aa", at_s=1)
    begin(workspace, "20261121-0430-777777bb", at_s=2)
    workspace.run_folder("20261121-0429-ffffffcc").mkdir()

    assert [run_id[9:13] for run_id in known_runs(workspace)] == ["0429", "0430", "0431"]


def test_runs_that_only_the_ledger_knows_are_ordered_by_their_first_machine(workspace):
    ledger, (request,) = Ledger(workspace.ledger_path), plan(offer()).node_requests()
    for second, run_id in enumerate(
        ["20261121-0430-ffffffcc", "20261121-0430-000000aa", "20261121-0430-ffffffcc.2"]
    ):
        ledger.intend(run_id, "local", request, at=datetime(2026, 11, 21, 4, 30, second, tzinfo=UTC))
    begin(workspace, "20261121-0430-777777bb", at_s=1_795_235_400)

    assert known_runs(workspace, among=providers_of_run(workspace)) == [
        "20261121-0430-ffffffcc",
        "20261121-0430-000000aa",
    ]
    assert find_run("latest", known_runs(workspace)) == "20261121-0430-000000aa"
