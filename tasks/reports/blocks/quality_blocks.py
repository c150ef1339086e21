"""The quality of a trained model on its run's page, and whether it became champion."""

from __future__ import annotations

from tasks.judging.promotion_gates import GateVerdict, ModelFigures, PromotionDecision
from tasks.reports.pages import Block, Table, Text
from tasks.reports.report_tables import QUALITY_HEADER, baseline_lines, quality_rows
from tasks.reports.run_report import RunReport

JUDGED_HEADER = ["model", "AUC", "log-loss", "predicted over observed clicks", "USD per million samples"]
GATE_HEADER = ["gate", "found", "must be", "bound", "outcome", "remark"]


def quality_blocks(report: RunReport, decision: PromotionDecision | None) -> list[Block]:
    """Return the model beside its baselines and, where somebody decided, beside the champion with all gates."""
    blocks: list[Block] = [
        Table(
            caption=f"On the {report.num_eval_rows:,} latest rows, which no model was trained on",
            header=QUALITY_HEADER,
            rows=quality_rows(report),
        ),
        *(Text(text=line) for line in baseline_lines(report)),
    ]
    if decision is None:
        return blocks
    outcome = "yes" if decision.is_promoted else "no"
    blocks.append(Text(text=f"Became champion: {outcome}. {decision.why[:1].upper()}{decision.why[1:]}"))
    judged = {"this model": decision.challenger, f"champion {decision.champion_version}": decision.champion}
    rows = [_figure_cells(name, figures) for name, figures in judged.items() if figures is not None]
    if rows:
        blocks.append(
            Table(
                caption=f"Judged on {decision.num_rows:,} rows with {decision.num_clicks:,} clicks",
                header=JUDGED_HEADER,
                rows=rows,
            )
        )
    if decision.gates:
        blocks.append(
            Table(
                caption=f"Gates, with intervals of {decision.confidence:.0%}",
                header=GATE_HEADER,
                rows=[_gate_cells(gate) for gate in decision.gates],
                text_columns=frozenset({0, 2, 4, 5}),
            )
        )
    return blocks


def _figure_cells(name: str, figures: ModelFigures) -> list[str]:
    usd = figures.usd_per_million_samples
    return [
        name,
        f"{figures.auc:.4f}",
        f"{figures.log_loss:.4f}",
        f"{figures.calibration_ratio:.3f}",
        "-" if usd is None else f"{usd:.4f}",
    ]


def _gate_cells(gate: GateVerdict) -> list[str]:
    value, bound = (
        "-" if number is None else number if isinstance(number, str) else f"{number:.5g}"
        for number in (gate.value, gate.bound)
    )
    return [gate.name, value, gate.rule, bound, "met" if gate.is_met else "missed", gate.remark]
