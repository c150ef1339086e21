from datetime import UTC, datetime

import pytest

from heterps_core.cluster import Cluster, Node
from heterps_core.hardware import Market
from heterps_core.training.storage.run_directory import RunDirectory
from infra.workspace import Workspace
from tasks.running.interruptions import note_interruptions, num_spot_losses


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path).create()


def make_cluster(launch_id):
    node = Node(
        node_id="stage0-node0",
        address="10.0.0.1",
        device_type="cpu-c7i-spot",
        instance_type="c7i.large",
        market=Market.SPOT,
        stage=0,
        num_workers=1,
        price_usd_per_hour=0.03,
        provider_instance_id="i-1",
    )
    created_at = datetime.now(UTC).isoformat()
    return Cluster(
        run_id=launch_id, provider="aws", nodes=(node,), rendezvous="10.0.0.1:1", created_at=created_at
    )


def leave(run, *, kind="spot interruption"):
    notice = {"kind": kind, "at": "2026-11-21T04:02:00Z", "noticed_at_s": 1.0}
    run.write_json("nodes/stage0-node0/leaving.json", notice)


def test_each_launch_that_lost_a_machine_counts_once(workspace, tmp_path):
    run = RunDirectory(str(tmp_path / "run"))
    leave(run)

    for launch_id in ("r1", "r1", "r1.2"):
        leaving = note_interruptions(workspace, "r1", run_directory=run, cluster=make_cluster(launch_id))
        assert leaving == ["stage0-node0"]

    assert num_spot_losses(workspace, "r1") == 2
    assert num_spot_losses(workspace, "r2") == 0


def test_a_recommendation_is_no_loss(workspace, tmp_path):
    run = RunDirectory(str(tmp_path / "run"))
    leave(run, kind="rebalance recommendation")

    assert note_interruptions(workspace, "r1", run_directory=run, cluster=make_cluster("r1")) == []
    assert num_spot_losses(workspace, "r1") == 0
