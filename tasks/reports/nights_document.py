"""The report of the last nights: a table to compare them by, and the same as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from heterps_core.planning.calibration.correction import Correction
from heterps_core.text_table import NOT_KNOWN, Table
from tasks.records.past_runs import PastRun
from tasks.reports.document import Document, Links, Picture, Section
from tasks.reports.plan_figures import DEVICE_COLOURS, GREY

MOST_NIGHTS = 30
MOST_DAYS_SHOWN = 8
"""Labels below a picture; more would overlap."""

BLUE, ORANGE, GREEN = DEVICE_COLOURS[0], "#B25000", DEVICE_COLOURS[2]

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
    """Return the report that compares nights.

    Args:
        nights: At least one, the newest last.
        current_run_id: The run that writes the report, and so has not ended.
        correction: What was learnt for the current run.
        links: Where to go on.
    """
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
            Section(title="Over time", blocks=[nights_picture(nights)]),
            Section(
                title="What was learnt", blocks=[f"The prediction for the newest run: {correction.summary}."]
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


def nights_picture(nights: Sequence[PastRun]) -> Picture:
    """Return the picture of nights, with what it shows in words."""
    speeds = [night.throughput_samples_per_s for night in nights if night.throughput_samples_per_s]
    shown = f"Throughput between {min(speeds):,.0f} and {max(speeds):,.0f} samples/s. " if speeds else ""
    found, cheap = _best(nights), _cheapest(nights)
    quality = f"The highest AUC is {found.auc:.4f}, of {found.night}. " if found else ""
    cost = f"The cheapest night is {cheap.night}. " if cheap else ""
    return Picture.of(
        nights_figure(nights),
        name="nights.png",
        caption="Cost, throughput, AUC and prediction error of each night",
        alt=f"Four charts over {len(nights)} nights. {cost}{shown}{quality}The table above holds the figures.",
    )


def nights_figure(nights: Sequence[PastRun]) -> Figure:
    """Draw cost, throughput, AUC and prediction error below one another, a night beside the other.

    Args:
        nights: At least one, the newest last.
    """
    figure = Figure(figsize=(10.0, 9.0), dpi=100, layout="constrained")
    cost, speed, quality, error = figure.subplots(4, 1, sharex=True)
    _draw(cost, nights, lambda night: night.usd_per_million_samples, "billed", BLUE, "o")
    _draw(speed, nights, lambda night: night.throughput_samples_per_s, "measured", BLUE, "o")
    _draw(speed, nights, _expected_throughput, "predicted", ORANGE, "x")
    for axes, unit in ((cost, "USD per million samples"), (speed, "samples/s")):
        axes.set_ylabel(unit)
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    _draw(quality, nights, lambda night: night.auc, "trained", BLUE, "o")
    _draw(quality, nights, lambda night: night.best_reachable_auc, "best reachable", GREEN, "_")
    promoted = [(index, night.auc) for index, night in enumerate(nights) if night.was_promoted and night.auc]
    if promoted:
        quality.scatter(
            *zip(*promoted, strict=True),
            s=120,
            facecolor="none",
            edgecolor=ORANGE,
            linewidth=1.6,
            label="became champion",
        )
    quality.set_ylabel("AUC")
    _draw(error, nights, _uncorrected_error, "cost model alone", ORANGE, "x")
    _draw(error, nights, lambda night: night.prediction_error, "as predicted, corrected", BLUE, "o")
    error.axhline(0.0, color=GREY, linewidth=0.8)
    error.yaxis.set_major_formatter(PercentFormatter(1.0))
    error.set_ylabel("measured over\npredicted, less 1")
    _finish(figure, nights)
    return figure


def _finish(figure: Figure, nights: Sequence[PastRun]) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
        axes.set_xlim(-0.5, len(nights) - 0.5)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
    last = figure.axes[-1]
    last.xaxis.set_major_locator(MaxNLocator(nbins=MOST_DAYS_SHOWN, integer=True))
    last.xaxis.set_major_formatter(
        lambda value, _: nights[round(value)].night if value in range(len(nights)) else ""
    )


def _draw(
    axes: Axes,
    nights: Sequence[PastRun],
    value: Callable[[PastRun], float | None],
    label: str,
    colour: str,
    marker: str,
) -> None:
    points = [(index, found) for index, night in enumerate(nights) if (found := value(night)) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linewidth=1.2, label=label)


def _uncorrected_error(night: PastRun) -> float | None:
    speed = night.speed
    return None if speed is None else speed.predicted_step_seconds / speed.measured_step_seconds - 1


def _expected_throughput(night: PastRun) -> float | None:
    measured, error = night.throughput_samples_per_s, night.prediction_error
    return None if measured is None or error is None else measured / (1 + error)


def _cheapest(nights: Sequence[PastRun]) -> PastRun | None:
    known = [night for night in nights if night.usd_per_million_samples is not None]
    return min(known, key=lambda night: night.usd_per_million_samples or 0.0, default=None)


def _best(nights: Sequence[PastRun]) -> PastRun | None:
    known = [night for night in nights if night.auc is not None]
    return max(known, key=lambda night: night.auc or 0.0, default=None)
