"""Files in the folder of a run that people or later runs read: parameters, explanation and report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterps_core.errors import ConfigurationError
from heterps_core.json_file import replace_json
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from infra.workspace import Workspace
from tasks.records.run_ids import SHOWN, known_runs

if TYPE_CHECKING:
    from tasks.reports.run_report import PlanReport

PARAMETERS_FILE = "parameters.json"
EXPLANATION_FILE = "explanation.json"
REPORT_FILE = "report.txt"


def save_parameters(workspace: Workspace, run_id: str, parameters: Mapping[str, Any]) -> None:
    """Write the parameters that decide the model of a new run."""
    replace_json(workspace.run_folder(run_id) / PARAMETERS_FILE, parameters)


def saved_parameters(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """Return the parameters that decide the model of a run, as they were saved when it began.

    Raises:
        ConfigurationError: There is no such run to resume, or its file is damaged.
    """
    known = known_runs(
        workspace, among={path.parent.name for path in workspace.runs_directory.glob(f"*/{PARAMETERS_FILE}")}
    )
    return _read(
        workspace.run_folder(run_id) / PARAMETERS_FILE,
        where_missing=f"resume_run_id must be a run in {workspace.runs_directory} whose files heterps tidy has not "
        f"deleted, got {run_id!r}; the newest are: {', '.join(known[-SHOWN:]) or 'none'}",
    )


def keep_explanation(workspace: Workspace, report: PlanReport) -> None:
    """Write down why a run's plan was chosen, in words and figures."""
    from heterps_core.planning.explain.text import explanation_text
    from tasks.reports.run_report import plan_summary

    plan = report.chosen.plan
    document = {
        "run_id": report.run_id,
        "model": report.model,
        "data": report.data,
        "summary": plan_summary(plan),
        "text": explanation_text(report.explanation),
        "tables": report.tables_text,
        "plan": plan.to_json(),
        "machines": report.provisioning.cloud_plan.to_json(),
        "explanation": report.explanation.to_json(),
    }
    replace_json(workspace.run_folder(report.run_id) / EXPLANATION_FILE, document)


def read_explanation(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """Return the explanation of a run: its `run_id`, `text` and more.

    Raises:
        ConfigurationError: There is none, as the run ended before its plan; or it is damaged.
    """
    path = workspace.run_folder(run_id) / EXPLANATION_FILE
    return _read(
        path,
        where_missing=f"only a run that came to a plan can be explained, but run {run_id} left no explanation in "
        f"{path}; heterps runs says how it ended",
    )


def newest_machines(workspace: Workspace, *, cloud: str, region: str) -> tuple[str, ProvisioningPlan] | None:
    """Return the machines of the newest plan that buys in a region, also for a dry run, and its run."""
    paths = workspace.runs_directory.glob(f"*/{EXPLANATION_FILE}")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        # Older files have none, and heterps explain names a damaged one.
        with suppress(ConfigurationError):
            if document := _read(path, where_missing="").get("machines"):
                plan = ProvisioningPlan.from_json(document)
                if {(offer.cloud, offer.region) for offer in plan.offers} == {(cloud, region)}:
                    return path.parent.name, plan
    return None


def read_report(workspace: Workspace, run_id: str) -> str:
    """Return the report of a run; empty where it has not ended, or came to no good end."""
    path = workspace.run_folder(run_id) / REPORT_FILE
    return path.read_text() if path.exists() else ""


def _read(path: Path, *, where_missing: str) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise ConfigurationError(where_missing) from error
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"a file of a run must hold a JSON object, but {path} is damaged: {error}"
        ) from error
