"""The sweep as two steps: machines first, then the records of the runs that they belonged to."""

from __future__ import annotations

from collections.abc import Sequence

from infra.machines.sweeper import Sweep, SweptMachine, sweep_workspace
from infra.workspace import Workspace, run_of_launch
from tasks.clusters import cost_metrics, live_run_ids, runs_with_machines
from tasks.records.mlflow_store import store_must_answer
from tasks.records.run_record import deliver, waiting_records
from tasks.running.run_lifecycle import close_dead_run, runs_without_process
from tasks.steps import REPEATABLE, step


@step("end orphans", **REPEATABLE)
def end_orphans(workspace: Workspace) -> Sweep:
    """End machines whose lease is over or whose owner is dead, on every provider in use."""
    return sweep_workspace(workspace)


@step("close dead records", **REPEATABLE)
def close_dead_records(workspace: Workspace, swept: Sequence[SweptMachine]) -> list[str]:
    """Write the records that wait to MLflow, then close the runs whose flow is gone; return their ids.

    A run is dead where its process on this host is gone, or where the sweep ended its machines and left
    it none. A run that died before its launch has no machine, so the process decides there. While the ledger has
    rented machines of it, whose lease is not over, its record stays open, and is closed with its whole cost.
    """
    reasons = {
        run_of_launch(machine.run_id): f"machines swept: {machine.reason}"
        for machine in swept
        if machine.problem is None
    }
    for run_id in waiting_records(workspace):
        if not deliver(workspace, run_id):
            # MLflow does not answer; the next sweep asks again.
            return []
    with store_must_answer(workspace):
        for run_id in runs_without_process(workspace):
            reasons.setdefault(run_id, "the process of the flow is gone")
        for run_id in live_run_ids(workspace) | runs_with_machines(workspace):
            reasons.pop(run_id, None)
        return [
            run_id
            for run_id, reason in sorted(reasons.items())
            if close_dead_run(
                workspace, run_id, status="KILLED", reason=reason, metrics=cost_metrics(workspace, run_id)
            )
        ]
