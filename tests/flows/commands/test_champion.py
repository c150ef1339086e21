"""`heterps champion` and `heterps rollback` as a person types them, over a real registry."""

import json

import pytest

from flows.cli import main
from infra.workspace import Workspace
from tasks.records import model_registry
from tasks.records.mlflow_names import Tag
from tasks.records.model_registry import tag_version
from tests.tasks.registry import FITTED, OLD, SHIFTED

pytestmark = pytest.mark.slow


@pytest.fixture
def heterps(models, capsys, monkeypatch):
    """Run the command in the workspace of the models; returns exit status, output and errors."""
    monkeypatch.setenv("HETERPS_HOME", str(models.workspace.root))

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["heterps", *arguments])
        status = main()
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def three_nights(models):
    """Version 1 was champion, 2 is, 4 was kept out, and nobody has judged 3, 5 and 6."""
    models.crown(OLD, usd=0.5)
    models.crown(FITTED, usd=0.25)
    models.decide(SHIFTED, usd=0.25)


def test_before_the_first_champion_there_is_nothing_to_show(heterps, tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "nothing"))

    assert heterps("champion") == (0, "there is no champion yet\n", "")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.usefixtures("three_nights")
def test_versions_are_read_as_mlflow_tells_them(models, monkeypatch):
    def read():
        champion = model_registry.version_called(models.workspace, "champion")
        folder = model_registry.verified_folder(models.workspace, champion)
        return champion, folder, model_registry.registered_versions(models.workspace)

    from_database = read()

    monkeypatch.setattr(Workspace, "has_own_tracking", False)
    assert from_database == read()


@pytest.mark.usefixtures("three_nights")
def test_the_champion_is_shown_with_its_figures_and_the_last_decisions(heterps):
    status, out, _ = heterps("champion")

    lines = out.splitlines()
    assert status == 0
    assert lines[0].startswith("champion: version 2 (")
    assert lines[1] == "  trained by run run-2 on 2026-11-02"
    assert "0.2500 USD per million samples on 4,000 rows it had not seen" in lines[2]
    outcomes = [line.split()[:3] for line in lines if line.strip()[:1].isdigit()]
    assert outcomes == [
        ["6", "2026-11-06", "not"],
        ["5", "2026-11-05", "not"],
        ["4", "2026-11-04", "kept"],
        ["3", "2026-11-03", "not"],
        ["2", "2026-11-02", "champion"],
        ["1", "2026-11-01", "promoted"],
    ]
    assert "last decision: version 2 stays champion" in lines[-1]


@pytest.mark.usefixtures("three_nights")
def test_the_same_as_json(heterps):
    status, out, _ = heterps("champion", "--json", "--last", "3")

    document = json.loads(out)
    assert status == 0
    assert (document["champion"]["version"], document["champion"]["files_are_whole"]) == ("2", True)
    assert document["champion"]["decision"]["challenger"]["usd_per_million_samples"] == 0.25
    assert [(entry["version"], entry["outcome"]) for entry in document["versions"]] == [
        ("6", "not decided"),
        ("5", "not decided"),
        ("4", "kept out"),
    ]


@pytest.mark.usefixtures("three_nights")
def test_damaged_files_of_the_champion_end_with_their_own_status(heterps, models):
    with models.damaged(FITTED):
        status, out, err = heterps("champion")

    assert status == 6
    assert "champion: version 2" in out
    assert "version 2 of ctr must have the files that it was registered with" in err


@pytest.mark.usefixtures("three_nights")
def test_a_roll_back_says_what_it_did_and_is_seen(heterps):
    assert heterps("rollback") == (
        0,
        "champion is version 1 again, trained by run run-1 on 2026-11-01; it was version 2\n",
        "",
    )

    out = heterps("champion")[1]
    assert "champion: version 1" in out
    assert "rolled back" in out
    status, _, err = heterps("rollback")
    assert status == 2
    assert "it was the first; name one with --to: 2" in err
    assert heterps("rollback", "--to", "2", "--json")[:2] == (
        0,
        json.dumps({"from_version": "1", "to_version": "2", "run_id": "run-2"}, indent=2) + "\n",
    )
    assert heterps("rollback", "--to", "none") == (0, "there is no champion now; it was version 2\n", "")
    assert heterps("champion")[1].startswith("there is no champion yet")


@pytest.mark.usefixtures("three_nights")
def test_a_version_that_came_back_after_it_was_rolled_back_and_was_succeeded_is_called_promoted(
    heterps, models
):
    # Version 1 is champion since now, so it was rolled back before that.
    tag_version(models.workspace, "1", {Tag.ROLLED_BACK: "2020-01-01T00:00:00+00:00"})

    outcomes = {
        entry["version"]: entry["outcome"]
        for entry in json.loads(heterps("champion", "--json")[1])["versions"]
    }

    assert (outcomes["2"], outcomes["1"]) == ("champion", "promoted")


@pytest.mark.usefixtures("three_nights")
def test_a_version_that_was_never_champion_is_refused(heterps):
    status, _, err = heterps("rollback", "--to", "4")

    assert status == 2
    assert "'4' is not a known earlier champion; known are: 1" in err


@pytest.mark.usefixtures("three_nights")
def test_a_roll_back_to_damaged_files_is_refused_with_its_own_status(heterps, models):
    with models.damaged(OLD):
        status, _, err = heterps("rollback")

    assert status == 6
    assert "champion is still 2" in err
