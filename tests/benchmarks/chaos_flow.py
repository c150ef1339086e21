"""Whole runs of `train-ctr` on a cloud that boots its machines, each with a worker killed while it trains.

The cloud is that of `tests/rented_cloud.py`: hosts with addresses of their own, moto for EC2, IAM and S3. The run
must end trained, or refuse with a reason. Afterwards no machine may be alive, the ledger must know each machine and
its end, and the steps of the model that is left must be each step once: a step's rows follow from its number, so then
no row is lost or doubled.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.training.node.worker_life import read_signs
from heterps_core.training.step_metrics import read_progress, read_steps
from infra.ledger.ledger import EntryState, Ledger
from tests.benchmarks.planner import figure, show
from tests.network_hosts import why_no_hosts
from tests.rented_cloud import RentedCloud
from tests.waiting import wait_for

NUM_ROWS, BATCH_SIZE, EPOCHS = 10_000, 256, 100
PARAMETERS = (
    *("--device-types", "cpu-c7i", "--scheduler", "exact", "--budget-evaluations", "64"),
    *("--batch-size", str(BATCH_SIZE), "--epochs", str(EPOCHS), "--throughput-floor-samples-per-s", "15000"),
)

MEASURED_S = 35.0
"""Of training, before a worker is killed: there are checkpoints then."""

LIMIT_S = 1_800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one case."""

    seconds: float
    ended_as: str
    """Trained, or the reason of the refusal."""

    generations: int
    wrong: tuple[str, ...]


class Case:
    """One run and what happens to it."""

    def __init__(self, cloud: RentedCloud) -> None:
        self.cloud = cloud
        self.flow = cloud.start_flow("--data", str(cloud.folder / "clicks.tsv"), *PARAMETERS)

    def said(self) -> str:
        """Return all that the flow has said."""
        return self.cloud.said.read_text()

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait while the flow lives."""

        def is_so() -> bool:
            assert self.flow.poll() is None, f"the flow ended before {what}: {self.said()[-500:]}"
            return bool(condition())

        wait_for(is_so, timeout_s=LIMIT_S, what=what, poll_s=0.5)

    def trains(self) -> bool:
        """Tell whether the present generation has trained for as long as its speed takes to be known."""
        run = self.cloud.run_directory()
        progress = None if run is None else read_progress(run)
        return progress is not None and progress.elapsed_s >= MEASURED_S

    def kill_a_worker(self) -> None:
        """Kill a worker of the present generation."""
        host = next(iter(self.cloud.hosts.values()))
        [path] = host.folder.glob("heterps-node-*/signs")
        psutil.Process(read_signs(path.read_bytes())[0].pid).kill()

    def outcome(self, status: int, seconds: float) -> Outcome:
        """Say how the run ended, and what is left that is not so."""
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
            wrong += rows_wrong(attempts, num_steps=EPOCHS * (NUM_ROWS * 4 // 5 // BATCH_SIZE))
        return Outcome(
            seconds=seconds,
            ended_as="trained" if status == 0 else errors[-1] if errors else "without a reason",
            generations=len(attempts),
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


def run_case(folder: Path, seed: int) -> Outcome:
    """Run a case in a fresh network namespace, on the rows of a seed."""
    started_s = time.monotonic()
    with RentedCloud(folder) as cloud:
        write_click_stream(folder / "clicks.tsv", num_rows=NUM_ROWS, seed=seed)
        case = Case(cloud)
        try:
            case.wait(case.trains, "training")
            case.kill_a_worker()
            status = case.flow.wait(LIMIT_S)
            return case.outcome(status, time.monotonic() - started_s)
        finally:
            if case.flow.poll() is None:
                case.flow.kill()


def run(*, seed: int = 0, num_cases: int = 2) -> list[dict[str, Any]]:
    """Run the cases of consecutive seeds; print a line for each and return the figures."""
    reason = why_no_hosts()
    if reason is not None:
        raise SystemExit(f"chaos_flow: {reason}")
    outcomes = []
    for case_seed in range(seed, seed + num_cases):
        with tempfile.TemporaryDirectory(prefix="heterps-chaos-") as folder:
            place = str(Path(folder) / "cloud")
            command = [*("unshare", "--net", sys.executable, "-m", __name__), place, str(case_seed)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        outcomes.append(Outcome(**json.loads(output.splitlines()[-1])))
        print(f"seed {case_seed}: {outcomes[-1]}", flush=True)
    trained = sum(each.ended_as == "trained" for each in outcomes)
    figures = [
        figure("chaos_flow_cases", len(outcomes), "cases"),
        figure("chaos_flow_trained", trained, "cases"),
        figure("chaos_flow_refused_with_a_reason", len(outcomes) - trained, "cases", higher=False),
        figure(
            "chaos_flow_something_wrong", sum(bool(each.wrong) for each in outcomes), "cases", higher=False
        ),
    ]
    show(figures, f"{len(outcomes)} runs on rented machines, each disturbed once")
    return figures


if __name__ == "__main__":
    print(json.dumps(asdict(run_case(Path(sys.argv[1]), int(sys.argv[2])))))
