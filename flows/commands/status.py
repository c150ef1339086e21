"""Show what runs now: services, runs with their phase, step, speed, cost and time left, machines with their age and
cost, caps and the month's spending, the champion, the next night, and records that still wait for MLflow.

Machines, spending and records are read from this workspace, so that they show also where the Prefect server is down.

examples:
  heterps status
  heterps status --json | jq '.machines | length'
  watch heterps status

exit status: 0, whatever runs and whatever is down; 2 where the workspace cannot be read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flows.service.prefect_connection import TIMEOUT_S, PrefectServer, chosen_server
from flows.service.schedule import NIGHTLY_TIME, TRAIN_CTR, nightly_timezone
from heterps_core.errors import ConfigurationError
from heterps_core.text_table import Table
from infra.billing.caps import Caps
from infra.workspace import Workspace, answers, run_of_launch
from tasks.records.mlflow_names import CHAMPION_ALIAS, DIED, STOPPED, Tag

if TYPE_CHECKING:
    from infra.ledger.ledger import LedgerEntry
    from tasks.records.past_runs import PastRun


_MOST_OPEN, _NEWEST = 1_000, 20
"""Runs that are looked at: open ones, and those of which the last that has ended is shown."""

_LIVE_STATES = ("PENDING", "RUNNING", "PAUSED", "CANCELLING")
_POLLED_WITHIN_S = 120.0
"""A process that serves deployments says so every few seconds; Prefect notes it less often."""

_MACHINE_COLUMNS = {
    **dict.fromkeys(("run", "machine", "provider", "instance", "market"), ""),
    "age": "s",
    "USD so far": ".6f",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, *, now: datetime | None = None) -> None:
    """Print what runs at a time, by default now."""
    status = gather(Workspace.locate(), now=now or datetime.now(UTC))
    print(json.dumps(status, indent=1) if options.json else as_text(status))


def gather(workspace: Workspace, *, now: datetime) -> dict[str, Any]:
    """Ask everything that can be asked, each part by itself; None stands for what cannot be known now."""
    from infra.ledger.ledger import EntryState, Ledger
    from tasks.records.run_record import refused_records, waiting_records

    server = _server(workspace)
    deployment = server and server.ask(f"/deployments/name/{TRAIN_CTR}/{TRAIN_CTR}")
    entries = Ledger(workspace.ledger_path).entries() if workspace.ledger_path.exists() else ()
    open_records, last_run = _records(workspace, entries, now=now)
    machines = [
        {name: getattr(entry, name) for name in ("run_id", "node_id", "provider", "instance_type", "market")}
        | {"age_s": (now - entry.launched_at).total_seconds(), "usd": _usd([entry], now=now)}
        for entry in entries
        if entry.state is EntryState.LAUNCHED and entry.launched_at is not None
    ]
    by_provider = {
        provider: [entry for entry in entries if entry.provider == provider]
        for provider in sorted({entry.provider for entry in entries})
    }
    caps = [field.name for field in fields(Caps)]
    return {
        "workspace": str(workspace.root),
        "services": _services(workspace, server, deployment, now=now),
        "flow_runs": server and _flow_runs(server),
        "open_records": open_records,
        "last_run": last_run,
        "machines": machines,
        "month_usd": {
            name: _usd(of_name, now=now, is_of_month=True) for name, of_name in by_provider.items()
        },
        "caps": deployment and {cap: deployment["parameters"].get(cap) for cap in caps},
        "champion": _champion(workspace),
        "next_night": _next_night(server),
        "num_waiting_records": len(waiting_records(workspace)),
        "num_refused_records": len(refused_records(workspace)),
    }


def as_text(status: dict[str, Any]) -> str:
    """Return the status for a terminal."""
    month = ", ".join(
        f"{usd:.6f} USD {'at list prices (local, not charged)' if name == 'local' else f'({name})'}"
        for name, usd in status["month_usd"].items()
    )
    waiting, refused = status["num_waiting_records"], status["num_refused_records"]
    records = f"{waiting} wait for MLflow to answer" if waiting else "all delivered to MLflow"
    rows = {
        "month so far": month or "0 USD",
        "nightly caps": _caps_text(status["caps"]),
        "last run": _last_run_text(status["last_run"]),
        "champion": status["champion"] or "none yet",
        "next night": status["next_night"],
        "records": records + (f", {refused} were refused by it" if refused else ""),
    }
    lines = [f"Workspace {status['workspace']}", "", "Services", *_rows(status["services"])]
    lines += [
        "",
        "Flow runs",
        *_flow_run_lines(status),
        "",
        "Machines",
        *_machine_lines(status["machines"]),
        "",
    ]
    return "\n".join([*lines, *_rows(rows)])


def _rows(rows: dict[str, str]) -> list[str]:
    return [f"  {name:<16}{text}" for name, text in rows.items()]


def _server(workspace: Workspace) -> PrefectServer | None:
    """Return the server that flows use, where it answers."""
    server = chosen_server(workspace)
    return server if server and answers(f"{server.api_url}/health", timeout_s=TIMEOUT_S) else None


def _services(
    workspace: Workspace, server: PrefectServer | None, deployment: Any, *, now: datetime
) -> dict[str, str]:
    services = workspace.recorded_services()
    mlflow_url = services.mlflow_url if workspace.has_own_tracking and services else workspace.tracking_uri
    is_mlflow_up = mlflow_url.startswith("http") and answers(f"{mlflow_url}/health", timeout_s=TIMEOUT_S)
    polled = deployment and deployment.get("last_polled")
    is_served = polled and (now - datetime.fromisoformat(polled)).total_seconds() < _POLLED_WITHIN_S
    return {
        "Prefect server": f"up       {server.api_url}" if server else "down     start it: make serve",
        "MLflow UI": f"up       {mlflow_url}" if is_mlflow_up else "down     start it: make serve",
        "serving process": "up" if is_served else "down     nothing runs by schedule: make serve",
    }


def _flow_runs(server: PrefectServer) -> list[dict[str, Any]] | None:
    found = server.ask(
        "/flow_runs/filter",
        {"flow_runs": {"state": {"type": {"any_": list(_LIVE_STATES)}}}, "sort": "START_TIME_ASC"},
    )
    return found and [
        {"name": run["name"], "id": run["id"], "state": run["state_name"], "started": run["start_time"]}
        for run in found
    ]


def _records(
    workspace: Workspace, entries: Sequence[LedgerEntry], *, now: datetime
) -> tuple[list[dict[str, Any]] | None, dict[str, Any] | None]:
    """Return the runs whose record is open and the newest that has ended; None where MLflow does not answer."""
    from tasks.records.past_runs import past_trainings

    try:
        running = past_trainings(workspace, most=_MOST_OPEN, status="RUNNING")
        ended = [run for run in past_trainings(workspace, most=_NEWEST) if run.status != "RUNNING"]
    except ConfigurationError:
        return None, None
    open_records = []
    for run in running:
        of_run = [entry for entry in entries if run_of_launch(entry.run_id) == run.run_id]
        known = {"usd": _usd(of_run, now=now), "num_machines": sum(entry.is_open for entry in of_run)}
        open_records.append(run.summary() | _state(workspace, run) | known)
    return open_records, ended[-1].summary() if ended else None


def _state(workspace: Workspace, run: PastRun) -> dict[str, Any]:
    """Return where a run stands; what cannot be read now is left out."""
    from tasks.clusters import nodes_folder
    from tasks.running.run_log import state_of

    try:
        return state_of(workspace, run.run_id, nodes_folder(workspace, run.run_id))
    except (ConfigurationError, OSError, ValueError):
        return {"phase": "not known"}


def _usd(entries: Sequence[LedgerEntry], *, now: datetime, is_of_month: bool = False) -> float:
    """Return what machines of one provider have cost; loads the providers, which an idle workspace does without."""
    if not entries:
        return 0.0
    from infra.billing.budget import spent_usd, start_of_month
    from infra.providers import get_provider

    since = start_of_month(now) if is_of_month else None
    return spent_usd(entries, get_provider(entries[0].provider), now=now, since=since)


def _champion(workspace: Workspace) -> str | None:
    from tasks.records.model_registry import version_called

    try:
        found = version_called(workspace, CHAMPION_ALIAS)
    except ConfigurationError:
        return "not known: the record of runs does not answer"
    if found is None:
        return None
    since = found.tags.get(Tag.SINCE) or found.registered_at.isoformat()
    day = f", trained on {found.day}" if found.day else ""
    return f"version {found.version} ({found.model}{day}) of run {found.run_id}, since {since[:16]} UTC"


def _next_night(server: PrefectServer | None) -> str:
    wanted = {
        "flows": {"name": {"any_": [TRAIN_CTR]}},
        "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
        "sort": "EXPECTED_START_TIME_ASC",
        "limit": 1,
    }
    found = server and server.ask("/flow_runs/filter", wanted)
    if found:
        moment = datetime.fromisoformat(found[0]["expected_start_time"]).astimezone(UTC)
        return f"{moment:%Y-%m-%d %H:%M} UTC"
    return f"none is scheduled; {NIGHTLY_TIME} {nightly_timezone()} once make serve runs"


def _flow_run_lines(status: dict[str, Any]) -> list[str]:
    lines = [
        f"  {run['name']:<28}{run['state']:<12}since {(run['started'] or '-')[:19]}"
        for run in status["flow_runs"] or []
    ]
    for record in status["open_records"] or []:
        lines.append(f"  {record['run_id']:<28}{record['model']}, since {record['started_at'][:19]}")
        lines.append(f"  {'':<28}{_state_text(record)}")
        if record["outcome"] == DIED:
            lines.append(f"  {'':<28}died, with {record['num_machines']} machines: {record['end_reason']}")
    if status["flow_runs"] is None:
        lines.append("  not known from Prefect, whose server does not answer")
    if status["open_records"] is None:
        lines.append("  not known from MLflow, whose store does not answer")
    return lines or ["  none"]


def _last_run_text(last: dict[str, Any] | None) -> str:
    if last is None:
        return "none has ended yet, or the record does not answer"
    reason = "" if last["outcome"] == "finished" else f": {last['end_reason'].removeprefix(f'{STOPPED}: ')}"
    return f"{last['run_id']} {last['outcome']}{reason}"


def _state_text(record: dict[str, Any]) -> str:
    """Return the phase of a run and what is known of it, in one line."""
    parts = [record["phase"]]
    if record.get("step") is not None:
        done = record["step"] / record["num_steps"]
        parts[0] += f": step {record['step']:,} of {record['num_steps']:,} ({done:.0%})"
    if record.get("samples_per_s") is not None:
        parts.append(f"{record['samples_per_s']:,.0f} samples/s")
    parts.append(f"{record['usd']:.6f} USD so far")
    if record.get("seconds_left") is not None:
        parts.append(f"{_age(record['seconds_left'])} of training left")
    return ", ".join(parts)


def _machine_lines(machines: Sequence[dict[str, Any]]) -> list[str]:
    if not machines:
        return ["  none"]
    rows = [[_age(value) if name == "age_s" else value for name, value in each.items()] for each in machines]
    return Table(columns=_MACHINE_COLUMNS, rows=rows).lines()


def _age(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"


def _caps_text(caps: dict[str, float | None] | None) -> str:
    if caps is None:
        return "not known: the nightly deployment is not registered, or its server does not answer"
    given = [
        f"{usd:g} USD {cap.removeprefix('max_usd_').replace('_', ' ')}" for cap, usd in caps.items() if usd
    ]
    return ", ".join(given) or "none"
