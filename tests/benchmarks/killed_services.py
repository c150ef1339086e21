"""Thirty nights of `make serve` in which its processes are killed at random moments: what came of it, what was left.

The story is that of `thirty_nights`, and each night the deployment `train-ctr` is asked for. In 20 of the nights
SIGKILL ends the supervisor (serve), Prefect's server, or both at a random moment; who started `make serve` starts it
again, as systemd does. The night's run must then come to an end of its own; a night that did not end as documented is
asked for once more, and must. After each night every day must be trained once, and nothing may be left that is not
so: no run that is called running, no flow run that nobody asked for, no machine, no process too many, no record that
waits to be delivered. `docs/OPERATING.md` says what is to be expected.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.service.schedule import BACKFILL_CTR, NIGHTLY_VARIABLE, SWEEP_ORPHANS, TRAIN_CTR
from infra.ledger.ledger import EntryState, Ledger
from tasks.records.mlflow_store import outbox
from tasks.records.past_runs import past_trainings
from tests.benchmarks.served_processes import kind_of, surplus
from tests.benchmarks.thirty_nights import ArrivingDays, Documented, day_of, documented_ending
from tests.served_workspace import ServedWorkspace, wait_for

ROWS_PER_DAY = 8_000

NIGHTS_PER_CASE = 1.5
"""Thirty nights for twenty kills."""

SERVE, SERVER, BOTH = "serve", "server", "both"
TARGETS = (SERVE, SERVER, BOTH)

ENDS_WITHIN_S = 300.0
"""A night takes a minute; a run whose process is gone is called crashed after 90 s without a heartbeat."""

COMPLETED = "COMPLETED"
TERMINAL = {COMPLETED, "FAILED", "CANCELLED", "CRASHED"}

STATE_OF = {
    Documented.TRAINED: COMPLETED,
    Documented.REFUSED: "FAILED",
    Documented.NOTHING_NEW: COMPLETED,
}
"""Prefect's state of a run that ended as documented."""


@dataclass(frozen=True, slots=True)
class Kill:
    """What is killed in a night, and when."""

    target: str
    after_s: float
    """Since the run was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of one night."""

    kill: Kill | None

    ended_as: str
    """State of the run that was asked for first."""

    ended_after_s: float
    """Since the kill; since it was asked for where nothing was killed."""

    wrong: Sequence[str]
    """What was left that is not so."""


def run(*, seed: int = 0, num_cases: int = 20, keep: Path | None = None) -> list[dict[str, Any]]:
    """Run the nights, print a line for each and return the figures in the form of the benchmark contract."""
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = run_nights(keep or Path(temporary), num_kills=num_cases, random=random.Random(seed))
    hit = [outcome for outcome in outcomes if outcome.kill is not None]
    ends = Counter(outcome.ended_as for outcome in hit)
    print("the runs that were hit ended as " + ", ".join(f"{state} ({n})" for state, n in ends.most_common()))
    figures = [
        figure("nights", len(outcomes), "nights"),
        figure("nights_with_a_kill", len(hit), "nights"),
        figure("nights_with_something_wrong", sum(bool(outcome.wrong) for outcome in outcomes), "nights"),
        figure("kill_to_end_of_run_median", statistics.median(each.ended_after_s for each in hit), "s"),
        figure("kill_to_end_of_run_worst", max(each.ended_after_s for each in hit), "s"),
    ]
    for entry in figures:
        print(f"{entry['name']:<36}{entry['value']:>10.1f} {entry['unit']}")
    return figures


def run_nights(folder: Path, *, num_kills: int, random: random.Random) -> list[Outcome]:
    """Serve a workspace and see the nights through; the first two are left alone.

    The second says how long a night is; the first also measures layers.
    """
    num_nights = math.ceil(NIGHTS_PER_CASE * num_kills)
    killed_nights = set(random.sample(range(3, num_nights + 1), num_kills))
    days = ArrivingDays(
        folder, num_nights=num_nights, rows_per_day=ROWS_PER_DAY, seed=random.randrange(1_000)
    )
    nightly = {"data": str(days.data), "budget_evaluations": 200}
    served = ServedWorkspace(folder / "home", settings={NIGHTLY_VARIABLE: json.dumps(nightly)})
    try:
        served.wait_until_up()
        nights = KilledNights(served=served, days=days)
        outcomes = []
        for night in range(1, num_nights + 1):
            kill = None
            if night in killed_nights:
                kill = Kill(random.choice(TARGETS), random.uniform(0, outcomes[1].ended_after_s))
            outcomes.append(nights.see_through(night, kill))
    finally:
        served.stop()
    return outcomes


