"""The figures of plans and searches in a run's record.

One parent run a flow run, one child a searcher, few parameters under the same keys in all of them, and
metrics under stable names, so that MLflow's comparison of runs answers what a run cost, whether it was
faster and whether it is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from heterps_core.device_types import get_device_type
from heterps_core.planning.search.search_result import SearchResult
from heterps_core.plans.scheduling_plan import Stage
from infra.workspace import Workspace
from tasks.records.mlflow_names import COMPLETED, Kind, Tag, TrackedRun
from tasks.records.run_ids import new_run_id, utc_now
from tasks.records.run_record import close_run, note, note_file, note_metrics, note_series, points
from tasks.running.run_lifecycle import open_run

if TYPE_CHECKING:
    from heterps_core.training.tuning.search import Tuning


def run_settings(
    stages: Sequence[Stage], *, method: str, model: str, batch_size: int, seed: int
) -> dict[str, str]:
    """Return the parameters that every run has, parent or child, so that columns line up.

    `device_types`, `replicas` and `market` are in the order of the stages: "cpu-c7i-spot | gpu-t4", "4 | 1" and
    "spot | on-demand". A stage of two device types has "gpu-t4 + gpu-t4-20gbit" and "26 + 9".
    """
    return {
        "method": method,
        "model": model,
        "device_types": " | ".join(stage.device_types for stage in stages),
        "replicas": " | ".join(stage.replicas for stage in stages),
        "market": " | ".join(
            " + ".join(dict.fromkeys(get_device_type(name).market for name in stage.replicas_by_type))
            for stage in stages
        ),
        "batch_size": str(batch_size),
        "seed": str(seed),
    }


def record_search(
    workspace: Workspace,
    parent: TrackedRun,
    result: SearchResult,
    settings: Mapping[str, str],
    *,
    name: str,
    is_chosen: bool = False,
    figures: Mapping[str, float] | None = None,
) -> None:
    """Add one searcher's result to a record, as a child run of this name, with further figures."""
    history = [(point.num_evaluations, point.best_cost_usd) for point in result.history]
    series = {each: [(0, value)] for each, value in {**plan_metrics(result), **(figures or {})}.items()}
    search = {
        "tags": {
            Tag.PARENT: parent.mlflow_run_id,
            Tag.RUN_ID: parent.run_id,
            Tag.KIND: Kind.SEARCH,
            Tag.CHOSEN: str(is_chosen).lower(),
        },
        "parameters": dict(settings),
        "metrics": points({**series, "search/best_cost_usd": history}),
        "plan": result.plan.to_json(),
    }
    note(workspace, parent, search={name: search})


def plan_metrics(result: SearchResult) -> dict[str, float]:
    """Return the promises of a plan and the effort of its search, under the stable names."""
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


def record_tuning(workspace: Workspace, tuning: Tuning, found: Mapping[str, Any], *, data: str) -> None:
    """Write a finished search.

    Raises:
        ConfigurationError: The store does not answer.
    """
    best = tuning.best
    run = open_run(
        workspace,
        run_id=new_run_id(None, now=utc_now()),
        run_name=f"tune {best.model}",
        tags={Tag.MODEL: best.model, Tag.DATA: data},
        kind=Kind.TUNING,
    )
    assert best.quality is not None
    note(workspace, run, parameters={name: str(value) for name, value in found.items()})
    note_metrics(
        workspace,
        run,
        {
            "tuning/log_loss": best.quality.log_loss,
            "tuning/auc": best.quality.auc,
            "tuning/num_trials": float(len(tuning.trials)),
            "tuning/seconds": tuning.seconds,
        },
    )
    reached = [
        (number, trial.quality.log_loss)
        for number, trial in enumerate(tuning.trials)
        if trial.is_complete and trial.quality is not None
    ]
    note_series(workspace, run, {"tuning/trial_log_loss": reached})
    note_file(workspace, run.run_id, "parameters.json", found)
    note_file(workspace, run.run_id, "trials.md", "\n".join(tuning.table().markdown()) + "\n")
    close_run(workspace, run, status="FINISHED", reason=COMPLETED)
