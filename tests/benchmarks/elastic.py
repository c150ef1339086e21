"""How long a training stands still where a host is killed without notice, and what it does again.

Hosts are network namespaces of this machine, the store is moto; a host is lost by SIGKILL of all that runs on it.
What the flow does then is done here by the same parts: `follow_training` names the lost host, and the next generation
has a spare one in its place, on which a node waits, or a replica less, until the lost one joins again. A case is
counted from the kill to the moment at which every worker has finished a step of the next generation; steps are read
from the memory in which workers give their nodes signs of life.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import boto3
import psutil

from heterps_core.cluster import Cluster, Node
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.hardware import Market
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.monitor import follow_training, publish_cluster, submit_job
from heterps_core.training.node.node_life import NODE_ID_VARIABLE, RUN_DIRECTORY_VARIABLE, RUN_KEY_VARIABLE
from heterps_core.training.node.worker_life import _read_signs, _Sign
from heterps_core.training.outcome import MachinesLost, Stopped
from heterps_core.training.storage.run_directory import JOB, RunDirectory
from heterps_core.training.storage.verified_files import write_signed_json
from infra.workspace import answers
from tests.benchmarks.planner import figure, show
from tests.heterps_core.training.node_processes import kill_machine
from tests.moto_server import REGION
from tests.network_hosts import NetworkHost, make_bridge, why_no_hosts
from tests.waiting import wait_for

STORE_ADDRESS, STORE_PORT, RENDEZVOUS_PORT = "172.31.255.254", 5000, 29500
LINK_MBIT_PER_S = 1_000.0
KEY = b"the key of this run"
STAGE_OF_HOST = (0, 0, 1)
"""Two replicas of the embeddings and one of the dense layers; one host more is the spare."""

CASES = 10
"""Of each kind; hosts live for a quarter of an hour."""

CHECKPOINT_INTERVAL_STEPS = 50
NUM_ROWS, BATCH_SIZE = 40_000, 512
MOST_STEPS_BEFORE_KILL = 40
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """Of one case; seconds from the kill."""

    named_s: float
    """Until the lost host was named."""

    resumed_s: float
    """Until all workers had loaded the checkpoint."""

    finished_s: float
    """Until all had finished a step after it."""

    steps_redone: int


@dataclass
class Host:
    """A machine with a node on it, as long as it lives."""

    number: int
    folder: Path
    network: NetworkHost
    node: psutil.Popen | None = field(default=None, init=False)

    @property
    def node_id(self) -> str:
        """Of the node on it."""
        return f"host{self.number}"

    def boot(self, run: RunDirectory) -> None:
        """Start the node, which waits for a generation that it is a part of."""
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "node.log").open("ab") as log:
            self.node = psutil.Popen(
                self.network.inside(sys.executable, "-m", "heterps_core.training.node"),
                env={
                    **os.environ,
                    RUN_DIRECTORY_VARIABLE: run.location,
                    RUN_KEY_VARIABLE: run.secret.hex(),
                    NODE_ID_VARIABLE: self.node_id,
                    "TMPDIR": str(self.folder),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until_ready(self) -> None:
        """Wait until workers can be forked there: the process that has imported torch has nothing more to do."""
        assert self.node is not None
        used_s = -1.0

        def is_idle() -> bool:
            nonlocal used_s
            children = self.node.children() if self.node is not None else []
            before_s, used_s = used_s, sum(child.cpu_times().user for child in children)
            return used_s == before_s and used_s > 1.0

        wait_for(is_idle, timeout_s=LIMIT_S, what="imports on a spare host", poll_s=1.0)

    def signs(self) -> list[_Sign]:
        """Return the newest signs of life of its workers."""
        return [
            sign
            for path in self.folder.glob("heterps-node-*/signs")
            for sign in _read_signs(path.read_bytes())
        ]

    def lose(self) -> None:
        """Kill all that runs on it, and forget what it had in memory."""
        assert self.node is not None
        kill_machine(self.node)
        self.node.wait(10)
        for path in self.folder.glob("heterps-node-*/signs"):
            path.unlink()

    def as_node(self, stage: int) -> Node:
        """Return what the flow says of it where it works on a stage."""
        return Node(
            node_id=self.node_id,
            address=self.network.address,
            device_type="cpu",
            instance_type="namespace",
            market=Market.ON_DEMAND,
            stage=stage,
            num_workers=1,
            price_usd_per_hour=0.1,
            provider_instance_id=self.node_id,
        )


def are_at(hosts: list[Host], cluster: Cluster, step: int) -> bool:
    """Tell whether every worker of a generation has finished a step."""
    steps = steps_of(hosts, cluster)
    return len(steps) == len(cluster.nodes) and min(steps) >= step


def steps_of(hosts: list[Host], cluster: Cluster) -> list[int]:
    """Return the last steps of a generation's workers."""
    return [sign.step for host in hosts for sign in host.signs() if sign.attempt == cluster.generation]


