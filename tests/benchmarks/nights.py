"""Thirty nights on a stream that drifts: how each ends, and how near models stay to the best reachable AUC.

The story is that of `thirty_nights`. Each night runs `train-ctr` as the schedule does, in a process of its own with
the parameters of the deployment, and must end as `docs/OPERATING.md` says; afterwards nothing may be recorded as
running, no day may have been trained twice, and no machine may be alive. Every third night loses a machine while it
trains, without notice, and goes on by itself. With `--keep` workspace and data stay.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterps_core.training.step_metrics import read_progress
from heterps_core.training.storage.run_directory import RunDirectory
from infra.ledger.ledger import EntryState, Ledger
from infra.workspace import HOME_VARIABLE, Workspace
from tasks.records.past_runs import PastRun, past_trainings
from tasks.running.losses import read_losses
from tests.benchmarks.thirty_nights import (
    ArrivingDays,
    Documented,
    day_of,
    documented_ending,
    loses_a_machine,
)
from tests.heterps_core.training.node_processes import kill_machine, nodes_of
from tests.waiting import wait_for

ROWS_PER_DAY = 20_000
NIGHT_LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How one night ended."""

    night: int
    day: str
    """That it should have trained; the one after it arrived on the evening before."""

    exit_status: int
    seconds: float
    words: str
    """What it said last."""


