"""How long MLflow's first page of our experiment takes to show, and the pages that compare runs, with 300 nights.

A workspace of its own is filled as the flow fills it: a run for each night with its figures, parameters, loss curve,
tags and note, and a child for each search method. The server is the one of `make serve`. The time is a browser's,
from asking for the address until the rows are there: of a first visit, which loads MLflow's own program too, and of
the next ones.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from flows.service.serve import service_environment, services_to_run
from infra.workspace import ServiceAddresses, Workspace, free_loopback_port
from tasks.learning import readable_past
from tasks.records import tracking
from tasks.records.mlflow_names import DAY_TAG, SPEED_TAG
from tasks.records.mlflow_store import client_of
from tasks.records.mlflow_views import compare_address, experiment_tags, nights_address, run_name
from tasks.records.tracking import TrackedRun
from tasks.reports.nights_document import MOST_NIGHTS
from tasks.reports.run_report import PlanReport
from tasks.reports.stage_outcomes import stage_series
from tasks.running import run_lifecycle
from tests.benchmarks.browser import Browser, open_browser
from tests.tasks.report_builders import make_plan_report, make_run_report
from tests.waiting import wait_for

METHODS = ("exact", "reinforce", "bayesian", "cpu-only", "gpu-only")
NUM_STEPS = 60
"""Points of each night's loss curve."""

FIRST_NIGHT = datetime(2026, 1, 1, 2, 30, tzinfo=UTC)
NUM_VISITS = 5
PAGE_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0

TABLE_HAS_ROWS = "document.querySelectorAll('.ag-center-cols-container .ag-row').length >= {rows}"
VIEW_IS_APPLIED = "document.querySelector('[col-id*=\"night/auc\"]') !== null"
COMPARISON_IS_THERE = "document.body.innerText.includes('Comparing')"


