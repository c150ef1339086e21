"""A cloud that boots what is rented: moto answers for EC2, IAM and S3, and each of its machines is a host of its own.

A host is a network namespace at the address that moto gave the machine, and runs the user data that the launch handed
to moto; it ends where moto says that its machine is terminated, and a machine that shuts itself down is terminated
there. Needs root, and to run in a fresh namespace (`unshare --net`), which stands for the cloud.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

import boto3
import psutil

from heterps_core.training.storage.run_directory import RunDirectory
from infra.workspace import HOME_VARIABLE, RUN_STORE_VARIABLE, Workspace, answers
from tests.heterps_core.training.node_processes import kill_machine
from tests.infra.bootstrap.fleet_in_namespaces import (
    CLOUD_ADDRESS,
    CLOUD_PORT,
    CREDENTIALS,
    Host,
    user_data_of,
)
from tests.moto_server import REGION
from tests.network_hosts import make_bridge
from tests.paths import PROJECT
from tests.waiting import wait_for

POLL_INTERVAL_S = 0.3
GONE = ("shutting-down", "terminated")
BOUNDARY = "arn:aws:iam::123456789012:policy/heterps-node"


IMAGE = """
mount -t tmpfs none /opt
mkdir /opt/heterps
mount --bind "$1" /opt/heterps
shift
exec "$@"
"""
"""What a machine sees of the image: this environment where an image has its own."""


class Machine(Host):
    """A host with Python where the image of nodes has it."""

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a command on this host, in a mount namespace of its own."""
        return super().start(
            ["unshare", "--mount", "sh", "-e", "-c", IMAGE, "sh", sys.prefix, *command], **options
        )


class RentedCloud:
    """The cloud; use it as a context.

    Args:
        folder: Of its machines, the workspace and what the flow says; must not exist.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.workspace = Workspace(root=folder / "home").create()
        self.said = folder / "flow.out"
        self.hosts: dict[str, Machine] = {}
        """By instance id; those that are there."""

        self.num_booted = 0
        self._is_over = threading.Event()
        self._boots = threading.Thread(target=self._boot_and_end, daemon=True)

    def __enter__(self) -> Self:
        make_bridge(CLOUD_ADDRESS)
        os.environ.update(CREDENTIALS)
        self.moto = psutil.Popen(
            [sys.executable, "-m", "moto.server", "-H", CLOUD_ADDRESS, "-p", str(CLOUD_PORT)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(lambda: answers(CREDENTIALS["AWS_ENDPOINT_URL"], timeout_s=1.0), what="the cloud")
        self._ec2 = boto3.client("ec2")
        self._ec2.register_image(Name="heterps-node-1", Architecture="x86_64", RootDeviceName="/dev/sda1")
        boto3.client("s3").create_bucket(Bucket="runs")
        self._boots.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._boots.join()
        for host in self.hosts.values():
            end(host)
        self.moto.kill()
        self.moto.wait()

    def start_flow(self, *parameters: str) -> psutil.Popen:
        """Start `train-ctr` on rented machines, as a person does."""
        with self.said.open("a") as said:
            return psutil.Popen(
                [sys.executable, "-m", "flows.train_ctr", "--provider", "aws", *parameters],
                cwd=PROJECT,
                env={
                    **os.environ,
                    HOME_VARIABLE: str(self.workspace.root),
                    RUN_STORE_VARIABLE: f"s3://runs/heterps?region={REGION}",
                    "HETERPS_AWS_NODE_BOUNDARY": BOUNDARY,
                    "AWS_EC2_METADATA_DISABLED": "true",
                    "PYTHONUNBUFFERED": "1",
                },
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def run_directory(self) -> RunDirectory | None:
        """Return where the run meets its machines; None where no run has begun."""
        ids = sorted(path.name for path in self.workspace.runs_directory.glob("*"))
        return RunDirectory(f"s3://runs/heterps/{ids[-1]}?region={REGION}") if ids else None

    def machines(self) -> list[dict[str, Any]]:
        """Return every machine that was ever launched, as EC2 tells of it."""
        pages = self._ec2.get_paginator("describe_instances").paginate()
        return [
            dict(found)
            for page in pages
            for reservation in page["Reservations"]
            for found in reservation["Instances"]
        ]

    def alive(self) -> list[str]:
        """Return the ids of machines that cost."""
        return [each["InstanceId"] for each in self.machines() if each["State"]["Name"] not in GONE]

    def _boot_and_end(self) -> None:
        while not self._is_over.wait(POLL_INTERVAL_S):
            try:
                machines = self.machines()
            except Exception:  # the cloud is away
                continue
            for machine in machines:
                instance_id, is_gone = machine["InstanceId"], machine["State"]["Name"] in GONE
                host = self.hosts.get(instance_id)
                if host is None and not is_gone:
                    self._boot(instance_id, machine["PrivateIpAddress"])
                elif host is not None and is_gone:
                    end(self.hosts.pop(instance_id))
                elif host is not None and "now" in shutdowns(host):
                    self._ec2.terminate_instances(InstanceIds=[instance_id])

    def _boot(self, instance_id: str, address: str) -> None:
        host = Machine(
            self.num_booted, address, instance_id, self.folder / f"{self.num_booted}-{instance_id}"
        )
        self.num_booted += 1
        self.hosts[instance_id] = host
        host.boot(user_data_of(self._ec2, instance_id))


def shutdowns(host: Host) -> str:
    """Return what a machine asked its system for."""
    log = host.folder / "shutdown.log"
    return log.read_text() if log.exists() else ""


def end(host: Host) -> None:
    """End a host with all that runs on it."""
    if host.node is not None and host.node.poll() is None:
        kill_machine(psutil.Process(host.node.pid))
    host.end()