def run(*, seed: int = 0, num_cases: int = 30, keep: Path | None = None) -> list[dict[str, Any]]:
    """Run the nights, print a table and return its figures in the form of the benchmark contract."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        workspace = Workspace(root=folder / "home").create()
        endings = run_nights(folder, workspace, num_nights=num_cases, seed=seed)
        recorded = past_trainings(workspace, most=10 * num_cases)
        machines = Ledger(workspace.ledger_path).entries()
        num_losses = sum(len(read_losses(workspace, night.run_id)) for night in recorded)
    nights = [night for night in recorded if night.status == "FINISHED"]
    running = [night for night in recorded if night.status == "RUNNING"]
    alive = [machine for machine in machines if machine.state in (EntryState.INTENDED, EntryState.LAUNCHED)]
    print_nights(nights, endings)
    trained = [night.night for night in nights]
    gaps = [
        best - night.auc
        for night in nights
        if (best := best_reachable_auc(night)) is not None and night.auc is not None
    ]
    figures = [
        figure("nights_that_ended_otherwise", len(unexpected(endings)), "nights"),
        figure("days_trained_twice", len(trained) - len(set(trained)), "days"),
        figure("days_never_trained", num_cases - len(set(trained)), "days"),
        figure("recorded_as_running", len(running), "runs"),
        figure("machines_alive", len(alive), "machines"),
        {**figure("machines_lost", num_losses, "machines"), "higher_is_better": True},
        figure("auc_gap_to_best_reachable_median", statistics.median(gaps), "AUC"),
        figure("auc_gap_to_best_reachable_last", gaps[-1], "AUC"),
        figure("night_seconds_median", statistics.median(ending.seconds for ending in endings), "s"),
    ]
    for entry in figures:
        print(f"{entry['name']:<36}{entry['value']:>10.4f} {entry['unit']}")
    return figures


def run_nights(folder: Path, workspace: Workspace, *, num_nights: int, seed: int) -> list[Ending]:
    """Let days arrive and run the nights; the night of day n runs once day n + 1 is there."""
    days = ArrivingDays(folder, num_nights=num_nights, rows_per_day=ROWS_PER_DAY, seed=seed)
    endings = []
    for night in range(1, num_nights + 1):
        endings += [
            backfill(missed, days.data, workspace) for missed in days.evening_before(night, workspace)
        ]
        endings.append(train(night, days.data, workspace))
    return endings


def train(night: int, data: Path, workspace: Workspace) -> Ending:
    """Run a night as the schedule does: it is told no day."""
    asked = ("flows.train_ctr", "--data", str(data))
    return start(night, workspace, *asked, loses_machine=loses_a_machine(night))


def backfill(night: int, data: Path, workspace: Workspace) -> Ending:
    """Train one day that a night has missed."""
    day = str(day_of(night))
    return start(
        night, workspace, "flows.backfill_ctr", "--data", str(data), "--first-day", day, "--last-day", day
    )


def start(
    night: int, workspace: Workspace, module: str, *arguments: str, loses_machine: bool = False
) -> Ending:
    """Run a flow in a process of its own, print how it ended, and return it."""
    started_s = time.perf_counter()
    earlier = set(workspace.runs_directory.iterdir())
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, HOME_VARIABLE: str(workspace.root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as flow:
        try:
            if loses_machine:
                lose_a_machine(flow, workspace, earlier)
            output, errors = flow.communicate(timeout=NIGHT_LIMIT_S)
        except BaseException:
            flow.kill()
            raise
    said = (errors if flow.returncode else output).strip().splitlines()
    ending = Ending(
        night=night,
        day=str(day_of(night)),
        exit_status=flow.returncode,
        seconds=time.perf_counter() - started_s,
        words=next((line for line in reversed(said) if line.startswith(("error:", "skipped"))), ""),
    )
    print(
        f"night {night:>2}, {module.rpartition('.')[2]:<12} {ending.day}: status {ending.exit_status}, "
        f"{ending.seconds:5.1f} s  {ending.words}",
        flush=True,
    )
    return ending


def lose_a_machine(flow: subprocess.Popen[str], workspace: Workspace, earlier: set[Path]) -> None:
    """Kill a machine of a run once it trains, with all that runs there; nothing where the run ends before."""

    def has_begun() -> bool:
        runs = set(workspace.runs_directory.iterdir()) - earlier
        return flow.poll() is not None or any(read_progress(RunDirectory(str(run))) for run in runs)

    wait_for(has_begun, timeout_s=NIGHT_LIMIT_S, what="a night that trains")
    for node in nodes_of(flow.pid)[-1:]:
        kill_machine(node)


def unexpected(endings: Sequence[Ending]) -> list[Ending]:
    """Return the endings that are not those that are documented."""
    seen: set[int] = set()
    found = []
    for ending in endings:
        documented = Documented.TRAINED if ending.night in seen else documented_ending(ending.night)
        seen.add(ending.night)
        is_as_documented = {
            Documented.TRAINED: ending.exit_status == 0 and not ending.words,
            Documented.REFUSED: ending.exit_status != 0 and "day=" in ending.words,
            Documented.NOTHING_NEW: ending.exit_status == 0 and ending.words.startswith("skipped"),
        }
        if not is_as_documented[documented]:
            found.append(ending)
    return found


def best_reachable_auc(night: PastRun) -> float | None:
    """Return the AUC of the true click probabilities."""
    return night.metrics.get("quality/best_reachable_auc")


def print_nights(nights: Sequence[PastRun], endings: Sequence[Ending]) -> None:
    """Print a line for each trained day, and what ended otherwise than documented."""
    print(f"\n{'day':<12}{'AUC':>8}{'best':>8}{'promoted':>10}{'USD':>10}{'samples/s':>11}{'error':>8}")
    for night in nights:
        cells = (
            f"{night.auc:>8.4f}" if night.auc is not None else f"{'-':>8}",
            f"{best_reachable_auc(night) or math.nan:>8.4f}",
            f"{night.was_promoted!s:>10}",
            f"{night.usd:>10.5f}" if night.usd is not None else f"{'-':>10}",
            f"{night.throughput_samples_per_s:>11,.0f}" if night.throughput_samples_per_s else f"{'-':>11}",
            f"{night.prediction_error:>+8.1%}" if night.prediction_error is not None else f"{'-':>8}",
        )
        print(f"{night.night:<12}{''.join(cells)}")
    for ending in unexpected(endings):
        print(f"not as documented: {ending}")


def figure(name: str, value: float, unit: str) -> dict[str, Any]:
    """Return a figure in the form of the benchmark contract."""
    return {"name": name, "value": value, "unit": unit, "higher_is_better": False}
