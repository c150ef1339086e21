"""What a run cost as figures of its record, also where it did not come to its end and never wrote a report."""

from __future__ import annotations

from infra.ledger.ledger import EntryState, Ledger
from infra.workspace import Workspace
from tasks.clusters import bills_of_run, providers_of_run, run_of_launch


def cost_metrics(workspace: Workspace, run_id: str) -> dict[str, float | None]:
    """Return what the ledger knows that a run has cost so far; nothing for a run of another workspace.

    A run that had no machine has cost 0, where its folder shows that it was begun here.
    """
    provider = providers_of_run(workspace).get(run_id)
    if provider is not None:
        usd = sum(bill.total_usd for bill in bills_of_run(workspace, provider, run_id))
    elif workspace.run_directory(run_id).exists():
        usd = 0.0
    else:
        return {}
    return {"cost/billed_usd": usd, "night/usd": four_digits(usd)}


def runs_with_machines(workspace: Workspace) -> set[str]:
    """Return the runs whose machines nobody has ended yet, as far as the ledger knows: their bills still grow."""
    if not workspace.ledger_path.exists():
        return set()
    return {
        run_of_launch(entry.run_id)
        for entry in Ledger(workspace.ledger_path).entries()
        if entry.state is EntryState.LAUNCHED
    }


def four_digits(value: float | None) -> float | None:
    """Return a figure as the first page of MLflow has it, which shows numbers as they are.

    Example:
        >>> four_digits(0.1234567)
        0.1235
    """
    return None if value is None else float(f"{value:.4g}")
