"""Whole runs of `train-ctr` on a cloud that boots its machines, each with one thing against it, drawn from a seed.

The cloud is that of `tests/rented_cloud.py`: hosts with addresses of their own, moto for EC2, IAM and S3. A case is a
run with a deadline, whose fleet has several machines; once it trains, something happens. The run must end trained, or
refuse with a reason; a flow that was killed is started again with `resume_run_id`, as a person does. Afterwards no
machine may be alive, the ledger must know each machine and its end, and the steps of the model that is left must be
each step once: a step's rows follow from its number, so then no row is lost or doubled.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.training.node.node_life import read_cluster
from heterps_core.training.node.worker_life import read_signs
from heterps_core.training.step_metrics import read_progress, read_steps
from infra.ledger.ledger import EntryState, Ledger
from tests.benchmarks.planner import figure, show
from tests.network_hosts import INTERFACE, why_no_hosts
from tests.rented_cloud import RentedCloud
from tests.waiting import wait_for

NUM_ROWS, EPOCHS = 10_000, 100
PARAMETERS = (
    *("--device-types", "cpu-c7i", "--scheduler", "exact", "--budget-evaluations", "64"),
    *("--batch-size", "256", "--epochs", str(EPOCHS), "--throughput-floor-samples-per-s", "15000"),
)
TIME_FOR_A_RUN = timedelta(minutes=14)
"""Until `ready_by`, so that a fleet that has shrunk is late, and grows."""

MEASURED_S = 35.0
"""Of training, before something happens: the flow knows its speed then."""

LIMIT_S = 1_800.0
AWAY_S, APART_S, SLOW_S = 60.0, 20.0, 60.0
JUMP_S = 7_200

CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *jump;
__attribute__((constructor)) static void open_jump(void) {
  jump = mmap(0, 8, PROT_READ, MAP_SHARED, open(getenv("CLOCK_JUMP"), O_RDONLY), 0);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += *jump;
  return status;
}
"""
"""Moves the wall clock of a process by the seconds that a file holds."""


class Kind(StrEnum):
    """What happens."""

    NOTHING = "nothing"
    WORKER = "worker killed"
    AGENT = "agent of a machine killed"
    HOST = "host killed"
    STORE_HOST = "host of the workers' store killed"
    TWO_HOSTS = "two hosts killed"
    HOST_IN_RECOVERY = "host killed while another's loss is recovered"
    FLOW = "flow killed and resumed"
    BUCKET = "bucket and EC2 away for 60 s"
    CLOCK_AHEAD = "clock of the flow +2 h"
    CLOCK_BEHIND = "clock of the flow -2 h"
    SLOW = "host slow but alive"
    PARTITION = "host apart from the network for 20 s"
    NO_CAPACITY = "host killed while none can be had, then capacity again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one case."""

    kind: str
    seconds: float
    ended_as: str
    """Trained, or the reason of the refusal."""

    generations: int
    sizes: tuple[int, ...]
    """Machines of the generations that the flow told of, in order."""

    wrong: tuple[str, ...]


