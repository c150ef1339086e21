"""Nights of `make serve` in which its processes are killed at random moments: what each came to, and what was left.

Days arrive in a served workspace, and for each the deployment `train-ctr` is asked for. At a random moment SIGKILL
ends the supervisor (serve), Prefect's server, or both; who started `make serve` starts it again, as systemd does.
The night's run must then come to an end of its own; a day that it did not train is asked for once more, and must be
trained. After each case every day must be trained once, and nothing may be left that is not so: no run that is
called running, no flow run that nobody asked for, no machine, no process too many, no record that waits to be
delivered. `docs/OPERATING.md` says what is to be expected.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from flows.schedule import NIGHTLY_VARIABLE, SWEEP_ORPHANS, TRAIN_CTR
from heterps_core.data.click_days import write_click_days
from heterps_core.data.days import PARTITION_PREFIX
from infra.ledger import EntryState, Ledger
from tasks.mlflow_store import outbox
from tasks.nights import night_of
from tasks.past_runs import past_trainings
from tests.served_workspace import ServedWorkspace, wait_for

FIRST_DAY = date(2026, 10, 1)
ROWS_PER_DAY = 8_000

SERVE, SERVER, BOTH = "serve", "server", "both"
TARGETS = (SERVE, SERVER, BOTH)

ENDS_WITHIN_S = 300.0
"""A night takes a minute; a run whose process is gone is called crashed after 90 s without a heartbeat."""

TERMINAL = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}

SERVICES = {
    "prefect server": 1,
    "mlflow server": 1,
    "flows.deployments": 1,
    "flows.guard": 1,
    "flows.serve": 1,
}
"""Processes of a served workspace in which nothing runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of one case."""

    case: int
    target: str
    killed_after_s: float
    """Since the run was asked for."""

    ended_as: str
    """State of the run that was hit."""

    ended_after_s: float
    """Since the kill."""

    wrong: Sequence[str]
    """What was left that is not so."""


def run(*, seed: int = 0, num_cases: int = 20, keep: Path | None = None) -> list[dict[str, Any]]:
    """Run the cases, print a line for each and return the figures in the form of the benchmark contract."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        outcomes = run_cases(folder, num_cases=num_cases, random=random.Random(seed))
    ends = Counter(outcome.ended_as for outcome in outcomes)
    print("the runs that were hit ended as " + ", ".join(f"{state} ({n})" for state, n in ends.most_common()))
    figures = [
        figure("cases", len(outcomes), "cases"),
        figure("cases_with_something_wrong", sum(bool(outcome.wrong) for outcome in outcomes), "cases"),
        figure("kill_to_end_of_run_median", statistics.median(each.ended_after_s for each in outcomes), "s"),
        figure("kill_to_end_of_run_worst", max(each.ended_after_s for each in outcomes), "s"),
    ]
    for entry in figures:
        print(f"{entry['name']:<36}{entry['value']:>10.1f} {entry['unit']}")
    return figures


def run_cases(folder: Path, *, num_cases: int, random: random.Random) -> list[Outcome]:
    """Serve a workspace, train a first day undisturbed, then kill once in each of the nights that follow."""
    data, arriving = folder / "clicks", folder / "arriving"
    data.mkdir()
    write_click_days(
        arriving,
        first_day=FIRST_DAY,
        num_days=num_cases + 2,
        rows_per_day=ROWS_PER_DAY,
        seed=random.randrange(1_000),
    )
    nightly = {"data": str(data), "budget_evaluations": 200}
    served = ServedWorkspace(folder / "home", settings={NIGHTLY_VARIABLE: json.dumps(nightly)})
    try:
        served.wait_until_up()
        arrive(1, arriving, data)
        arrive(2, arriving, data)
        nights = KilledNights(served=served, asked=[])
        started_s = time.perf_counter()
        assert nights.train() == "COMPLETED", served.serving_log()
        night_s = time.perf_counter() - started_s
        print(f"a night that nothing disturbs takes {night_s:.1f} s from being asked for", flush=True)
        outcomes = []
        for case in range(1, num_cases + 1):
            arrive(case + 2, arriving, data)
            outcomes.append(
                nights.case(case, target=random.choice(TARGETS), after_s=random.uniform(0, night_s))
            )
    finally:
        served.stop()
    return outcomes


