"""Trains one cluster on hosts of their own, network namespaces of this machine, and measures its steps."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from heterps_core.cluster import Cluster, Node
from heterps_core.data.dataset import PreparedDataset
from heterps_core.errors import HeterpsError
from heterps_core.field_rules import sized
from heterps_core.hardware import Market
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import (
    DELAYED,
    SYNC,
    TrainingConfig,
    TrainingJob,
    default_microbatches,
    delayed_microbatches,
)
from heterps_core.training.monitor import publish_cluster, submit_job
from heterps_core.training.node.node_life import NODE_ID_VARIABLE, RUN_DIRECTORY_VARIABLE
from heterps_core.training.step_metrics import read_progress, read_steps
from heterps_core.training.storage.run_directory import STOP, RunDirectory
from tests.network_hosts import INTERFACE, NetworkHost, make_bridge
from tests.waiting import wait_for

MOST_STAGES = 4
UNLIMITED_MBIT_PER_S = 1e9
"""No link has a limit where the processor is measured."""

MEASURED_S, LEAST_STEPS = 8.0, 24
LIMIT_S = 180.0
BRIDGE_ADDRESS, PORT = "10.77.255.254", 29_500
CLONE_NEWNET = 0x40000000

multiprocessing.set_forkserver_preload(["heterps_core.training.worker"])


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnCluster(JsonDocument):
    """One case."""

    json_form = JsonForm(what="a drawn cluster", version=1)

    model: str
    batch_size: int
    last_layers: Annotated[tuple[int, ...], sized(1, MOST_STAGES, "stages")]
    replicas: tuple[int, ...]
    mbit_per_s: tuple[float, ...]
    """Of the hosts of each stage."""

    update_mode: str = DELAYED
    wire_dtype: str = "float32"

    @property
    def is_by_processor(self) -> bool:
        """The processor time is measured, not the clock."""
        return UNLIMITED_MBIT_PER_S in self.mbit_per_s

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages, each on a device type of its own."""
        firsts = (0, *(last + 1 for last in self.last_layers[:-1]))
        return tuple(
            Stage(first, last, f"cpu-hosts-{index}", count)
            for index, (first, last, count) in enumerate(
                zip(firsts, self.last_layers, self.replicas, strict=True)
            )
        )

    @property
    def config(self) -> TrainingConfig:
        """The numbers of the run, with the trainer's own micro-batches."""
        of_mode = {DELAYED: delayed_microbatches, SYNC: default_microbatches}
        return TrainingConfig(
            batch_size=self.batch_size,
            num_microbatches=of_mode[self.update_mode](self.batch_size, num_stages=len(self.replicas)),
            num_epochs=1_000,
            seed=0,
            checkpoint_interval_steps=1_000_000,
            update_mode=self.update_mode,
            wire_dtype=self.wire_dtype,
        )

    def __str__(self) -> str:
        cuts = " ".join(
            f"{stage.first_layer}-{stage.last_layer}x{stage.num_replicas}"
            + ("" if self.is_by_processor else f"@{rate:.0f}")
            for stage, rate in zip(self.stages, self.mbit_per_s, strict=True)
        )
        rounded = "" if self.wire_dtype == "float32" else f" {self.wire_dtype}"
        return f"{self.model} {self.batch_size} {self.update_mode}: {cuts}{rounded}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured(JsonDocument):
    """A run in the middle of its steps."""

    json_form = JsonForm(what="a measurement", version=1)

    samples_per_s: float
    core_share: float
    """Of this machine's cores, by the processor time of all workers."""

    processor_s: tuple[float, ...]
    """Processor time of a step by host, in all threads."""

    link_shares: tuple[tuple[float, float], ...]
    """By host, what was received and sent over what its link could carry."""


