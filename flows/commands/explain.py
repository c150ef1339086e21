"""Show all that is known of a run: its plan, stages, bill, quality and gates; then why its plan was chosen: reasons,
the next best plan, the next price that would change it, and what more throughput would have cost; and how many
values each column has in how large a table. Nothing is computed again: these are the words and figures of the
time.

examples:
  heterps explain latest
  heterps explain 20261121-0430-1a2b3c4d
  heterps explain 20261121 --json

exit status: 0; 2 where the run is not known, or ended before it had a plan.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from flows.commands import RUN_HELP
from infra.workspace import Workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run_id", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Print the explanation."""
    from tasks.records.run_files import read_explanation, read_report
    from tasks.records.run_ids import find_run, known_runs

    workspace = Workspace.locate()
    run_id = find_run(options.run_id, known_runs(workspace))
    document = read_explanation(workspace, run_id)
    if options.json:
        print(json.dumps(document, indent=1))
        return
    if report := read_report(workspace, run_id):
        print("\n".join([report.lstrip(), "", document["text"], *_tables_of(document)]))
        return
    model = f": {document['model']} on {document['data']}" if "model" in document else ""
    summary = [document["summary"], ""] if "summary" in document else [""]
    print("\n".join([f"Run {document['run_id']}{model}", *summary, document["text"], *_tables_of(document)]))


def _tables_of(document: dict[str, Any]) -> list[str]:
    """Return the lines about tables; none of a run that was kept without them."""
    return ["", document["tables"]] if "tables" in document else []
