"""Many small trainings on machines that are lost, stand still, or are cut off, each drawn by a seed.

Machines are network namespaces with real nodes, lost by SIGKILL; the store is moto. Plan and job are given. After a
loss the benchmark does what the flow does, by the same parts: `follow_training` names the lost machines, and a spare
machine takes their place or a smaller fleet goes on. Each case must end trained or refused with a reason, the final
model must have trained every row exactly once, and no process may run afterwards. `tests/flows/test_lost_machines.py`
loses machines of whole runs, with planner, cloud and bill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.monitor import follow_training
from heterps_core.training.outcome import Complete, Failed, MachinesLost
from heterps_core.training.storage.run_directory import RunDirectory
from tasks.running.fleet import _forget_lost
from tests.benchmarks.elastic import (
    KEY,
    LINK_MBIT_PER_S,
    STAGE_OF_HOST,
    STORE_ADDRESS,
    STORE_PORT,
    Host,
    Training,
    start_store,
)
from tests.benchmarks.planner import figure, show
from tests.heterps_core.training.node_processes import NUM_MICROBATCHES
from tests.heterps_core.training.test_rows_after_losses import FOLDER_VARIABLE, noted_steps
from tests.moto_server import REGION
from tests.network_hosts import BRIDGE, NetworkHost, why_no_hosts
from tests.waiting import wait_for

NUM_STEPS, BATCH_SIZE, CHECKPOINT_INTERVAL_STEPS = 100, 64, 15
NUM_ROWS = NUM_STEPS * BATCH_SIZE * 5 // 4
"""A fifth is held out; each row is trained once."""

CASES_PER_SESSION = 8
"""Hosts live for a quarter of an hour."""

MAX_RESTARTS = 4
LIMIT_S = 240.0
END_LIMIT_S = 60.0

CLOCK_VARIABLE = "HETERPS_TEST_CLOCK"
CLOCK = f"""
import os, time
_time = time.time
time.time = lambda: _time() + (7200 if os.path.exists(os.environ["{CLOCK_VARIABLE}"]) else 0)
"""
"""Of a host whose clock jumps by two hours, once a file is there; in every Python process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one case."""

    seed: int
    kind: str
    step: int
    """At which it happened."""

    seconds: float
    ended_as: str
    generations: int
    rows_lost: int
    rows_doubled: int
    steps_redone: int
    """Trained in a generation and once more in a later one."""

    wrong: tuple[str, ...]


class Case:
    """One training and what happens to it."""

    def __init__(
        self, folder: Path, networks: list[NetworkHost], store: subprocess.Popen[bytes], seed: int
    ) -> None:
        self.seed, self.store, self.folder = seed, store, folder
        self.draw = random.Random(seed)
        self.kind = self.draw.choice(list(KINDS))
        self.shrinks = self.draw.random() < 0.5
        self.at_step = self.draw.randrange(2, NUM_STEPS - 15)
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        os.environ[FOLDER_VARIABLE] = str(self.notes)
        location = (
            f"s3://runs/{seed}?region={REGION}&scheme=http&endpoint_override={STORE_ADDRESS}:{STORE_PORT}"
        )
        self.run = RunDirectory(location, secret=KEY)
        self.hosts = [
            Host(number, folder / f"host{number}", network) for number, network in enumerate(networks)
        ]
        for host in self.hosts:
            self.boot(host)
        self.spares = self.hosts[len(STAGE_OF_HOST) :]
        self.job = make_job(folder.parent / "prepared")
        self.training = Training(self.run, self.hosts, self.job)
        self.trouble: list[str] = []

    def boot(self, host: Host) -> None:
        """Start a node on a machine that has nothing in memory."""
        os.environ[CLOCK_VARIABLE] = str(host.folder / "two hours later")
        host.boot(self.run)

    def victim(self) -> Host:
        """Draw one of the machines of the present generation."""
        return self.training.host_of(self.draw.choice(self.training.cluster.nodes))

    def workers(self, host: Host) -> list[int]:
        """Return the worker processes of the present generation on a machine."""
        return [sign.pid for sign in host.signs() if sign.attempt == self.training.cluster.generation]

    def disturb(self) -> None:
        """Let it happen, once the training is at its step."""
        try:
            self._wait_for_step(self.training.cluster.generation, self.at_step)
            KINDS[self.kind](self)
        except (AssertionError, OSError, psutil.Error, subprocess.SubprocessError) as error:
            self.trouble.append(f"it did not happen: {error!r}")

    def lose_in_recovery(self) -> None:
        """Lose a machine, and another or a worker while the next generation begins."""
        generation = self.training.cluster.generation
        self.victim().lose()
        wait_for(
            lambda: self.training.cluster.generation > generation,
            timeout_s=LIMIT_S,
            what="recovery",
            poll_s=0.02,
        )
        time.sleep(self.draw.uniform(0.0, 4.0))
        self.victim().lose()

    def _wait_for_step(self, generation: int, step: int) -> None:
        wait_for(
            lambda: any(
                sign.step >= step and sign.attempt >= generation
                for host in self.hosts
                for sign in host.signs()
            ),
            timeout_s=LIMIT_S,
            what=f"step {step}",
            poll_s=0.01,
        )

    def go_on(self, lost: MachinesLost) -> None:
        """Name the next generation: lost machines are ended, spare ones or a smaller fleet take their places."""
        cluster, job = self.training.cluster, self.job
        gone = [node for node in cluster.nodes if node.node_id in lost.node_ids]
        for node in gone:
            host = self.training.host_of(node)
            host.lose()
            self.boot(host)
            self.spares.append(host)
        _forget_lost(self.run, lost.node_ids)
        left = Counter(node.stage for node in cluster.nodes if node not in gone)
        if self.shrinks and gone and all(left[stage] for stage in STAGE_OF_HOST):
            left_nodes = tuple(node for node in cluster.nodes if node not in gone)
            following = replace(cluster, nodes=left_nodes).next_generation()
        else:
            following = cluster.next_generation(
                {node.node_id: self.spares.pop(0).as_node(node.stage) for node in gone}
            )
        counts = Counter(node.stage for node in following.nodes)
        stages = tuple(replace(stage, num_replicas=counts[index]) for index, stage in enumerate(job.stages))
        self.training.go_on(following, replace(job, stages=stages))

    def train(self) -> str:
        """Follow the training to its end; returns how it ended."""
        for _ in range(MAX_RESTARTS + 1):
            outcome = follow_training(self.run, self.training.cluster, on_progress=lambda progress: None)
            match outcome:
                case Complete():
                    return "trained"
                case MachinesLost():
                    print(
                        f"  {outcome.message.splitlines()[0]} {outcome.node_ids}", file=sys.stderr, flush=True
                    )
                    self.go_on(outcome)
                case Failed(error):
                    return f"refused: {error}"
                case _:
                    return f"without a reason: {outcome}"
        return f"refused: it was lost more than {MAX_RESTARTS} times"

    def outcome(self, dataset: PreparedDataset) -> Outcome:
        """Train, and say what is left that is not so."""
        started_s = time.monotonic()
        happening = threading.Thread(target=self.disturb, daemon=True)
        happening.start()
        ended_as = self.train()
        happening.join(LIMIT_S)
        wrong = list(self.trouble)
        seconds = time.monotonic() - started_s
        if ended_as == "trained":
            working = {node.node_id for node in self.training.cluster.nodes}
            for host in self.hosts:
                if host.node_id in working:
                    wrong += self._left_running(host)
        elif not ended_as.startswith("refused"):
            wrong.append(ended_as)
        lost, doubled, redone = rows_wrong(self.notes, dataset) if ended_as == "trained" else (0, 0, 0)
        return Outcome(
            seed=self.seed,
            kind=self.kind,
            step=self.at_step,
            seconds=round(seconds, 1),
            ended_as=ended_as,
            generations=self.training.cluster.generation,
            rows_lost=lost,
            rows_doubled=doubled,
            steps_redone=redone,
            wrong=tuple(wrong),
        )

    def _left_running(self, host: Host) -> list[str]:
        """Return what runs on a machine long after its training has ended."""
        assert host.node is not None
        running: list[psutil.Process] = []

        def has_ended() -> bool:
            running[:] = processes_of(self.run, host)
            return not running

        with suppress(AssertionError):
            wait_for(has_ended, timeout_s=END_LIMIT_S, what="the end", poll_s=0.2)
        return [f"{host.node_id} still runs {process.pid}" for process in running]

    def end(self) -> None:
        """End all that is left."""
        for host in self.hosts:
            for process in processes_of(self.run, host):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if host.node is not None:
                host.node.wait(10)


def processes_of(run: RunDirectory, host: Host) -> list[psutil.Process]:
    """Return all living processes of a run on a machine, whatever process started them."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            variables = process.environ()
            own = (
                variables.get("TMPDIR") == str(host.folder)
                and variables.get("HETERPS_RUN_DIR") == run.location
            )
            if own and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _kill_worker(case: Case) -> None:
    os.kill(case.draw.choice(case.workers(case.victim())), signal.SIGKILL)


