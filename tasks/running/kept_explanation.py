"""The explanation of a run's plan, kept beside the run before anything is launched.

A run that fails in training has never come to its record, and it is the one whose plan people ask about.
"""

from __future__ import annotations

import json
from typing import Any

from heterps_core.errors import ConfigurationError
from heterps_core.json_file import replace_json
from heterps_core.planning.explain.explanation import PlanExplanation
from heterps_core.planning.explain.text import explanation_text
from infra.workspace import Workspace
from tasks.records.past_runs import recorded_text
from tasks.reports.run_report import PlanReport
from tasks.reports.summaries import plan_summary

EXPLANATION_FILE = "explanation.json"
RECORDED_EXPLANATION = "explanation.md"
"""Among the artifacts of a run in MLflow."""

_FENCE = "```"


def explanation_markdown(explanation: PlanExplanation) -> str:
    """Return the explanation of the plan as Markdown; its lines are aligned, so they stay as they are."""
    return f"# The plan, explained\n\n{_FENCE}\n{explanation_text(explanation)}\n{_FENCE}\n"


def keep_explanation(workspace: Workspace, report: PlanReport) -> None:
    """Write down why a run's plan was chosen, in words and figures."""
    plan = report.chosen.plan
    document = {
        "run_id": report.run_id,
        "model": report.model,
        "data": report.data,
        "summary": plan_summary(plan),
        "text": explanation_text(report.explanation),
        "plan": plan.to_json(),
        "explanation": report.explanation.to_json(),
    }
    replace_json(workspace.run_directory(report.run_id) / EXPLANATION_FILE, document)


def read_explanation(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """Return what was kept beside a run, else what was recorded with it: its `run_id`, `text` and more.

    Raises:
        ConfigurationError: Neither is there, as the run ended before its plan; or it is damaged.
    """
    path = workspace.run_directory(run_id) / EXPLANATION_FILE
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        return document
    except FileNotFoundError:
        recorded = recorded_text(workspace, run_id, RECORDED_EXPLANATION)
    except ValueError as error:
        raise ConfigurationError(f"an explanation must be JSON, but {path} is damaged: {error}") from error
    if recorded is None:
        raise ConfigurationError(
            f"only a run that came to a plan can be explained, but run {run_id} left no explanation, neither in "
            f"{path} nor with its record; heterps runs says how it ended"
        )
    parts = recorded.split(_FENCE)
    return {"run_id": run_id, "text": (parts[1] if len(parts) > 1 else recorded).strip("\n")}
