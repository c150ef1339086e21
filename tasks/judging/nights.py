"""The last nights beside one another: what each cost, how fast it was, how good its model is, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterps_core.planning.calibration.run_speed import RunSpeed
from infra.workspace import Workspace
from tasks.learning import readable_past, speed_of
from tasks.records.mlflow_names import DAY_TAG, MODEL_TAG, PROMOTED_TAG
from tasks.records.past_runs import PastRun
from tasks.records.tracked_run import TrackedRun

MOST_NIGHTS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Night:
    """One training run; None stands for what it never came to."""

    run_id: str
    tracked: TrackedRun
    day: str
    """Of its data, YYYY-MM-DD, or of its start where the data has none."""

    model: str
    status: str
    """FINISHED, FAILED, KILLED or RUNNING, as MLflow has it."""

    usd: float | None
    """Billed."""

    usd_per_million_samples: float | None
    throughput_samples_per_s: float | None
    """Of the median step."""

    auc: float | None
    best_reachable_auc: float | None
    """Of the true click probabilities; None where nobody knows them."""

    optimality_gap: float | None
    """Cost of the plan over the proven bound, less 1."""

    was_promoted: bool | None
    """None where there was no decision."""

    speed: RunSpeed | None

    @property
    def auc_gap(self) -> float | None:
        """What is missing to the best reachable AUC."""
        if self.auc is None or self.best_reachable_auc is None:
            return None
        return self.best_reachable_auc - self.auc

    @property
    def prediction_error(self) -> float | None:
        """Measured throughput over what was expected, less 1; None where none was measured."""
        if self.speed is None:
            return None
        expected_seconds = self.speed.predicted_step_seconds * self.speed.correction_factor
        return expected_seconds / self.speed.measured_step_seconds - 1

    @property
    def uncorrected_error(self) -> float | None:
        """The same for the cost model's own prediction."""
        if self.speed is None:
            return None
        return self.speed.predicted_step_seconds / self.speed.measured_step_seconds - 1


def last_nights(workspace: Workspace) -> list[Night]:
    """Return the newest training runs, the newest last; none where the record does not answer."""
    return [night_of(run) for run in readable_past(workspace, most=MOST_NIGHTS)]


def night_of(run: PastRun) -> Night:
    """Return what a run's record says of it."""
    promoted = run.tags.get(PROMOTED_TAG)
    return Night(
        run_id=run.run_id,
        tracked=run.tracked,
        day=run.tags.get(DAY_TAG) or f"{run.started_at:%Y-%m-%d}",
        model=run.parameters.get("model") or run.tags.get(MODEL_TAG, "-"),
        status=run.status,
        usd=run.metrics.get("cost/billed_usd"),
        usd_per_million_samples=run.metrics.get("cost/billed_usd_per_million_samples"),
        throughput_samples_per_s=run.metrics.get("measured/undisturbed_throughput_samples_per_s"),
        auc=run.metrics.get("quality/auc"),
        best_reachable_auc=run.metrics.get("quality/best_reachable_auc"),
        optimality_gap=run.metrics.get("search/optimality_gap"),
        was_promoted=None if promoted is None else promoted == "true",
        speed=speed_of(run),
    )


def cheapest(nights: Sequence[Night]) -> Night | None:
    """Return the finished night with the least cost for its samples."""
    known = [night for night in nights if night.usd_per_million_samples is not None]
    return min(known, key=lambda night: night.usd_per_million_samples or 0.0, default=None)


def best(nights: Sequence[Night]) -> Night | None:
    """Return the night with the highest AUC."""
    known = [night for night in nights if night.auc is not None]
    return max(known, key=lambda night: night.auc or 0.0, default=None)
