"""From the start of a flow to its first training step, by the age of the files that workers leave."""

import os
from datetime import UTC, datetime, timedelta

import pytest
from mlflow import MlflowClient

from heterps_core.training.storage.run_directory import RunDirectory
from infra.workspace import Workspace
from tasks.recording import START_TO_FIRST_STEP, _start_to_first_step_s, record_overhead
from tasks.running.run_lifecycle import close_run, open_run
from tests.paths import PROJECT

STARTED_AT = datetime(2026, 11, 21, 4, 30, tzinfo=UTC)


@pytest.fixture
def run(tmp_path):
    return RunDirectory(str(tmp_path / "run"))


def write_steps(run, name, *, after_s):
    run.write_json(f"steps/{name}", [])
    at = (STARTED_AT + timedelta(seconds=after_s)).timestamp()
    os.utime(run.path(f"steps/{name}"), (at, at))


def test_the_first_step_is_as_old_as_the_first_file_of_steps(run):
    write_steps(run, "000-00000001.json", after_s=12.5)
    write_steps(run, "000-00000002.json", after_s=13.0)

    assert _start_to_first_step_s(run, started_at=STARTED_AT) == pytest.approx(12.5)


def test_steps_from_before_a_run_was_resumed_do_not_count(run):
    write_steps(run, "000-00000001.json", after_s=-600.0)
    write_steps(run, "001-00000051.json", after_s=9.0)

    assert _start_to_first_step_s(run, started_at=STARTED_AT) == pytest.approx(9.0)


def test_a_run_that_trained_nothing_has_no_first_step(run):
    assert _start_to_first_step_s(run, started_at=STARTED_AT) is None


def test_it_is_recorded_under_a_name_that_is_described(tmp_path, run):
    write_steps(run, "000-00000001.json", after_s=12.5)
    workspace = Workspace(root=tmp_path / "home").create()
    tracked = open_run(workspace, run_id="r1", run_name="r1", tags={})

    record_overhead(workspace, tracked, run, started_at=STARTED_AT)
    close_run(workspace, tracked, status="FINISHED", reason="completed")

    recorded = MlflowClient(workspace.tracking_uri).get_run(tracked.mlflow_run_id).data.metrics
    assert recorded == {START_TO_FIRST_STEP: pytest.approx(12.5)}
    described = (PROJECT / "docs" / "METRICS.md").read_text()
    assert f"`{START_TO_FIRST_STEP}`" in described
