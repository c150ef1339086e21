"""The report of the last nights: a table to compare them by."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from heterps_core.planning.calibration.correction import Correction
from heterps_core.text_table import NOT_KNOWN, Table
from tasks.records.past_runs import PastRun
from tasks.reports.document import Document, Links, Section

MOST_NIGHTS = 30

COLUMNS = {
    "night": "",
    "model": "",
    "USD": ".6f",
    "USD per million": ".4f",
    "samples/s": ",.0f",
    "off by": "+.1%",
    "AUC": ".4f",
    "to best": ".4f",
    "plan gap": ".2%",
    "champion": "",
    "ended": "",
    "run": "",
}
WAS_PROMOTED = {True: "yes", False: "no", None: None}


def nights_document(
    nights: Sequence[PastRun], *, current_run_id: str, correction: Correction, links: Links
) -> Document:
    """Return the report that compares nights."""
    finished = sum(night.status == "FINISHED" or night.run_id == current_run_id for night in nights)
    table = Table(
        caption="What each cost, whether it was faster, whether it is better",
        columns=COLUMNS,
        rows=[
            (
                night.night,
                night.model,
                night.usd,
                night.usd_per_million_samples,
                night.throughput_samples_per_s,
                night.prediction_error,
                night.auc,
                night.auc_gap,
                night.optimality_gap,
                WAS_PROMOTED[night.was_promoted],
                "this run" if night.run_id == current_run_id else night.status.lower(),
                night.run_id,
            )
            for night in nights
        ],
    )
    meaning = (
        "off by: measured throughput over the predicted one, less 1. to best: what is missing to the AUC of the "
        "true click probabilities, where these are known. plan gap: how much more expensive the plan is than the "
        "proven bound on its cost, at most."
    )
    return Document(
        title=f"The last {len(nights)} nights, {nights[0].night} to {nights[-1].night}",
        summary=f"{finished} of {len(nights)} runs came to their end. A night is a training run; the newest is last.",
        facts=_facts(nights),
        sections=[
            Section(title="Nights", blocks=[table, meaning]),
            Section(
                title="Calibration", blocks=[f"The prediction for the newest run: {correction.summary}."]
            ),
            Section(title="Links", blocks=[links]),
        ],
    )


def _facts(nights: Sequence[PastRun]) -> list[tuple[str, str]]:
    costs = [night.usd for night in nights if night.usd is not None]
    errors = [abs(error) for night in nights if (error := night.prediction_error) is not None]
    found, cheap = _best(nights), _cheapest(nights)
    facts = [("All nights cost", f"{sum(costs):.4f} USD" if costs else NOT_KNOWN)]
    if cheap is not None:
        facts.append(("Cheapest", f"{cheap.usd_per_million_samples:.4f} USD per million, {cheap.night}"))
    if found is not None:
        facts.append(("Best AUC", f"{found.auc:.4f}, {found.night}"))
    if errors:
        facts.append(("Predictions were off by", f"{median(errors):.1%} (median)"))
    facts.append(("New champions", str(sum(night.was_promoted is True for night in nights))))
    return facts


def _cheapest(nights: Sequence[PastRun]) -> PastRun | None:
    known = [night for night in nights if night.usd_per_million_samples is not None]
    return min(known, key=lambda night: night.usd_per_million_samples or 0.0, default=None)


def _best(nights: Sequence[PastRun]) -> PastRun | None:
    known = [night for night in nights if night.auc is not None]
    return max(known, key=lambda night: night.auc or 0.0, default=None)
