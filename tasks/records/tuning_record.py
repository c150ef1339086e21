"""A search of parameters as one run in MLflow: what it found, and its trials as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from infra.workspace import Workspace
from tasks.records.mlflow_names import COMPLETED, Kind, Tag
from tasks.records.run_ids import new_run_id, utc_now
from tasks.records.run_record import note, note_file, note_metrics, note_series
from tasks.running.run_lifecycle import close_run, open_run

if TYPE_CHECKING:
    from heterps_core.training.tuning.search import Tuning


def record_tuning(workspace: Workspace, tuning: Tuning, found: Mapping[str, Any], *, data: str) -> None:
    """Write a finished search.

    Raises:
        ConfigurationError: The store does not answer.
    """
    best = tuning.best
    run = open_run(
        workspace,
        run_id=new_run_id(None, now=utc_now()),
        run_name=f"tune {best.model}",
        tags={Tag.MODEL: best.model, Tag.DATA: data},
        kind=Kind.TUNING,
    )
    assert best.quality is not None
    note(workspace, run, parameters={name: str(value) for name, value in found.items()})
    note_metrics(
        workspace,
        run,
        {
            "tuning/log_loss": best.quality.log_loss,
            "tuning/auc": best.quality.auc,
            "tuning/num_trials": float(len(tuning.trials)),
            "tuning/seconds": tuning.seconds,
        },
    )
    reached = [
        (number, trial.quality.log_loss)
        for number, trial in enumerate(tuning.trials)
        if trial.is_complete and trial.quality is not None
    ]
    note_series(workspace, run, {"tuning/trial_log_loss": reached})
    note_file(workspace, run.run_id, "parameters.json", found)
    note_file(workspace, run.run_id, "trials.md", "\n".join(tuning.table().markdown()) + "\n")
    close_run(workspace, run, status="FINISHED", reason=COMPLETED)
