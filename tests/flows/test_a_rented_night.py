"""A night on rented machines, as a person starts it, on a cloud that boots each machine by the launch's user data."""

import json
import os
import subprocess
import sys

import pytest

from heterps_core.data.synthetic.click_stream import write_click_stream
from tests.paths import PROJECT

pytestmark = [
    pytest.mark.weekly,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="hosts of their own need root"),
]

NIGHT = """
import json, sys, time
from pathlib import Path
import boto3
from tests.rented_cloud import RentedCloud

def watch(cloud, *parameters):
    seen = []
    flow = cloud.start_flow("--data", sys.argv[2], "--device-types", "cpu-c7i", "--scheduler", "exact", *parameters)
    while flow.poll() is None:
        parts = (len(roles()), len(groups()), len(cloud.machines()), len(cloud.alive()))
        if parts not in seen[-1:]:
            seen.append(parts)
        time.sleep(0.3)
    return {"status": flow.wait(), "seen": [*seen, (len(roles()), len(groups()), len(cloud.machines()), 0)]}

with RentedCloud(Path(sys.argv[1])) as cloud:
    roles = lambda: boto3.client("iam").list_roles()["Roles"]
    # Beside that of the network.
    groups = lambda: boto3.client("ec2").describe_security_groups()["SecurityGroups"][1:]
    refused = watch(cloud, "--max-usd-per-hour", "0.01")
    print(json.dumps([refused, watch(cloud, "--max-usd-per-run", "1"), cloud.alive(), cloud.said.read_text()]))
"""
"""Prints status and numbers of roles, groups, machines and living ones, in order, of a refused night and another."""


def test_a_nights_role_and_group_are_there_while_it_is_planned_and_its_machine_is_gone_at_the_end(tmp_path):
    data = write_click_stream(tmp_path / "clicks.tsv", num_rows=5_000, seed=1).path
    program = [sys.executable, "-c", NIGHT, str(tmp_path / "cloud"), str(data)]
    in_a_net = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *program]

    done = subprocess.run(in_a_net, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=900)

    assert done.returncode == 0, done.stderr
    refused, night, alive, said = json.loads(done.stdout.splitlines()[-1])
    # Without a machine both are made and removed again.
    assert (refused["status"], refused["seen"][0], refused["seen"][-1]) == (4, [0, 0, 0, 0], [0, 0, 0, 0]), (
        said
    )
    assert [1, 1, 0, 0] in refused["seen"]
    assert night["status"] == 0, said
    planned, running = night["seen"].index([1, 1, 0, 0]), night["seen"].index([1, 1, 1, 1])
    assert planned < running
    # The group is in use by a machine that ends, and left to the sweep.
    assert (night["seen"][-1], alive) == ([0, 1, 1, 0], [])
    assert "serves from now on" in " ".join(said.split())
