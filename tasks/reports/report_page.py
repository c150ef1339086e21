"""The page of one run: plan, why, stages over time, bill, waste, prediction error, quality, and where to look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heterps_core.planning.calibration.rolling_origin import as_share
from heterps_core.planning.explain.text import explanation_text
from tasks.judging.nights import Night
from tasks.judging.promotion_gates import PromotionDecision
from tasks.reports.blocks.bill_blocks import bill_blocks
from tasks.reports.blocks.quality_blocks import quality_blocks
from tasks.reports.pages import Block, Lines, Link, Links, Page, Picture, Section, Table, Text
from tasks.reports.report_pictures import FRONT_PICTURE, SEARCHES_PICTURE, STAGES_PICTURE, error_picture
from tasks.reports.report_tables import (
    ESTIMATED_NOTE,
    SEARCH_HEADER,
    STAGE_HEADER,
    STAGE_SPEED_HEADER,
    failed_search_lines,
    floor_text,
    gap_text,
    search_rows,
    speed_rows,
    speed_text,
    stage_rows,
)
from tasks.reports.run_report import PlanReport, RunReport

Pictures = Mapping[str, Picture]


def plan_page(report: PlanReport, *, pictures: Pictures, links: Sequence[Link]) -> Page:
    """Return the page of a run that ended with its plan."""
    return Page(
        title=f"Plan {report.run_id}: {report.model}",
        summary=f"{report.model} on {report.data}. Nothing was launched.",
        facts=_plan_facts(report),
        sections=[*_plan_sections(report, pictures), _links_section(links)],
    )


def run_page(
    report: RunReport,
    *,
    pictures: Pictures,
    nights: Sequence[Night],
    decision: PromotionDecision | None,
    links: Sequence[Link],
) -> Page:
    """Return the page of a finished run.

    Args:
        report: The run.
        pictures: Of its plan.
        nights: The last ones with this run, the newest last.
        decision: Whether its model became champion; None where nobody decided.
        links: Where to go on.
    """
    plan, why, *searches = _plan_sections(report, pictures)
    return Page(
        title=f"Run {report.run_id}: {report.model}",
        summary=f"{report.model} on {report.data}, {report.num_train_rows:,} rows to train on and the latest "
        f"{report.num_eval_rows:,} held out.",
        facts=_run_facts(report),
        sections=[
            plan,
            why,
            Section(title="Stages over time", blocks=_stage_blocks(report, pictures)),
            Section(title="Bill", blocks=bill_blocks(report)),
            Section(title="Prediction error", blocks=_error_blocks(report, nights)),
            Section(title="Quality", blocks=quality_blocks(report, decision)),
            *searches,
            _links_section(links),
        ],
    )


def _plan_facts(report: PlanReport) -> list[tuple[str, str]]:
    plan = report.chosen.plan
    return [
        ("Planned cost", f"{plan.cost_usd:.6f} USD"),
        ("Planned price", f"{plan.price_usd_per_hour:.4f} USD/hour"),
        ("Planned speed", f"{plan.throughput_samples_per_s:,.0f} samples/s"),
        ("Proof", f"gap {plan.optimality_gap:.2%}"),
    ]


def _run_facts(report: RunReport) -> list[tuple[str, str]]:
    quality, error = report.training.quality, report.prediction_error
    charged = "list prices, nothing is charged" if report.provisioning.is_rehearsal else "charged"
    facts = [
        ("What did it cost?", f"{report.billed_usd:.6f} USD ({charged})"),
        ("How fast was it?", f"{speed_text(report.training.undisturbed_throughput_samples_per_s)} samples/s"),
    ]
    if error is not None:
        facts.append(("Against the prediction", f"{error:+.1%}"))
    facts.append(("How good is it?", "AUC -" if quality.auc is None else f"AUC {quality.auc:.4f}"))
    facts.append(("The plan's cost is at most", f"{report.chosen.plan.optimality_gap:.2%} above the optimum"))
    return facts


def _plan_sections(report: PlanReport, pictures: Pictures) -> list[Section]:
    """Return plan, why and search methods."""
    plan = report.chosen.plan
    why: list[Block] = [
        Lines(label="Why this plan", text=explanation_text(report.problem, report.explanation))
    ]
    if FRONT_PICTURE in pictures:
        why.append(pictures[FRONT_PICTURE])
    return [
        Section(
            title="Plan",
            blocks=[
                Table(
                    caption=f"Stages of the plan by {plan.scheduler}",
                    header=STAGE_HEADER,
                    rows=stage_rows(report),
                    text_columns=frozenset({0, 1, 2}),
                ),
                Text(
                    text=f"Predicted {plan.throughput_samples_per_s:,.0f} samples/s "
                    f"({floor_text(report)}) at {plan.price_usd_per_hour:.4f} USD/hour, "
                    f"{plan.cost_usd:.6f} USD for the run. Simulated step by step: "
                    f"{report.simulation.run.throughput_samples_per_s:,.0f} samples/s, "
                    f"{report.simulated_cost_usd:.6f} USD."
                ),
                Text(text=f"Machines: {report.provisioning.summary}."),
                Text(text=f"The plan is {gap_text(report)}."),
                *([Text(text=f"Note: {ESTIMATED_NOTE}.")] if report.is_estimated else []),
            ],
        ),
        Section(title="Why this plan", blocks=why),
        Section(
            title="Search methods",
            blocks=[
                Table(
                    caption="What each method found with the same budget",
                    header=SEARCH_HEADER,
                    rows=search_rows(report),
                ),
                *(Text(text=line) for line in failed_search_lines(report)),
                pictures[SEARCHES_PICTURE],
            ],
        ),
    ]


def _stage_blocks(report: RunReport, pictures: Pictures) -> list[Block]:
    shown = (
        "Planned stages, rehearsed here by fewer workers" if report.provisioning.is_rehearsal else "Stages"
    )
    return [
        pictures[STAGES_PICTURE],
        Table(
            caption=f"{shown}: predicted and measured, for a batch of {report.batch_size:,}",
            header=STAGE_SPEED_HEADER,
            rows=speed_rows(report),
            text_columns=frozenset({0, 1}),
        ),
        Text(
            text="Times are of a stage's own work, without waits for other stages; USD are its machines' price "
            "for the trained steps, at the predicted and at the measured speed of the whole pipeline."
        ),
    ]


def _error_blocks(report: RunReport, nights: Sequence[Night]) -> list[Block]:
    error, correction = report.prediction_error, report.correction
    blocks: list[Block] = [
        Text(
            text=f"Predicted {report.predicted_throughput_samples_per_s:,.0f} samples/s, measured "
            f"{speed_text(report.training.undisturbed_throughput_samples_per_s)}"
            + ("." if error is None else f" ({error:+.1%}).")
        ),
        Text(
            text=f"The prediction was {correction.summary}."
            if report.provisioning.is_rehearsal
            else (f"{report.learning.summary(report.problem)}.")
        ),
    ]
    if correction.error_without is not None and correction.error_with is not None:
        blocks.append(
            Table(
                caption=f"Mean error on {correction.num_answers} earlier predictions, "
                "each corrected by the nights before it",
                header=["prediction", "off by a factor of"],
                rows=[
                    ["cost model alone", f"{1 + as_share(correction.error_without):.3f}"],
                    ["corrected", f"{1 + as_share(correction.error_with):.3f}"],
                ],
            )
        )
    if any(night.speed is not None for night in nights):
        blocks.append(error_picture(nights))
    return blocks


def _links_section(links: Sequence[Link]) -> Section:
    return Section(title="Links", blocks=[Links(links=links)])