@dataclass(kw_only=True)
class KilledNights:
    """The nights of one served workspace."""

    served: ServedWorkspace
    asked: list[str]
    """Ids of the runs of `train-ctr` that were asked for."""

    def case(self, case: int, *, target: str, after_s: float) -> Outcome:
        """Ask for a night, kill, and see it through."""
        asked = self.ask_for(TRAIN_CTR)
        time.sleep(after_s)
        killed_s = time.perf_counter()
        self.kill(target)
        ended_as = self.end_of(asked)
        ended_after_s = time.perf_counter() - killed_s
        wrong = []
        if not self.is_trained(case + 1) and (again := self.train()) != "COMPLETED":
            wrong.append(f"the day was asked for again and ended as {again}")
        self.sweep()
        wrong += self.what_is_wrong(num_days=case + 1)
        outcome = Outcome(
            case=case,
            target=target,
            killed_after_s=after_s,
            ended_as=ended_as,
            ended_after_s=ended_after_s,
            wrong=wrong,
        )
        print(
            f"case {case:>2}: {target:<6} killed after {after_s:5.1f} s; the run ended as {ended_as:<9} "
            f"{ended_after_s:5.1f} s later  {'; '.join(wrong) or 'nothing wrong'}",
            flush=True,
        )
        return outcome

    def train(self) -> str:
        """Ask for a night, wait for its end and return its state."""
        return self.end_of(self.ask_for(TRAIN_CTR))

    def sweep(self) -> None:
        """Sweep to the end; a sweep is refused while the one that runs every five minutes is at work."""
        wait_for(
            lambda: self.end_of(self.ask_for(SWEEP_ORPHANS)) == "COMPLETED",
            timeout_s=ENDS_WITHIN_S,
            what="a sweep",
        )

    def ask_for(self, deployment: str) -> str:
        """Ask for a run as `prefect deployment run` does; return its id."""
        found = self.served.ask("/deployments/filter", {"deployments": {"name": {"any_": [deployment]}}})
        asked: str = self.served.ask(f"/deployments/{found[0]['id']}/create_flow_run", {})["id"]
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

    def is_trained(self, day: int) -> bool:
        """Tell whether a day, counted from 1, has been trained to its end."""
        return str(day_of(day)) in self.trained_days()

    def trained_days(self) -> list[str]:
        """Return the days of all runs that were trained to their end."""
        return [night.day for night in map(night_of, self.records()) if night.status == "FINISHED"]

    def what_is_wrong(self, *, num_days: int) -> list[str]:
        """Return what stands that is not so, after days 1 to `num_days` were seen to."""
        wrong = []
        trained = Counter(self.trained_days())
        for number in range(1, num_days + 1):
            if (times := trained[str(day_of(number))]) != 1:
                wrong.append(f"{day_of(number)} was trained {times} times")
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
        unasked = [each for each in runs if each["start_time"] and each["id"] not in self.asked]
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


def surplus(served: ServedWorkspace) -> list[str]:
    """Return the processes of a workspace that are not its services, or more of one than there should be."""
    left = Counter(SERVICES)
    found = []
    for process in served.processes():
        kind = kind_of(process)
        # Children of a service, such as MLflow's worker, are its own.
        if kind is None and has_service_above(process):
            continue
        left[kind or ""] -= 1
        if left[kind or ""] < 0:
            found.append(f"process {process.pid} is left: {' '.join(words_of(process))[:80]}")
    return found


def has_service_above(process: psutil.Process) -> bool:
    """Tell whether a process was started by a service that runs no flows."""
    try:
        return any(kind_of(each) in ("prefect server", "mlflow server") for each in process.parents())
    except psutil.Error:
        return False


def kind_of(process: psutil.Process) -> str | None:
    """Return which service a process is, None where it is none."""
    words = " ".join(words_of(process)[1:4]).removeprefix("-m ")
    return next((name for name in SERVICES if words.startswith(name)), None)


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty where it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def arrive(number: int, arriving: Path, data: Path) -> None:
    """Let a day, counted from 1, arrive whole."""
    name = f"{PARTITION_PREFIX}{day_of(number)}"
    (arriving / name).rename(data / name)


def day_of(number: int) -> date:
    """Return the date of a day; days count from 1."""
    return FIRST_DAY + timedelta(days=number - 1)


def figure(name: str, value: float, unit: str) -> dict[str, Any]:
    """Return a figure in the form of the benchmark contract."""
    return {"name": name, "value": value, "unit": unit, "higher_is_better": False}
