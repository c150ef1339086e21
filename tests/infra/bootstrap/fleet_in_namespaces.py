"""A fleet that really boots: moto's instances, each a network namespace with its own address and a limited link.

Run as root inside a fresh namespace (`unshare --net python -m ... FOLDER`), which stands for the cloud: moto answers
there for EC2 and S3. The very user data that boto3 handed to moto is what each host runs, with the metadata service
at its true address. Prints one JSON document.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan
from heterps_core.training.monitor import follow_training, publish_cluster, submit_job
from heterps_core.training.step_metrics import read_process_reports
from heterps_core.training.storage.run_directory import RunDirectory
from infra.bootstrap.node_start import Bootstrap, publish_node_wheel
from infra.ledger.ledger import Ledger
from infra.providers.aws.provider import AwsEc2Provider
from tests.heterps_core.training.node_processes import TINY, make_job, prepare_clicks, trained
from tests.infra.builders import offer
from tests.moto_server import REGION
from tests.network_hosts import NetworkHost, make_bridge

CLOUD_ADDRESS = "172.31.255.254"
"""In the range of the default network, in which EC2 and moto give addresses."""
METADATA_ADDRESS = "169.254.169.254"
CLOUD_PORT = 5000
LINK_MBIT_PER_S = 200

SHUTDOWN = '#!/bin/sh\necho "$@" >> "$SHUTDOWN_LOG"\n'
"""Writes down what it is asked for: this machine is only borrowed."""

NO_DISKS = "#!/bin/sh\n"
"""The disks of this machine are not the host's to format."""

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": REGION,
    "AWS_REGION": REGION,
    "AWS_ENDPOINT_URL": f"http://{CLOUD_ADDRESS}:{CLOUD_PORT}",
}
"""Stands for the rights of an instance profile."""


class Host(NetworkHost):
    """A machine of the fleet, with the metadata service at its true address."""

    def __init__(self, number: int, address: str, instance_id: str, folder: Path) -> None:
        super().__init__(number, address, mbit_per_s=LINK_MBIT_PER_S)
        self.instance_id = instance_id
        self.folder = folder
        folder.mkdir(parents=True)
        self.run("ip", "addr", "add", f"{METADATA_ADDRESS}/32", "dev", "lo")
        service = (METADATA_ADDRESS, "80", f"instance-id={instance_id}")
        self.metadata = self.start([sys.executable, "-m", "tests.metadata_server", *service])
        self.node: subprocess.Popen[bytes] | None = None

    def boot(self, user_data: bytes) -> None:
        """Run the user data as the first boot does, with nothing but a machine's own environment."""
        tools = self.folder / "sbin"
        tools.mkdir()
        for name, command in {"shutdown": SHUTDOWN, "lsblk": NO_DISKS}.items():
            (tools / name).write_text(command)
            (tools / name).chmod(0o755)
        script = self.folder / "user-data"
        script.write_bytes(user_data)
        script.chmod(0o755)
        environment = {
            **CREDENTIALS,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "SHUTDOWN_LOG": str(self.folder / "shutdown.log"),
            "TMPDIR": str(self.folder),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        }
        with (self.folder / "boot.log").open("wb") as log:
            self.node = self.start(
                [str(script)], cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def end(self) -> None:
        """End what runs on it, and the host."""
        for process in (self.node, self.metadata):
            if process is not None:
                process.kill()
                process.wait()
        super().end()

    def report(self) -> dict[str, Any]:
        assert self.node is not None
        return {
            "exit_status": self.node.wait(60),
            "shutdowns": (self.folder / "shutdown.log").read_text().splitlines(),
            "log": (self.folder / "boot.log").read_text()[-4000:],
        }


@contextlib.contextmanager
def cloud() -> Iterator[None]:
    """The bridge that all machines hang on, and moto behind it."""
    make_bridge(CLOUD_ADDRESS)
    os.environ.update(CREDENTIALS)
    server = ThreadedMotoServer(ip_address=CLOUD_ADDRESS, port=CLOUD_PORT, verbose=False)
    server.start()
    try:
        yield
    finally:
        server.stop()


def user_data_of(client: Any, instance_id: str) -> bytes:
    """Return what EC2 would hand to the machine's first boot."""
    answer = client.describe_instance_attribute(InstanceId=instance_id, Attribute="userData")
    return base64.b64decode(answer["UserData"]["Value"])


def main(folder: Path) -> None:
    """Launch, boot, train, end; print what came of it."""
    folder.mkdir(exist_ok=True)
    dataset = prepare_clicks(folder)
    with cloud():
        client = boto3.client("ec2")
        client.register_image(Name="heterps-node-1", Architecture="x86_64", RootDeviceName="/dev/sda1")
        boto3.client("s3").create_bucket(Bucket="runs")
        run_directory = RunDirectory(f"s3://runs/nightly?region={REGION}", secret=b"the key of this run")
        # Two machines for the embeddings, one for the dense layers; each with a worker.
        purchase = ProvisioningPlan(
            replicas=(2, 1),
            groups=tuple(
                InstanceGroup(
                    stage=stage, device_type="cpu-c7i", offer=offer(name), count=count, units_per_instance=1
                )
                for stage, (name, count) in enumerate([("c7i.large", 2), ("c7i.xlarge", 1)])
            ),
            planned_price_usd_per_hour=0.27,
        )
        job = make_job(dataset, (2, 1), model=TINY)
        submit_job(run_directory, job)
        provider, ledger = AwsEc2Provider(client), Ledger(folder / "ledger.sqlite")
        cluster = provider.launch(
            purchase,
            run_id="r1",
            lease_until=datetime.now(UTC) + timedelta(hours=1),
            bootstrap=Bootstrap(
                run_location=run_directory.location,
                python=sys.executable,
                run_key=run_directory.secret,
                wheel=publish_node_wheel(run_directory, job.model),
                lifetime_s=3600,
            ),
            ledger=ledger,
        )
        hosts = [
            Host(number, node.address, node.provider_instance_id, folder / node.node_id)
            for number, node in enumerate(cluster.nodes)
        ]
        try:
            for host in hosts:
                host.boot(user_data_of(client, host.instance_id))
            publish_cluster(run_directory, cluster)
            error, training = None, None
            try:
                training = trained(follow_training(run_directory, cluster, on_progress=lambda progress: None))
            except Exception as problem:  # the report is more use than a traceback
                error = f"{type(problem).__name__}: {problem}"
                for host in hosts:
                    host.node and host.node.kill()
            usage = [
                report.storage for report in read_process_reports(run_directory) if report.stage is not None
            ]
            print(
                json.dumps(
                    {
                        "error": error,
                        "addresses": [node.address for node in cluster.nodes],
                        "losses": [step.loss for step in training.steps] if training else [],
                        "auc": training.quality.auc if training else None,
                        "hosts": [host.report() for host in hosts],
                        "usage": [asdict(storage) for storage in usage],
                    }
                )
            )
        finally:
            for host in hosts:
                host.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
