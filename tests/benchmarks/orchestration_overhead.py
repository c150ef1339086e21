"""From the start of a night to its first training step, in parts; and what runs beside the training while it goes on.

Nights run on days of clicks, first as `train-ctr` in a process of its own, where the first one measures layers and
makes databases, then through `make serve` and `prefect deployment run`. The parts come from what a run leaves behind
anyway: lines of its story, files of its run directory, the log of its workers, its record.

What recording and orchestration cost while a night trains is counted in seconds of a core, not as the difference of
runs with and without: one percent drowns in what two runs differ by anyway. Counted are the flow, its Prefect server,
and the processes that watch over workers, from the first step to the last; and the writes of step metrics, the only
recording inside of the step loop, which are done once more by themselves, file by file. Shares are of the core
seconds of the workers. MLflow is not written to while a run trains.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

import psutil

from heterps_core.data.synthetic.click_stream import write_click_days
from heterps_core.training.step_metrics import MetricWriter, StepMetrics, read_progress
from heterps_core.training.storage.run_directory import CLUSTER, JOB, STEPS, RunDirectory
from infra.workspace import HOME_VARIABLE, Workspace
from tasks.recording import START_TO_FIRST_STEP
from tasks.records.past_runs import past_trainings
from tests.served_workspace import ServedWorkspace

FIRST_DAY = date(2026, 10, 1)
ROWS_PER_DAY = 20_000
LONG_EPOCHS = 20
"""Of the night in which core seconds are counted: 6,240 steps."""

NIGHT_LIMIT_S = 600.0
SAMPLE_INTERVAL_S = 1.0

PARTS = (
    ("until the flow starts", "flow"),
    ("record is opened", "start"),
    ("data", "data"),
    ("profile", "profile"),
    ("plan", "job"),
    ("launch", "cluster"),
    ("workers start", "workers"),
    ("first step", "first step"),
)
"""What passes until a moment, each from the one before; the first from when the night was asked for."""

ROLES = {
    "flows.service.guarded_servers prefect": "Prefect's server",
    "torch.distributed.run": "watchers of workers",
    "heterps_core.training.node": "watchers of workers",
    "heterps_core.training.worker": "workers",
    "flows.train_ctr": "flow",
}
"""What a process is, by the first of these that stands in its command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NightStart:
    """When a night came to what, in seconds since 1970."""

    asked: float
    """Its process was started, or its flow run was due."""

    moments: Mapping[str, float]

    @property
    def asked_to_first_step_s(self) -> float:
        """All of it."""
        return self.moments["first step"] - self.asked

    @property
    def start_to_first_step_s(self) -> float:
        """From the start of the flow, as the run has recorded it."""
        return self.moments["first step"] - self.moments["flow"]

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds by part, in order."""
        ends = [self.asked, *(self.moments[moment] for _, moment in PARTS)]
        return {name: ends[i + 1] - ends[i] for i, (name, _) in enumerate(PARTS)}


def run(*, seed: int = 0, num_cases: int = 3, keep: Path | None = None) -> list[dict[str, Any]]:
    """Run the nights, print tables and return their figures in the form of the benchmark contract.

    Args:
        seed: Of the clicks.
        num_cases: Later nights in each of the two ways.
        keep: Where workspace and data stay.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        workspace = Workspace(root=folder / "home").create()
        data = folder / "clicks"
        num_days = 2 * num_cases + 3
        write_click_days(data, first_day=FIRST_DAY, num_days=num_days, rows_per_day=ROWS_PER_DAY, seed=seed)
        days = [date.fromordinal(FIRST_DAY.toordinal() + number) for number in range(num_days - 1)]
        first, *later = [start_of_process_night(workspace, data, day) for day in days[: num_cases + 1]]
        core_seconds = core_seconds_while_training(workspace, data, days[num_cases + 1])
        served = served_nights(workspace, data, days[num_cases + 2 :])
    print_starts({"first": [first], "later": later, "served": served})
    shares = {
        role: seconds / core_seconds["workers"] for role, seconds in core_seconds.items() if role != "workers"
    }
    print(f"\n{'while it trains':<24}{'core s':>10}{'share':>10}")
    for role, seconds in core_seconds.items():
        print(f"{role:<24}{seconds:>10.3f}{seconds / core_seconds['workers']:>10.2%}")
    return [
        figure("first_night_start_to_first_step_s", first.start_to_first_step_s, "s"),
        figure("later_night_start_to_first_step_s_median", median_start_s(later), "s"),
        figure("served_night_start_to_first_step_s_median", median_start_s(served), "s"),
        figure("first_night_process_to_first_step_s", first.asked_to_first_step_s, "s"),
        figure("later_night_process_to_first_step_s_median", median_asked_s(later), "s"),
        figure("scheduled_to_first_step_s_median", median_asked_s(served), "s"),
        figure("metric_writes_share_of_training", shares["writes of metrics"], ""),
        figure("recording_and_orchestration_share_of_training", sum(shares.values()), ""),
    ]