@dataclass(kw_only=True)
class KilledNights:
    """The nights of one served workspace."""

    served: ServedWorkspace
    days: ArrivingDays
    asked: list[str] = field(default_factory=list)
    """Ids of the runs of `train-ctr` that were asked for."""

    trained: list[int] = field(default_factory=list)
    """Nights that should have trained by now, back-filled ones among them."""

    def see_through(self, night: int, kill: Kill | None) -> Outcome:
        """Let the days of a night arrive, ask for it, kill, and see it through."""
        wrong = [
            f"the back-fill of {day_of(missed)} ended as {state}"
            for missed in self.days.evening_before(night, self.served.workspace)
            if (state := self.backfill(missed)) != COMPLETED
        ]
        documented = documented_ending(night)
        asked, since_s = self.ask_for(TRAIN_CTR), time.perf_counter()
        if kill is not None:
            time.sleep(kill.after_s)
            since_s = time.perf_counter()
            self.kill(kill.target)
        ended_as = self.end_of(asked)
        ended_after_s = time.perf_counter() - since_s
        if ended_as != STATE_OF[documented]:
            again = self.end_of(self.ask_for(TRAIN_CTR))
            if again != STATE_OF[documented]:
                wrong.append(f"it was asked for again and ended as {again}, not as {documented}")
        if documented is Documented.TRAINED:
            self.trained.append(night)
        self.sweep()
        wrong += self.what_is_wrong()
        was_killed = "" if kill is None else f"{kill.target} killed after {kill.after_s:.1f} s"
        print(
            f"night {night:>2} ({documented}): {was_killed:<27} ended as {ended_as:<9} after "
            f"{ended_after_s:5.1f} s  {'; '.join(wrong) or 'nothing wrong'}",
            flush=True,
        )
        return Outcome(kill=kill, ended_as=ended_as, ended_after_s=ended_after_s, wrong=wrong)

    def backfill(self, night: int) -> str:
        """Train one day that a night has missed; return the state in which the back-fill ended."""
        self.trained.append(night)
        day = str(day_of(night))
        settings = {"budget_evaluations": 200}
        return self.end_of(
            self.ask_for(
                BACKFILL_CTR, first_day=day, last_day=day, data=str(self.days.data), settings=settings
            )
        )

    def sweep(self) -> None:
        """Sweep to the end; a sweep is refused while the one that runs every five minutes is at work."""
        wait_for(
            lambda: self.end_of(self.ask_for(SWEEP_ORPHANS)) == COMPLETED,
            timeout_s=ENDS_WITHIN_S,
            what="a sweep",
        )

    def ask_for(self, deployment: str, **parameters: Any) -> str:
        """Ask for a run as `prefect deployment run` does; return its id."""
        found = self.served.ask("/deployments/filter", {"deployments": {"name": {"any_": [deployment]}}})
        asked: str = self.served.ask(
            f"/deployments/{found[0]['id']}/create_flow_run", {"parameters": parameters}
        )["id"]
        if deployment == TRAIN_CTR:
            self.asked.append(asked)
        return asked

    def end_of(self, flow_run_id: str) -> str:
        """Wait for the end of a flow run and return the state in which it ended."""

        def ended() -> str | None:
            [found] = self.served.ask("/flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})
            return found["state_type"] if found["state_type"] in TERMINAL else None

        state: str = wait_for(ended, timeout_s=ENDS_WITHIN_S, what=f"the end of flow run {flow_run_id}")
        return state

    def kill(self, target: str) -> None:
        """Kill the supervisor, the server, or both at once; return when all is up again.

        Who started `make serve` starts it again; a server by itself is the supervisor's to start.
        """
        restarts = self.num_restarts()
        if target in (SERVE, BOTH):
            self.served.process.kill()
        if target in (SERVER, BOTH):
            for process in self.served.processes():
                if kind_of(process) == "prefect server":
                    process.kill()
        if target == SERVER:
            wait_for(
                lambda: self.num_restarts() > restarts, timeout_s=120, what="the restart of Prefect's server"
            )
            return
        self.served.process.wait(10)
        self.served.restart()
        self.served.wait_until_up()

    def num_restarts(self) -> int:
        """Return how often Prefect's server was started again since the start of `make serve`."""
        return self.served.output.read_text().count("Prefect server is up again")

    def what_is_wrong(self) -> list[str]:
        """Return what stands that is not so."""
        trained = Counter(night.night for night in self.records() if night.status == "FINISHED")
        wanted = Counter(str(day_of(night)) for night in self.trained)
        wrong = [
            f"{day} was trained {trained[day]} times and not {wanted[day]} times"
            for day in sorted(trained | wanted)
            if trained[day] != wanted[day]
        ]
        wrong += [
            f"record {past.run_id} is called running" for past in self.records() if past.status == "RUNNING"
        ]
        now = datetime.now(UTC)
        runs = self.served.flow_runs(TRAIN_CTR)
        wrong += [
            f"flow run {each['id']} is {each['state_type']}"
            for each in runs
            if each["state_type"] not in TERMINAL
            and datetime.fromisoformat(each["expected_start_time"]) < now
        ]
        # A day of a back-fill is a run within a run.
        by_itself = [each for each in runs if each["start_time"] and not each["parent_task_run_id"]]
        unasked = [each for each in by_itself if each["id"] not in self.asked]
        wrong += [f"flow run {each['id']} was not asked for" for each in unasked]
        due = Counter(each["expected_start_time"] for each in runs if each["state_type"] == "SCHEDULED")
        wrong += [f"{count} runs are scheduled for {at}" for at, count in due.items() if count > 1]
        wrong += [
            f"machine {entry.node_id} of {entry.run_id} is {entry.state}"
            for entry in Ledger(self.served.workspace.ledger_path).entries()
            if entry.state in (EntryState.INTENDED, EntryState.LAUNCHED)
        ]
        if not outbox(self.served.workspace).is_empty:
            wrong.append("records wait to be delivered")
        return wrong + self.processes_too_many()

    def processes_too_many(self) -> list[str]:
        """Return what runs besides the services, once processes that are ending have had a moment."""
        found: list[str] = []

        def is_quiet() -> bool:
            found[:] = surplus(self.served)
            return not found

        try:
            wait_for(is_quiet, timeout_s=30, what="the end of all runs")
        except AssertionError:
            return found
        return []

    def records(self) -> Any:
        """Return MLflow's records of all runs."""
        return past_trainings(self.served.workspace, most=1_000)


def figure(name: str, value: float, unit: str) -> dict[str, Any]:
    """Return a figure in the form of the benchmark contract."""
    return {"name": name, "value": value, "unit": unit, "higher_is_better": False}
