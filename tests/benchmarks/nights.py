"""Thirty nights on a stream that drifts: how each ends, and how near models stay to the best reachable AUC.

Days arrive one by one, and three things go wrong on the way: a day's rows are damaged and repaired later, a day
arrives a day late, and prices jump. The night of day n trains day n and judges on day n + 1, which arrived on the
evening before. Each night runs `train-ctr` as the schedule does, in a process of its own with
the parameters of the deployment, and must end as `docs/OPERATING.md` says; afterwards nothing may be recorded as
running, no day may have been trained twice, and no machine may be alive. Every third night loses a machine while it
trains, without notice, and goes on by itself. With `--keep` workspace and data stay.
"""

from __future__ import annotations

import gzip
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from heterps_core.data.reading.days import PARTITION_PREFIX
from heterps_core.data.synthetic.click_stream import write_click_days
from heterps_core.training.step_metrics import read_progress
from heterps_core.training.storage.run_directory import RunDirectory
from infra.ledger.ledger import EntryState, Ledger
from infra.prices.price_catalogue import BUNDLED_SNAPSHOT, write_refreshed
from infra.workspace import HOME_VARIABLE, Workspace
from tasks.records.past_runs import PastRun, past_trainings
from tasks.running.losses import _read_losses
from tests.heterps_core.training.node_processes import kill_machine, nodes_of
from tests.waiting import wait_for

ROWS_PER_DAY = 20_000
FIRST_DAY = date(2026, 10, 1)

BAD, REPAIRED, LATE, PRICES = 7, 9, 14, 20
"""Nights before which a damaged day arrives, is repaired, is late, and prices jump; counted from 1."""

NIGHTS_PER_LOSS = 3

PRICE_JUMP = 4.0
"""Accelerators cost so many times as much from then on."""
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
        num_losses = sum(len(_read_losses(workspace, night.run_id)) for night in recorded)
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
    """Run a night as the schedule does: it gets no day."""
    asked = ("flows.train_ctr", "--provider", "local", "--data", str(data))
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
            f"{error:>+8.1%}"
            if (error := night.metrics.get("measured/prediction_error")) is not None
            else f"{'-':>8}",
        )
        print(f"{night.night:<12}{''.join(cells)}")
    for ending in unexpected(endings):
        print(f"not as documented: {ending}")


def figure(name: str, value: float, unit: str) -> dict[str, Any]:
    """Return a figure in the form of the benchmark contract."""
    return {"name": name, "value": value, "unit": unit, "higher_is_better": False}


class Documented(StrEnum):
    """How a night ends, as `docs/OPERATING.md` says."""

    TRAINED = "trained"
    REFUSED = "refused"
    """Fails and names the damaged day."""

    NOTHING_NEW = "nothing new"
    """Its latest whole day is done, and it says so."""


def documented_ending(night: int) -> Documented:
    """Return how a night ends that nothing else disturbs; a day that is back-filled is trained."""
    if night in (BAD, BAD + 1):
        return Documented.REFUSED
    return Documented.NOTHING_NEW if night == LATE else Documented.TRAINED


def loses_a_machine(night: int) -> bool:
    """Return whether a machine of a night is killed while it trains."""
    return night % NIGHTS_PER_LOSS == 0 and documented_ending(night) is Documented.TRAINED


def day_of(number: int) -> date:
    """Return the date of a day; days, like nights, count from 1."""
    return FIRST_DAY + timedelta(days=number - 1)


class ArrivingDays:
    """A folder in which the days arrive.

    Args:
        folder: Gets `clicks`, where they arrive, and `arriving`, where they wait.
        num_nights: One day more is written.
        rows_per_day: Of clicks.
        seed: Of the stream.
    """

    def __init__(self, folder: Path, *, num_nights: int, rows_per_day: int, seed: int) -> None:
        self.data, self._waiting = folder / "clicks", folder / "arriving"
        self.data.mkdir(exist_ok=True)
        write_click_days(
            self._waiting, first_day=FIRST_DAY, num_days=num_nights + 1, rows_per_day=rows_per_day, seed=seed
        )
        self._arrive(1)

    def evening_before(self, night: int, workspace: Workspace) -> list[int]:
        """Let happen what happens before a night, in the order of nights.

        Returns:
            The nights whose days are to be back-filled first.
        """
        if night != LATE:
            self._arrive(night + 1)
        if night == BAD:
            self._damage(night + 1)
        if night == PRICES:
            raise_prices(workspace)
        if night == LATE + 1:
            self._arrive(night)
            return [LATE]
        if night == REPAIRED:
            self._repair(BAD + 1)
            return [BAD, BAD + 1]
        return []

    def _arrive(self, number: int) -> None:
        """Let a day arrive whole."""
        self._partition(number, self._waiting).rename(self._partition(number, self.data))

    def _damage(self, number: int) -> None:
        """Put a line in the middle of a day's file that is no row, and keep the good file beside the folder."""
        [path] = self._partition(number, self.data).glob("*.tsv.gz")
        good = path.read_bytes()
        self._good_file(number).write_bytes(good)
        rows = gzip.decompress(good).splitlines(keepends=True)
        rows[len(rows) // 2] = b"no row at all\n"
        path.write_bytes(gzip.compress(b"".join(rows)))

    def _repair(self, number: int) -> None:
        """Put the good file back."""
        [path] = self._partition(number, self.data).glob("*.tsv.gz")
        path.write_bytes(self._good_file(number).read_bytes())

    def _partition(self, number: int, folder: Path) -> Path:
        return folder / f"{PARTITION_PREFIX}{day_of(number)}"

    def _good_file(self, number: int) -> Path:
        return self._waiting / f"{day_of(number)}.good"


def raise_prices(workspace: Workspace) -> None:
    """Write prices of today in which accelerators have become expensive."""
    offers = [
        replace(offer, price_usd_per_hour=offer.price_usd_per_hour * PRICE_JUMP)
        if offer.instance_type.accelerator_count
        else offer
        for offer in BUNDLED_SNAPSHOT.offers()
    ]
    write_refreshed(workspace.price_folder, offers, at=datetime.now(UTC))
