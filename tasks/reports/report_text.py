"""A report for a terminal: the screen that ends a run, and the whole text that `heterps explain` shows."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from heterps_core.data.distinct_values import turnover_summary, turnover_table
from heterps_core.planning.explain.text import essential_facts
from heterps_core.text_table import NOT_KNOWN, WIDTH, labelled_lines, usd_text
from heterps_core.units import BYTES_PER_MIB, SECONDS_PER_HOUR, SECONDS_PER_MINUTE, ratio
from tasks.judging.baseline import Baseline
from tasks.judging.promotion_gates import PromotionDecision
from tasks.reports import tables
from tasks.reports.bills import bill_text, waste_text
from tasks.reports.run_report import PlanReport, RunReport, gap_text

RULE = "-" * 78

_SCREEN_WIDTH = 80


def screen(report: PlanReport, decision: PromotionDecision | str) -> str:
    """Return the facts of a plan or a run, in 80 columns.

    Args:
        decision: On the model of a run; or why it was not judged.
    """
    more = f"  stages, bill, gates, why this plan:  heterps explain {report.run_id}"
    return "\n".join(
        [*_heading(report), *labelled_lines(facts(report, decision), width=_SCREEN_WIDTH), "", more]
    )


def report_text(
    report: PlanReport, decision: PromotionDecision | str, links: Sequence[tuple[str, str]]
) -> str:
    """Return the whole report of a plan or a run for a terminal of 100 columns."""
    sections = {
        "Plan": _plan_lines(report),
        "Why this plan": _why_lines(report),
        "Stages": [
            *tables.stages_table(report).captioned_lines(),
            "  Times are of a stage's own work, without waits for other stages.",
        ],
    }
    if isinstance(report, RunReport):
        sections |= {
            "Restarts": tables.restarts_table(report).captioned_lines() if report.restarts else [],
            "Bill": ["\n\n".join(map(bill_text, report.bills)), waste_text(report.waste)],
            "Speed": labelled_lines(_speed_facts(report)),
            "Quality": _quality_lines(report, decision),
        }
    sections |= {"Search methods": _search_lines(report), "Links": labelled_lines(links)}
    parts = [[*_heading(report), *labelled_lines(facts(report, decision))]]
    parts += [[title, *lines] for title, lines in sections.items() if lines]
    return "\n\n".join("\n".join(part) for part in parts)


def facts(report: PlanReport, decision: PromotionDecision | str) -> list[tuple[str, str]]:
    """Return what a person wants to know first: machines, one cost, one speed, one proof; of a run also its model."""
    cost, speed = f"promised {report.promised_cost}", f"promised {report.promised_speed}"
    held_out = f"the latest {report.num_eval_rows:,} are held out"
    found = [
        ("rows", f"{report.data}: {report.num_train_rows:,} to train on, {held_out}"),
        ("plan", _machines_text(report)),
        *([("region", report.explanation.region)] if report.explanation.region else []),
        ("proof", gap_text(report)),
        *([("batch", report.batch_choice)] if report.batch_choice else []),
        *([("busy", report.busy)] if report.busy else []),
    ]
    if not isinstance(report, RunReport):
        return [*found, ("cost", cost), ("speed", speed), ("launched", "nothing")]
    auc, training = report.quality.auc, report.training
    baseline = report.baseline.quality.auc if isinstance(report.baseline, Baseline) else None
    found += [
        ("cost", f"{cost}; billed {usd_text(report.billed_usd)} ({report.billed_where})"),
        ("speed", f"{speed}; measured {report.measured_speed}"),
        (
            "quality",
            f"AUC {NOT_KNOWN if auc is None else f'{auc:.4f}'}"
            + (f"; a logistic regression has {baseline:.4f}" if baseline is not None else ""),
        ),
    ]
    if (beside := _beside_trees(report)) is not None:
        found.append(("beside", beside))
    if training.num_attempts > 1:
        again = f"{training.num_repeated_steps:,} steps done again"
        found.append(("restarted", f"{training.num_attempts - 1} times; {again}"))
    return [*found, ("champion", _champion(decision))]


def _duration_text(seconds: float) -> str:
    """Return a length of time in the unit that suits it.

    Example:
        >>> _duration_text(41.2), _duration_text(158.0), _duration_text(9_000.0)
        ('41 seconds', '3 minutes', '2.5 hours')
    """
    if seconds < SECONDS_PER_MINUTE:
        return f"{seconds:.0f} seconds"
    if seconds < 2 * SECONDS_PER_HOUR:
        return f"{seconds / SECONDS_PER_MINUTE:.0f} minutes"
    return f"{seconds / SECONDS_PER_HOUR:.1f} hours"


def _baseline_remarks(report: RunReport) -> list[str]:
    """Return why there are no baselines, or the sample that they saw; nothing where they saw all rows."""
    return [
        f"There is no {name} to compare with: {found}."
        if isinstance(found, str)
        else f"{name} was fitted on {found.num_train_rows:,} of these training rows, evenly over them, and rated on "
        f"{found.quality.num_rows:,} of the others."
        for name, found in report.baselines.items()
        if isinstance(found, str) or found.num_train_rows < report.num_train_rows
    ]


def _beside_trees(report: RunReport) -> str | None:
    """Return who is better, the model or LightGBM, by how much and at what cost; None where that is not known.

    Of more rows than LightGBM rates the model is judged on all.
    """
    trees, own = report.boosted_trees, report.quality
    if trees is None or own.auc is None or trees.quality.auc is None:
        return None
    auc, loss = trees.quality.auc - own.auc, own.log_loss - trees.quality.log_loss
    cost = f"in {trees.processor_seconds:.1f} processor seconds"
    if auc <= 0 and loss <= 0:
        return (
            f"{report.model} is better than LightGBM by {-auc:.4f} AUC and {-loss:.4f} nats; LightGBM {cost}"
        )
    ways_out = "try heterps tune" if report.model == "cross-deep" else "try cross-deep, or heterps tune"
    if auc >= 0 and loss >= 0:
        return f"LightGBM is better by {auc:.4f} AUC and {loss:.4f} nats, {cost}; {ways_out}"
    return f"LightGBM has {auc:+.4f} AUC and {-loss:+.4f} nats of log-loss, {cost}; {ways_out}"


def _heading(report: PlanReport) -> list[str]:
    kind = "Run" if isinstance(report, RunReport) else "Plan"
    return ["", RULE, f"{kind} {report.run_id}: {report.model}", RULE, ""]


def _champion(decision: PromotionDecision | str) -> str:
    if isinstance(decision, str):
        return f"not judged: {decision}"
    if decision.is_promoted:
        return f"yes: version {decision.version} serves from now on"
    if decision.champion_version is None:
        way_out = f"heterps predict --version {decision.version} uses it anyway"
        return f"no: version {decision.version} did not pass every gate; {way_out}"
    return f"no: version {decision.champion_version} stays; version {decision.version} is not proven better"


def _machines_text(report: PlanReport) -> str:
    bought, plan, num_planned = report.provisioning, report.chosen.plan, report.problem.num_samples
    machines = bought.cloud_plan.machines
    if machines.startswith("1 x ") and "+" not in machines:
        machines = f"fits on one {machines.removeprefix('1 x ')}"
    free_hours = report.chosen.evaluation.run_seconds / SECONDS_PER_HOUR
    hourly_usd = plan.cost_usd - report.problem.extra_costs.fixed_usd
    seconds = ratio(hourly_usd, plan.price_usd_per_hour, otherwise=free_hours) * SECONDS_PER_HOUR
    text = f"{machines}: {_duration_text(seconds)} from start to end"
    if not bought.is_dry_run or num_planned == report.num_train_rows:
        return text
    return (
        f"of a night of {num_planned:,.0f} samples (planned_samples): {text}; your rows are trained with "
        f"its stages, {sum(stage.num_replicas for stage in bought.launch_stages)} processes here"
    )


def _plan_lines(report: PlanReport) -> list[str]:
    problem = report.problem
    state_bytes = sum(layer.state_bytes for layer in problem.layers)
    floor = problem.throughput_floor_samples_per_s
    asked = f"at least {floor:,.0f} samples/s were asked for" if floor > 0 else "no floor was set"
    found = [
        (
            "job",
            f"{problem.num_samples * problem.num_epochs:,.0f} samples in batches of {problem.batch_size:,}, "
            f"{_gigabytes(state_bytes)} of weights and optimizer state",
        ),
        ("throughput", asked),
        ("machines", report.provisioning.summary),
        *((f"disk of stage {index}", str(sweep)) for index, sweep in report.chosen.evaluation.sweeps.items()),
    ]
    if report.uncounted:
        found.append(("not counted", report.uncounted))
    purchase = [] if isinstance(report, RunReport) else ["", *tables.purchase_table(report).captioned_lines()]
    return [*labelled_lines(found), *purchase]


def _why_lines(report: PlanReport) -> list[str]:
    """Return the reasons, and what became of the ids of the tables."""
    if isinstance(report, RunReport) and report.id_turnover:
        ids = [
            *_wrapped(f"After this night {turnover_summary(report.id_turnover)}."),
            "",
            *turnover_table(report.id_turnover).captioned_lines(),
        ]
    else:
        most = max(report.tables.rows, key=lambda row: (row[-1] or 0.0, row[1] or 0))
        ids = _wrapped(
            f"Column {most[0]} has most collisions of {len(report.tables.rows)}: {most[-1]:.0%} of its "
            f"{most[1]:,} values share one of {most[3]:,} rows with another."
        )
    return [*labelled_lines(essential_facts(report.explanation)), *ids]


def _search_lines(report: PlanReport) -> list[str]:
    """Return the plan of each search method, the cheapest first, and why others found none."""
    # The fix that an error ends with is not for a method that is only compared.
    failed = {name: str(error).partition(";")[0] for name, error in report.searches.without_plan.items()}
    table = tables.search_table(report).captioned_lines()
    return [*table, *(line for name, text in failed.items() for line in _wrapped(f"{name}: {text}"))]


def _speed_facts(report: RunReport) -> list[tuple[str, str]]:
    training, error = report.training, report.prediction_error
    found = [("promised", report.promised_speed), ("measured", report.measured_speed)]
    if error is not None:
        trained = f"the prediction for the machines that trained{report.caution}"
        found.append(("off by", f"{error:+.1%} against {trained}"))
    if training.memory_bytes:
        each = (
            f"stage {stage} {_gigabytes(peak)} of {_gigabytes(counted)}"
            for stage, (counted, peak) in training.memory_bytes.items()
        )
        found.append(("memory", f"a worker had at most, of what was counted for it: {', '.join(each)}"))
    if training.shares:
        each = (
            f"stage {stage} {' '.join(f'{share:.1%}' for share in shares)}"
            for stage, shares in training.shares.items()
        )
        found.append(("shares", f"of each batch, by the speeds of replicas: {', '.join(each)}"))
    if training.sweeps:
        each = (
            f"stage {stage} had {sweep.hit_share:.1%} of the rows of a batch in memory, fetched "
            f"{sweep.rows_per_step:,.0f} a step, and read and wrote {sweep.disk_bytes_per_sample:,.0f} bytes a sample"
            for stage, sweep in training.sweeps.items()
        )
        found.append(("tables on disk", "; ".join(each)))
    if training.sent_bytes_per_step:
        sent = f"{training.sent_bytes_per_step / BYTES_PER_MIB:,.2f} MiB a step between workers"
        found.append(("sent", f"{sent}, in {report.config.wire_dtype}"))
    is_dry_run = report.provisioning.is_dry_run
    calibration = str(report.correction) if is_dry_run else report.learning.summary(report.problem)
    return [*found, ("calibration", calibration)]


def _quality_lines(report: RunReport, decision: PromotionDecision | str) -> list[str]:
    """Return the model beside its baselines and, where it was judged, beside the champion with all gates."""
    lines = tables.quality_table(report).captioned_lines()
    for remark in [f"{beside}." if (beside := _beside_trees(report)) else "", *_baseline_remarks(report)]:
        lines += _wrapped(remark)
    calibration = tables.calibration_table(report)
    if calibration.rows:
        lines += ["", *calibration.captioned_lines()]
    if isinstance(decision, str):
        return [*lines, *_wrapped(f"The model was not judged: {decision}.")]
    both = [table for table in (tables.judged_table(decision), tables.gates_table(decision)) if table.rows]
    judged = [line for table in both for line in ["", *table.captioned_lines()]]
    return [*lines, *_wrapped(decision.why), *judged]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.0f} GB" if num_bytes >= 1e10 else f"{num_bytes / 1e9:.2g} GB"
