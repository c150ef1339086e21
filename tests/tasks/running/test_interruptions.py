import pytest

from heterps_core.training.storage.run_directory import RunDirectory
from infra.workspace import Workspace
from tasks.running.losses import note_interruptions, num_spot_losses
from tests.tasks.running.builders import spot_cluster


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path).create()


def leave(run, *, kind="spot interruption"):
    notice = {"kind": kind, "at": "2026-11-21T04:02:00Z", "noticed_at_s": 1.0}
    run.write_json("nodes/stage0-node0/leaving.json", notice)


def test_each_launch_that_lost_a_machine_counts_once(workspace, tmp_path):
    run = RunDirectory(str(tmp_path / "run"))
    leave(run)

    for launch_id in ("r1", "r1", "r1.2"):
        leaving = note_interruptions(workspace, "r1", run_directory=run, cluster=spot_cluster(launch_id))
        assert leaving == ["stage0-node0"]

    assert num_spot_losses(workspace, "r1") == 2
    assert num_spot_losses(workspace, "r2") == 0


def test_a_recommendation_is_no_loss(workspace, tmp_path):
    run = RunDirectory(str(tmp_path / "run"))
    leave(run, kind="rebalance recommendation")

    assert note_interruptions(workspace, "r1", run_directory=run, cluster=spot_cluster("r1")) == []
    assert num_spot_losses(workspace, "r1") == 0
