"""How far a plan's simulated speed is from that of the same plan on hosts of their own, over random clusters.

Each cluster is drawn by the seed: 2 to 12 hosts, network namespaces of this machine, a model, a cut, and how a step
updates. Workers of the trainer, one on each host, train synthetic clicks. The prediction is that of a user's plan:
layers, exchanges and boundaries timed on this machine, links as wide as the hosts' are, then the simulation.

This machine has few cores, which hosts share. So every other cluster has links so slow that they set the pace, and
its speed is that of the middle of the run by its own step metrics; the share of the cores that its workers needed is
reported, and where it comes near 1 the measurement is that of the cores. The others have links without a limit, and
the processor time of a step is compared, of all workers and of those of each stage.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from heterps_core.cluster import Cluster, Node
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.device_types import get_device_type
from heterps_core.errors import HeterpsError
from heterps_core.field_rules import sized
from heterps_core.hardware import Market
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.planning.cost_model.run_tables import plan_table
from heterps_core.planning.problem.problem_builder import build_problem, unit_type
from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.planning.simulate.plan_simulation import simulate_plan
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.analytic_profile import estimate_profile
from heterps_core.profiling.device_profile import DeviceProfile
from heterps_core.profiling.layer_profile import LOCAL_DEVICE_TYPE
from heterps_core.profiling.measuring_process import ProfileRequest
from heterps_core.profiling.profile_cache import profile_model
from heterps_core.training.job import (
    DELAYED,
    SYNC,
    UPDATE_MODES,
    TrainingConfig,
    TrainingJob,
    default_microbatches,
    delayed_microbatches,
)
from heterps_core.training.monitor import publish_cluster, submit_job
from heterps_core.training.node.node_life import NODE_ID_VARIABLE, RUN_DIRECTORY_VARIABLE
from heterps_core.training.step_metrics import read_progress, read_steps
from heterps_core.training.storage.run_directory import STOP, RunDirectory
from heterps_core.units import BYTES_PER_S_PER_MBIT_PER_S
from tests.network_hosts import INTERFACE, NetworkHost, make_bridge, why_no_hosts
from tests.waiting import wait_for

MODELS = (
    "ctrdnn(hidden_widths=64-32, embedding_dim=8)",
    "ctrdnn(hidden_widths=256-64-32, embedding_dim=8)",
    "ctrdnn(hidden_widths=128-64)",
    "2emb(hidden_widths=128-64)",
)
RELATIVE_RATES = (10, 15, 20, 30, 40, 60)
STEP_S = 0.4
"""That rates are chosen for: a worker's calls take some 100 ms of a core for each step of all hosts."""

UNLIMITED_MBIT_PER_S = 1e9
"""No link has a limit where the processor is measured."""

BATCH_SIZES = (512, 1024)
PROCESSOR_BATCH_SIZES = (4096, 8192)
"""So large that a worker computes for some milliseconds before another one takes its core and its caches."""
LEAST_HOSTS, MOST_HOSTS = 4, 12
PROCESSOR_HOSTS = 2, 4
"""Fewest and most where the processor is measured. 12 workers in turns on 2 cores find their caches cold: predicted
processor time was 0.36 to 0.55 of the measured one, and 0.77 to 1.03 with 2 to 4 workers (2 x86 cores, load 27)."""

MOST_STAGES, MOST_REPLICAS = 4, 8
MOST_RUN_S = 540.0
"""No cluster is begun after so long."""

NUM_CLICKS = 24_000
BUCKETS_PER_SLOT = 2_000
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


class Prediction(NamedTuple):
    """What a plan promises of a cluster."""

    samples_per_s: float
    processor_s: tuple[float, ...]
    """Processor time of a step, of a worker of each stage."""


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


