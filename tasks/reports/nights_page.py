"""The page of the last nights: a table to compare them by, and the same as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from heterps_core.planning.calibration.rolling_origin import Correction
from tasks.judging.nights import Night, best, cheapest
from tasks.reports.nights_figure import nights_figure
from tasks.reports.pages import Link, Links, Page, Picture, Section, Table, Text

HEADER = [
    "night",
    "model",
    "USD",
    "USD per million",
    "samples/s",
    "off by",
    "AUC",
    "to best",
    "plan gap",
    "champion",
    "ended",
    "run",
]
NOTHING = "-"


def nights_page(
    nights: Sequence[Night], *, current_run_id: str, correction: Correction, links: Sequence[Link]
) -> Page:
    """Return the page that compares nights.

    Args:
        nights: At least one, the newest last.
        current_run_id: The run that writes the page, and so has not ended.
        correction: What was learnt for the current run.
        links: Where to go on.
    """
    finished = sum(night.status == "FINISHED" or night.run_id == current_run_id for night in nights)
    return Page(
        title=f"The last {len(nights)} nights, {nights[0].day} to {nights[-1].day}",
        summary=f"{finished} of {len(nights)} runs came to their end. A night is a training run; the newest is last.",
        facts=_facts(nights),
        sections=[
            Section(
                title="Nights",
                blocks=[
                    Table(
                        caption="What each cost, whether it was faster, whether it is better",
                        header=HEADER,
                        rows=[_row(night, current_run_id=current_run_id) for night in nights],
                        text_columns=frozenset({0, 1, 9, 10, 11}),
                    ),
                    Text(
                        text="off by: measured throughput over the predicted one, less 1. to best: what is missing "
                        "to the AUC of the true click probabilities, where these are known. plan gap: how much "
                        "dearer the plan is than the proven bound on its cost, at most."
                    ),
                ],
            ),
            Section(title="Over time", blocks=[nights_picture(nights)]),
            Section(
                title="What was learnt",
                blocks=[Text(text=f"The prediction for the newest run: {correction.summary}.")],
            ),
            Section(title="Links", blocks=[Links(links=links)]),
        ],
    )


def nights_picture(nights: Sequence[Night]) -> Picture:
    """Return the picture of nights, with what it shows in words."""
    speeds = [night.throughput_samples_per_s for night in nights if night.throughput_samples_per_s]
    shown = f"Throughput between {min(speeds):,.0f} and {max(speeds):,.0f} samples/s. " if speeds else ""
    found, cheap = best(nights), cheapest(nights)
    quality = f"The highest AUC is {found.auc:.4f}, of {found.day}. " if found else ""
    cost = f"The cheapest night is {cheap.day}. " if cheap else ""
    return Picture.of(
        nights_figure(nights),
        name="nights.png",
        caption="Cost, throughput, AUC and prediction error of each night",
        alt=f"Four charts over {len(nights)} nights. {cost}{shown}{quality}The table above holds the figures.",
    )


def _facts(nights: Sequence[Night]) -> list[tuple[str, str]]:
    costs = [night.usd for night in nights if night.usd is not None]
    errors = [abs(night.prediction_error) for night in nights if night.prediction_error is not None]
    found, cheap = best(nights), cheapest(nights)
    facts = [("All nights cost", f"{sum(costs):.4f} USD" if costs else NOTHING)]
    if cheap is not None:
        facts.append(
            ("Cheapest", f"{_number(cheap.usd_per_million_samples, '.4f')} USD per million, {cheap.day}")
        )
    if found is not None:
        facts.append(("Best AUC", f"{_number(found.auc, '.4f')}, {found.day}"))
    if errors:
        facts.append(("Predictions were off by", f"{median(errors):.1%} (median)"))
    facts.append(("New champions", str(sum(night.was_promoted is True for night in nights))))
    return facts


def _row(night: Night, *, current_run_id: str) -> list[str]:
    is_current = night.run_id == current_run_id
    decided = {True: "yes", False: "no", None: NOTHING}
    return [
        night.day,
        night.model,
        _number(night.usd, ".6f"),
        _number(night.usd_per_million_samples, ".4f"),
        _number(night.throughput_samples_per_s, ",.0f"),
        _number(night.prediction_error, "+.1%"),
        _number(night.auc, ".4f"),
        _number(night.auc_gap, ".4f"),
        _number(night.optimality_gap, ".2%"),
        decided[night.was_promoted],
        "this run" if is_current else night.status.lower(),
        night.run_id,
    ]


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)
