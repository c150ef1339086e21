import json

import pytest

from flows.cli import main
from heterps_core.plans.scheduling_plan import Stage
from infra.workspace import Workspace
from tasks.records import mlflow_store, tracking
from tasks.records.mlflow_names import Tag
from tasks.records.run_record import note, note_metrics
from tasks.running import run_lifecycle


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A night that ended well, one that was killed early, and one of another model whose process is gone."""
    workspace = Workspace(root=tmp_path_factory.mktemp("home")).create()
    good = run_lifecycle.open_run(
        workspace,
        run_id="20261120-0430-aaaaaaaa",
        run_name="ctrdnn exact 20261120-0430-aaaaaaaa",
        tags={Tag.DAY: "2026-11-19"},
    )
    stages = [Stage(0, 0, "cpu-c7i", 4), Stage(1, 2, "gpu-t4", 1)]
    settings = tracking.run_settings(stages, method="exact", model="ctrdnn", batch_size=512, seed=0)
    note(workspace, good, parameters=settings)
    figures = {
        "cost/billed_usd": 0.125,
        "measured/throughput_samples_per_s": 11_111.1,
        "measured/undisturbed_throughput_samples_per_s": 12_345.6,
        "quality/auc": 0.7812,
    }
    note_metrics(workspace, good, figures)
    run_lifecycle.close_run(workspace, good, status="FINISHED", reason="completed")
    killed = run_lifecycle.open_run(
        workspace, run_id="20261121-0430-bbbbbbbb", run_name="ctrdnn greedy 20261121-0430-bbbbbbbb", tags={}
    )
    run_lifecycle.close_run(workspace, killed, status="KILLED", reason="Cancelled: by hand")
    lost = run_lifecycle.open_run(
        workspace, run_id="20261121-0930-cccccccc", run_name="2emb exact 20261121-0930-cccccccc", tags={}
    )
    mlflow_store.client_of(workspace).set_tag(lost.mlflow_run_id, Tag.PROCESS, "1 1.00")
    return workspace


@pytest.fixture
def heterps(workspace, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setenv("HETERPS_HOME", str(workspace.root))
        monkeypatch.setattr("sys.argv", ["heterps", *arguments])
        return main(), capsys.readouterr()

    return run


def ids(printed):
    return [line["run_id"].rpartition("-")[2] for line in json.loads(printed.out)]


def test_each_run_is_a_line_with_its_figures(heterps):
    status, printed = heterps("runs")

    assert status == 0
    header, good, killed, lost = printed.out.splitlines()
    assert header.split()[:5] == ["run", "day", "model", "scheduler", "plan"]
    assert " ".join(good.split()) == (
        "20261120-0430-aaaaaaaa 2026-11-19 ctrdnn exact 4 x cpu-c7i + 1 x gpu-t4 "
        "finished 0.125000 12,346 0.7812 completed"
    )
    assert killed.split()[:6] == ["20261121-0430-bbbbbbbb", "-", "ctrdnn", "-", "-", "killed"]
    assert "process is gone" in lost


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["aaaaaaaa", "bbbbbbbb", "cccccccc"]),
        (["--last", "1"], ["cccccccc"]),
        (["--model", "ctrdnn"], ["aaaaaaaa", "bbbbbbbb"]),
        (["--model", "ctrdnn", "--last", "1"], ["bbbbbbbb"]),
        (["--status", "killed"], ["bbbbbbbb"]),
        (["--status", "running"], []),
        (["--status", "died"], ["cccccccc"]),
        (["--day", "2026-11-19"], ["aaaaaaaa"]),
        (["--day", "2026-11-18"], []),
    ],
)
def test_filters_choose_among_them(heterps, arguments, expected):
    status, printed = heterps("runs", "--json", *arguments)

    assert status == 0
    assert ids(printed) == expected


@pytest.mark.parametrize("wrong", [["--day", "yesterday"], ["--last", "0"], ["--status", "lost"]])
def test_what_cannot_be_is_refused(heterps, capsys, wrong):
    with pytest.raises(SystemExit) as ended:
        heterps("runs", *wrong)

    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_a_workspace_without_runs_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.argv", ["heterps", "runs"])

    assert main() == 0
    assert capsys.readouterr().out == "no run has been recorded yet\n"
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_does_not_answer_is_one_line(workspace, monkeypatch, capsys):
    monkeypatch.setenv("HETERPS_HOME", str(workspace.root))
    monkeypatch.setenv("HETERPS_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("sys.argv", ["heterps", "runs"])

    assert main() == 2
    error = capsys.readouterr().err
    assert error.startswith("heterps: error: runs are recorded in http://127.0.0.1:1, which must answer")
    assert "unset HETERPS_TRACKING_URI" in error
