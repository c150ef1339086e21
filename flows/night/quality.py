"""Chooses the batch of a night with its plan: a target AUC at least cost, or nearly the best AUC for less."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial

from flows.night.plan import NightPlan, plan_night
from flows.night.run import OpenedRun
from flows.parameters import TrainedParameters
from heterps_core.errors import ConfigurationError, InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.quality_curve import QualityCurve
from heterps_core.planning.search.optimum import find_optimum, highest_throughput
from heterps_core.text_table import usd_text
from heterps_core.training.job import PRECISIONS, SYNC, WIRE_DTYPES, TrainingConfig
from infra.providers import get_provider
from tasks.planning.samples_to_quality import (
    BatchOption,
    KeptCurve,
    choice_text,
    measure_points,
    options_of,
    plans_of_batches,
)
from tasks.records.mlflow_names import Tag
from tasks.records.past_runs import readable_past
from tasks.records.run_files import save_parameters
from tasks.records.run_record import note
from tasks.running.progress import log_step

_MOST_RUNS = 90
_SETTINGS = {
    *("dense_optimizer", "dense_learning_rate", "dense_l2"),
    *("embedding_optimizer", "embedding_learning_rate", "embedding_l2"),
    *("clip_norm", "warmup_steps", "label_weights"),
}
_FASTEST_SECONDS = 3.0
"""Processor time of each search for the fastest plan, which is for people alone."""

_SHARES_OF_HIGHEST = (0.999, 0.9, 0.75, 0.5)
"""Of the highest throughput, the first that a plan reaches is the fastest: pipelines that drain do not reach all."""


def plan_with_batch(run: OpenedRun) -> tuple[OpenedRun, NightPlan]:
    """Plan a night, with its batch where a curve is at hand or a target is asked for, and a batch is not.

    Raises:
        ConfigurationError: The target cannot be reached by the rows, or there is no curve to plan by.
        HeterpsError: As `plan_night`.
    """
    asked = run.asked
    if run.is_resumed or (asked.target_auc is None and (asked.batch_size or run.start.model)):
        return run, plan_night(run)
    curve = _curve_of(run)
    if curve is None:
        return run, plan_night(run)
    is_night_planned = get_provider(asked.provider).is_dry_run and asked.planned_samples
    num_samples = asked.planned_samples if is_night_planned else run.dataset.num_train_rows
    assert num_samples is not None
    options = options_of(curve, target_auc=asked.target_auc, num_samples=num_samples)
    options = [each for each in options if asked.batch_size in (None, each.batch_size)]
    if not options:
        raise _out_of_reach(run, curve, num_samples)
    plans, bounds_usd = plans_of_batches(options, lambda option: plan_night(_with(run, option)), _usd)
    option = min(
        (each for each in options if each.batch_size in plans), key=lambda each: _usd(plans[each.batch_size])
    )
    plan, costs = plans[option.batch_size], {size: _cost_text(each) for size, each in plans.items()}
    fastest = _fastest_text(plan) if asked.target_auc else ""
    text = choice_text(option, curve, costs, bounds_usd, target_auc=asked.target_auc, fastest=fastest)
    log_step("target" if asked.target_auc else "batch", text)
    run = _with(run, option)
    save_parameters(run.workspace, run.run_id, run.asked.values_for(TrainedParameters))
    return run, replace(plan, report=replace(plan.report, batch_choice=text))


def _usd(plan: NightPlan) -> float:
    return plan.report.chosen.plan.cost_usd


def _cost_text(plan: NightPlan) -> str:
    return f"{usd_text(_usd(plan))} in {plan.report.chosen.evaluation.run_seconds:,.0f} s"


def _with(run: OpenedRun, option: BatchOption) -> OpenedRun:
    """Return a run in batches of an option; what a dry run trains of a larger night keeps its own batch."""
    changed = {"max_samples": option.num_samples} if option.needed else {}
    if not run.asked.planned_samples:
        changed["batch_size"] = option.batch_size
    asked = run.asked.model_copy(update=changed)
    return replace(run, asked=asked, planned_batch_size=option.batch_size)


def _curve_of(run: OpenedRun) -> QualityCurve | None:
    """Return the curve of a run: of past ones with the same data, model and settings, else measured for a target."""
    asked = run.asked
    if run.start.model is not None:
        raise ConfigurationError(
            f"target_auc is planned for a model that begins with new weights, but this one goes on with version "
            f"{run.start.model.version}; add start_from=scratch, or leave target_auc out"
        )
    settings = json.dumps(asked.model_dump(include=_SETTINGS), sort_keys=True)
    past = [
        each
        for each in readable_past(run.workspace, most=_MOST_RUNS)
        if each.tags.get(Tag.DATA) == asked.source.name and each.tags.get(Tag.MODEL) == asked.sized_model
    ]
    curves = [
        KeptCurve.from_json(json.loads(each.tags[Tag.CURVE])) for each in past if Tag.CURVE in each.tags
    ]
    kept = next((curve for curve in reversed(curves) if curve.settings == settings), None)
    if kept is None and asked.target_auc is None:
        return None
    if kept is None:
        points = measure_points(run.dataset, asked.sized_model, partial(_config, run))
        kept = KeptCurve(settings=settings, points=points)
    curve = QualityCurve.of(kept.points)
    note(run.workspace, run.tracked, tags={Tag.CURVE: json.dumps(kept.to_json())})
    return curve


def _config(run: OpenedRun, batch_size: int) -> TrainingConfig:
    """Return the numbers with which the trainer would train in batches of a size, in one process."""
    own = {"batch_size": batch_size, "num_microbatches": 1, "num_epochs": 1}
    plain = {"precision": PRECISIONS[0], "wire_dtype": WIRE_DTYPES[0], "update_mode": SYNC}
    return TrainingConfig(**run.training_numbers | plain | own)


def _fastest_text(plan: NightPlan) -> str:
    """Return how much more the fastest plan of the same batch costs, and how long it takes."""
    problem = plan.report.problem
    highest = highest_throughput(problem, deadline=time.process_time() + _FASTEST_SECONDS)
    for share in _SHARES_OF_HIGHEST:
        try:
            faster = replace(problem, throughput_floor_samples_per_s=share * highest)
            found = find_optimum(faster, seconds=_FASTEST_SECONDS)
        except InfeasiblePlanError:
            continue
        extra = usd_text(max(found.cost_usd - _usd(plan), 0.0))
        seconds = evaluate(problem, found.stages).run_seconds
        return f"; the fastest plan costs {extra} more and takes {seconds:,.0f} s"
    return "; no plan is much faster"


def _out_of_reach(run: OpenedRun, curve: QualityCurve, num_samples: int) -> ConfigurationError:
    """Return the error for a target that no batch reaches, with the best AUC in reach and its cost."""
    asked, best = run.asked, options_of(curve, target_auc=None, num_samples=num_samples)
    best = [each for each in best if asked.batch_size in (None, each.batch_size)] or [
        BatchOption(batch_size=asked.batch_size or run.batch_size, num_samples=num_samples, needed=None)
    ]
    usd = usd_text(_usd(plan_night(_with(run, best[0]))))
    auc = curve.auc_after(num_samples, best[0].batch_size)
    return ConfigurationError(
        f"target_auc must be within reach of the {num_samples:,} samples, got {asked.target_auc}; the best of the "
        f"curve is {auc:.4f}, by all of them in batches of {best[0].batch_size:,} for {usd}; lower it, or take more "
        f"rows"
    )