class Case:
    """One run and what happens to it."""

    def __init__(self, cloud: RentedCloud, kind: Kind, randomly: random.Random) -> None:
        self.cloud, self.kind, self.randomly = cloud, kind, randomly
        self.jump = cloud.folder / "clock"
        set_jump(self.jump, 0)
        self.flow = self.start()

    def start(self, *parameters: str) -> psutil.Popen:
        """Start the flow, with a clock that can be moved where that happens."""
        environment = {}
        if self.kind in (Kind.CLOCK_AHEAD, Kind.CLOCK_BEHIND):
            environment = clock_moved_by(self.jump)
        ready_by = datetime.now(UTC) + TIME_FOR_A_RUN
        clicks = str(self.cloud.folder / "clicks.tsv")
        asked = ("--data", clicks, "--ready-by", f"{ready_by:%H:%M}", *PARAMETERS)
        return self.cloud.start_flow(*asked, *parameters, **environment)

    def said(self) -> str:
        """Return all that the flow has said."""
        return self.cloud.said.read_text()

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait while the flow lives; whatever it waits for may fail while the cloud is away."""

        def is_so() -> bool:
            assert self.flow.poll() is None, f"the flow ended before {what}: {self.said()[-500:]}"
            try:
                return bool(condition())
            except OSError:
                return False

        wait_for(is_so, timeout_s=LIMIT_S, what=what, poll_s=0.5)

    def trains(self) -> bool:
        """Tell whether the present generation has trained for as long as its speed takes to be known."""
        run = self.cloud.run_directory()
        progress = None if run is None else read_progress(run)
        return progress is not None and progress.elapsed_s >= MEASURED_S

    def machines(self) -> list[str]:
        """Return the machines of the present generation, that of the workers' store first."""
        run = self.cloud.run_directory()
        cluster = None if run is None else read_cluster(run)
        assert cluster is not None
        at_store = cluster.rendezvous_node
        others = [node.provider_instance_id for node in cluster.nodes if node is not at_store]
        self.randomly.shuffle(others)
        return [at_store.provider_instance_id, *others]

    def disturb(self) -> None:
        """Let happen what is against the run."""
        first, *others = self.machines()
        at_random = (others or [first])[0]
        match self.kind:
            case Kind.WORKER:
                host = self.cloud.hosts[at_random]
                [path] = host.folder.glob("heterps-node-*/signs")
                psutil.Process(read_signs(path.read_bytes())[0].pid).kill()
            case Kind.AGENT:
                node = self.cloud.hosts[at_random].node
                assert node is not None
                children = psutil.Process(node.pid).children(recursive=True)
                next(each for each in children if "heterps_core.training.node" in each.cmdline()).kill()
            case Kind.HOST:
                self.cloud.kill(at_random)
            case Kind.STORE_HOST:
                self.cloud.kill(first)
            case Kind.TWO_HOSTS:
                for instance_id in [*others, first][:2]:
                    self.cloud.kill(instance_id)
            case Kind.HOST_IN_RECOVERY:
                self.cloud.kill(at_random)
                self.wait(lambda: "lost " in self.said(), "the first loss")
                self.cloud.kill(first)
            case Kind.FLOW:
                self.flow.kill()
                self.flow.wait()
                [run_id] = [path.name for path in self.cloud.workspace.runs_directory.iterdir()]
                self.flow = self.start("--resume-run-id", run_id)
            case Kind.BUCKET:
                with suspended(self.cloud.moto):
                    time.sleep(AWAY_S)
            case Kind.CLOCK_AHEAD | Kind.CLOCK_BEHIND:
                seconds = JUMP_S if self.kind is Kind.CLOCK_AHEAD else -JUMP_S
                set_jump(self.jump, seconds)
            case Kind.SLOW:
                self.slow_down(at_random)
            case Kind.PARTITION:
                host = self.cloud.hosts[at_random]
                host.run("ip", "link", "set", INTERFACE, "down")
                time.sleep(APART_S)
                host.run("ip", "link", "set", INTERFACE, "up")
            case Kind.NO_CAPACITY:
                self.cloud.full.touch()
                self.cloud.kill(at_random)
                self.wait(lambda: "machines cannot be had" in self.said(), "a fleet that cannot grow")
                self.cloud.full.unlink()

    def slow_down(self, instance_id: str) -> None:
        """Let all that runs on a machine stand still for most of the time."""
        node = self.cloud.hosts[instance_id].node
        assert node is not None
        until_s = time.monotonic() + SLOW_S
        while time.monotonic() < until_s:
            processes = psutil.Process(node.pid).children(recursive=True)
            for process in processes:
                with suspended(process):
                    time.sleep(0.4 / len(processes))
            time.sleep(0.1)

    def outcome(self, seconds: float) -> Outcome:
        """Say how the run ended, and what is left that is not so."""
        status = self.flow.wait(LIMIT_S)
        said = self.said()
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        wrong = []
        if "Traceback" in said or (status != 0 and not errors):
            wrong.append(f"status {status} without a reason: {said[-300:]}")
        wait_for(lambda: not self.cloud.hosts, timeout_s=60, what="the end of all hosts")
        wrong += [f"machine {instance_id} is alive" for instance_id in self.cloud.alive()]
        entries = Ledger(self.cloud.workspace.ledger_path).entries()
        booked = Counter(entry.provider_instance_id for entry in entries if entry.state is EntryState.ENDED)
        launched = Counter(each["InstanceId"] for each in self.cloud.machines())
        wrong += [f"{name} is in the books {booked[name]} times" for name in launched if booked[name] != 1]
        run = self.cloud.run_directory()
        attempts = [] if run is None else [[each.step for each in attempt] for attempt in read_steps(run)]
        if status == 0:
            wrong += rows_wrong(attempts, num_steps=EPOCHS * -(-(NUM_ROWS * 4 // 5) // 256))
        return Outcome(
            kind=self.kind,
            seconds=seconds,
            ended_as="trained" if status == 0 else errors[-1] if errors else "without a reason",
            generations=len(attempts),
            sizes=tuple(map(int, re.findall(r"(\d+) machines go on", said))),
            wrong=tuple(wrong),
        )


def rows_wrong(attempts: list[list[int]], *, num_steps: int) -> list[str]:
    """Return what is wrong where the generations of a run trained these steps, in order.

    Each must go on at a step behind a checkpoint of those before, and train every step to its end once.
    """
    wrong, last = [], 0
    for number, steps in enumerate(attempts):
        if steps != list(range(steps[0], steps[0] + len(steps))) or steps[0] > last + 1:
            wrong.append(f"generation {number + 1} trained steps {steps[0]} to {steps[-1]} behind {last}")
        last = steps[-1]
    return [*wrong, *([f"{last} of {num_steps} steps were trained"] if last != num_steps else [])]


def clock_moved_by(jump: Path) -> dict[str, str]:
    """Return the environment of a process whose wall clock is off by the seconds in a file, at any moment."""
    library = jump.with_suffix(".so")
    if not library.exists():
        gcc = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(gcc, input=CLOCK.encode(), check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_JUMP": str(jump)}


def set_jump(jump: Path, seconds: int) -> None:
    """Write by how many seconds a clock is off; in place, as processes have the file in memory."""
    with jump.open("r+b" if jump.exists() else "wb") as file:
        file.write(seconds.to_bytes(8, sys.byteorder, signed=True))


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    """Let a process stand still while the block runs; one that has ended stays so."""
    try:
        process.send_signal(signal.SIGSTOP)
        yield
        process.send_signal(signal.SIGCONT)
    except psutil.NoSuchProcess:
        return


def run_case(folder: Path, kind: Kind, seed: int) -> Outcome:
    """Run a case in a fresh network namespace."""
    started_s = time.monotonic()
    with RentedCloud(folder) as cloud:
        write_click_stream(folder / "clicks.tsv", num_rows=NUM_ROWS, seed=0)
        case = Case(cloud, kind, random.Random(seed))
        try:
            case.wait(case.trains, "training")
            case.disturb()
            return case.outcome(time.monotonic() - started_s)
        finally:
            if case.flow.poll() is None:
                case.flow.kill()


def run(*, seed: int = 0, num_cases: int = 2 * len(Kind)) -> list[dict[str, Any]]:
    """Run the cases of consecutive seeds, each kind in turn; print a line for each and return the figures."""
    reason = why_no_hosts()
    if reason is not None:
        raise SystemExit(f"chaos: {reason}")
    outcomes = []
    for case_seed in range(seed, seed + num_cases):
        kind = list(Kind)[case_seed % len(Kind)]
        with tempfile.TemporaryDirectory(prefix="heterps-chaos-") as folder:
            place = str(Path(folder) / "cloud")
            command = [*("unshare", "--net", sys.executable, "-m", __name__), place, kind, str(case_seed)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        outcomes.append(Outcome(**json.loads(output.splitlines()[-1])))
        print(f"seed {case_seed}: {outcomes[-1]}", flush=True)
    trained = sum(each.ended_as == "trained" for each in outcomes)
    figures = [
        figure("chaos_cases", len(outcomes), "cases"),
        figure("chaos_trained", trained, "cases"),
        figure("chaos_refused_with_a_reason", len(outcomes) - trained, "cases", higher=False),
        figure("chaos_something_wrong", sum(bool(each.wrong) for each in outcomes), "cases", higher=False),
    ]
    show(figures, f"{len(outcomes)} runs on rented machines, each disturbed once")
    return figures


if __name__ == "__main__":
    print(json.dumps(asdict(run_case(Path(sys.argv[1]), Kind(sys.argv[2]), int(sys.argv[3])))))
