"""`heterps explain`: why a past run had its plan, from what was kept of it."""

from __future__ import annotations

import argparse
import json

from flows.commands import RUN_HELP
from infra.workspace import Workspace

HELP = """\
Show why a run's plan was chosen: reasons, the next best plan, at which prices the choice flips, and what more
throughput would have cost; and which columns have how many values in how large a table. Nothing is computed again:
these are the words and figures of the time.

examples:
  heterps explain latest
  heterps explain 20261121-0430-1a2b3c4d
  heterps explain 20261121 --json

exit status: 0; 2 where the run is not known, or ended before it had a plan.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run_id", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Print the explanation."""
    from tasks.records.runs import find_run, known_runs, read_explanation

    workspace = Workspace.locate()
    document = read_explanation(workspace, find_run(options.run_id, known_runs(workspace)))
    if options.json:
        print(json.dumps(document, indent=1))
        return
    model = f": {document['model']} on {document['data']}" if "model" in document else ""
    summary = [document["summary"], ""] if "summary" in document else [""]
    tables = ["", document["tables"]] if "tables" in document else []
    print("\n".join([f"Run {document['run_id']}{model}", *summary, document["text"], *tables]))
