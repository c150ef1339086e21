"""Recording and publishing a run from its reports, against a real store; Prefect's artifacts are collected here."""

import json
from dataclasses import replace

import pytest
from mlflow import MlflowClient

from heterps_core.hardware import Market
from infra.workspace import Workspace
from tasks import publishing
from tasks.profiling import learn_from_runs
from tasks.publishing import publish_report
from tasks.recording import record_plan, record_run
from tasks.records.mlflow_names import Tag
from tasks.records.past_runs import readable_past
from tasks.running import run_lifecycle
from tests.paths import PROJECT
from tests.tasks.report_builders import ID_TURNOVER, RUN_ID, make_bill, make_plan_report, make_run_report


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run that was recorded and published once for all tests here: workspace, report and Prefect's artifacts."""
    workspace = Workspace(root=tmp_path_factory.mktemp("home")).create()
    tracked = run_lifecycle.open_run(workspace, run_id=RUN_ID, run_name=RUN_ID, tags={})
    planned = make_plan_report(tracked=tracked)
    report = make_run_report(planned=planned, id_turnover=ID_TURNOVER)
    artifacts = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            publishing,
            "create_markdown_artifact",
            lambda text, *, key, description: artifacts.update({key: text}),
        )
        record_plan.fn(workspace, planned)
        record_run.fn(workspace, report)
        publish_report.fn(workspace, report, decision="it is a test")
        run_lifecycle.close_run(workspace, tracked, status="FINISHED", reason="completed")
        of_run = dict(artifacts)
        planned_only = run_lifecycle.open_run(workspace, run_id="plan-only", run_name="plan-only", tags={})
        publish_report.fn(workspace, make_plan_report(run_id="plan-only", tracked=planned_only))
        run_lifecycle.close_run(workspace, planned_only, status="FINISHED", reason="plan only")
    assert "launched    nothing" in artifacts["report"]
    return workspace, report, of_run


@pytest.fixture(scope="module")
def client(recorded):
    return MlflowClient(tracking_uri=recorded[0].tracking_uri)


def test_pages_are_kept_with_the_run(recorded, client):
    workspace, report, artifacts = recorded

    names = {file.path for file in client.list_artifacts(report.tracked.mlflow_run_id)}

    assert {"report.html", "report.txt", "plan.json", "explanation.md"} <= names
    assert set(artifacts) == {"report"}
    assert "<svg" in (workspace.run_folder(RUN_ID) / "report.html").read_text()


def test_the_run_is_named_and_its_figures_have_stable_names(recorded, client):
    _, report, _ = recorded

    run = client.get_run(report.tracked.mlflow_run_id)

    assert run.info.run_name == "2026-11-20 ctrdnn exact 4 x cpu-c7i + 1 x gpu-t4"
    assert run.data.metrics["measured/prediction_error"] == pytest.approx(-0.2)
    stages = client.get_metric_history(run.info.run_id, "stage/measured_step_seconds")
    assert {point.step: point.value for point in stages} == pytest.approx({0: 0.020, 1: 0.010})
    # By hand: 0.009 USD for 4,000 samples.
    assert run.data.metrics["cost/billed_usd_per_million_samples"] == pytest.approx(2.25)


def test_every_figure_is_described(recorded, client):
    _, report, _ = recorded
    text = (PROJECT / "docs" / "METRICS.md").read_text()

    names = client.get_run(report.tracked.mlflow_run_id).data.metrics
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_the_next_run_learns_from_it_and_compares_itself_with_it(recorded):
    workspace, report, _ = recorded

    assert learn_from_runs.fn(workspace, run_id="next").speeds == (report.speed,)
    first, second, *_ = readable_past(workspace, most=30)
    assert (first.usd, first.auc, first.status) == (pytest.approx(0.009), 0.7432, "FINISHED")
    assert (second.usd, second.speed) == (None, None)


def test_the_experiment_says_what_it_is_and_has_its_view(recorded, client):
    _, report, _ = recorded

    tags = client.get_experiment(report.tracked.experiment_id).tags

    # MLflow shows the first line alone until someone unfolds it.
    assert "Open _Views_ > _Nights_" in tags["mlflow.note.content"].splitlines()[0]
    assert json.loads(tags["mlflow.sharedViewState.heterps-nights"])["name"] == "Nights"


def test_the_artifact_links_to_the_run_and_to_the_nights(recorded):
    _, report, artifacts = recorded

    assert f"/runs/{report.tracked.mlflow_run_id}?workflowType=machine_learning)" in artifacts["report"]
    assert "viewStateShareKey=heterps-nights" in artifacts["report"]


def test_a_run_does_not_learn_from_itself_nor_from_a_damaged_record(recorded):
    workspace, _, _ = recorded
    damaged = run_lifecycle.open_run(workspace, run_id="damaged", run_name="damaged", tags={Tag.SPEED: "{"})
    run_lifecycle.close_run(workspace, damaged, status="FAILED", reason="made up")

    assert learn_from_runs.fn(workspace, run_id=RUN_ID).speeds == ()


def market_of(workspace, planned, bills):
    tracked = run_lifecycle.open_run(workspace, run_id=planned.run_id, run_name=planned.run_id, tags={})
    record_plan.fn(workspace, replace(planned, tracked=tracked), bills)
    run_lifecycle.close_run(workspace, tracked, status="FINISHED", reason="completed")
    return MlflowClient(workspace.tracking_uri).get_run(tracked.mlflow_run_id).data.params["market"]


def test_a_run_has_the_markets_of_the_machines_that_were_rented(recorded):
    """The first stage lost a machine on spot, and the next was rented on-demand; a failed launch counts not."""
    workspace, _, _ = recorded
    bill = make_bill(run_id="rented")
    first, second = bill.lines
    failed = replace(second, market="spot", is_waste=True)
    rented = replace(bill, is_dry_run=False, lines=(first, replace(first, market="spot"), second, failed))

    assert market_of(workspace, make_plan_report(run_id="rented"), [rented]) == "on-demand + spot | on-demand"


def test_a_dry_run_has_the_markets_that_its_plan_would_rent_in(recorded):
    workspace, _, _ = recorded
    planned = make_plan_report(run_id="dry")
    cloud = planned.provisioning.cloud_plan
    on_spot = replace(cloud.groups[0].offer, market=Market.SPOT)
    groups = (replace(cloud.groups[0], offer=on_spot, alternatives=()), *cloud.groups[1:])
    planned = replace(
        planned, provisioning=replace(planned.provisioning, cloud_plan=replace(cloud, groups=groups))
    )

    assert market_of(workspace, planned, [make_bill(run_id="dry")]) == "spot | on-demand"
