"""The reports of a plan and of a finished run: what it cost, how fast and how good it was, and why it was planned."""

from __future__ import annotations

from heterps_core.data.distinct_values import turnover_summary, turnover_table
from heterps_core.judging.quality import ClickQuality
from heterps_core.planning.cost_model.evaluation import StageEvaluation
from heterps_core.planning.explain.text import essential_facts
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.text_table import Table, Value, usd_text
from heterps_core.units import BYTES_PER_MIB, MS_PER_S
from tasks.judging.baseline import Baseline
from tasks.judging.promotion_gates import PromotionDecision
from tasks.records.past_runs import PastRun
from tasks.reports.bills import bill_blocks, waste_block
from tasks.reports.decision_document import decision_tables
from tasks.reports.document import Answer, Block, Document, Facts, Links, Picture, Section
from tasks.reports.run_report import PlanReport, RunReport, gap_text, taken_text
from tasks.reports.verdicts import answers_of

PURCHASE_COLUMNS = {
    "stage": "d",
    "count": "d",
    "instance": "",
    "market": "",
    "where": "",
    "USD/hour each": ".4f",
    "USD/hour": ".4f",
    "price of": "s",
}
SPEED_COLUMNS = {
    "stage": "d",
    "device type": "",
    "workers": "d",
    **dict.fromkeys(("predicted ms", "measured ms"), ".2f"),
    "waited": ".0%",
}
SEARCH_COLUMNS = {
    "method": "",
    "USD per run": ".6f",
    "samples/s": ",.0f",
    "gap": ".2%",
    "evaluations": ",d",
    "seconds": ".2f",
}
RESTART_COLUMNS = {
    "at": "",
    "lost": "",
    "steps": ",d",
    "decided": "",
    "seconds": ",.1f",
    "USD": ".6f",
}
QUALITY_COLUMNS = {"model": "", "AUC": ".4f", "log-loss": ".4f"}


def plan_document(report: PlanReport, *, links: Links) -> Document:
    """Return the report of a run that ended with its plan: what would be bought, for how much and why."""
    plan = report.chosen.plan
    bought = report.provisioning.cloud_plan
    purchase = Table(
        caption=f"Would be bought for {bought.price_usd_per_hour:.4f} USD/hour; nothing was",
        columns=PURCHASE_COLUMNS,
        rows=[
            (
                group.stage,
                group.count,
                group.offer.instance_type.name,
                str(group.offer.market),
                group.offer.zone or group.offer.region,
                group.offer.price_usd_per_hour,
                group.price_usd_per_hour,
                group.offer.price_as_of[:10],
            )
            for group in bought.groups
        ],
    )
    return Document(
        title=f"{report.name}: the plan",
        summary=f"Run {report.run_id} on {report.data}. Nothing was launched.",
        picture=plan_picture(report),
        answers=[
            Answer("What would it cost?", usd_text(plan.cost_usd), f"{plan.price_usd_per_hour:.4f} USD/hour"),
            Answer("How fast would it be?", f"{plan.throughput_samples_per_s:,.0f} samples/s"),
            Answer("Is there a cheaper plan?", "no", "proven")
            if plan.optimality_gap == 0
            else Answer("Is there a cheaper plan?", "perhaps", f"by {plan.optimality_gap:.2%} at most"),
        ],
        sections=[
            _plan_section(report, purchase),
            Section(title="Why this plan", blocks=_why_blocks(report)),
            _search_section(report),
        ],
        links=links,
    )


def run_document(
    report: RunReport, *, decision: PromotionDecision | str, last: PastRun | None, links: Links
) -> Document:
    """Return the report of a finished run.

    In place of a decision it may be told why the model was not judged; `last` is the night to compare with.
    """
    bills = (block for bill in report.bills for block in bill_blocks(bill))
    return Document(
        title=report.name,
        summary=f"Run {report.run_id} on {report.data}, {report.num_train_rows:,} rows to train on and the latest "
        f"{report.num_eval_rows:,} held out.",
        picture=plan_picture(report),
        answers=answers_of(report, decision, last),
        sections=[
            _plan_section(report),
            Section(title="Why this plan", blocks=_why_blocks(report)),
            Section(title="Stages", blocks=_stage_blocks(report)),
            *_restarts_section(report),
            Section(title="Bill", blocks=[*bills, waste_block(report.waste)]),
            Section(title="Speed", blocks=_error_blocks(report)),
            Section(title="Quality", blocks=_quality_blocks(report, decision)),
            _search_section(report),
        ],
        links=links,
    )