class Training:
    """A training on hosts, with what the flow does of it: it follows, and names who goes on."""

    def __init__(self, run: RunDirectory, hosts: list[Host], job: TrainingJob) -> None:
        self.run, self.hosts = run, hosts
        nodes = tuple(host.as_node(stage) for host, stage in zip(hosts, STAGE_OF_HOST, strict=False))
        self.cluster = Cluster(
            run_id="elastic",
            provider="aws",
            nodes=nodes,
            rendezvous=f"{nodes[0].address}:{RENDEZVOUS_PORT}",
            created_at="2026-11-23T00:00:00+00:00",
        )
        submit_job(run, job)
        publish_cluster(run, self.cluster)

    def lose(self, lost: Node, *, steps_before: int, following: Cluster, job: TrainingJob) -> Recovery:
        """Kill the host of a node some steps ahead, and let the training go on with another cluster."""
        killed: list[float] = []
        reached: list[int] = []
        resumed: list[float] = []
        finished: list[float] = []
        before = self.cluster
        self.wait_for(before, 1)
        step = max(steps_of(self.hosts, before))

        def kill_and_watch() -> None:
            self.wait_for(before, step + CHECKPOINT_INTERVAL_STEPS + steps_before)
            reached.append(max(steps_of(self.hosts, before)))
            killed.append(time.monotonic())
            self.host_of(lost).lose()
            self.wait_for(following, 1)
            resumed.append(time.monotonic())
            first = min(steps_of(self.hosts, following))
            self.wait_for(following, first + 1)
            finished.append(time.monotonic())
            reached.append(first)

        watcher = threading.Thread(target=kill_and_watch, daemon=True)
        watcher.start()
        outcome = follow_training(self.run, self.cluster, on_progress=lambda progress: None)
        named_s = time.monotonic()
        assert isinstance(outcome, MachinesLost), outcome
        assert outcome.node_ids == (lost.node_id,), outcome
        self.go_on(following, job)
        watcher.join(LIMIT_S)
        recovery = Recovery(
            named_s=named_s - killed[0],
            resumed_s=resumed[0] - killed[0],
            finished_s=finished[0] - killed[0],
            steps_redone=reached[0] - reached[1],
        )
        print(recovery, file=sys.stderr, flush=True)
        return recovery

    def go_on(self, following: Cluster, job: TrainingJob) -> None:
        """Let the next generation begin."""
        write_signed_json(self.run, JOB, job.to_json())
        self.cluster = following
        publish_cluster(self.run, following)

    def stop(self) -> int:
        """Let the workers write a checkpoint and end, as for a notice; their nodes stay. Returns the last step."""
        self.wait_for(self.cluster, 1)
        self.run.request_stop()
        outcome = follow_training(self.run, self.cluster, on_progress=lambda progress: None)
        assert isinstance(outcome, Stopped), outcome
        return outcome.training.steps[-1].step

    def slowest_step(self) -> int:
        """Return the last step that all workers of this generation have finished."""
        return min(steps_of(self.hosts, self.cluster))

    def host_of(self, node: Node) -> Host:
        """Return the host that a node is on."""
        return next(host for host in self.hosts if host.node_id == node.node_id)

    def wait_for(self, cluster: Cluster, step: int) -> None:
        """Wait until every worker of a generation has finished a step."""
        wait_for(
            lambda: are_at(self.hosts, cluster, step),
            timeout_s=LIMIT_S,
            what=f"step {step} of generation {cluster.generation}",
            poll_s=0.03,
        )


def without(cluster: Cluster, lost: Node) -> Cluster:
    """Return the next generation without one of several replicas."""
    following = cluster.next_generation()
    nodes = tuple(node for node in following.nodes if node.node_id != lost.node_id)
    return replace(following, nodes=nodes, rendezvous=f"{nodes[0].address}:{RENDEZVOUS_PORT}")