def start_of_process_night(workspace: Workspace, data: Path, day: date) -> NightStart:
    """Run a night in a process of its own."""
    asked = time.time()
    with night_process(workspace, data, day) as process:
        assert process.stdout is not None
        # Lines come unbuffered, so that each is as old as its coming.
        told = first_told((line, time.time()) for line in process.stdout)
    assert process.returncode == 0, f"the night of {day} ended with status {process.returncode}"
    return night_start(workspace, asked=asked, told=told, day=day)


def served_nights(workspace: Workspace, data: Path, days: Sequence[date]) -> list[NightStart]:
    """Serve the workspace, ask for each night as a person does, and stop."""
    service = ServedWorkspace(workspace.root)
    try:
        service.wait_until_up()
        return [start_of_served_night(service, data, day) for day in days]
    finally:
        service.stop()


def start_of_served_night(service: ServedWorkspace, data: Path, day: date) -> NightStart:
    """Run a night through the deployment."""
    service.command(
        *("deployment", "run", "train-ctr", "--watch", "--watch-interval", "1"),
        *("--param", f"data={json.dumps(str(data))}", "--param", f'day="{day}"'),
        timeout_s=NIGHT_LIMIT_S,
    )
    newest = [run for run in service.flow_runs("train-ctr") if run["state_type"] == "COMPLETED"][-1]
    lines = service.ask("/logs/filter", {"logs": {"flow_run_id": {"any_": [newest["id"]]}}})
    story = [line for line in lines if line["name"] == "tasks.running.progress"]
    told = first_told((line["message"], seconds_of(line["timestamp"])) for line in story)
    return night_start(service.workspace, asked=seconds_of(newest["expected_start_time"]), told=told, day=day)


