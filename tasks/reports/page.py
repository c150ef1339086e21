"""A report as one HTML page to look at: the facts, charts of nights, loss and pipeline, and four tables.

The page needs no script and no other file, so that it opens from an artifact store, on a phone and in the dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from heterps_core.plain_text import plain
from heterps_core.text_table import Table
from tasks.judging.promotion_gates import PromotionDecision
from tasks.records.past_runs import PastRun
from tasks.reports import tables
from tasks.reports.bills import machines_table
from tasks.reports.charts import Chart, Night, loss_chart, night_charts, pipeline_chart
from tasks.reports.report_text import facts
from tasks.reports.run_report import PlanReport, RunReport

_TEMPLATES = Path(__file__).parent / "templates"


def page(
    report: PlanReport,
    decision: PromotionDecision | str,
    nights: Sequence[PastRun],
    links: Sequence[tuple[str, str]],
) -> str:
    """Return the page of a plan or a run; every text is escaped.

    Args:
        decision: On the model of a run; or why it was not judged.
        nights: Earlier runs; those of the same model that finished are drawn before this one.
        links: Texts, each with an address.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        # Markup is the templates' own, and stays.
        finalize=lambda value: plain(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html").render(
        title=report.name if isinstance(report, RunReport) else f"{report.name}: the plan",
        run_id=report.run_id,
        facts=facts(report, decision),
        why="" if isinstance(decision, str) else decision.why,
        charts=_charts(report, decision, nights),
        tables=_tables(report, decision),
        links=links,
    )


def _charts(report: PlanReport, decision: PromotionDecision | str, nights: Sequence[PastRun]) -> list[Chart]:
    charts = [pipeline_chart(report.simulation.load)]
    if not isinstance(report, RunReport):
        return charts
    charts.insert(0, loss_chart([step.loss for step in report.training.steps]))
    this = Night(
        day=report.name[:10],
        usd=report.billed_usd,
        auc=report.quality.auc,
        samples_per_s=report.training.undisturbed_throughput_samples_per_s,
        became_champion=None if isinstance(decision, str) else decision.is_promoted,
    )
    earlier = [
        Night(night.night, night.usd, night.auc, night.throughput_samples_per_s, night.was_promoted)
        for night in sorted(nights, key=lambda night: night.by_day)
        if night.model == report.model and night.status == "FINISHED" and night.auc is not None
    ]
    return [*(night_charts([*earlier, this]) if earlier else []), *charts]


def _tables(report: PlanReport, decision: PromotionDecision | str) -> list[Table]:
    if not isinstance(report, RunReport):
        return [tables.stages_table(report), tables.purchase_table(report), tables.search_table(report)]
    models = tables.quality_table(report) if isinstance(decision, str) else tables.judged_table(decision)
    found = [
        tables.stages_table(report),
        models,
        tables.calibration_table(report),
        machines_table(report.bills),
    ]
    return [table for table in found if table.rows]