def make_job(folder: Path) -> TrainingJob:
    """Prepare clicks; a training of them that outlasts all cases."""
    stream = write_click_stream(folder / "clicks.tsv", num_rows=NUM_ROWS, seed=0)
    prepare_dataset(stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=2_000, out_dir=folder / "prepared")
    return TrainingJob(
        run_id="elastic",
        model="ctrdnn",
        dataset=str(folder / "prepared"),
        stages=(Stage(0, 0, "cpu", 2), Stage(1, 7, "cpu", 1)),
        config=TrainingConfig(
            batch_size=BATCH_SIZE,
            num_microbatches=2,
            num_epochs=1_000,
            seed=0,
            checkpoint_interval_steps=CHECKPOINT_INTERVAL_STEPS,
        ),
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen of one training."""

    spare: list[Recovery]
    shrink: list[Recovery]
    steps_redone_noticed: list[int]


def start_store() -> subprocess.Popen[bytes]:
    """Start S3 of moto for all hosts, in a process of its own, as what watches must not wait for it."""
    make_bridge(STORE_ADDRESS)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{STORE_ADDRESS}:{STORE_PORT}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    store = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", STORE_ADDRESS, "-p", str(STORE_PORT)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: answers(os.environ["AWS_ENDPOINT_URL"], timeout_s=1.0), what="the store", timeout_s=60)
    boto3.client("s3").create_bucket(Bucket="runs")
    return store


def measure(folder: Path, *, num_cases: int, seed: int) -> Measured:
    """Lose one host after the other of one training."""
    randomly = random.Random(seed)
    server = start_store()
    address = f"{STORE_ADDRESS}:{STORE_PORT}"
    run = RunDirectory(
        f"s3://runs/elastic?region={REGION}&scheme=http&endpoint_override={address}", secret=KEY
    )
    hosts = [
        Host(
            number,
            folder / f"host{number}",
            NetworkHost(number, f"172.31.0.{number + 10}", mbit_per_s=LINK_MBIT_PER_S),
        )
        for number in range(len(STAGE_OF_HOST) + 1)
    ]
    found: dict[str, list[Recovery]] = {"spare": [], "shrink": []}
    noticed: list[int] = []
    try:
        for host in hosts:
            host.boot(run)
        job = make_job(folder)
        training = Training(run, hosts, job)
        spare = hosts[-1]
        for _ in range(num_cases):
            cluster = training.cluster
            lost = randomly.choice(cluster.nodes)
            spare.wait_until_ready()
            found["spare"].append(
                training.lose(
                    lost,
                    steps_before=randomly.randrange(MOST_STEPS_BEFORE_KILL),
                    following=cluster.next_generation({lost.node_id: spare.as_node(lost.stage)}),
                    job=job,
                )
            )
            # The lost one is repaired, and the spare of the next case.
            spare = training.host_of(lost)
            spare.boot(run)
        smaller = replace(job, stages=tuple(replace(stage, num_replicas=1) for stage in job.stages))
        for _ in range(num_cases):
            cluster = training.cluster
            lost = randomly.choice([node for node in cluster.nodes if node.stage == 0])
            found["shrink"].append(
                training.lose(
                    lost,
                    steps_before=randomly.randrange(MOST_STEPS_BEFORE_KILL),
                    following=without(cluster, lost),
                    job=smaller,
                )
            )
            host = training.host_of(lost)
            host.boot(run)
            host.wait_until_ready()
            stopped_at = training.stop()
            grown = replace(cluster, generation=training.cluster.generation + 1)
            training.go_on(grown, job)
            training.wait_for(grown, 1)
            noticed.append(stopped_at - training.slowest_step())
        training.stop()
    finally:
        for host in hosts:
            if host.node is not None:
                kill_machine(host.node)
            host.network.end()
        server.kill()
        server.wait()
    return Measured(**found, steps_redone_noticed=noticed)


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Measure in a fresh network namespace."""
    reason = why_no_hosts()
    if reason is not None:
        raise SystemExit(f"elastic: {reason}")
    with tempfile.TemporaryDirectory(prefix="heterps-elastic-") as folder:
        command = ["unshare", "--net", sys.executable, "-m", __name__, folder, str(seed), str(CASES)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    found = json.loads(output.splitlines()[-1])
    figures = []
    unannounced = []
    for kind in ("spare", "shrink"):
        cases = [Recovery(**document) for document in found[kind]]
        unannounced += [case.steps_redone for case in cases]
        seconds = {
            "": [case.finished_s for case in cases],
            "_until_named": [case.named_s for case in cases],
            "_until_resumed": [case.resumed_s for case in cases],
        }
        figures += [
            figure(f"recovery_seconds_{kind}{name}", statistics.median(values), "s", higher=False)
            for name, values in seconds.items()
        ]
        most = max(seconds[""])
        figures.append(figure(f"recovery_seconds_{kind}_most", most, "s", higher=False))
    for name, steps in (("unannounced", unannounced), ("noticed", found["steps_redone_noticed"])):
        figures.append(figure(f"steps_redone_{name}", statistics.median(steps), "steps", higher=False))
        figures.append(figure(f"steps_redone_{name}_most", max(steps), "steps", higher=False))
    show(figures, f"{CASES} hosts killed with a spare one at hand, {CASES} without")
    return figures


if __name__ == "__main__":
    measured = measure(Path(sys.argv[1]), num_cases=int(sys.argv[3]), seed=int(sys.argv[2]))
    print(json.dumps(asdict(measured)))
