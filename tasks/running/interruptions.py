"""What becomes of a run whose machines the cloud preempts: it is noted, and the run goes on with others.

The notice comes two minutes ahead. The workers write a checkpoint and end (`heterps_core/training/node/leaving.py`);
the flow ends what is left of the fleet, plans again for what can still be bought, and resumes the run.
"""

from __future__ import annotations

import json
from pathlib import Path

from heterps_core.cluster import Cluster
from heterps_core.hardware import Market
from heterps_core.json_file import replace_json
from heterps_core.training.node.node_life import leaving_nodes
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.training_run import TrainingRun
from infra.ledger.ledger import EndReason, Ledger
from infra.workspace import Workspace
from tasks.clusters import launch_ids_of

INTERRUPTIONS_FILE = "interruptions.json"


def note_interruptions(
    workspace: Workspace,
    run_id: str,
    *,
    run_directory: RunDirectory,
    cluster: Cluster,
    lost_node_id: str | None = None,
) -> list[str]:
    """Write down which machines of a launch were told that they will be preempted; return their node ids.

    A spot machine that was lost without a notice (`lost_node_id`) is written down with them.
    """
    leaving = sorted(leaving_nodes(run_directory))
    lost = [
        node.node_id for node in cluster.nodes if node.node_id == lost_node_id and node.market is Market.SPOT
    ]
    if leaving or lost:
        noted = _noted(workspace, run_id) | {(cluster.run_id, node_id) for node_id in (*leaving, *lost)}
        replace_json(_path(workspace, run_id), sorted(noted))
    return leaving


def num_spot_losses(workspace: Workspace, run_id: str) -> int:
    """Return how many spot instances of all launches of a run were preempted, with a notice or without."""
    ledger = Ledger(workspace.ledger_path)
    found_gone = {
        (launch_id, entry.node_id)
        for launch_id in launch_ids_of(ledger, run_id)
        for entry in ledger.entries(run_id=launch_id)
        if entry.market is Market.SPOT and entry.reason == EndReason.GONE
    }
    return len(found_gone | _noted(workspace, run_id))


def interruption_summary(training: TrainingRun, leaving: list[str]) -> str:
    """Return what happened and what comes next, in one line."""
    step = training.steps[-1].step if training.steps else 0
    return (
        f"{', '.join(leaving)} will be preempted: a checkpoint of step {step:,} is written, and the run goes on "
        f"from there with other machines"
    )


def _noted(workspace: Workspace, run_id: str) -> set[tuple[str, str]]:
    try:
        document = json.loads(_path(workspace, run_id).read_text())
    except FileNotFoundError:
        return set()
    return {(launch_id, node_id) for launch_id, node_id in document}


def _path(workspace: Workspace, run_id: str) -> Path:
    return workspace.run_directory(run_id) / INTERRUPTIONS_FILE