def _kill_agent(case: Case) -> None:
    node = case.victim().node
    assert node is not None
    node.kill()


def _lose_two(case: Case) -> None:
    for node in case.draw.sample(case.training.cluster.nodes, 2):
        case.training.host_of(node).lose()


def _lose_store_host(case: Case) -> None:
    case.training.host_of(case.training.cluster.rendezvous_node).lose()


def _stop_bucket(case: Case) -> None:
    case.store.send_signal(signal.SIGSTOP)
    time.sleep(60.0)
    case.store.send_signal(signal.SIGCONT)


def _jump_clock(case: Case) -> None:
    (case.victim().folder / "two hours later").touch()


def _stand_still(case: Case) -> None:
    processes = processes_of(case.run, case.victim())
    for process in processes:
        process.suspend()
    time.sleep(case.draw.uniform(2.0, 12.0))
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _cut_off(case: Case) -> None:
    link = f"host{case.victim().number}"
    subprocess.run(["ip", "link", "set", link, "nomaster"], check=True)
    time.sleep(case.draw.choice([5.0, 15.0, 45.0]))
    subprocess.run(["ip", "link", "set", link, "master", BRIDGE], check=True)


KINDS: dict[str, Callable[[Case], None]] = {
    "worker": _kill_worker,
    "agent": _kill_agent,
    "host": lambda case: case.victim().lose(),
    "two hosts": _lose_two,
    "host of the workers' store": _lose_store_host,
    "bucket away": _stop_bucket,
    "clock jumps": _jump_clock,
    "host stands still": _stand_still,
    "loss in recovery": Case.lose_in_recovery,
    "host cut off": _cut_off,
}


