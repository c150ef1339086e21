from datetime import UTC, datetime

import pytest

from heterps_core.errors import ConfigurationError
from infra.workspace import Workspace
from tasks.clusters import launch_ids_of, next_launch_id
from tasks.runs import (
    TrainingParameters,
    clean_up_run,
    find_run_id,
    keep_parameters,
    new_run_id,
)

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
    assert find_run_id(workspace, FLOW_RUN_ID, resume_run_id="older") == "older"
    assert find_run_id(workspace, FLOW_RUN_ID.replace("ab", "ac"), resume_run_id=None) is None


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
