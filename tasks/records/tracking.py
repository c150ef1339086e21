"""A run in MLflow by its ids, and what is written into its record: searches, parameters and figures.

One parent run a flow run, one child a searcher, few parameters under the same keys in all of them, and
metrics under stable names, so that the comparison page answers what a run cost, whether it was
faster and whether it is better.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from heterps_core.device_types import get_device_type
from heterps_core.planning.search.search_result import SearchResult
from heterps_core.plans.scheduling_plan import Stage
from infra.workspace import Workspace
from tasks.records.mlflow_names import CHOSEN_TAG, KIND_SEARCH, KIND_TAG, PARENT_TAG, RUN_ID_TAG
from tasks.records.mlflow_store import client_of

if TYPE_CHECKING:
    from mlflow.entities import Run

TRAINING_VIEW = "workflowType=machine_learning"
"""Of an address; without it MLflow opens its view of language models."""

METRICS_PER_REQUEST = 1_000

logger = logging.getLogger(__name__)


EndStatus = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """An MLflow run by its ids."""

    mlflow_run_id: str
    experiment_id: str
    run_id: str

    @classmethod
    def of(cls, run: Run) -> TrackedRun:
        """Return the ids of an MLflow run of ours."""
        run_id = run.data.tags[RUN_ID_TAG]
        return cls(mlflow_run_id=run.info.run_id, experiment_id=run.info.experiment_id, run_id=run_id)

    def address(self, mlflow_url: str) -> str:
        """Return the page of this run in an MLflow UI at `mlflow_url`, in its view of model training."""
        return f"{mlflow_url}/#/experiments/{self.experiment_id}/runs/{self.mlflow_run_id}?{TRAINING_VIEW}"


def run_settings(
    stages: Sequence[Stage], *, method: str, model: str, batch_size: int, seed: int
) -> dict[str, str]:
    """Return the parameters that every run has, parent or child, so that columns line up.

    `device_types`, `replicas` and `market` are in the order of the stages: "cpu-c7i-spot | gpu-t4", "4 | 1" and
    "spot | on-demand".
    """
    return {
        "method": method,
        "model": model,
        "device_types": " | ".join(stage.device_type for stage in stages),
        "replicas": " | ".join(str(stage.num_replicas) for stage in stages),
        "market": " | ".join(get_device_type(stage.device_type).market for stage in stages),
        "batch_size": str(batch_size),
        "seed": str(seed),
    }


def record_search(
    workspace: Workspace,
    parent: TrackedRun,
    result: SearchResult,
    settings: Mapping[str, str],
    *,
    is_chosen: bool,
) -> None:
    """Write one searcher's result as a child run."""
    client = client_of(workspace)
    child = client.create_run(
        parent.experiment_id,
        run_name=f"search {settings['method']}",
        tags={
            PARENT_TAG: parent.mlflow_run_id,
            RUN_ID_TAG: parent.run_id,
            KIND_TAG: KIND_SEARCH,
            CHOSEN_TAG: str(is_chosen).lower(),
        },
    )
    tracked = TrackedRun.of(child)
    record_settings(workspace, tracked, settings)
    record_metrics(workspace, tracked, plan_metrics(result))
    record_series(
        workspace,
        tracked,
        {"search/best_cost_usd": [(point.num_evaluations, point.best_cost_usd) for point in result.history]},
    )
    client.log_dict(tracked.mlflow_run_id, result.plan.to_json(), "plan.json")
    client.set_terminated(tracked.mlflow_run_id, "FINISHED")


def plan_metrics(result: SearchResult) -> dict[str, float]:
    """Return what a plan promises and what finding it took, under the stable names."""
    plan = result.plan
    return {
        "predicted/throughput_samples_per_s": plan.throughput_samples_per_s,
        "predicted/price_usd_per_hour": plan.price_usd_per_hour,
        "predicted/cost_usd": plan.cost_usd,
        "cost/usd_per_million_samples": plan.usd_per_million_samples,
        "search/optimality_gap": plan.optimality_gap,
        "search/cost_lower_bound_usd": plan.cost_lower_bound_usd,
        "search/num_evaluations": float(plan.num_evaluations),
        "search/seconds": result.search_seconds,
        "search/certificate_seconds": result.certificate_seconds,
    }


def record_settings(workspace: Workspace, run: TrackedRun, settings: Mapping[str, str]) -> None:
    """Write the parameters; a run that is resumed keeps those it had."""
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException

    parameters = [Param(name, value) for name, value in settings.items()]
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