def make_job(dataset: Path) -> TrainingJob:
    """Return the training of all cases; the two replicas of the first stage note the rows that they train."""
    return TrainingJob(
        run_id="elastic",
        model="tests.heterps_core.training.test_rows_after_losses:build_noting",
        dataset=str(dataset),
        stages=(Stage(0, 1, "cpu", 2), Stage(2, 2, "cpu", 1)),
        config=TrainingConfig(
            batch_size=BATCH_SIZE,
            num_microbatches=NUM_MICROBATCHES,
            num_epochs=1,
            seed=3,
            checkpoint_interval_steps=CHECKPOINT_INTERVAL_STEPS,
        ),
    )


def rows_wrong(notes: Path, dataset: PreparedDataset) -> tuple[int, int, int]:
    """Return how many rows the model that is left lacks, how many it has seen more than once, and steps redone.

    A row is known by its numeric columns. Generations are read from the last to the first: each one's steps before
    the first of the next one are those of the model.
    """
    step_of_row: dict[bytes, int] = {}
    for step in range(NUM_STEPS):
        rows = dataset.batch_rows(0, step, batch_size=BATCH_SIZE, seed=3)
        for row in dataset.batch(rows).dense.numpy():
            step_of_row[row.tobytes()] = step
    assert len(step_of_row) == NUM_STEPS * BATCH_SIZE, "rows must differ in their numeric columns"
    seen: Counter[bytes] = Counter()
    redone: set[tuple[int, int]] = set()
    after = NUM_STEPS
    for generation in sorted({int(path.name.partition("-")[0]) for path in notes.iterdir()}, reverse=True):
        first = after
        for path in notes.glob(f"{generation}-*"):
            steps = [[row.tobytes() for row in rows] for rows in noted_steps(path)]
            if steps:
                first = min(first, step_of_row[steps[0][0]])
            for rows in steps:
                seen.update(row for row in rows if step_of_row[row] < after)
                redone.update((generation, step_of_row[row]) for row in rows if step_of_row[row] >= after)
        after = first
    doubled = sum(count > 1 for count in seen.values())
    return len(step_of_row.keys() - seen.keys()), doubled, len(redone)


