"""What a run cost, how fast and how good it was, each against the night before, with a verdict in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heterps_core.text_table import NOT_KNOWN, usd_text
from tasks.judging.promotion_gates import PromotionDecision
from tasks.records.mlflow_names import DATA_TAG
from tasks.records.past_runs import PastRun
from tasks.reports.document import Answer
from tasks.reports.run_report import RunReport, speed_text

SAME = 0.05
"""Relative change of a cost or speed that is no verdict: so far apart are two runs of one job on one machine."""

STANDARD_ERRORS = 1.96
"""Of a change of the AUC that chance alone reaches in one of twenty nights."""

NOTHING_BEFORE = "no night before to compare with"


def night_before(nights: Sequence[PastRun], run_id: str) -> PastRun | None:
    """Return the last night before a run, in the order of days, that finished with its model on its data."""
    current = next((night for night in nights if night.run_id == run_id), None)
    if current is None:
        return None
    earlier = [
        night
        for night in nights
        if night.status == "FINISHED"
        and night.auc is not None
        and night.by_day < current.by_day
        and (night.model, night.tags.get(DATA_TAG)) == (current.model, current.tags.get(DATA_TAG))
    ]
    return max(earlier, key=lambda night: night.by_day, default=None)


def answers_of(report: RunReport, decision: PromotionDecision | str, last: PastRun | None) -> list[Answer]:
    """Return the four answers that a page opens with.

    In place of a decision it may be told why the model was not judged; `last` is the night to compare with.
    """
    speed = report.training.undisturbed_throughput_samples_per_s
    usd, auc = report.billed_usd_per_million_samples, report.quality.auc
    cheaper = faster = NOTHING_BEFORE
    if last is not None:
        cheaper = _compared(
            usd, last.usd_per_million_samples, last.night, words=("cheaper", "more expensive")
        )
        faster = _compared(speed, last.throughput_samples_per_s, last.night, words=("slower", "faster"))
    if isinstance(decision, str):
        champion = ("not judged", decision)
    else:
        champion = ("yes" if decision.is_promoted else "no", decision.why)
    return [
        Answer(
            "What did it cost?",
            usd_text(report.billed_usd),
            f"billed ({report.billed_where}); promised {report.promised_cost}; {cheaper}",
        ),
        Answer(
            "How fast was it?",
            f"{speed_text(speed)} samples/s",
            f"measured ({report.trained_where}); promised {report.promised_speed}; {faster}",
        ),
        Answer("How good is it?", f"AUC {NOT_KNOWN if auc is None else f'{auc:.4f}'}", _better(report, last)),
        Answer("Is it the champion?", *champion),
    ]


def auc_standard_error(auc: float, *, num_clicks: int, num_others: int) -> float:
    """Return the standard error of an AUC over rows drawn by chance (Hanley and McNeil 1982).

    sqrt((A(1-A) + (n1-1)(Q1-A^2) + (n0-1)(Q0-A^2)) / (n1 n0)), Q1 = A / (2-A), Q0 = 2A^2 / (1+A), for n1 clicks and
    n0 other rows, each at least 1.

    Example:
        >>> round(auc_standard_error(0.75, num_clicks=100, num_others=100), 4)
        0.0344
    """
    spread = auc * (1 - auc)
    spread += (num_clicks - 1) * (auc / (2 - auc) - auc**2)
    spread += (num_others - 1) * (2 * auc**2 / (1 + auc) - auc**2)
    return math.sqrt(spread / (num_clicks * num_others))


def _compared(now: float | None, before: float | None, night: str, *, words: tuple[str, str]) -> str:
    """Return a change with its verdict; `words` are for less and for more."""
    if now is None or not before:
        return NOTHING_BEFORE
    change = now / before - 1
    verdict = "about the same" if abs(change) < SAME else words[change > 0]
    return f"{verdict}, {change:+.1%} since {night}"


def _better(report: RunReport, last: PastRun | None) -> str:
    now, judgement = report.quality.auc, report.training.judgement
    if last is None or now is None or last.auc is None or judgement is None:
        return NOTHING_BEFORE
    clicks, others = judgement.num_clicks, judgement.num_rows - judgement.num_clicks
    # Both nights were judged, on rows of their own.
    chance = STANDARD_ERRORS * math.sqrt(2) * auc_standard_error(now, num_clicks=clicks, num_others=others)
    change = now - last.auc
    verdict = "no clear change" if abs(change) < chance else "better" if change > 0 else "worse"
    return f"{verdict}, {change:+.4f} since {last.night} (chance alone: up to {chance:.4f})"
