"""Past runs as one line each, from the record of runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infra.workspace import Workspace
from tasks.records.mlflow_names import DAY_TAG, END_REASON_TAG
from tasks.records.mlflow_store import store_must_answer
from tasks.records.past_runs import PastRun, past_trainings, running_trainings
from tasks.running.run_lifecycle import process_is_gone


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLine:
    """What a person compares runs by; None where a run never came so far."""

    run_id: str
    day: str | None
    """Of the data that it trained on, YYYY-MM-DD; None where its data has no days."""

    model: str
    scheduler: str | None
    plan: str | None
    """For instance "4 x cpu-c7i + 1 x gpu-t4"."""

    status: str
    """FINISHED, FAILED, KILLED or RUNNING, as MLflow has it."""

    end_reason: str | None
    usd: float | None
    throughput_samples_per_s: float | None
    """Of the median step, as in all that compares nights."""

    auc: float | None
    started_at: str
    """ISO 8601, UTC."""


def run_lines(workspace: Workspace, *, most: int) -> list[RunLine]:
    """Return the newest runs, the newest last.

    Raises:
        ConfigurationError: The record of runs does not answer.
    """
    with store_must_answer(workspace):
        past = past_trainings(workspace, most=most)
    return [_line(run) for run in past]


def running_lines(workspace: Workspace) -> list[RunLine]:
    """Return the runs that are called running, the newest last.

    Raises:
        ConfigurationError: The record of runs does not answer.
    """
    return [_line(run) for run in running_trainings(workspace)]


def _line(run: PastRun) -> RunLine:
    is_gone = run.status == "RUNNING" and process_is_gone(run.tags)
    reason = "its process is gone; the sweeper closes it" if is_gone else None
    return RunLine(
        run_id=run.run_id,
        day=run.tags.get(DAY_TAG),
        # The name is "model scheduler run id", from the start on; parameters come with the plan.
        model=run.parameters.get("model", run.name.partition(" ")[0]),
        scheduler=run.parameters.get("method"),
        plan=_plan(run.parameters),
        status=run.status,
        end_reason=run.tags.get(END_REASON_TAG) or reason,
        usd=run.metrics.get("cost/billed_usd"),
        throughput_samples_per_s=run.metrics.get("measured/undisturbed_throughput_samples_per_s"),
        auc=run.metrics.get("quality/auc"),
        started_at=run.started_at.isoformat(),
    )


def _plan(parameters: Mapping[str, str]) -> str | None:
    if "device_types" not in parameters:
        return None
    device_types, replicas = (parameters[name].split(" | ") for name in ("device_types", "replicas"))
    return " + ".join(f"{count} x {kind}" for count, kind in zip(replicas, device_types, strict=True))
