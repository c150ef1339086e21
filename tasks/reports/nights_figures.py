"""The pictures of many nights: cost, throughput and AUC of each, and how far predictions were off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from tasks.judging.nights import Night, best, cheapest
from tasks.reports.document import Picture
from tasks.reports.plan_figures import DEVICE_COLOURS, GREY

MOST_DAYS_SHOWN = 8
"""Labels below a picture; more would overlap."""

BLUE, ORANGE, GREEN = DEVICE_COLOURS[0], "#B25000", DEVICE_COLOURS[2]

Value = Callable[[Night], float | None]


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


def nights_figure(nights: Sequence[Night]) -> Figure:
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
    _draw(error, nights, lambda night: night.uncorrected_error, "cost model alone", ORANGE, "x")
    _draw(error, nights, lambda night: night.prediction_error, "as predicted, corrected", BLUE, "o")
    error.axhline(0.0, color=GREY, linewidth=0.8)
    error.yaxis.set_major_formatter(PercentFormatter(1.0))
    error.set_ylabel("measured over\npredicted, less 1")
    _finish(figure, nights)
    return figure


def _finish(figure: Figure, nights: Sequence[Night]) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
        axes.set_xlim(-0.5, len(nights) - 0.5)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
    last = figure.axes[-1]
    last.xaxis.set_major_locator(MaxNLocator(nbins=MOST_DAYS_SHOWN, integer=True))
    last.xaxis.set_major_formatter(
        lambda value, _: nights[round(value)].day if value in range(len(nights)) else ""
    )


def _draw(axes: Axes, nights: Sequence[Night], value: Value, label: str, colour: str, marker: str) -> None:
    points = [(index, found) for index, night in enumerate(nights) if (found := value(night)) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linewidth=1.2, label=label)


def _expected_throughput(night: Night) -> float | None:
    measured, error = night.throughput_samples_per_s, night.prediction_error
    return None if measured is None or error is None else measured / (1 + error)
