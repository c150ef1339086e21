import json

import pytest

from flows.cli import main
from heterps_core.plans.scheduling_plan import SchedulingPlan
from infra.workspace import Workspace
from tasks.records.run_files import keep_explanation
from tests.tasks.report_builders import RUN_ID, make_plan_report


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path))
    return Workspace.locate().create()


def heterps(capsys, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["heterps", *arguments])
    return main(), capsys.readouterr()


def keep(workspace, run_id, **document):
    folder = workspace.run_folder(run_id)
    folder.mkdir(parents=True)
    (folder / "explanation.json").write_text(json.dumps({"run_id": run_id, **document}))


def test_what_was_kept_beside_a_run_is_shown(workspace, capsys, monkeypatch):
    keep(
        workspace,
        "r1",
        model="ctrdnn",
        data="clicks",
        summary="exact: 4 x cpu-c7i",
        text="Why this plan\n  cheap",
    )

    status, printed = heterps(capsys, monkeypatch, "explain", "latest")

    assert status == 0
    assert printed.out == "Run r1: ctrdnn on clicks\nexact: 4 x cpu-c7i\n\nWhy this plan\n  cheap\n"


def test_a_plan_is_kept_before_anything_is_launched(workspace, capsys, monkeypatch):
    report = make_plan_report()
    keep_explanation(workspace, report)

    _, text = heterps(capsys, monkeypatch, "explain", RUN_ID[:8])
    status, printed = heterps(capsys, monkeypatch, "explain", "latest", "--json")

    assert status == 0
    document = json.loads(printed.out)
    assert SchedulingPlan.from_json(document["plan"]) == report.chosen.plan
    assert document["text"] in text.out
    assert text.out.startswith(f"Run {RUN_ID}: ctrdnn on clicks <of> a day\nexact: 4 x cpu-c7i, 1 x gpu-t4;")


def test_a_run_without_a_plan_says_so(workspace, capsys, monkeypatch):
    workspace.run_folder("r1").mkdir()

    status, printed = heterps(capsys, monkeypatch, "explain", "r1")

    assert status == 2
    assert "run r1 left no explanation" in printed.err


def test_a_damaged_explanation_is_one_line(workspace, capsys, monkeypatch):
    workspace.run_folder("r1").mkdir()
    (workspace.run_folder("r1") / "explanation.json").write_text("{")

    status, printed = heterps(capsys, monkeypatch, "explain", "r1", "--json")

    assert status == 2
    assert "explanation.json is damaged" in printed.err
