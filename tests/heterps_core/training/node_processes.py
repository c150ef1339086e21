"""Real nodes on this machine: processes that start workers, and what is needed to train on them and disturb them.

Every run trains the same 40 steps with SGD on the same data, so each step must have the same loss whatever the cut
and whatever happened on the way: a sample lost or doubled would show.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from torch import nn

from heterps_core.cluster import Cluster, Node
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import TrainingError
from heterps_core.hardware import Market
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.monitor import follow_training, publish_cluster, submit_job
from heterps_core.training.node.node_life import NODE_ID_VARIABLE, RUN_DIRECTORY_VARIABLE, RUN_KEY_VARIABLE
from heterps_core.training.outcome import Complete, Failed, MachinesLost, Stopped, TrainingOutcome
from heterps_core.training.step_metrics import REPORT_INTERVAL_S, Progress
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.training_run import TrainingRun
from infra.workspace import free_loopback_port
from tests.waiting import wait_for

NUM_STEPS = 40
NUM_MICROBATCHES = 2
CHECKPOINT_INTERVAL_STEPS = 10
HELD_STEP = 13
"""Between two checkpoints."""

TINY = f"{__name__}:build_tiny"
HELD = f"{__name__}:build_held"
GO_ON_VARIABLE = "HETERPS_TEST_GO_ON"
"""Names the file for which a held run waits."""


class Slow(nn.Module):
    """Passes its input through after a moment, so that a run lasts long enough to be disturbed."""

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return activation


class Held(Slow):
    """Stands in one step until a file is there, so that whatever happens meanwhile happens in this step."""

    held_step = HELD_STEP
    """Counted from the worker's first."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def go_on_path(self) -> Path:
        return Path(os.environ[GO_ON_VARIABLE])

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        if self.num_calls == (self.held_step - 1) * NUM_MICROBATCHES:
            # The end of this step is reported then: one of several within the interval.
            time.sleep(1.5 * REPORT_INTERVAL_S)
        if self.num_calls == (self.held_step - 1) * NUM_MICROBATCHES + 1:
            wait_for(self.go_on_path().exists, what="the word to go on")
        return super().forward(activation)


def build_tiny(features, slow=Slow):
    embedding = SlotEmbedding(features, dimension=4)
    return nn.Sequential(
        OrderedDict(embedding=embedding, slow=slow(), output=nn.Linear(embedding.output_width, 1))
    )


def build_held(features):
    return build_tiny(features, Held)


def prepare_clicks(folder: Path) -> Path:
    """Write and prepare 1,600 clicks; returns the prepared data set."""
    stream = write_click_stream(folder / "clicks.tsv", num_rows=1600, seed=0)
    prepare_dataset(stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=50, out_dir=folder / "prepared")
    return folder / "prepared"


def make_job(dataset: Path, replicas: tuple[int, int], *, model: str = TINY) -> TrainingJob:
    return TrainingJob(
        run_id="test",
        model=model,
        dataset=str(dataset),
        stages=(Stage(0, 0, "cpu", replicas[0]), Stage(1, 2, "cpu", replicas[1])),
        config=TrainingConfig(
            batch_size=64,
            num_microbatches=NUM_MICROBATCHES,
            num_epochs=2,
            seed=3,
            dense_optimizer="sgd",
            embedding_optimizer="sgd",
            dense_learning_rate=0.1,
            embedding_learning_rate=1.0,
            checkpoint_interval_steps=CHECKPOINT_INTERVAL_STEPS,
        ),
    )