def plan_picture(report: PlanReport) -> Picture:
    """Return the layers of a plan over its machines: what each stage costs, how long it works and how long it waits.

    Times are the plan's. Where a run has told how long its workers waited, idle is that, else the plan's.
    """
    problem, plan, evaluation = report.problem, report.chosen.plan, report.chosen.evaluation
    step_seconds = problem.batch_size / plan.throughput_samples_per_s
    idle = [max(0.0, 1 - part.seconds / step_seconds) for part in evaluation.stages]
    waits = "idle, planned"
    if isinstance(report, RunReport) and len(report.training.idle_shares) == len(idle):
        idle = [report.training.idle_shares[index] for index in range(len(idle))]
        waits = "idle, measured"
    groups = report.provisioning.cloud_plan.groups
    machines = [
        " + ".join(
            f"{group.count} x {group.offer.instance_type.name}" for group in groups if group.stage == index
        )
        for index in range(len(idle))
    ]
    return Picture(
        table=Table(
            caption=f"The plan of {plan.scheduler}{taken_text(report.searches, report.scheduler)}: "
            f"{problem.num_samples * problem.num_epochs:,.0f} samples in batches of {problem.batch_size:,} for "
            f"{usd_text(plan.cost_usd)}, at {plan.throughput_samples_per_s:,.0f} samples/s and "
            f"{plan.price_usd_per_hour:.4f} USD/hour",
            columns={
                "layers": "",
                "machines": "",
                "USD/hour": ".4f",
                "ms/batch, planned": ".2f",
                waits: ".0%",
            },
            rows=[
                (
                    _layers_of(problem, part),
                    f"{machines[index]} ({part.stage.num_replicas} x {part.stage.device_type})",
                    part.price_usd_per_hour,
                    part.seconds * MS_PER_S,
                    idle[index],
                )
                for index, part in enumerate(evaluation.stages)
            ],
        ),
        widths=[part.stage.last_layer - part.stage.first_layer + 1 for part in evaluation.stages],
        filled=[1 - share for share in idle],
    )


def baseline_lines(report: RunReport) -> list[str]:
    """Return whether there is no logistic regression, or that it saw a sample."""
    if report.baseline is None:
        return []
    if not isinstance(report.baseline, Baseline):
        return [f"There is no logistic regression to compare with: {report.baseline}."]
    if report.baseline.num_train_rows < report.num_train_rows:
        return [
            f"The logistic regression was fitted on {report.baseline.num_train_rows:,} of these training rows, "
            f"evenly over them, and rated on {report.baseline.quality.num_rows:,} of the others."
        ]
    return []


def _plan_section(report: PlanReport, *more: Block) -> Section:
    problem, plan = report.problem, report.chosen.plan
    state_bytes = sum(layer.state_bytes for layer in problem.layers)
    floor = problem.throughput_floor_samples_per_s
    asked = f"at least {floor:,.0f} were asked for" if floor > 0 else "no floor was set"
    facts = [
        (
            "job",
            f"{problem.num_samples * problem.num_epochs:,.0f} samples in batches of {problem.batch_size:,}, "
            f"{_gigabytes(state_bytes)} of weights and optimizer state",
        ),
        (
            "promised",
            f"{report.promised_speed}, {asked}; {report.promised_cost}, at {plan.price_usd_per_hour:.4f} USD/hour",
        ),
        ("machines", report.provisioning.summary),
        *((f"disk of stage {index}", str(sweep)) for index, sweep in report.chosen.evaluation.sweeps.items()),
        ("proof", gap_text(plan)),
    ]
    if report.is_estimated:
        facts.append(
            ("note", "times of device types that are not at hand are estimates from published figures")
        )
    if report.uncounted:
        facts.append(("not counted", report.uncounted))
    return Section(title="Plan", blocks=[Facts(pairs=facts), *more])


def _why_blocks(report: PlanReport) -> list[Block]:
    """Return the reasons, and what became of the ids of the tables."""
    if isinstance(report, RunReport) and report.id_turnover:
        told = turnover_summary(report.id_turnover)
        tables: list[Block] = [f"Behind this night {told}.", turnover_table(report.id_turnover)]
    else:
        most = max(report.tables.rows, key=lambda row: (row[-1] or 0.0, row[1] or 0))
        tables = [
            f"Of the {len(report.tables.rows)} columns {most[0]} has most collisions: {most[-1]:.0%} of its "
            f"{most[1]:,} values share one of {most[3]:,} rows with another."
        ]
    return [
        Facts(pairs=essential_facts(report.explanation)),
        *tables,
        f"heterps explain {report.run_id} and explanation.md, beside this page, show all reasons and columns.",
    ]


def _search_section(report: PlanReport) -> Section:
    """Return what each search method found, the cheapest first, and why others found nothing."""
    searches = report.searches
    marks = {report.scheduler: " (asked for)"} | {searches.taken: " (chosen)"}
    table = Table(
        caption="What each method found, and how many plans it has rated",
        columns=SEARCH_COLUMNS,
        rows=[
            (
                f"{name}{marks.get(name, '')}",
                result.plan.cost_usd,
                result.plan.throughput_samples_per_s,
                result.plan.optimality_gap,
                result.plan.num_evaluations,
                result.search_seconds,
            )
            for name, result in sorted(searches.results.items(), key=lambda item: item[1].plan.cost_usd)
        ],
    )
    # The fix that an error ends with is not for a method that is only compared.
    failed = [f"{name}: {str(error).partition(';')[0]}" for name, error in searches.without_plan.items()]
    return Section(title="Search methods", blocks=[table, *failed])


