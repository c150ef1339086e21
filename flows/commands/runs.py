"""Show the last runs, the newest last: what each was, how it ended, what it cost, and whether it was fast and good.

The figures are those of MLflow, under the same names in every run. A run whose process is gone has died, and says how
to go on; one that heterps stop ended is stopped. USD of a dry run are list prices; nothing is charged.

examples:
  heterps runs
  heterps runs --last 100 --status failed
  heterps runs --model ctrdnn --day 2026-11-20
  heterps runs --json | jq -r '.[] | [.run_id, .auc] | @tsv'

exit status: 0, also where no run fits; 2 where an argument cannot be, or the record of runs cannot be read.
"""

from __future__ import annotations

import argparse
import json
from datetime import date

from flows.commands import whole_number
from heterps_core.text_table import Table
from infra.workspace import Workspace
from tasks.records.mlflow_names import OUTCOMES

DEFAULT_LAST = 20
_MOST_READ = 1_000
"""Runs that filters look at, the newest."""

COLUMNS = {
    **dict.fromkeys(("run", "day", "model", "scheduler", "plan", "status"), ""),
    "USD": ".6f",
    "samples/s": ",.0f",
    "AUC": ".4f",
    "how it ended": "",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--last",
        type=whole_number(_MOST_READ),
        default=DEFAULT_LAST,
        metavar="N",
        help="how many (default: %(default)s)",
    )
    parser.add_argument("--model", metavar="NAME", help="only of this model")
    parser.add_argument("--status", choices=OUTCOMES, help="only those that ended so, or still run")
    parser.add_argument(
        "--day", type=_day, metavar="YYYY-MM-DD", help="only those that trained on this day's data"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Print the runs."""
    from tasks.records.past_runs import past_trainings

    has_filter = options.model or options.status or options.day
    workspace = Workspace.locate()
    past = past_trainings(workspace, most=_MOST_READ if has_filter else options.last)
    lines = [
        line
        for line in past
        if options.model in (None, line.model)
        and options.status in (None, line.outcome)
        and options.day in (None, line.day)
    ][-options.last :]
    if options.json:
        print(json.dumps([line.summary() for line in lines], indent=1))
    elif not lines:
        print("no run fits" if has_filter else "no run has been recorded yet")
    else:
        rows = [
            [
                line.run_id,
                line.day,
                line.model,
                line.parameters.get("method"),
                line.plan or None,
                line.outcome,
                line.usd,
                line.throughput_samples_per_s,
                line.auc,
                line.end_reason or None,
            ]
            for line in lines
        ]
        print("\n".join(Table(columns=COLUMNS, rows=rows).lines()))


def _day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a day such as 2026-11-20, got {text!r}") from error
