"""Writes into the record of a run in MLflow: parameters, figures, documents and tags.

One parent run a flow run, one child a searcher, few parameters under the same keys in all of them, and
metrics under stable names, so that the comparison page answers what a run cost, whether it was
faster and whether it is better.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from heterps_core.planning.search.search_result import SearchResult
from heterps_core.units import SAMPLES_PER_MILLION, SECONDS_PER_HOUR
from infra.workspace import Workspace
from tasks.records.mlflow_names import CHOSEN_TAG, KIND_SEARCH, KIND_TAG, PARENT_TAG, RUN_ID_TAG
from tasks.records.mlflow_store import client_of
from tasks.records.tracked_run import RunSettings, TrackedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS_PER_REQUEST = 1_000
"""MLflow's limit of one log_batch."""

logger = logging.getLogger(__name__)


def record_search(
    workspace: Workspace, parent: TrackedRun, result: SearchResult, settings: RunSettings, *, is_chosen: bool
) -> None:
    """Write one searcher's result as a child run."""
    client = client_of(workspace)
    run_id = parent.run_id or client.get_run(parent.mlflow_run_id).data.tags[RUN_ID_TAG]
    child = client.create_run(
        parent.experiment_id,
        run_name=f"search {settings.method}",
        tags={
            PARENT_TAG: parent.mlflow_run_id,
            RUN_ID_TAG: run_id,
            KIND_TAG: KIND_SEARCH,
            CHOSEN_TAG: str(is_chosen).lower(),
        },
    )
    tracked = TrackedRun(mlflow_run_id=child.info.run_id, experiment_id=parent.experiment_id)
    record_settings(workspace, tracked, settings)
    record_metrics(workspace, tracked, plan_metrics(result))
    record_series(
        workspace,
        tracked,
        {"search/best_cost_usd": [(point.num_evaluations, point.best_cost_usd) for point in result.history]},
    )
    record_document(workspace, tracked, "plan.json", result.plan.to_json())
    client.set_terminated(tracked.mlflow_run_id, "FINISHED")


def plan_metrics(result: SearchResult) -> dict[str, float]:
    """Return what a plan promises and what finding it took, under the stable names."""
    plan = result.plan
    usd_per_second = plan.price_usd_per_hour / SECONDS_PER_HOUR
    return {
        "predicted/throughput_samples_per_s": plan.throughput_samples_per_s,
        "predicted/price_usd_per_hour": plan.price_usd_per_hour,
        "predicted/cost_usd": plan.cost_usd,
        "cost/usd_per_million_samples": usd_per_second / plan.throughput_samples_per_s * SAMPLES_PER_MILLION,
        "search/optimality_gap": plan.optimality_gap,
        "search/cost_lower_bound_usd": plan.cost_lower_bound_usd,
        "search/num_evaluations": float(plan.num_evaluations),
        "search/seconds": result.search_seconds,
        "search/certificate_seconds": result.certificate_seconds,
    }


def record_settings(workspace: Workspace, run: TrackedRun, settings: RunSettings) -> None:
    """Write the parameters; a run that is resumed keeps those it had."""
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException

    parameters = [Param(name, str(value)) for name, value in asdict(settings).items()]
    try:
        client_of(workspace).log_batch(run.mlflow_run_id, params=parameters)
    except MlflowException as error:
        # MLflow never changes a parameter. The plan of a resumed run may be another one.
        logger.info("the run keeps its first parameters: %s", error)


def record_metrics(workspace: Workspace, run: TrackedRun, metrics: Mapping[str, float | None]) -> None:
    """Write single figures; those that are missing or not finite are left out."""
    known = {name: [(0, value)] for name, value in metrics.items() if value is not None}
    record_series(workspace, run, known)


def record_series(
    workspace: Workspace, run: TrackedRun, series: Mapping[str, Iterable[tuple[int, float]]]
) -> None:
    """Write figures over steps in few requests; a request each would take 7 ms apiece."""
    from mlflow.entities import Metric

    now_ms = int(time.time() * 1_000)
    metrics = [
        Metric(name, value, now_ms, step)
        for name, points in series.items()
        for step, value in points
        if math.isfinite(value)
    ]
    client = client_of(workspace)
    for start in range(0, len(metrics), METRICS_PER_REQUEST):
        client.log_batch(run.mlflow_run_id, metrics=metrics[start : start + METRICS_PER_REQUEST])


def record_document(workspace: Workspace, run: TrackedRun, name: str, document: Mapping[str, Any]) -> None:
    """Keep a JSON document with the run."""
    client_of(workspace).log_dict(run.mlflow_run_id, dict(document), name)


def record_text(workspace: Workspace, run: TrackedRun, name: str, text: str) -> None:
    """Keep a text with the run."""
    client_of(workspace).log_text(run.mlflow_run_id, text, name)


def record_file(workspace: Workspace, run: TrackedRun, path: Path) -> None:
    """Keep a copy of a file with the run."""
    client_of(workspace).log_artifact(run.mlflow_run_id, str(path))


def record_bytes(workspace: Workspace, run: TrackedRun, name: str, content: bytes) -> None:
    """Keep a file with the run, for instance a picture that was drawn already."""
    with TemporaryDirectory(prefix="heterps-mlflow-") as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        client_of(workspace).log_artifact(run.mlflow_run_id, str(path))


def record_figure(workspace: Workspace, run: TrackedRun, name: str, figure: Figure) -> None:
    """Keep a figure with the run."""
    client_of(workspace).log_figure(run.mlflow_run_id, figure, name)


def name_run(workspace: Workspace, run: TrackedRun, name: str) -> None:
    """Call a run otherwise, once there is more to say of it than at its start."""
    client_of(workspace).update_run(run.mlflow_run_id, name=name)


def tag_run(workspace: Workspace, run: TrackedRun, tags: Mapping[str, str]) -> None:
    """Write tags of a run."""
    client = client_of(workspace)
    for name, value in tags.items():
        client.set_tag(run.mlflow_run_id, name, value)


def tag_experiment(workspace: Workspace, run: TrackedRun, tags: Mapping[str, str]) -> None:
    """Write tags of a run's experiment; may be done again with every run."""
    client = client_of(workspace)
    for name, value in tags.items():
        client.set_experiment_tag(run.experiment_id, name, value)
