"""Let a run write a checkpoint and stop, then see that its machines are gone.

The workers agree within two seconds on the step after which they stop. If they have not ended after --wait
seconds (a hang, a lost flow), the machines are terminated; the newest complete checkpoint is kept.
The run ends as stopped, its model is not judged, its day is not done; it can go on later with resume_run_id=RUN.

examples:
  heterps stop latest
  heterps stop 20261121-0430-1a2b3c4d
  heterps stop 20261121-0430 --wait 0

exit status: 0 when no machine is left; 2 where the run is not known; 5 where machines could not be ended.
"""

from __future__ import annotations

import argparse
import time

from flows.commands import RUN_HELP
from infra.workspace import Workspace

DEFAULT_WAIT_S = 120.0
POLL_INTERVAL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run_id", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--wait",
        type=float,
        default=DEFAULT_WAIT_S,
        metavar="SECONDS",
        help="for the checkpoint; 0 ends the machines at once (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> None:
    """Stop a run."""
    from tasks.clusters import directory_of_run, end_machines_of, machines_of_run, providers_of_run
    from tasks.records.run_ids import find_run, known_runs

    workspace = Workspace.locate()
    providers = providers_of_run(workspace)
    # A lost ledger knows no machines, and their tags do.
    known = known_runs(workspace, among=providers if workspace.ledger_path.exists() else None)
    run_id = find_run(options.run_id, known, family="run with machines")
    live = machines_of_run(workspace, run_id)
    if not live:
        if run_id not in providers and (ended := end_machines_of(workspace, run_id)):
            print(f"the ledger is lost; {ended} machines of run {run_id} were ended as they were")
            return
        print(
            f"run {run_id} has no machines: nothing to stop; one that waits for spot machines ends with its flow "
            f"run (prefect flow-run cancel)"
        )
        return
    # Also where nothing waits for it: a run that is not asked to stop goes on with other machines.
    directory_of_run(workspace, providers[run_id], run_id).request_stop()
    if options.wait > 0:
        print(f"asked {len(live)} machines for a checkpoint and a stop; waiting up to {options.wait:.0f} s")
        deadline_s = time.monotonic() + options.wait
        while live and time.monotonic() < deadline_s:
            time.sleep(POLL_INTERVAL_S)
            live = machines_of_run(workspace, run_id)
    ended = end_machines_of(workspace, run_id)
    print(f"run {run_id} has ended" + (f"; {ended} machines were ended as they were" if ended else ""))
