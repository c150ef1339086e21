"""Ends the remains of dead runs: machines whose lease is over, and records that still say running.

The third of the four layers of teardown. It runs every five minutes beside the serving process, and may
run at any time by hand (`python -m flows.sweep_orphans`); a second sweep finds nothing left to do.
"""

from __future__ import annotations

import sys

from flows.parameter_model import FlowParameters

if __name__ == "__main__":
    # Before Prefect is loaded, so that --help and a wrong value are answered at once.
    from flows.command_line import main

    sys.exit(main("flows.sweep_orphans", FlowParameters))

from prefect import flow

from flows.service.schedule import SWEEP_ORPHANS
from infra.workspace import Workspace
from tasks.running.progress import log_step
from tasks.sweeping import close_dead_records, end_orphans


@flow(name=SWEEP_ORPHANS)
def sweep_orphans() -> int:
    """End the machines of dead runs and close their records.

    Returns:
        How many machines were ended and records closed together.

    Raises:
        ProvisioningError: A machine could not be ended or its end not be written down, or a provider did not
            answer; names them. The others are swept, and records are closed.
    """
    workspace = Workspace.locate().create()
    swept = end_orphans(workspace)
    for machine in swept.machines:
        log_step("orphan", str(machine))
    for note in swept.notes:
        log_step("ledger", note)
    closed = close_dead_records(workspace, swept.machines)
    for run_id in closed:
        log_step("closed", f"the record of run {run_id}")
    ended = sum(machine.problem is None for machine in swept.machines)
    log_step("swept", f"{ended} machines ended, {len(closed)} records closed")
    swept.check_clean()
    return ended + len(closed)