def first_told(story: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return when each word first began a line of a story; the report at the end begins lines with some again."""
    told: dict[str, float] = {}
    for line, at in story:
        told.setdefault(next(iter(line.split()), ""), at)
    return told


def night_start(workspace: Workspace, *, asked: float, told: Mapping[str, float], day: date) -> NightStart:
    """Put together when a night came to what, from its story, its run directory and its record."""
    [recorded] = past_trainings(workspace, most=1, day=str(day))
    directory = RunDirectory(str(workspace.run_directory(recorded.run_id)))
    first_step = min(directory.stamps(STEPS).values()) / 1e9
    return NightStart(
        asked=asked,
        moments={
            **told,
            "flow": first_step - recorded.metrics[START_TO_FIRST_STEP],
            "job": directory.path(JOB).stat().st_mtime,
            "cluster": directory.path(CLUSTER).stat().st_mtime,
            "workers": max(ready_workers(directory)),
            "first step": first_step,
        },
    )


def ready_workers(directory: RunDirectory) -> list[float]:
    """Return when each worker was ready to train, by its log."""
    line = re.compile(r"^(\S+ \S+),(\d+) .* starts at step \d+$", re.MULTILINE)
    return [
        datetime.fromisoformat(second).timestamp() + int(milliseconds) / 1e3
        for path in directory.path("nodes").glob("*/workers.log")
        for second, milliseconds in line.findall(path.read_text())
    ]


def core_seconds_while_training(workspace: Workspace, data: Path, day: date) -> dict[str, float]:
    """Run a long night; return core seconds between its first step and its last, by role, and of writing metrics."""
    before: dict[str, float] = {}
    latest: dict[str, float] = {}
    known = set(workspace.runs_directory.iterdir())
    with night_process(workspace, data, day, "--epochs", str(LONG_EPOCHS)) as process:
        while process.poll() is None:
            time.sleep(SAMPLE_INTERVAL_S)
            new = set(workspace.runs_directory.iterdir()) - known
            progress = read_progress(RunDirectory(str(*new))) if new else None
            if progress is not None and progress.phase == "training":
                now = core_seconds_by_role(workspace)
                # The phase is not written again once the workers have ended.
                if now["workers"] > latest.get("workers", 0.0):
                    latest = now
                    before = before or latest
    assert process.returncode == 0, f"the night of {day} ended with status {process.returncode}"
    [directory] = set(workspace.runs_directory.iterdir()) - known
    return {
        **{role: latest[role] - before[role] for role in dict.fromkeys(ROLES.values())},
        "writes of metrics": core_seconds_of_metric_writes(RunDirectory(str(directory))),
    }


def core_seconds_by_role(workspace: Workspace) -> dict[str, float]:
    """Return the core seconds so far of what runs for a workspace."""
    seconds: dict[str, float] = defaultdict(float)
    for process in psutil.process_iter():
        try:
            if process.environ().get(HOME_VARIABLE) != str(workspace.root):
                continue
            command, used = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        role = next((role for words, role in ROLES.items() if words in command), None)
        if role is not None:
            seconds[role] += used.user + used.system
    return seconds


def core_seconds_of_metric_writes(directory: RunDirectory) -> float:
    """Write the metrics of a run once more, as its worker did, and return the core seconds that it took."""
    files = [directory.require_json(f"{STEPS}/{name}") for name in directory.names(STEPS)]
    steps = [[StepMetrics(**document) for document in documents] for documents in files]
    with tempfile.TemporaryDirectory(dir=directory.path(".")) as folder:
        writer = MetricWriter(RunDirectory(folder), num_steps=sum(map(len, steps)), attempt=0)
        started = time.process_time()
        for written_together in steps:
            for step in written_together:
                writer.add(step)
            writer.flush("training")
        return time.process_time() - started


def night_process(workspace: Workspace, data: Path, day: date, *arguments: str) -> subprocess.Popen[str]:
    """Start a night in a process of its own, as a person does."""
    return subprocess.Popen(
        [sys.executable, "-m", "flows.train_ctr", "--data", str(data), "--day", str(day), *arguments],
        env={**os.environ, HOME_VARIABLE: str(workspace.root), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def print_starts(nights: Mapping[str, Sequence[NightStart]]) -> None:
    """Print the parts of each night in a column."""
    columns = [(kind, night.parts_s, night) for kind, several in nights.items() for night in several]
    print(f"{'seconds':<24}{''.join(f'{kind:>9}' for kind, _, _ in columns)}")
    for name, _ in PARTS:
        print(f"{name:<24}{''.join(f'{parts[name]:>9.2f}' for _, parts, _ in columns)}")
    print(
        f"{'from the flow on':<24}{''.join(f'{night.start_to_first_step_s:>9.2f}' for *_, night in columns)}"
    )
    print(f"{'all':<24}{''.join(f'{night.asked_to_first_step_s:>9.2f}' for *_, night in columns)}")


def median_start_s(nights: Sequence[NightStart]) -> float:
    """Return the median time from the start of the flow."""
    return statistics.median(night.start_to_first_step_s for night in nights)


def median_asked_s(nights: Sequence[NightStart]) -> float:
    """Return the median time from when a night was asked for."""
    return statistics.median(night.asked_to_first_step_s for night in nights)


def seconds_of(timestamp: str) -> float:
    """Return a time of Prefect's API in seconds since 1970."""
    return datetime.fromisoformat(timestamp).timestamp()


def figure(name: str, value: float, unit: str) -> dict[str, Any]:
    """Return a figure in the form of the benchmark contract."""
    return {"name": name, "value": value, "unit": unit, "higher_is_better": False}