def _stage_blocks(report: RunReport) -> list[Block]:
    shown = "Stages"
    if report.provisioning.is_dry_run:
        launched = " + ".join(str(stage.num_replicas) for stage in report.provisioning.launch_stages)
        planned = " + ".join(str(stage.num_replicas) for stage in report.chosen.plan.stages)
        shown = f"Dry run on this machine, {launched} workers for the plan's {planned}"
    rows: list[list[Value]] = [
        [
            stage.index,
            stage.device_type,
            stage.num_replicas,
            stage.predicted_seconds * MS_PER_S,
            None if stage.measured_seconds is None else stage.measured_seconds * MS_PER_S,
            stage.idle_share,
        ]
        for stage in report.stages
    ]
    return [
        Table(
            caption=f"{shown}: predicted and measured, for a batch of {report.batch_size:,}",
            columns=SPEED_COLUMNS,
            rows=rows,
        ),
        "Times are of a stage's own work, without waits for other stages.",
    ]


def _restarts_section(report: RunReport) -> list[Section]:
    if not report.restarts:
        return []
    rows: list[list[Value]] = [
        [
            restart.loss.at[:19],
            restart.loss.what,
            restart.loss.lost_steps,
            restart.loss.decision or "the workers begin again",
            restart.seconds,
            restart.usd,
        ]
        for restart in report.restarts
    ]
    table = Table(
        caption="What was lost, how the run went on and why, and what passed until the last step was trained again",
        columns=RESTART_COLUMNS,
        rows=rows,
    )
    return [Section(title="Restarts", blocks=[table])]


def _error_blocks(report: RunReport) -> list[Block]:
    training, error = report.training, report.prediction_error
    facts = [("promised", report.promised_speed), ("measured", report.measured_speed)]
    if error is not None:
        facts.append(("off by", f"{error:+.1%} against the prediction for the machines that trained"))
    if training.memory_bytes:
        each = (
            f"stage {stage} {_gigabytes(peak)} of {_gigabytes(counted)}"
            for stage, (counted, peak) in training.memory_bytes.items()
        )
        facts.append(("memory", f"a worker had at most, of what was counted for it: {', '.join(each)}"))
    if training.sweeps:
        each = (
            f"stage {stage} had {found.hit_share:.1%} of the rows of a batch in memory, fetched "
            f"{found.rows_per_step:,.0f} a step, and read and wrote {found.disk_bytes_per_sample:,.0f} bytes a sample"
            for stage, found in training.sweeps.items()
        )
        facts.append(("tables on disk", "; ".join(each)))
    if training.sent_bytes_per_step:
        facts.append(
            (
                "sent",
                f"{training.sent_bytes_per_step / BYTES_PER_MIB:,.2f} MiB a step between workers, in "
                f"{report.config.wire_dtype}",
            )
        )
    if training.num_attempts > 1:
        restarts, repeated = training.num_attempts - 1, training.num_repeated_steps
        facts.append(("restarted", f"{restarts} times; {repeated:,} steps were done again"))
    is_dry_run = report.provisioning.is_dry_run
    calibration = str(report.correction) if is_dry_run else report.learning.summary(report.problem)
    return [Facts(pairs=[*facts, ("calibration", calibration)])]


def _quality_blocks(report: RunReport, decision: PromotionDecision | str) -> list[Block]:
    """Return the model beside its baselines and, where it was judged, beside the champion with all gates."""
    models: dict[str, ClickQuality | None] = {
        report.model: report.quality,
        **{
            f"{report.model}, {name}": found
            for name, found in report.training.quality_of_other_labels.items()
        },
        "logistic regression": report.baseline.quality if isinstance(report.baseline, Baseline) else None,
        "best reachable": report.best_reachable,
    }
    blocks: list[Block] = [
        Table(
            caption=f"On the {report.num_eval_rows:,} latest rows, trained on the {report.num_train_rows:,} before",
            columns=QUALITY_COLUMNS,
            rows=[(name, found.auc, found.log_loss) for name, found in models.items() if found is not None],
        ),
        *baseline_lines(report),
    ]
    if isinstance(decision, str):
        return [*blocks, f"The model was not judged: {decision}."]
    return [*blocks, *decision_tables(decision)]


def _layers_of(problem: SchedulingProblem, part: StageEvaluation) -> str:
    """Return a stage's layers by number, as explanations name them, and by name."""
    first, last = part.stage.first_layer, part.stage.last_layer
    if first == last:
        return f"{first} {problem.layers[first].name}"
    return f"{first}..{last} {problem.layers[first].name} .. {problem.layers[last].name}"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.0f} GB" if num_bytes >= 1e10 else f"{num_bytes / 1e9:.2g} GB"
