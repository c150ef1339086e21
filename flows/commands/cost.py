"""Show what runs cost: seconds of every instance times the price that was frozen when it was launched.

Without RUN: one line a run, the newest last, and the sum of this month. With RUN: its bill line by line, all
launches of it.

examples:
  heterps cost
  heterps cost latest
  heterps cost 20261121-0430-1a2b3c4d --json

exit status: 0; 2 where a run is not known, or the ledger cannot be read.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime

from flows.commands import RUN_HELP
from heterps_core.text_table import Table
from infra.workspace import Workspace

COLUMNS = {
    "run": "",
    "provider": "",
    "launches": "d",
    "instance-seconds": ",.0f",
    "USD": ".6f",
    "of it failed launches": ".6f",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run_id", nargs="?", metavar="RUN", help=f"{RUN_HELP} (default: all runs)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Print bills."""
    workspace = Workspace.locate()
    if options.run_id is not None:
        _print_bill(workspace, options.run_id, as_json=options.json)
    else:
        _print_runs(workspace, as_json=options.json)


def _print_bill(workspace: Workspace, named: str, *, as_json: bool) -> None:
    from tasks.clusters import bills_of_run, providers_of_run
    from tasks.records.run_ids import find_run, known_runs
    from tasks.reports.bills import bill_text
    from tasks.running.losses import restarts_text

    providers = providers_of_run(workspace)
    run_id = find_run(named, known_runs(workspace, among=providers), family="run with machines")
    bills = bills_of_run(workspace, providers[run_id], run_id)
    if as_json:
        print(json.dumps([bill.to_json() for bill in bills], indent=2))
    else:
        restarts = restarts_text(workspace, run_id)
        print(
            "\n\n".join([bill_text(bill) for bill in bills] + ([] if restarts is None else [f"  {restarts}"]))
        )


def _print_runs(workspace: Workspace, *, as_json: bool) -> None:
    from infra.billing.budget import start_of_month
    from infra.providers import get_provider
    from tasks.clusters import bills_of_run, providers_of_run
    from tasks.running.budget import spending_of

    now = datetime.now(UTC)
    providers = providers_of_run(workspace)
    bills = {run_id: bills_of_run(workspace, provider, run_id) for run_id, provider in providers.items()}
    months = {
        provider: spending_of(workspace, provider, "", now=now).month_usd
        for provider in sorted(set(providers.values()))
    }
    totals = {
        run_id: {
            "total_usd": sum(bill.total_usd for bill in launches),
            "failed_launches_usd": sum(bill.failed_launches_usd for bill in launches),
        }
        for run_id, launches in bills.items()
    }
    if as_json:
        runs = [{"run_id": run_id, "provider": providers[run_id], **usd} for run_id, usd in totals.items()]
        print(json.dumps({"runs": runs, "month": f"{now:%Y-%m}", "month_usd": months}, indent=2))
        return
    if not bills:
        print("no run has had machines yet")
        return
    rows = [
        [
            run_id,
            providers[run_id],
            len(launches),
            sum(line.instance_seconds for bill in launches for line in bill.lines),
            *totals[run_id].values(),
        ]
        for run_id, launches in bills.items()
    ]
    print("\n".join(Table(columns=COLUMNS, rows=rows).lines()))
    for provider, usd in months.items():
        charged = " at list prices; nothing is charged" if get_provider(provider).is_dry_run else ""
        print(f"  since {start_of_month(now):%Y-%m-%d}, provider {provider}: {usd:.6f} USD{charged}")
