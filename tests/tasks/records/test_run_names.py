import pytest

from heterps_core.errors import ConfigurationError, UnknownNameError
from infra.workspace import Workspace
from tasks.records.runs import find_run, known_runs

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
    assert find_run(named, reversed(IDS)) == meant


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


def test_runs_are_known_by_their_folders(tmp_path):
    workspace = Workspace(root=tmp_path).create()
    assert known_runs(workspace) == []
    for name in ("r2", "r1"):
        workspace.run_directory(name).mkdir()

    assert known_runs(workspace) == ["r1", "r2"]
