import json
from datetime import UTC, datetime

import pytest

from heterps_core.errors import ConfigurationError
from infra.workspace import Workspace
from tasks.clusters import launch_ids_of, next_launch_id
from tasks.records.past_runs import past_trainings
from tasks.records.runs import (
    COMPLETED,
    TrainingParameters,
    clean_up_run,
    find_run_id,
    finished_run,
    keep_parameters,
    new_run_id,
    open_record,
)
from tasks.running import run_lifecycle
from tasks.running.live_fleet import only_fleet

FLOW_RUN_ID = "067e5f3c-0000-7000-8000-1234567890ab"


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path).create()


def make_parameters(**changes):
    values = {
        "data": None,
        "schema_file": None,
        "model": "ctrdnn",
        "epochs": 1,
        "batch_size": None,
        "seed": 0,
    }
    return TrainingParameters(**{**values, **changes})


def test_a_run_is_found_again_by_the_id_of_its_flow_run(workspace):
    run_id = new_run_id(FLOW_RUN_ID, now=datetime(2026, 11, 21, 4, 30, tzinfo=UTC))
    keep_parameters(workspace, make_parameters(), run_id=run_id, is_resumed=False)

    assert run_id.startswith("20261121-0430-")
    assert find_run_id(workspace, FLOW_RUN_ID, resume_run_id=None) == run_id
    assert find_run_id(workspace, FLOW_RUN_ID.replace("ab", "ac"), resume_run_id=None) is None


def test_a_resumed_run_is_its_flow_runs_own_once_that_has_had_the_fleet(workspace):
    refused, resuming = FLOW_RUN_ID.replace("ab", "ac"), FLOW_RUN_ID
    with only_fleet(workspace, "older", flow_run_id=resuming):
        assert find_run_id(workspace, resuming, resume_run_id="older") == "older"
        assert find_run_id(workspace, refused, resume_run_id="older") is None
    assert find_run_id(workspace, resuming, resume_run_id="older") == "older"

    with only_fleet(workspace, "newer", flow_run_id=refused):
        assert find_run_id(workspace, resuming, resume_run_id="older") is None


def test_a_resumed_run_keeps_the_parameters_it_began_with(workspace):
    began = make_parameters(data="clicks.tsv", epochs=3)
    keep_parameters(workspace, began, run_id="run-1", is_resumed=False)

    kept = keep_parameters(workspace, make_parameters(epochs=9), run_id="run-1", is_resumed=True)

    assert kept == began


def test_resuming_what_is_not_there_names_the_newest_runs(workspace):
    keep_parameters(workspace, make_parameters(), run_id="run-1", is_resumed=False)

    with pytest.raises(ConfigurationError, match=r"got 'run-2'; the newest are: run-1"):
        keep_parameters(workspace, make_parameters(), run_id="run-2", is_resumed=True)


def test_a_run_that_did_nothing_leaves_no_folder(workspace):
    run_id = new_run_id(FLOW_RUN_ID, now=datetime(2026, 11, 21, tzinfo=UTC))
    keep_parameters(workspace, make_parameters(), run_id=run_id, is_resumed=False)

    for _ in range(2):
        clean_up_run(workspace, FLOW_RUN_ID, resume_run_id=None, status="FAILED", reason="no such file")

    assert list(workspace.runs_directory.iterdir()) == []


class Entries:
    """Stands for the ledger's entries where only their launch ids matter."""

    def __init__(self, *ids):
        self.ids = ids

    def entries(self):
        return [type("Entry", (), {"run_id": name}) for name in self.ids]


def test_each_launch_of_a_run_has_its_own_id():
    assert next_launch_id(Entries(), "run") == "run"
    assert next_launch_id(Entries("run", "run", "other"), "run") == "run.2"
    assert next_launch_id(Entries("run", "run.2"), "run") == "run.3"
    assert launch_ids_of(Entries("run", "run.2", "runner"), "run") == ["run", "run.2"]