def run(*, seed: int = 0, num_cases: int = 300, keep: Path | None = None) -> list[dict[str, Any]]:
    """Fill a record, open its pages, print the seconds and return them.

    Args:
        seed: Of the nights' figures.
        num_cases: Nights.
        keep: Where the workspace, and pictures of the pages, stay; what is there already is opened again.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        workspace = Workspace(root=folder / "home").create()
        if not workspace.tracking_path.exists():
            write_nights(workspace, num_nights=num_cases, seed=seed)
        runs = [run.tracked for run in readable_past(workspace, most=MOST_NIGHTS)]
        with serving(workspace) as mlflow_url, open_browser() as browser:
            pages = pages_of(runs, mlflow_url, num_rows=min(num_cases, 10))
            figures = []
            print(f"{'page':<16}{'first visit':>12}{'median of next':>16}  seconds, {num_cases} nights")
            for name, (address, condition) in pages.items():
                seconds = visit(browser, address, condition)
                if keep is not None:
                    browser.wait_until_calm(timeout_s=PAGE_TIMEOUT_S)
                    browser.save_picture(keep / f"{name}.png")
                first, following = seconds[0], statistics.median(seconds[1:])
                print(f"{name:<16}{first:>12.2f}{following:>16.2f}", flush=True)
                figures += [
                    figure(f"{name}_first_visit_seconds", first),
                    figure(f"{name}_seconds", following),
                ]
    return figures


def pages_of(runs: list[TrackedRun], mlflow_url: str, *, num_rows: int) -> dict[str, tuple[str, str]]:
    """Return by name the addresses of pages, each with what must hold when it is there."""
    rows = TABLE_HAS_ROWS.format(rows=num_rows)
    experiment = f"{mlflow_url}/#/experiments/{runs[0].experiment_id}/runs"
    return {
        "nights": (nights_address(runs[0], mlflow_url), f"{rows} && {VIEW_IS_APPLIED}"),
        "all_runs": (experiment, rows),
        "compare": (compare_address(runs, mlflow_url), COMPARISON_IS_THERE),
    }


def visit(browser: Browser, address: str, condition: str) -> list[float]:
    """Return the seconds of each of several visits of a page, the first by a browser that has kept nothing."""
    browser.call("Network.clearBrowserCache")
    return [
        browser.seconds_until(address, condition, timeout_s=PAGE_TIMEOUT_S) for _ in range(1 + NUM_VISITS)
    ]


def write_nights(workspace: Workspace, *, num_nights: int, seed: int) -> None:
    """Write nights with their children as the flow does, without pictures."""
    random = np.random.default_rng(seed)
    planned = make_plan_report()
    started_s = time.perf_counter()
    for index in range(num_nights):
        write_night(workspace, planned, FIRST_NIGHT + timedelta(days=index), random)
    print(f"wrote {num_nights} nights in {time.perf_counter() - started_s:.1f} s")


def write_night(
    workspace: Workspace, planned: PlanReport, night: datetime, random: np.random.Generator
) -> None:
    """Write one run with the figures of `planned`, with noise, and a child for each search method."""
    run_id, day = f"{night:%Y%m%d-%H%M}-{random.integers(16**8):08x}", f"{night:%Y-%m-%d}"
    tracked = run_lifecycle.open_run(workspace, run_id=run_id, run_name=run_id, tags={DAY_TAG: day})
    planned = replace(planned, run_id=run_id, tracked=tracked, day=day)
    report = make_run_report(planned=planned)
    result = planned.chosen
    client = client_of(workspace)
    for name, value in experiment_tags().items():
        client.set_experiment_tag(tracked.experiment_id, name, value)
    client.update_run(tracked.mlflow_run_id, name=run_name(planned))
    for method in METHODS:
        settings = _settings(planned.chosen.plan.stages, method)
        tracking.record_search(workspace, tracked, result, settings, is_chosen=method == "exact")
    tracking.record_settings(workspace, tracked, _settings(result.plan.stages, "exact"))
    metrics = {**tracking.plan_metrics(result), **report.metrics()}
    noise = {
        name: None if value is None else float(f"{value * random.normal(1.0, 0.03):.4g}")
        for name, value in metrics.items()
    }
    tracking.record_metrics(workspace, tracked, noise)
    loss = [(step, 0.7 / (1 + step / 20)) for step in range(NUM_STEPS)]
    tracking.record_series(workspace, tracked, {"train/log_loss": loss, **stage_series(report.stages)})
    assert report.speed is not None
    client.set_tag(tracked.mlflow_run_id, SPEED_TAG, json.dumps(report.speed.to_json()))
    run_lifecycle.close_run(workspace, tracked, status="FINISHED", reason="completed")


def _settings(stages: Any, method: str) -> dict[str, str]:
    return tracking.run_settings(stages, method=method, model="ctrdnn", batch_size=100, seed=0)


@contextmanager
def serving(workspace: Workspace) -> Iterator[str]:
    """Run MLflow as `make serve` does, and yield its address."""
    addresses = ServiceAddresses(
        prefect_url=f"http://127.0.0.1:{free_loopback_port()}",
        mlflow_url=f"http://127.0.0.1:{free_loopback_port()}",
        supervisor_pid=os.getpid(),
    )
    _, mlflow_ui, _ = services_to_run(workspace, addresses)
    with (workspace.logs_directory / "mlflow-ui.log").open("w") as log:
        process = subprocess.Popen(
            mlflow_ui.command,
            env=service_environment(workspace, addresses),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_for(mlflow_ui.is_ready, timeout_s=START_TIMEOUT_S, what="MLflow", poll_s=0.2)
            yield addresses.mlflow_url
        finally:
            os.killpg(process.pid, 15)
            process.wait()


def figure(name: str, seconds: float) -> dict[str, Any]:
    """Return a figure in the form of the benchmark contract."""
    return {"name": name, "value": round(seconds, 2), "unit": "s", "higher_is_better": False}
