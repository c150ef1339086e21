from datetime import UTC, datetime

import pytest

from heterps_core.errors import ConfigurationError
from infra.workspace import Workspace
from tasks.clusters import _launch_ids_of, next_launch_id
from tasks.records.mlflow_names import COMPLETED, Tag
from tasks.records.past_runs import check_not_finished, finished_run, past_trainings
from tasks.records.run_files import save_parameters, saved_parameters
from tasks.records.run_ids import find_run_id, new_run_id
from tasks.running import run_lifecycle
from tasks.running.live_fleet import only_fleet
from tasks.running.run_lifecycle import clean_up_run

FLOW_RUN_ID = "067e5f3c-0000-7000-8000-1234567890ab"


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path).create()


def save(workspace, run_id, **values):
    save_parameters(workspace, run_id, {"epochs": 1, "day": None, **values})


def resumed(workspace, run_id):
    check_not_finished(workspace, run_id)
    return saved_parameters(workspace, run_id)


def test_a_run_is_found_again_by_the_id_of_its_flow_run(workspace):
    run_id = new_run_id(FLOW_RUN_ID, now=datetime(2026, 11, 21, 4, 30, tzinfo=UTC))
    save(workspace, run_id)

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
    save(workspace, "run-1", data="clicks.tsv", epochs=3)

    assert resumed(workspace, "run-1") == {"data": "clicks.tsv", "epochs": 3, "day": None}


def test_resuming_what_is_not_there_names_the_newest_runs(workspace):
    save(workspace, "run-1")

    with pytest.raises(ConfigurationError, match=r"got 'run-2'; the newest are: run-1"):
        resumed(workspace, "run-2")


def test_a_run_that_did_nothing_leaves_no_folder(workspace):
    run_id = new_run_id(FLOW_RUN_ID, now=datetime(2026, 11, 21, tzinfo=UTC))
    save(workspace, run_id)

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
    assert _launch_ids_of(Entries("run", "run.2", "runner"), "run") == ["run", "run.2"]


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
    tags = {Tag.MODEL: model, Tag.DATA: data, **({Tag.DAY: day} if day else {})}
    tracked = run_lifecycle.open_run(workspace, run_id=run_id, run_name=run_id, tags=tags)
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
    save(workspace, "done")
    record(workspace, "done")
    (before,) = past_trainings(workspace, most=10)

    with pytest.raises(
        ConfigurationError, match=r"but done finished at .* nothing is left to resume; .*again=True"
    ):
        resumed(workspace, "done")

    assert past_trainings(workspace, most=10) == [before]


def test_runs_that_did_not_train_to_their_end_are_resumed(workspace):
    for run_id, status, reason in [
        ("failed", "FAILED", "a bad row"),
        ("killed", "KILLED", "cancelled"),
        ("running", "RUNNING", ""),
        ("planned", "FINISHED", "plan only"),
    ]:
        save(workspace, run_id, epochs=3)
        record(workspace, run_id, status=status, reason=reason)

        assert resumed(workspace, run_id)["epochs"] == 3


def test_a_run_that_was_tidied_is_not_resumed(workspace):
    save(workspace, "other")
    (workspace.run_folder("tidied")).mkdir()
    (workspace.run_folder("tidied") / "explanation.json").write_text("{}")

    with pytest.raises(
        ConfigurationError, match=r"heterps tidy has not deleted, got 'tidied'; the newest are: other$"
    ):
        resumed(workspace, "tidied")


def test_machines_are_ended_and_nothing_is_raised_where_the_record_is_away(workspace, monkeypatch, caplog):
    monkeypatch.setenv("HETERPS_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run_id = new_run_id(FLOW_RUN_ID, now=datetime(2026, 11, 21, 4, 30, tzinfo=UTC))
    workspace.run_folder(run_id).mkdir(parents=True)

    clean_up_run(workspace, FLOW_RUN_ID, resume_run_id=None, status="FAILED", reason="no such file")

    assert "is left to the sweeper" in caplog.text