def test_parameters_of_a_run_from_before_there_were_days_are_read(workspace):
    keep_parameters(workspace, make_parameters(), run_id="run-1", is_resumed=False)
    path = workspace.run_directory("run-1") / "parameters.json"
    older = {name: value for name, value in json.loads(path.read_text()).items() if name != "day"}
    path.write_text(json.dumps(older))

    assert keep_parameters(workspace, make_parameters(), run_id="run-1", is_resumed=True).day is None


HERE = "/it's/here"
"""An apostrophe, which ends a text in MLflow's filters."""


def record(
    workspace,
    run_id,
    *,
    day="2026-11-01",
    data=HERE,
    model="ctrdnn",
    status="FINISHED",
    reason=COMPLETED,
):
    tracked = open_record(
        workspace,
        run_id=run_id,
        model=model,
        scheduler="exact",
        provider="local",
        flow_run_id=None,
        data=data,
        day=day,
    )
    if status != "RUNNING":
        run_lifecycle.close_run(workspace, tracked, status=status, reason=reason)


def test_a_night_is_done_where_the_same_day_data_and_model_have_finished(workspace):
    wanted = {"day": "2026-11-01", "data": HERE, "model": "ctrdnn"}
    assert finished_run(workspace, **wanted) is None

    record(workspace, "other-day", day="2026-11-02")
    record(workspace, "no-day", day=None)
    record(workspace, "other-data", data="/there")
    record(workspace, "other-model", model="nce")
    record(workspace, "failed", status="FAILED", reason="a bad row")
    record(workspace, "planned", reason="plan only")
    record(workspace, "live", status="RUNNING")
    assert finished_run(workspace, **wanted) is None

    record(workspace, "done")
    record(workspace, "failed-later", status="KILLED", reason="cancelled")
    assert finished_run(workspace, **wanted) == "done"


def test_a_run_that_has_finished_is_not_resumed_and_its_record_stays(workspace):
    keep_parameters(workspace, make_parameters(), run_id="done", is_resumed=False)
    record(workspace, "done")
    (before,) = past_trainings(workspace, most=10)

    with pytest.raises(
        ConfigurationError, match=r"but done finished at .* nothing is left to resume; .*again=True"
    ):
        keep_parameters(workspace, make_parameters(), run_id="done", is_resumed=True)

    assert past_trainings(workspace, most=10) == [before]


def test_runs_that_did_not_train_to_their_end_are_resumed(workspace):
    for run_id, status, reason in [
        ("failed", "FAILED", "a bad row"),
        ("killed", "KILLED", "cancelled"),
        ("running", "RUNNING", ""),
        ("planned", "FINISHED", "plan only"),
    ]:
        keep_parameters(workspace, make_parameters(epochs=3), run_id=run_id, is_resumed=False)
        record(workspace, run_id, status=status, reason=reason)

        assert keep_parameters(workspace, make_parameters(), run_id=run_id, is_resumed=True).epochs == 3


def test_a_run_that_was_tidied_is_not_resumed(workspace):
    keep_parameters(workspace, make_parameters(), run_id="other", is_resumed=False)
    (workspace.run_directory("tidied")).mkdir()
    (workspace.run_directory("tidied") / "explanation.json").write_text("{}")

    with pytest.raises(
        ConfigurationError, match=r"heterps tidy has not deleted, got 'tidied'; the newest are: other$"
    ):
        keep_parameters(workspace, make_parameters(), run_id="tidied", is_resumed=True)


def test_machines_are_ended_and_nothing_is_raised_where_the_record_is_away(workspace, monkeypatch, caplog):
    monkeypatch.setenv("HETERPS_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run_id = new_run_id(FLOW_RUN_ID, now=datetime(2026, 11, 21, 4, 30, tzinfo=UTC))
    workspace.run_directory(run_id).mkdir(parents=True)

    clean_up_run(workspace, FLOW_RUN_ID, resume_run_id=None, status="FAILED", reason="no such file")

    assert "is left to the sweeper" in caplog.text
