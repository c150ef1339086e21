import json
from urllib.parse import parse_qs, urlparse

from tasks.records import tracking
from tasks.records.mlflow_names import TrackedRun
from tasks.records.mlflow_views import (
    NIGHT_COLUMNS,
    NIGHTS_VIEW,
    compare_address,
    experiment_tags,
    nights_address,
)
from tests.tasks.report_builders import make_plan_report, make_run_report

URL = "http://127.0.0.1:5000"


def parameters_of(address):
    return parse_qs(urlparse(urlparse(address).fragment).query)


def test_the_saved_view_shows_trainings_alone_newest_first_with_existing_columns():
    tags = experiment_tags()
    view = json.loads(tags[f"mlflow.sharedViewState.{NIGHTS_VIEW}"])
    state = json.loads(view["state"])

    assert view["name"] == "Nights"
    assert state["searchFilter"] == "tags.`heterps.kind` = 'training'"
    assert (state["orderByKey"], state["orderByAsc"]) == ("attributes.start_time", False)
    figures = ["metrics.`night/auc`", "metrics.`night/usd`", "metrics.`night/samples_per_s`"]
    # These fit into a window of 1,280 pixels, of which MLflow's own panels take the first 295 and those from 920 on.
    columns = ["attributes.`Run Name`", "runDateAndNestInfo", "tags.`heterps.promoted`", *figures]
    assert state["columnOrder"][:6] == columns
    assert 295 + sum(state["columnWidths"][name] for name in columns) <= 920
    report = make_run_report()
    recorded = {**tracking.plan_metrics(report.chosen), **report.metrics()}
    assert {name for name, _ in NIGHT_COLUMNS} <= set(recorded)


def test_links_open_the_view_and_the_comparison():
    run = TrackedRun(mlflow_run_id="a" * 32, experiment_id="7", run_id="r1")
    other = TrackedRun(mlflow_run_id="b" * 32, experiment_id="7", run_id="r2")

    assert nights_address(run, URL).startswith(f"{URL}/#/experiments/7/runs?")
    assert parameters_of(nights_address(run, URL))["viewStateShareKey"] == [NIGHTS_VIEW]
    compared = parameters_of(compare_address([run, other], URL))
    assert json.loads(compared["runs"][0]) == ["a" * 32, "b" * 32]
    assert json.loads(compared["experiments"][0]) == ["7"]


def test_a_name_says_day_model_and_plan():
    assert make_plan_report().name_with_plan == "2026-11-20 ctrdnn exact 4 x cpu-c7i + 1 x gpu-t4"
