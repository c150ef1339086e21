"""A dry run beside another program of the machine that has not the run's key and wants to be one of its workers."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from heterps_core.errors import CheckpointError
from heterps_core.training.monitor import follow_training, publish_cluster, submit_job
from heterps_core.training.node import OWN_DISKS_VARIABLE
from heterps_core.training.node.node_life import exit_key
from heterps_core.training.node.training_node import _worker_environments
from heterps_core.training.storage.run_directory import CLUSTER, JOB, RESULT, RunDirectory
from tests.heterps_core.training.node_processes import (
    GO_ON_VARIABLE,
    HELD,
    NUM_STEPS,
    cluster_of,
    make_job,
    node_environment,
    prepare_clicks,
    running_nodes,
    trained,
)
from tests.waiting import wait_for

KEY = b"the key of this run"


class Harm:
    """What runs where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def join_as_rank_1(user, port, harm, said):
    """Join wherever it may, again and again, and send what harms who unpickles it."""
    if user is not None:
        os.setuid(user)
    while True:
        try:
            store = dist.TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2)
            )
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("generation-1", store),
                rank=1,
                world_size=2,
                timeout=timedelta(seconds=10),
            )
            dist.all_gather_object([None, None], Harm(harm))
            said.put("is a worker")
        except RuntimeError:
            time.sleep(0.1)


OTHER_USER = pytest.param(
    65534,
    id="of-another-user",
    marks=[
        pytest.mark.root,
        pytest.mark.skipif(os.geteuid() != 0, reason="another user's process needs root"),
    ],
)


@pytest.mark.weekly
@pytest.mark.parametrize("user", [pytest.param(None, id="of-this-user"), OTHER_USER])
def test_a_stranger_who_joins_as_rank_1_is_refused_and_the_workers_train(user, tmp_path, monkeypatch):
    run = RunDirectory(str(tmp_path / "run"), secret=KEY)
    spawned = multiprocessing.get_context("spawn")
    harm, said, go_on = tmp_path / "harm", spawned.Queue(), tmp_path / "go on"
    monkeypatch.setenv(GO_ON_VARIABLE, str(go_on))
    tmp_path.chmod(0o777)

    def refused():
        logs = [path.read_text() for path in tmp_path.glob("run/nodes/*/workers.log")]
        return "refused ('127.0.0.1'" in "".join(logs)

    job = make_job(prepare_clicks(tmp_path), (1, 1), model=HELD)
    with running_nodes(run, job) as (cluster, _):
        port = int(cluster.rendezvous.rpartition(":")[2])
        stranger = spawned.Process(target=join_as_rank_1, args=(user, port, str(harm), said), daemon=True)
        stranger.start()
        try:
            wait_for(refused, what="the stranger's refusal")
            go_on.touch()
            training = trained(follow_training(run, cluster, on_progress=lambda progress: None))
        finally:
            stranger.kill()
            stranger.join()

    assert training.is_complete
    assert len(training.steps) == NUM_STEPS
    assert said.empty()
    assert not harm.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "status", "where"),
    [
        (CLUSTER, CheckpointError.exit_status, "stderr"),
        pytest.param(JOB, CheckpointError.exit_status, "exit.json", marks=pytest.mark.weekly),
    ],
)
def test_a_node_does_not_use_a_file_that_was_written_without_the_key(key, status, where, tmp_path):
    run = RunDirectory(str(tmp_path / "run"), secret=KEY)
    forging = RunDirectory(run.location, secret=b"another key")
    job = make_job(tmp_path, (1, 1))
    submit_job(forging if key == JOB else run, job)
    publish_cluster(forging if key == CLUSTER else run, cluster_of(job))
    run.write_json(RESULT, {"is_complete": True})  # after it a node waits for no other generation

    ended = subprocess.run(
        [sys.executable, "-m", "heterps_core.training.node"],
        env={**os.environ, **node_environment(run, "stage0")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    said = ended.stderr if where == "stderr" else run.require_json(exit_key("stage0"))["log_tail"]
    assert f"{key} in {run.location} must bear the tag that the run's key gives, but has another" in said
    assert ended.returncode == status


def test_workers_listen_on_the_interface_of_their_node_alone(tmp_path):
    job = make_job(tmp_path, (2, 1))
    cluster = cluster_of(job)
    for environment in _worker_environments(cluster, cluster.nodes[0], job, signs=tmp_path / "signs"):
        assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


@pytest.mark.parametrize(("own_disk_bytes", "folders"), [(468e9, "/mnt/a:/mnt/b"), (0.0, "")])
def test_workers_use_the_machines_own_disks_where_its_cluster_says_so(
    own_disk_bytes, folders, tmp_path, monkeypatch
):
    monkeypatch.setenv(OWN_DISKS_VARIABLE, "/mnt/a:/mnt/b")
    job = make_job(tmp_path, (1, 1))
    cluster = cluster_of(job)
    node = replace(cluster.nodes[0], own_disk_bytes=own_disk_bytes)
    cluster = replace(cluster, nodes=(node, *cluster.nodes[1:]))

    [environment] = _worker_environments(cluster, node, job, signs=tmp_path / "signs")

    assert {**os.environ, **environment}[OWN_DISKS_VARIABLE] == folders
