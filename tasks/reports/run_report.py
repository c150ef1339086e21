"""The report of a planned and of a finished run, and its figures under stable names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from heterps_core.data.distinct_values import IdTurnover
from heterps_core.judging.quality import ClickQuality
from heterps_core.planning.calibration import Calibration, Correction, RunSpeed, StageSpeed
from heterps_core.planning.explain.explanation import PlanExplanation
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.search_result import SearchResult
from heterps_core.planning.simulate.dry_run import DryRunPrediction
from heterps_core.planning.simulate.plan_simulation import PlanSimulation
from heterps_core.plans.scheduling_plan import SchedulingPlan
from heterps_core.text_table import NOT_KNOWN, Table, table_text, usd_text
from heterps_core.training.job import TrainingConfig
from heterps_core.training.training_run import TrainingRun
from heterps_core.units import SAMPLES_PER_MILLION, ratio
from infra.billing.bill import Bill, WasteLine, waste_lines
from tasks.judging.baseline import LIGHTGBM, LOGISTIC_REGRESSION, Baseline
from tasks.provisioning import Provisioning
from tasks.records.mlflow_names import TrackedRun, night_name
from tasks.reports.stage_outcomes import StageOutcome, measured_step_seconds, seconds_by_stage, stage_outcomes
from tasks.running.losses import Restart
from tasks.scheduling import Searches

_SHORT_STEP_SECONDS = 0.002
"""Predictions of shorter steps are off by up to a third: at a load of 3 steps of lr took 1.04 and 1.47 times the
predicted time in two runs, those of nce 1.54 times (2 x86 cores, AMD EPYC, 2026-11-26)."""


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
    """The method that was asked for; `searches.taken` found the plan."""

    explanation: PlanExplanation
    simulation: PlanSimulation
    provisioning: Provisioning
    tracked: TrackedRun
    config: TrainingConfig
    prediction: DryRunPrediction | None
    """Prediction of a dry run on this machine, by the cost model from its profile; None for rented machines."""

    correction: Correction
    """Correction of that prediction; rented runs are planned with corrected times instead."""

    hardware: str
    """Hardware that trains: for a dry run this machine, else the plan's device types."""

    uncounted: str = ""
    """Layers whose work could not be counted; see `ModelGraph.uncounted_text`."""

    busy: str = ""
    """How busy this machine was while layers were timed; see `LayerProfile.busy_text`."""

    tables: Table
    """The categorical columns with their values, and how many collide."""

    cuts: Table | None = None
    """The tensors at each cut; None where the plan has one stage."""

    batch_choice: str = ""
    """Why the batch was taken, for people; empty where no curve of quality was at hand."""

    day: str | None = None
    """Day of the data that is trained on, YYYY-MM-DD; None where it has no days."""

    @property
    def name(self) -> str:
        """Day, model and scheduler, such as "2026-11-20 ctrdnn exact"."""
        return night_name(self.day, self.run_id, model=self.model, scheduler=self.scheduler)

    @property
    def name_with_plan(self) -> str:
        """The same with the plan, such as "2026-11-20 ctrdnn exact 4 x cpu-c7i + 1 x gpu-t4"."""
        stages = " + ".join(stage.units for stage in self.chosen.plan.stages)
        return f"{self.name} {stages}"

    @property
    def planned_where(self) -> str:
        """For which machines the promised figures are."""
        if self.problem.num_samples == self.num_train_rows:
            return "planned machines"
        return f"planned machines, a night of {self.problem.num_samples:,.0f} samples"

    @property
    def trained_where(self) -> str:
        """For which machines the measured figures are."""
        return self.provisioning.machines_text

    @property
    def promised_speed(self) -> str:
        """The plan's speed, with its unit and its machines."""
        return f"{self.chosen.plan.throughput_samples_per_s:,.0f} samples/s ({self.planned_where})"

    @property
    def promised_cost(self) -> str:
        """The plan's cost of the whole job, with its unit and its machines."""
        return f"{usd_text(self.provisioning.predicted_cost_usd)} ({self.planned_where})"

    @property
    def other_speeds(self) -> str:
        """The speeds that the first page leaves out, each with the machines that it is for."""
        simulated = self.simulation.run.throughput_samples_per_s
        lines = [f"simulated step by step: {simulated:,.0f} samples/s (planned machines)"]
        if self.prediction is not None:
            predicted = (
                f"{self.predicted_throughput_samples_per_s:,.0f} samples/s (dry run here){self.caution}"
            )
            lines.append(f"predicted from this machine's profile, before the training: {predicted}")
        return "\n".join(lines)

    @property
    def tables_text(self) -> str:
        """Details of the reasons: other speeds, the tensors at the cuts, and the columns."""
        tables = [table_text(table) for table in (self.cuts, self.tables) if table is not None]
        return "\n\n".join([self.other_speeds, *([self.uncounted] if self.uncounted else []), *tables])

    @property
    def chosen(self) -> SearchResult:
        """The plan that was taken, with its search."""
        return self.searches.chosen

    @property
    def batch_size(self) -> int:
        """Samples of a trained step; a dry run has its own."""
        return self.config.batch_size

    @property
    def predicted_step_seconds(self) -> float:
        """Time of a step of the launched run, corrected by past runs; known before the training."""
        if self.prediction is not None:
            return self.prediction.step_seconds * self.correction.factor
        return self.batch_size / self.chosen.plan.throughput_samples_per_s

    @property
    def caution(self) -> str:
        """What to say after a prediction of steps that vary much between runs; nothing after others."""
        is_short = self.prediction is not None and self.prediction.step_seconds < _SHORT_STEP_SECONDS
        return "; steps of less than 2 ms vary by a third between runs" if is_short else ""

    @property
    def predicted_throughput_samples_per_s(self) -> float:
        """The same as samples per second."""
        return self.batch_size / self.predicted_step_seconds

    def promises(self) -> dict[str, float | None]:
        """Return the speed that is expected of the launched run under its stable names."""
        return {
            "predicted/step_seconds": self.predicted_step_seconds,
            "predicted/correction_factor": self.correction.factor,
        }

    def plan_metrics(self) -> dict[str, float | None]:
        """Return the figures of the plan under their stable names, besides those of its search."""
        return {
            **_explanation_metrics(self.explanation),
            "cost/cloud_price_usd_per_hour": self.provisioning.cloud_plan.price_usd_per_hour,
            "cost/cloud_usd": self.provisioning.predicted_cost_usd,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport(PlanReport):
    """Everything that a finished run can be judged by."""

    learning: Calibration
    training: TrainingRun
    baselines: Mapping[str, Baseline | str]
    """By name, or why there is none; empty where none was asked for."""

    best_reachable: ClickQuality | None
    bills: Sequence[Bill]
    restarts: Sequence[Restart] = ()
    id_turnover: Sequence[IdTurnover] = ()

    @classmethod
    def of(cls, planned: PlanReport, **outcome: Any) -> RunReport:
        """Return the report of a plan with its outcome."""
        return cls(**{field.name: getattr(planned, field.name) for field in fields(planned)}, **outcome)

    @property
    def baseline(self) -> Baseline | str | None:
        """The logistic regression, which a first champion is held against; None where none was asked for."""
        return self.baselines.get(LOGISTIC_REGRESSION)

    @property
    def boosted_trees(self) -> Baseline | None:
        """LightGBM, where it was measured."""
        found = self.baselines.get(LIGHTGBM)
        return found if isinstance(found, Baseline) else None

    @property
    def measured_step_seconds(self) -> float | None:
        """Time of the median step; None where too few were trained."""
        return measured_step_seconds(self.training, batch_size=self.batch_size)

    @property
    def prediction_error(self) -> float | None:
        """Throughput of the median step over the predicted one, less 1; None where none was measured."""
        measured = self.measured_step_seconds
        return None if measured is None else self.predicted_step_seconds / measured - 1

    @property
    def stages(self) -> tuple[StageOutcome, ...]:
        """The outcome of each launched stage."""
        is_dry_run = self.prediction is not None
        evaluation = self.chosen.evaluation if self.prediction is None else self.prediction.evaluation
        return stage_outcomes(
            self.provisioning.launch_stages,
            seconds_by_stage(evaluation.stages, is_dry_run=is_dry_run),
            self.training,
            self.bills,
            batch_size=self.batch_size,
        )

    @property
    def speed(self) -> RunSpeed | None:
        """Speed that later runs learn from; None where none was measured, or a part of the fleet trained last."""
        measured = self.measured_step_seconds
        if measured is None or any(restart.loss.is_of_other_size for restart in self.restarts):
            return None
        is_dry_run = self.provisioning.is_dry_run
        factors = {} if is_dry_run else self.learning.factors(self.problem)
        stages = tuple(
            StageSpeed(
                device_type=stage.device_type,
                num_replicas=stage.num_replicas,
                predicted_seconds=stage.predicted_seconds / factors.get(stage.device_type, 1.0),
                measured_seconds=stage.measured_seconds,
            )
            for stage in self.stages
        )
        slowest = max(stage.predicted_seconds for stage in stages)
        uncorrected = slowest if self.prediction is None else self.prediction.step_seconds
        return RunSpeed(
            run_id=self.run_id,
            model=self.problem.model,
            hardware=self.hardware,
            is_dry_run=is_dry_run,
            predicted_step_seconds=uncorrected,
            correction_factor=self.predicted_step_seconds / uncorrected,
            measured_step_seconds=measured,
            stages=stages,
        )

    @property
    def measured_speed(self) -> str:
        """Speed of the undisturbed steps, with its unit and its machines."""
        speed = _speed_text(self.training.undisturbed_throughput_samples_per_s)
        return f"{speed} samples/s ({self.trained_where})"

    @property
    def billed_where(self) -> str:
        """For which machines the bill is."""
        listed = " at list prices, nothing is charged" if self.provisioning.is_dry_run else ""
        return f"{self.trained_where}{listed}"

    @property
    def billed_usd(self) -> float:
        """The bill of all launches, at list prices where it is a dry run."""
        return sum(bill.total_usd for bill in self.bills)

    @property
    def billed_usd_per_million_samples(self) -> float | None:
        """The bill for a million samples that were trained in all launches; None where none was."""
        num_samples = sum(step.num_samples for step in self.training.steps)
        return self.billed_usd / num_samples * SAMPLES_PER_MILLION if num_samples else None

    @property
    def waste(self) -> tuple[WasteLine, ...]:
        """Money that was paid while nothing was trained, by cause."""
        return waste_lines(
            self.bills,
            trained_seconds=self.training.trained_seconds,
            repeated_seconds=self.training.repeated_seconds,
            idle_shares=self.training.idle_shares,
        )

    @property
    def quality(self) -> ClickQuality:
        """On held-out rows; a report is made of a run that came to its end."""
        assert self.training.quality is not None
        return self.training.quality

    def night_metrics(self) -> dict[str, float | None]:
        """Return the few figures by which nights are compared, in short names and four digits.

        MLflow's table shows names and numbers as they are, and has room for no more.
        """
        best, auc = self.best_reachable, self.quality.auc
        figures = {
            "night/usd": self.billed_usd,
            "night/usd_per_million": self.billed_usd_per_million_samples,
            "night/samples_per_s": self.training.undisturbed_throughput_samples_per_s,
            "night/off_by": self.prediction_error,
            "night/auc": auc,
            "night/auc_gap": best.auc - auc if best and best.auc and auc else None,
            "night/plan_gap": self.chosen.plan.optimality_gap,
        }
        return {name: None if value is None else float(f"{value:.4g}") for name, value in figures.items()}

    def metrics(self) -> dict[str, float | None]:
        """Return the figures of the whole run under their stable names, beside those of its plan."""
        quality, best = self.quality, self.best_reachable
        baseline = self.baseline.quality if isinstance(self.baseline, Baseline) else None
        trees = self.boosted_trees
        samples = sum(step.num_samples for step in self.training.steps)
        return (
            {
                **self.night_metrics(),
                "measured/step_seconds": self.measured_step_seconds,
                "measured/undisturbed_throughput_samples_per_s": self.training.undisturbed_throughput_samples_per_s,
                "measured/prediction_error": self.prediction_error,
                "measured/samples": float(samples),
                "measured/sent_bytes_per_step": self.training.sent_bytes_per_step,
                "measured/repeated_steps": float(self.training.num_repeated_steps),
                "restarts/count": float(len(self.restarts)),
                "restarts/seconds": sum(restart.seconds or 0.0 for restart in self.restarts),
                "restarts/usd": sum(restart.usd or 0.0 for restart in self.restarts),
                **self.plan_metrics(),
                "cost/billed_usd": self.billed_usd,
                "cost/billed_usd_per_million_samples": self.billed_usd_per_million_samples,
                "cost/waste_usd": sum(line.usd for line in self.waste),
                "quality/auc": quality.auc,
                "quality/log_loss": quality.log_loss,
                "quality/baseline_auc": baseline.auc if baseline else None,
                "quality/baseline_log_loss": baseline.log_loss if baseline else None,
                "quality/normalized_entropy": quality.normalized_entropy,
                "quality/lightgbm_auc": trees.quality.auc if trees else None,
                "quality/lightgbm_log_loss": trees.quality.log_loss if trees else None,
                "quality/lightgbm_processor_seconds": trees.processor_seconds if trees else None,
                "quality/best_reachable_auc": best.auc if best else None,
                "quality/best_reachable_log_loss": best.log_loss if best else None,
            }
            | {
                f"quality/{_metric_part(name)}/{figure}": value
                for name, found in self.training.quality_of_other_labels.items()
                for figure, value in (("auc", found.auc), ("log_loss", found.log_loss))
            }
            | self.id_metrics()
        )

    def id_metrics(self) -> dict[str, float | None]:
        """Return the turnover of dynamic ids in all columns together; nothing where ids are hashed."""
        found = self.id_turnover
        if not found:
            return {}
        return {
            "ids/rows": float(sum(turnover.table_rows for turnover in found)),
            "ids/count": float(sum(turnover.num_ids for turnover in found)),
            "ids/with_row": float(sum(turnover.num_with_row for turnover in found)),
            "ids/admitted": float(sum(turnover.num_admitted for turnover in found)),
            "ids/evicted": float(sum(turnover.num_evicted for turnover in found)),
        }


def _metric_part(column: str) -> str:
    """Return a column's name with what MLflow takes in the name of a metric."""
    return re.sub(r"[^\w .-]", "_", column)


def _explanation_metrics(explanation: PlanExplanation) -> dict[str, float | None]:
    """Return the figures of an explanation under their stable names."""
    runner_up = explanation.runner_up
    return {
        "explanation/runner_up_extra_usd": runner_up.extra_usd if runner_up else None,
        "explanation/ten_percent_more_usd": explanation.ten_percent_more.extra_usd,
    }


def plan_summary(plan: SchedulingPlan) -> str:
    """Return a plan in one line."""
    stages = ", ".join(stage.units for stage in plan.stages)
    gap = "optimal" if plan.optimality_gap == 0 else _gap_at_most(plan)
    return f"{plan.scheduler}: {stages}; {plan.throughput_samples_per_s:,.0f} samples/s, {gap}"


def taken_text(searches: Searches, asked: str) -> str:
    """Return why a plan is not that of the method that was asked for; nothing where it is."""
    if searches.taken == asked:
        return ""
    if asked in searches.without_plan:
        return f"; {asked}, which was asked for, found no plan"
    extra = (
        ratio(searches.results[asked].plan.cost_usd, searches.chosen.plan.cost_usd, otherwise=math.inf) - 1
    )
    return f"; the plan of {asked}, which was asked for, costs {extra:.2%} more"


def training_summary(training: TrainingRun) -> str:
    """Return steps, speed and quality of a training run in one line."""
    assert training.quality is not None
    attempts = "" if training.num_attempts == 1 else f", {training.num_attempts} attempts"
    return (
        f"{len(training.steps):,} steps, {_speed_text(training.throughput_samples_per_s)} samples/s, "
        f"log-loss {training.quality.log_loss:.4f} on held-out rows{attempts}"
    )


def gap_text(report: PlanReport) -> str:
    """Return the proof of the plan's cost; where machines cost nothing, the fastest plan is the cheapest."""
    plan = report.chosen.plan
    if plan.optimality_gap == 0:
        is_free = report.provisioning.cloud_plan.price_usd_per_hour == 0
        return f"optimal: no plan for this problem is {'faster' if is_free else 'cheaper'} (gap 0)"
    return f"{_gap_at_most(plan)} for this problem"


def _speed_text(samples_per_s: float | None) -> str:
    """Return a speed; "-" where too few steps were trained to measure one."""
    return NOT_KNOWN if samples_per_s is None else f"{samples_per_s:,.0f}"


def _gap_at_most(plan: SchedulingPlan) -> str:
    return f"at most {plan.optimality_gap:.2%} more expensive than the cheapest plan"
