"""Hands pages to people: on the flow run's page in Prefect, and as one HTML file each with the run in MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from infra.workspace import Workspace
from tasks.judging.nights import Night, last_nights
from tasks.judging.promotion_gates import PromotionDecision
from tasks.records import tracking
from tasks.records.mlflow_names import NOTE_TAG
from tasks.records.mlflow_views import compare_address, nights_address, plan_note
from tasks.records.retries import REPEATABLE
from tasks.reports.nights_page import nights_page
from tasks.reports.pages import Link, Page, Picture, page_html, page_markdown
from tasks.reports.report_page import plan_page, run_page
from tasks.reports.reporting import DEFAULT_MLFLOW_URL
from tasks.reports.run_report import PlanReport, RunReport

PREFECT_FLOW_RUN = "runs/flow-run"


@task(name="publish plan", cache_policy=NO_CACHE, **REPEATABLE)
def publish_plan(workspace: Workspace, report: PlanReport, pictures: Mapping[str, Picture]) -> None:
    """Show the plan and why it was chosen, where nothing comes after it."""
    page = plan_page(report, pictures=pictures, links=links_of(workspace, report, nights=()))
    _publish(workspace, report, page, name="report", description="The plan and what it promises")
    tracking.tag_run(workspace, report.tracked, {NOTE_TAG: plan_note(report)})


@task(name="publish report", cache_policy=NO_CACHE, **REPEATABLE)
def publish_report(
    workspace: Workspace,
    report: RunReport,
    pictures: Mapping[str, Picture],
    *,
    decision: PromotionDecision | None = None,
) -> None:
    """Show what came of the run, and the last nights beside it; the run must have been recorded.

    Args:
        workspace: Where runs are recorded.
        report: The run.
        pictures: Of its plan.
        decision: Whether its model became champion; None where nobody decided.
    """
    nights = last_nights(workspace)
    links = links_of(workspace, report, nights=nights)
    page = run_page(report, pictures=pictures, nights=nights, decision=decision, links=links)
    _publish(
        workspace, report, page, name="report", description="What the run cost, how fast and how good it was"
    )
    if nights:
        compared = nights_page(
            nights, current_run_id=report.run_id, correction=report.correction, links=links
        )
        _publish(workspace, report, compared, name="nights", description="The last nights beside one another")


def links_of(workspace: Workspace, report: PlanReport, *, nights: Sequence[Night]) -> list[Link]:
    """Return where a reader of a run's page may go on; addresses of services that run now, else the usual ones."""
    services = workspace.running_services()
    mlflow_url = services.mlflow_url if services else DEFAULT_MLFLOW_URL
    links = [
        Link(text="This run in MLflow", address=report.tracked.address(mlflow_url)),
        Link(text="All nights in MLflow, newest first", address=nights_address(report.tracked, mlflow_url)),
    ]
    if len(nights) > 1:
        runs = [night.tracked for night in nights]
        links.append(
            Link(text=f"The last {len(nights)} nights compared", address=compare_address(runs, mlflow_url))
        )
    if services and flow_run.id:
        links.append(
            Link(
                text="This run in Prefect", address=f"{services.prefect_url}/{PREFECT_FLOW_RUN}/{flow_run.id}"
            )
        )
    return links


def _publish(workspace: Workspace, report: PlanReport, page: Page, *, name: str, description: str) -> None:
    """Publish a page under a name in both places."""
    markdown = page_markdown(page)
    create_markdown_artifact(markdown, key=name, description=description)
    tracking.record_text(workspace, report.tracked, f"{name}.html", page_html(page))
    tracking.record_text(workspace, report.tracked, f"{name}.md", markdown)
