"""What the MLflow UI shows of our runs before anyone clicks: names, notes, and a view of the columns that count.

MLflow's own first page shows no metric and mixes the children of a run with the runs. A saved view (MLflow 3.15 and
later) is an experiment's tag, so it is written with the runs: one row a night, newest first, with columns for the
three questions: what did it cost, was it faster, is it better. Links open it by its key.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import quote, urlencode

from tasks.records.mlflow_names import TRAINING_VIEW, Kind, Tag, TrackedRun

DEFAULT_MLFLOW_URL = "http://127.0.0.1:5000"
NIGHTS_VIEW = "heterps-nights"
VIEW_TAG_PREFIX = "mlflow.sharedViewState."
VIEW_PARAMETER = "viewStateShareKey"
_RUN_NAME, _CREATED = "attributes.`Run Name`", "runDateAndNestInfo"
"""MLflow keeps both before all others, so they are narrow."""

VIEW_WRITTEN_AT_MS = 1_795_219_200_000
"""2026-11-21. The same in every run, so that the tag is written once."""

NIGHT_COLUMNS = (
    ("night/auc", 85),
    ("night/usd", 80),
    ("night/samples_per_s", 85),
    ("night/off_by", 100),
    ("night/auc_gap", 110),
    ("night/usd_per_million", 160),
    ("night/plan_gap", 115),
)
"""Metric and width in pixels. One of quality, cost and speed each comes first, for narrow windows."""

EXPERIMENT_NOTE = f"""What did a night cost, was it faster, is its model better? **Open _Views_ > _Nights_.**

The view (also `?{VIEW_PARAMETER}={NIGHTS_VIEW}` after this page's address) has one row a night, newest first:
whether its model became champion (`{Tag.PROMOTED}`), quality (`night/auc`, and what is missing to the best
reachable), cost (`night/usd`, and for a million samples), speed (`night/samples_per_s`, and how far the prediction
was off), and how far the plan is from the optimum. Each run has a page with charts as `report.html` among its
artifacts, and its whole report as `report.txt`. Children
named _search ..._ are what each search method found for the same problem."""


def experiment_tags() -> dict[str, str]:
    """Return the note, the kind and the saved view of the experiment of trainings."""
    figures = {f"metrics.`{name}`": width for name, width in NIGHT_COLUMNS}
    widths = {_RUN_NAME: 200, _CREATED: 80, f"tags.`{Tag.PROMOTED}`": 95} | figures
    state = {
        "searchFilter": f"tags.`{Tag.KIND}` = '{Kind.TRAINING}'",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "datasetsFilter": [],
        "selectedColumns": list(widths),
        "columnOrder": list(widths),
        "columnWidths": widths,
    }
    view = {"name": "Nights", "createdAt": VIEW_WRITTEN_AT_MS, "state": json.dumps(state)}
    return {
        Tag.NOTE: EXPERIMENT_NOTE,
        Tag.EXPERIMENT_KIND: "custom_model_development",
        f"{VIEW_TAG_PREFIX}{NIGHTS_VIEW}": json.dumps(view),
    }


def nights_address(run: TrackedRun, mlflow_url: str) -> str:
    """Return the page of all nights: a table with the columns that count, newest first."""
    parameters = urlencode({VIEW_PARAMETER: NIGHTS_VIEW, "compareRunsMode": "TABLE"})
    return f"{mlflow_url}/#/experiments/{run.experiment_id}/runs?{parameters}&{TRAINING_VIEW}"


def compare_address(runs: Sequence[TrackedRun], mlflow_url: str) -> str:
    """Return the page that compares runs of one experiment in charts and tables."""
    ids = quote(json.dumps([run.mlflow_run_id for run in runs]))
    experiments = quote(json.dumps([runs[0].experiment_id]))
    return f"{mlflow_url}/#/compare-runs?runs={ids}&experiments={experiments}&{TRAINING_VIEW}"