def measured_in_namespace(cluster: DrawnCluster, dataset: PreparedDataset, folder: Path) -> Measured:
    """Train a cluster in a fresh namespace, or return what is kept of an earlier run.

    Raises:
        HeterpsError: The run did not come to its end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{cluster!s}.json".replace(" ", "_")
    if not kept.exists():
        with tempfile.TemporaryDirectory() as temporary:
            (Path(temporary) / "cluster.json").write_text(json.dumps(cluster.to_json()))
            command = ["unshare", "--net", sys.executable, "-m", __name__, temporary, str(dataset.directory)]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode:
                raise HeterpsError(f"{cluster} was not trained: {ended.stderr[-3000:]}")
            kept.write_text((Path(temporary) / "measured.json").read_text())
    return Measured.from_json(json.loads(kept.read_text()))


def measure(cluster: DrawnCluster, dataset: str, folder: Path) -> Measured:
    """Make the hosts in this namespace, a fresh one, and train on them."""
    make_bridge(BRIDGE_ADDRESS)
    places = [(stage, part) for stage, count in enumerate(cluster.replicas) for part in range(count)]
    hosts: list[NetworkHost] = []
    try:
        for number, (stage, _) in enumerate(places):
            rate = cluster.mbit_per_s[stage]
            limit = None if cluster.is_by_processor else rate
            hosts.append(NetworkHost(number, f"10.77.0.{number + 1}", mbit_per_s=limit))
        nodes = tuple(
            Node(
                node_id=f"stage{stage}-{part}",
                address=host.address,
                device_type=cluster.stages[stage].device_type,
                instance_type="host",
                market=Market.ON_DEMAND,
                stage=stage,
                num_workers=1,
                price_usd_per_hour=1.0,
                provider_instance_id=str(number),
            )
            for number, ((stage, part), host) in enumerate(zip(places, hosts, strict=True))
        )
        description = Cluster(
            run_id="measured",
            provider="local",
            nodes=nodes,
            rendezvous=f"{hosts[0].address}:{PORT}",
            created_at="2026-11-22T00:00:00+00:00",
        )
        return train(cluster, description, hosts, dataset, folder / "run")
    finally:
        for host in hosts:
            host.end()


def train(
    cluster: DrawnCluster,
    description: Cluster,
    hosts: list[NetworkHost],
    dataset: str,
    folder: Path,
) -> Measured:
    """Train until enough steps were seen, with one worker of the trainer on each host."""
    run_directory = RunDirectory(str(folder))
    config = cluster.config
    job = TrainingJob(
        run_id="measured", model=cluster.model, dataset=dataset, stages=cluster.stages, config=config
    )
    submit_job(run_directory, job)
    publish_cluster(run_directory, description)
    forked = multiprocessing.get_context("forkserver")
    workers = []
    for rank, (host, node) in enumerate(zip(hosts, description.nodes, strict=True)):
        environment = {
            RUN_DIRECTORY_VARIABLE: run_directory.location,
            NODE_ID_VARIABLE: node.node_id,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(PORT),
            "WORLD_SIZE": str(len(hosts)),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
        }
        arguments = (str(host.namespace), environment, str(folder / f"clock-{rank}.json"))
        workers.append(forked.Process(target=train_on_host, args=arguments))
        workers[-1].start()

    def is_enough() -> bool:
        progress = read_progress(run_directory)
        ended = [worker for worker in workers if worker.exitcode]
        assert not ended, f"{len(ended)} workers failed"
        return progress is not None and progress.step >= LEAST_STEPS and progress.elapsed_s >= MEASURED_S

    try:
        wait_for(is_enough, timeout_s=LIMIT_S, what="enough steps", poll_s=0.2)
        run_directory.write_json(STOP, {})
        for worker in workers:
            worker.join(LIMIT_S)
        assert not any(worker.exitcode for worker in workers), [worker.exitcode for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    [steps] = read_steps(run_directory)
    # The first steps fill links and caches; the last ones drain.
    first, last = len(steps) // 4, len(steps) - 4
    seconds = steps[last].elapsed_s - steps[first].elapsed_s
    uses = []
    for rank in range(len(hosts)):
        clock = json.loads((folder / f"clock-{rank}.json").read_text())
        uses.append([after - before for before, after in zip(clock[first], clock[last], strict=True)])
    return Measured(
        samples_per_s=config.batch_size * (last - first) / seconds,
        processor_s=tuple(use[1] / (last - first) for use in uses),
        core_share=sum(use[1] for use in uses) / seconds / (os.cpu_count() or 1),
        link_shares=tuple(
            (received / host.bytes_per_s / own_seconds, sent / host.bytes_per_s / own_seconds)
            for host, (own_seconds, _, received, sent) in zip(hosts, uses, strict=True)
        ),
    )


def train_on_host(namespace: str, environment: dict[str, str], clock_file: str) -> None:
    """Move this process, forked a moment ago, to a host, and be a worker there."""
    from heterps_core.training.node.node_life import own_run_directory
    from heterps_core.training.node.worker_life import SignsOfLife
    from heterps_core.training.worker import train

    with Path(namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns failed")
    os.environ |= environment
    clock: list[tuple[float, float, int, int]] = []

    class ClockedSigns(SignsOfLife):
        """Notes the time, its processor time and what its link has received and sent, at the end of each step."""

        def finish_step(self, step: int) -> None:
            super().finish_step(step)
            if step:
                clock.append((time.monotonic(), time.process_time(), *carried_bytes()))

    train(own_run_directory(), ClockedSigns(int(os.environ["RANK"]), attempt=1))
    Path(clock_file).write_text(json.dumps(clock))


def carried_bytes() -> tuple[int, int]:
    """Return what the link of this host has received and sent."""
    counts = Path("/proc/self/net/dev").read_text().partition(f"{INTERFACE}:")[2].split()
    return int(counts[0]), int(counts[8])


def main(folder: Path, dataset: str) -> None:
    """Measure the cluster that is described in a folder, and leave the result there."""
    cluster = DrawnCluster.from_json(json.loads((folder / "cluster.json").read_text()))
    found = measure(cluster, dataset, folder).to_json()
    (folder / "measured.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
