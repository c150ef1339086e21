"""Hands pages to people: on the flow run's page in Prefect, and as one HTML file each with the run in MLflow."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from infra.workspace import Workspace
from tasks import REPEATABLE
from tasks.judging.promotion_gates import PromotionDecision
from tasks.learning import readable_past
from tasks.records.mlflow_store import client_of
from tasks.records.mlflow_views import DEFAULT_MLFLOW_URL, compare_address, nights_address
from tasks.records.past_runs import PastRun
from tasks.records.runs import keep_report
from tasks.records.tracking import TrackedRun, record_metrics
from tasks.reports.decision_document import decision_metrics
from tasks.reports.document import Document, Links, html_page, markdown, terminal_text
from tasks.reports.first_screen import plan_screen, run_screen
from tasks.reports.nights_document import MOST_NIGHTS, nights_document
from tasks.reports.run_document import plan_document, run_document
from tasks.reports.run_report import PlanReport, RunReport
from tasks.reports.verdicts import night_before

PREFECT_FLOW_RUN = "runs/flow-run"


@task(name="publish plan", cache_policy=NO_CACHE, **REPEATABLE)
def publish_plan(workspace: Workspace, report: PlanReport) -> str:
    """Show the plan and why it was chosen, where nothing comes after it; return its first screen."""
    document = plan_document(report, links=links_of(workspace, report))
    _publish(workspace, report, document, name="report", description="The plan and what it promises")
    keep_report(workspace, report.run_id, terminal_text(document))
    return plan_screen(report)


@task(name="publish report", cache_policy=NO_CACHE, **REPEATABLE)
def publish_report(workspace: Workspace, report: RunReport, *, decision: PromotionDecision | str) -> str:
    """Show what came of the run, and the last nights beside it; the run must have been recorded.

    Args:
        decision: Or why its model was not judged.

    Returns:
        Its first screen.
    """
    nights = readable_past(workspace, most=MOST_NIGHTS)
    links = links_of(workspace, report, nights=nights)
    last = night_before(nights, report.run_id)
    document = run_document(report, decision=decision, last=last, links=links)
    what = "What the run cost, how fast and how good it was"
    _publish(workspace, report, document, name="report", description=what)
    text = terminal_text(document)
    keep_report(workspace, report.run_id, text)
    client_of(workspace).log_text(report.tracked.mlflow_run_id, text, "report.txt")
    if nights:
        compared = nights_document(
            nights, current_run_id=report.run_id, correction=report.correction, links=links
        )
        _publish(workspace, report, compared, name="nights", description="The last nights beside one another")
    return run_screen(report, decision)


@task(name="publish decision", cache_policy=NO_CACHE)
def publish_decision(workspace: Workspace, run: TrackedRun, decision: PromotionDecision) -> None:
    """Write a decision that was applied to the record; the report of the run shows it."""
    record_metrics(workspace, run, decision_metrics(decision))
    client_of(workspace).log_dict(run.mlflow_run_id, decision.to_json(), "promotion.json")


@task(name="publish comparison", cache_policy=NO_CACHE, **REPEATABLE)
def publish_comparison(text: str) -> None:
    """Show a comparison's Markdown on the flow run's page."""
    create_markdown_artifact(text, key="comparison", description="Every search method on every problem")


def links_of(workspace: Workspace, report: PlanReport, *, nights: Sequence[PastRun] = ()) -> Links:
    """Return where a reader of a run may go on; addresses of services that run now, else the usual ones."""
    services = workspace.running_services()
    url = services.mlflow_url if services else DEFAULT_MLFLOW_URL
    hint = "" if services else " (after: make serve)"
    links = [
        (f"This run in MLflow{hint}", report.tracked.address(url)),
        ("All nights in MLflow, newest first", nights_address(report.tracked, url)),
    ]
    if len(nights) > 1:
        address = compare_address([night.tracked for night in nights], url)
        links.append((f"The last {len(nights)} nights compared", address))
    if services and flow_run.id:
        address = f"{services.prefect_url}/{PREFECT_FLOW_RUN}/{flow_run.id}"
        links.append(("This run in Prefect", address))
    folder = workspace.run_directory(report.run_id).absolute()
    return Links(pairs=[*links, ("Its files", folder.as_uri())])


def _publish(
    workspace: Workspace, report: PlanReport, document: Document, *, name: str, description: str
) -> None:
    """Publish a document under a name in both places."""
    text = markdown(document)
    create_markdown_artifact(text, key=name, description=description)
    client, run_id = client_of(workspace), report.tracked.mlflow_run_id
    client.log_text(run_id, html_page(document), f"{name}.html")
    client.log_text(run_id, text, f"{name}.md")
