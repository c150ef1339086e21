"""The report of the last nights: a table to compare them by."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from heterps_core.planning.calibration import Correction
from heterps_core.text_table import NOT_KNOWN, Table
from tasks.records.past_runs import PastRun
from tasks.reports.document import Answer, Document, Links, Section

MOST_NIGHTS = 30

COLUMNS = {
    **dict.fromkeys(("night", "model", "scheduler", "plan"), ""),
    "USD": ".6f",
    "USD per million": ".4f",
    "samples/s": ",.0f",
    "off by": "+.1%",
    "AUC": ".4f",
    **dict.fromkeys(("champion", "ended", "run"), ""),
}


def nights_document(
    nights: Sequence[PastRun], *, current_run_id: str, correction: Correction, links: Links
) -> Document:
    """Return the report that compares nights, in the order of their days."""
    nights = sorted(nights, key=lambda night: night.by_day)
    promoted = [night.run_id for night in nights if night.was_promoted]
    finished = sum(night.status == "FINISHED" or night.run_id == current_run_id for night in nights)
    table = Table(
        caption="What each cost, whether it was faster, whether it is better",
        columns=COLUMNS,
        rows=[
            (
                night.night,
                night.model,
                night.parameters.get("method"),
                night.plan,
                night.usd,
                night.usd_per_million_samples,
                night.throughput_samples_per_s,
                night.prediction_error,
                night.auc,
                _mark(night, newest=promoted[-1:]),
                "this run" if night.run_id == current_run_id else night.outcome,
                night.run_id,
            )
            for night in nights
        ],
    )
    meaning = (
        "off by: measured throughput over the predicted one, less 1. champion: whether the model took the place of "
        "the one in use; of the days here the newest such is marked."
    )
    return Document(
        title=f"The last {len(nights)} nights, {nights[0].night} to {nights[-1].night}",
        summary=f"{finished} of {len(nights)} runs came to their end. A night is a training run; "
        "they stand in the order of the days that they trained.",
        answers=_answers(nights),
        sections=[
            Section(title="Nights", blocks=[table, meaning]),
            Section(title="Calibration", blocks=[f"The prediction for the newest run: {correction}."]),
        ],
        links=links,
    )


def _answers(nights: Sequence[PastRun]) -> list[Answer]:
    costs = [night.usd for night in nights if night.usd is not None]
    errors = [abs(error) for night in nights if (error := night.prediction_error) is not None]
    # A model that was kept out is no good one, however cheap it was.
    good = [night for night in nights if night.was_promoted is not False]
    found, cheap = _best(good), _cheapest(good)
    facts = [Answer("All nights cost", f"{sum(costs):.4f} USD" if costs else NOT_KNOWN)]
    if cheap is not None:
        facts.append(Answer("Cheapest", f"{cheap.usd_per_million_samples:.4f} USD per million", cheap.night))
    if found is not None:
        facts.append(Answer("Best AUC", f"{found.auc:.4f}", found.night))
    if errors:
        facts.append(Answer("Predictions were off by", f"{median(errors):.1%}", "the median"))
    facts.append(Answer("New champions", str(sum(night.was_promoted is True for night in nights))))
    return facts


def _mark(night: PastRun, *, newest: Sequence[str]) -> str | None:
    if night.was_promoted is None:
        return None
    return "no" if not night.was_promoted else "★ newest" if night.run_id in newest else "★ yes"


def _cheapest(nights: Sequence[PastRun]) -> PastRun | None:
    known = [night for night in nights if night.usd_per_million_samples is not None]
    return min(known, key=lambda night: night.usd_per_million_samples or 0.0, default=None)


def _best(nights: Sequence[PastRun]) -> PastRun | None:
    known = [night for night in nights if night.auc is not None]
    return max(known, key=lambda night: night.auc or 0.0, default=None)
