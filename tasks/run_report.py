"""The nouns of a planned and of a finished run: what each can be judged by, and its figures under stable names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from heterps_core.data.quality import ClickQuality
from heterps_core.explanation.explanation import PlanExplanation
from heterps_core.problem.scheduling_problem import SchedulingProblem
from heterps_core.scheduling.rehearsal import RehearsalPrediction
from heterps_core.scheduling.search_result import SearchResult
from heterps_core.simulation.plan_simulation import PlanSimulation, run_cost_usd
from heterps_core.training.training_run import TrainingRun
from infra.billing import Bill
from infra.waste import WasteLine, waste_lines
from tasks.baseline import Baseline
from tasks.provisioning import Provisioning
from tasks.scheduling import Searches
from tasks.tracking import TrackedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """Everything that a run can be judged by before it launches anything."""

    run_id: str
    model: str
    data: str
    num_train_rows: int
    num_eval_rows: int
    problem: SchedulingProblem
    searches: Searches
    scheduler: str
    explanation: PlanExplanation
    simulation: PlanSimulation
    provisioning: Provisioning
    tracked: TrackedRun
    is_estimated: bool
    """Times of at least one device type of the plan are a roofline and not a measurement."""

    @property
    def chosen(self) -> SearchResult:
        """Result of the scheduler whose plan was taken."""
        return self.searches.results[self.scheduler]

    @property
    def simulated_cost_usd(self) -> float:
        """Of the whole job at the speed that the plan's pipeline reaches step by step."""
        return run_cost_usd(
            self.problem, self.simulation.evaluation, step_seconds=self.simulation.run.step_seconds
        )

    def plan_metrics(self) -> dict[str, float | None]:
        """Return the figures of the plan under their stable names, besides those of its search."""
        return {
            **explanation_metrics(self.explanation),
            "simulated/throughput_samples_per_s": self.simulation.run.throughput_samples_per_s,
            "simulated/cost_usd": self.simulated_cost_usd,
            "cost/cloud_price_usd_per_hour": self.provisioning.cloud_plan.price_usd_per_hour,
            "cost/cloud_usd": self.provisioning.predicted_cost_usd,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport(PlanReport):
    """Everything that a finished run can be judged by."""

    prediction: RehearsalPrediction
    training: TrainingRun
    baseline: Baseline | None
    best_reachable: ClickQuality | None
    bills: Sequence[Bill]

    @classmethod
    def of(cls, planned: PlanReport, **outcome: Any) -> RunReport:
        """Return the report of a run that went as planned so far; `outcome` are the fields that are added."""
        return cls(**{field.name: getattr(planned, field.name) for field in fields(planned)}, **outcome)

    @property
    def prediction_error(self) -> float | None:
        """Throughput of the rehearsal's median step over the predicted one, less 1; None where none was measured."""
        measured = self.training.undisturbed_throughput_samples_per_s
        if not self.provisioning.is_rehearsal or measured == 0:
            return None
        return measured / self.prediction.throughput_samples_per_s - 1

    @property
    def billed_usd(self) -> float:
        """Of all launches, at list prices where it is a rehearsal."""
        return sum(bill.total_usd for bill in self.bills)

    @property
    def waste(self) -> tuple[WasteLine, ...]:
        """What was paid while nothing was trained, by cause."""
        return waste_lines(
            self.bills,
            trained_seconds=self.training.trained_seconds,
            repeated_seconds=self.training.repeated_seconds,
            idle_shares=self.training.idle_shares,
        )

    def metrics(self) -> dict[str, float | None]:
        """Return the figures of the whole run under their stable names, beside those of its plan."""
        quality, baseline, best = self.training.quality, self.baseline, self.best_reachable
        samples = sum(step.num_samples for step in self.training.steps)
        return {
            "predicted/rehearsal_throughput_samples_per_s": self.prediction.throughput_samples_per_s,
            "measured/throughput_samples_per_s": self.training.throughput_samples_per_s,
            "measured/undisturbed_throughput_samples_per_s": self.training.undisturbed_throughput_samples_per_s,
            "measured/prediction_error": self.prediction_error,
            "measured/samples": float(samples),
            "measured/repeated_steps": float(self.training.num_repeated_steps),
            **self.plan_metrics(),
            "cost/billed_usd": self.billed_usd,
            "cost/waste_usd": sum(line.usd for line in self.waste),
            "quality/auc": quality.auc,
            "quality/log_loss": quality.log_loss,
            "quality/baseline_auc": baseline.quality.auc if baseline else None,
            "quality/baseline_log_loss": baseline.quality.log_loss if baseline else None,
            "quality/best_reachable_auc": best.auc if best else None,
            "quality/best_reachable_log_loss": best.log_loss if best else None,
        }


def explanation_metrics(explanation: PlanExplanation) -> dict[str, float | None]:
    """Return the figures of an explanation under their stable names."""
    cost, runner_up = explanation.cost_range, explanation.runner_up
    regrets = [doubt.regret_usd for doubt in explanation.doubts if doubt.regret_usd is not None]
    return {
        "explanation/low_cost_usd": cost.low_usd if cost else None,
        "explanation/high_cost_usd": cost.high_usd if cost else None,
        "explanation/regret_usd": max(regrets, default=0.0) if cost else None,
        "explanation/runner_up_extra_usd": runner_up.extra_usd if runner_up else None,
        "explanation/ten_percent_more_usd": explanation.ten_percent_more.extra_usd,
    }
