"""Hands the report of a run to people: as a page, as text beside the run and in Prefect, and in MLflow."""

from __future__ import annotations

from collections.abc import Sequence

from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from heterps_core.text_table import WIDTH
from infra.workspace import Workspace
from tasks.judging.promotion_gates import PromotionDecision
from tasks.records.mlflow_names import TrackedRun
from tasks.records.mlflow_views import DEFAULT_MLFLOW_URL, compare_address, nights_address
from tasks.records.past_runs import PastRun, readable_past
from tasks.records.run_files import REPORT_FILE
from tasks.records.run_record import note_file, note_metrics
from tasks.reports.page import page
from tasks.reports.report_text import report_text, screen
from tasks.reports.run_report import PlanReport
from tasks.steps import REPEATABLE, step

PREFECT_FLOW_RUN = "runs/flow-run"
PAGE_FILE = "report.html"

_MOST_NIGHTS = 30

_MOST_OF_ADDRESS = 2 * WIDTH
"""Characters; a text leaves out longer addresses, which compare many runs."""


@step("publish report", **REPEATABLE)
def publish_report(
    workspace: Workspace, report: PlanReport, *, decision: PromotionDecision | str = "nothing was trained"
) -> str:
    """Write the report of a plan or a run as page and text, here and into the run's record; return its screen.

    Args:
        decision: On the model of a run; or why it was not judged.
    """
    nights = [night for night in readable_past(workspace, most=_MOST_NIGHTS) if night.run_id != report.run_id]
    links = _links(workspace, report, nights)
    folder = workspace.run_folder(report.run_id).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    shown = [*links, ("Its page", (folder / PAGE_FILE).as_uri())]
    text = report_text(report, decision, [link for link in shown if len(link[1]) <= _MOST_OF_ADDRESS])
    files = {PAGE_FILE: page(report, decision, nights, links), REPORT_FILE: text}
    for name, content in files.items():
        (folder / name).write_text(content)
        note_file(workspace, report.tracked.run_id, name, content)
    listed = "\n".join(f"- [{title}]({address})" for title, address in links)
    create_markdown_artifact(f"{listed}\n\n```\n{text}\n```\n", key="report", description=report.name)
    return screen(report, decision)


@step("publish decision")
def publish_decision(workspace: Workspace, run: TrackedRun, decision: PromotionDecision) -> None:
    """Add a decision that was applied to the run's record; the report of the run shows it."""
    note_metrics(workspace, run, decision.metrics())
    note_file(workspace, run.run_id, "promotion.json", decision.to_json())


def _links(workspace: Workspace, report: PlanReport, nights: Sequence[PastRun]) -> list[tuple[str, str]]:
    """Return where a reader of a run may go on; addresses of services that run now, else the usual ones."""
    services = workspace.running_services()
    url = services.mlflow_url if services else DEFAULT_MLFLOW_URL
    hint = "" if services else " (after: make serve)"
    links = [
        (f"This run in MLflow{hint}", report.tracked.address(url)),
        ("All nights in MLflow, newest first", nights_address(report.tracked, url)),
    ]
    if nights:
        address = compare_address([*(night.tracked for night in nights), report.tracked], url)
        links.append((f"The last {len(nights) + 1} nights compared in MLflow", address))
    if services and flow_run.id:
        links.append(("This run in Prefect", f"{services.prefect_url}/{PREFECT_FLOW_RUN}/{flow_run.id}"))
    return [*links, ("Its files", workspace.run_folder(report.run_id).absolute().as_uri())]