def run(*, seed: int = 0, num_cases: int = 10, keep: Path | None = None) -> list[dict[str, Any]]:
    """Measure, print a table and return its figures in the form of the benchmark contract."""
    if (reason := why_no_hosts()) is not None:
        sys.exit(reason)
    errors: dict[str, list[float]] = {"link": [], "processor": [], "stage": []}
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        dataset = make_dataset(folder)
        print(f"{'cluster: layers x replicas @ Mbit/s':<92}predicted measured   error cores  link; by stage")
        for drawn in draw_clusters(dataset, num_clusters=num_cases, seed=seed):
            if time.monotonic() - began_s > MOST_RUN_S:
                break
            cluster = drawn if drawn.is_by_processor else at_pace(drawn, dataset, folder / "profiles")
            predicted = predict(cluster, dataset, folder / "profiles")
            measured = measured_in_namespace(cluster, dataset, folder / "measured")
            print(line_of(cluster, predicted, measured, errors), flush=True)
    absolute = [abs(error) for kind in ("link", "processor") for error in errors[kind]]
    figures = [
        figure("cluster_error_median", statistics.median(absolute)),
        figure("cluster_error_worst", max(absolute)),
        *(
            figure(f"{kind}_error_{name}", summary(map(abs, found)))
            for kind, found in errors.items()
            if found
            for name, summary in (("median", statistics.median), ("worst", max))
        ),
        figure("clusters_measured", len(absolute), unit="", higher_is_better=True),
    ]
    print(f"seed {seed}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    for entry in figures:
        print(f"{entry['name']:<28}{entry['value']:>9.4f}")
    return figures


def line_of(
    cluster: DrawnCluster, predicted: Prediction, measured: Measured, errors: dict[str, list[float]]
) -> str:
    """Return the line of a cluster in the table, and add its errors to those of others."""
    if not cluster.is_by_processor:
        errors["link"].append(predicted.samples_per_s / measured.samples_per_s - 1)
        return (
            f"{cluster!s:<92}{predicted.samples_per_s:>9,.0f}{measured.samples_per_s:>9,.0f}"
            f"{errors['link'][-1]:>+8.1%}{measured.core_share:>6.0%}{max(map(max, measured.link_shares)):>6.0%}"
        )
    firsts = [0, *accumulate(cluster.replicas)]
    by_stage = [statistics.fmean(measured.processor_s[first:stop]) for first, stop in pairwise(firsts)]
    stage_errors = [wanted / found - 1 for wanted, found in zip(predicted.processor_s, by_stage, strict=True)]
    errors["stage"] += stage_errors
    predicted_s = sum(map(mul, cluster.replicas, predicted.processor_s))
    errors["processor"].append(predicted_s / sum(measured.processor_s) - 1)
    stages = " ".join(f"{error:+.0%}" for error in stage_errors)
    return (
        f"{cluster!s:<92}{1e3 * predicted_s:>7.1f}ms{1e3 * sum(measured.processor_s):>7.1f}ms"
        f"{errors['processor'][-1]:>+8.1%}{measured.core_share:>6.0%}        {stages}"
    )


def make_dataset(folder: Path, *, num_clicks: int = NUM_CLICKS) -> PreparedDataset:
    """Write and prepare synthetic clicks, or open those that are there."""
    clicks = folder / "clicks.tsv"
    if not clicks.exists():
        write_click_stream(clicks, num_rows=num_clicks, seed=0)
    return prepare_dataset(
        clicks, schema=CRITEO_SCHEMA, buckets_per_slot=BUCKETS_PER_SLOT, out_dir=folder / "prepared"
    )


def draw_clusters(dataset: PreparedDataset, *, num_clusters: int, seed: int) -> list[DrawnCluster]:
    """Draw clusters; models, what is measured and update modes take turns. Rates are right in proportion alone."""
    from heterps_core.models.chain import build_chain

    random = np.random.default_rng(seed)
    num_layers_of = {model: len(build_chain(model, dataset.features, seed=0)) for model in MODELS}
    clusters = []
    for index in range(num_clusters):
        model, is_by_processor = MODELS[index % len(MODELS)], index % 2 == 1
        num_layers = num_layers_of[model]
        replicas: list[int] = []
        least, most = PROCESSOR_HOSTS if is_by_processor else (LEAST_HOSTS, MOST_HOSTS)
        while not least <= sum(replicas) <= most:
            num_stages = int(random.integers(2, MOST_STAGES + 1))
            replicas = random.integers(1, MOST_REPLICAS + 1, num_stages).tolist()
        cuts = np.sort(random.choice(num_layers - 1, len(replicas) - 1, replace=False)).tolist()
        clusters.append(
            DrawnCluster(
                model=model,
                batch_size=int(random.choice(PROCESSOR_BATCH_SIZES if is_by_processor else BATCH_SIZES)),
                last_layers=(*cuts, num_layers - 1),
                replicas=tuple(replicas),
                mbit_per_s=(UNLIMITED_MBIT_PER_S,) * len(replicas)
                if is_by_processor
                else tuple(random.choice(RELATIVE_RATES, len(replicas)).astype(float).tolist()),
                update_mode=UPDATE_MODES[index // 2 % 2],
            )
        )
    return clusters


def at_pace(cluster: DrawnCluster, dataset: PreparedDataset, cache: Path) -> DrawnCluster:
    """Return a cluster with rates of the same proportions with which steps take about `STEP_S`, in whole Mbit/s."""
    step_s = cluster.batch_size / predict(cluster, dataset, cache).samples_per_s
    rates = tuple(max(round(rate * step_s / STEP_S), 1.0) for rate in cluster.mbit_per_s)
    return replace(cluster, mbit_per_s=rates)


def predict(cluster: DrawnCluster, dataset: PreparedDataset, cache: Path) -> Prediction:
    """Profile, build the problem as a plan's is, and simulate it."""
    from heterps_core.profiling.measurement.layer_profiler import trace_model

    request = ProfileRequest(
        model=cluster.model,
        features=dataset.features,
        batch_size=cluster.config.microbatch_size,
        dataset=str(dataset.directory),
        dataset_fingerprint=dataset.manifest.fingerprint,
    )
    graph = trace_model(request)
    local = profile_model(request, graph, (), cache_directory=cache)[LOCAL_DEVICE_TYPE]
    hosts = {
        stage.device_type: replace(
            get_device_type("cpu-c7i"),
            name=stage.device_type,
            network_bandwidth_bytes_per_s=rate * BYTES_PER_S_PER_MBIT_PER_S,
        )
        for stage, rate in zip(cluster.stages, cluster.mbit_per_s, strict=True)
    }
    # As after `heterps profile-devices`: the layers' times measured, the links published.
    profiles = {
        name: DeviceProfile(
            device_type=name, instance_type="host", is_dry_run=False, profile=local
        ).in_place_of(estimate_profile(graph, local, host))
        for name, host in hosts.items()
    }
    units = {
        name: unit_type(
            graph,
            profiles[name],
            host,
            batch_size=cluster.batch_size,
            price_usd_per_hour=1.0,
            max_units=MOST_HOSTS,
            step_model=StepModel.TRAINER,
        )
        for name, host in hosts.items()
    }
    problem = build_problem(
        graph,
        profiles,
        units,
        batch_size=cluster.batch_size,
        num_samples=NUM_CLICKS,
        num_epochs=1,
        throughput_floor_samples_per_s=0,
        step_model=StepModel.TRAINER,
        drains=cluster.update_mode == SYNC,
    )
    simulation = simulate_plan(problem, cluster.stages, num_microbatches=cluster.config.num_microbatches)
    table = plan_table(problem, cluster.stages, num_microbatches=cluster.config.num_microbatches)
    terms = table.terms(np.array(cluster.replicas, dtype=np.float64))
    return Prediction(
        simulation.run.throughput_samples_per_s, tuple((terms.compute + terms.exchange).tolist())
    )


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


def figure(name: str, value: float, *, unit: str = "ratio", higher_is_better: bool = False) -> dict[str, Any]:
    """Return a figure in the form of the benchmark contract."""
    return {"name": name, "value": round(value, 4), "unit": unit, "higher_is_better": higher_is_better}


def main(folder: Path, dataset: str) -> None:
    """Measure the cluster that is described in a folder, and leave the result there."""
    cluster = DrawnCluster.from_json(json.loads((folder / "cluster.json").read_text()))
    found = measure(cluster, dataset, folder).to_json()
    (folder / "measured.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