def measure(folder: Path, *, seeds: range) -> None:
    """Run cases one after the other, and print a line for each."""
    (folder / "sitecustomize.py").write_text(CLOCK)
    store = start_store()
    os.environ |= {"PYTHONPATH": f"{folder}:{Path.cwd()}", "OMP_NUM_THREADS": "1"}
    stream = write_click_stream(folder / "clicks.tsv", num_rows=NUM_ROWS, seed=0)
    prepare_dataset(stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=50, out_dir=folder / "prepared")
    dataset = PreparedDataset.open(folder / "prepared")
    networks = [
        NetworkHost(number, f"172.31.0.{number + 10}", mbit_per_s=LINK_MBIT_PER_S)
        for number in range(len(STAGE_OF_HOST) + 1)
    ]
    try:
        for seed in seeds:
            case = Case(folder / str(seed), networks, store, seed)
            try:
                print(json.dumps(asdict(case.outcome(dataset))), flush=True)
            finally:
                case.end()
    finally:
        for network in networks:
            network.end()
        store.kill()
        store.wait()


def run(*, seed: int = 0, num_cases: int = 200) -> list[dict[str, Any]]:
    """Run the cases of consecutive seeds, each session of them in a fresh network namespace."""
    reason = why_no_hosts()
    if reason is not None:
        raise SystemExit(f"chaos: {reason}")
    outcomes: list[Outcome] = []
    for first in range(seed, seed + num_cases, CASES_PER_SESSION):
        count = min(CASES_PER_SESSION, seed + num_cases - first)
        with tempfile.TemporaryDirectory(prefix="heterps-chaos-") as folder:
            command = [*("unshare", "--net", sys.executable, "-m", __name__), folder, str(first), str(count)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as session:
                assert session.stdout is not None
                for line in session.stdout:
                    outcomes.append(Outcome(**json.loads(line)))
                    print(outcomes[-1], flush=True)
    trained = [each for each in outcomes if each.ended_as == "trained"]
    figures = [
        figure("chaos_cases", len(outcomes), "cases"),
        figure("chaos_trained", len(trained), "cases"),
        figure("chaos_refused_with_a_reason", len(outcomes) - len(trained), "cases", higher=False),
        figure("chaos_something_wrong", sum(bool(each.wrong) for each in outcomes), "cases", higher=False),
        figure("chaos_rows_lost", sum(each.rows_lost for each in outcomes), "rows", higher=False),
        figure("chaos_steps_redone", sum(each.steps_redone for each in outcomes), "steps", higher=False),
        figure("chaos_rows_doubled", sum(each.rows_doubled for each in outcomes), "rows", higher=False),
    ]
    show(figures, f"{len(outcomes)} trainings, each disturbed once")
    return figures


if __name__ == "__main__":
    first_seed = int(sys.argv[2])
    measure(Path(sys.argv[1]), seeds=range(first_seed, first_seed + int(sys.argv[3])))