def cluster_of(job: TrainingJob, *, is_one_per_replica: bool = False) -> Cluster:
    """Return a cluster of one node for each stage, or each replica, all on this machine."""
    places = [
        (index, part)
        for index, stage in enumerate(job.stages)
        for part in range(stage.num_replicas if is_one_per_replica else 1)
    ]
    nodes = tuple(
        Node(
            node_id=f"stage{index}-{part}" if is_one_per_replica else f"stage{index}",
            address="127.0.0.1",
            device_type=job.stages[index].device_type + (f"-{part}" if is_one_per_replica else ""),
            instance_type="local",
            market=Market.ON_DEMAND,
            stage=index,
            num_workers=1 if is_one_per_replica else job.stages[index].num_replicas,
            price_usd_per_hour=0.1,
            provider_instance_id=f"{index}-{part}",
        )
        for index, part in places
    )
    return Cluster(
        run_id="test",
        provider="local",
        nodes=nodes,
        rendezvous=f"127.0.0.1:{free_loopback_port()}",
        created_at="2026-11-21T00:00:00+00:00",
    )


def node_environment(run: RunDirectory, node_id: str) -> dict[str, str]:
    """Return the variables that a node learns from who it is."""
    return {
        RUN_DIRECTORY_VARIABLE: run.location,
        RUN_KEY_VARIABLE: run.secret.hex(),
        NODE_ID_VARIABLE: node_id,
    }


@contextlib.contextmanager
def running_nodes(
    run: RunDirectory,
    job: TrainingJob,
    *,
    astray: tuple[RunDirectory, TrainingJob] | None = None,
    is_one_per_replica: bool = False,
) -> Iterator[tuple[Cluster, list[psutil.Process]]]:
    """One node for each stage, or each replica, as a provider would start them; ended for good afterwards.

    The last node goes by `astray`, where that is given.
    """
    cluster = cluster_of(job, is_one_per_replica=is_one_per_replica)
    runs = [run] * len(cluster.nodes)
    submit_job(run, job)
    if astray is not None:
        submit_job(*astray)
        runs[-1] = astray[0]
    processes = [
        psutil.Popen(
            [sys.executable, "-m", "heterps_core.training.node"],
            env={**os.environ, **node_environment(own, node.node_id)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node, own in zip(cluster.nodes, runs, strict=True)
    ]
    for own in runs:
        publish_cluster(own, cluster)
    try:
        yield cluster, processes
    finally:
        for process in processes:
            kill_machine(process)
            process.wait(120)


def nodes_of(flow_pid: int) -> list[psutil.Process]:
    """Return the first process of each node that a flow has launched on this machine."""
    try:
        children = psutil.Process(flow_pid).children()
        return [child for child in children if NODE_ID_VARIABLE in child.environ()]
    except psutil.NoSuchProcess:
        return []


def kill_machine(node: psutil.Process) -> None:
    """End a node with all that runs on it, at once, as a machine that is lost does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*node.children(recursive=True), node]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def train(
    run: RunDirectory,
    job: TrainingJob,
    disturb: Callable[[Progress, list[psutil.Process]], bool] = lambda progress, processes: True,
    *,
    astray: tuple[RunDirectory, TrainingJob] | None = None,
) -> TrainingRun:
    """Train to the end, with new workers once where some fail; `disturb` is called with progress until it is True."""
    done = False
    with running_nodes(run, job, astray=astray) as (cluster, processes):

        def on_progress(progress: Progress) -> None:
            nonlocal done
            done = done or disturb(progress, processes)

        outcome = follow_training(run, cluster, on_progress=on_progress)
        if isinstance(outcome, MachinesLost) and not outcome.node_ids:
            following = cluster.next_generation()
            publish_cluster(run, following)
            outcome = follow_training(run, following, on_progress=on_progress)
        return trained(outcome)


def trained(outcome: TrainingOutcome) -> TrainingRun:
    """Return the record of a training that came to an end or was stopped; raises what else became of it."""
    match outcome:
        case Complete(training) | Stopped(training):
            return training
        case Failed(error):
            raise error
        case MachinesLost(message=message):
            raise TrainingError(message)


def worker_processes(nodes: list[psutil.Process]) -> list[psutil.Process]:
    return [
        child
        for node in nodes
        for child in node.children(recursive=True)
        if child.parent() not in (None, node) and "forkserver" in " ".join(child.cmdline())
    ]
