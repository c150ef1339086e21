"""The picture of a comparison: how far from the proven bound each method ended, a panel for each problem."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tasks.comparison import Comparison, MethodSummary
from tasks.reports.plan_figures import DEVICE_COLOURS

MAX_COLUMNS = 4
LINEAR_GAP = 1e-3
"""Gaps below 0.1 % share the linear part of the axis with 0; above, the axis is logarithmic."""

TICKS = (0.0, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)


def gap_figure(comparison: Comparison) -> Figure:
    """Draw the gap of each method on each problem: a dot for each seed, a line from the bound to the typical one."""
    methods = _methods_by_gap(comparison)
    names = list(comparison.summaries)
    num_columns = min(MAX_COLUMNS, len(names))
    num_rows = math.ceil(len(names) / num_columns)
    figure = Figure(
        figsize=(2.2 + 2.7 * num_columns, 1.1 + num_rows * (0.8 + 0.24 * len(methods))),
        dpi=120,
        layout="constrained",
    )
    panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    for axes in panels.flat[len(names) :]:
        axes.set_visible(False)
    every = [summary for summaries in comparison.summaries.values() for summary in summaries]
    largest = max((summary.largest_gap for summary in every if summary.results), default=0.0)
    for axes, name in zip(panels.flat, names, strict=False):
        _draw_panel(axes, {summary.method: summary for summary in comparison.summaries[name]}, methods)
        axes.set_title(name.rpartition("/")[2], fontsize=10, loc="left")
    first = panels.flat[0]
    first.set_yticks(range(len(methods)), methods)
    first.invert_yaxis()
    first.set_xscale("symlog", linthresh=LINEAR_GAP, linscale=0.6)
    first.set_xlim(-LINEAR_GAP / 4, max(largest, LINEAR_GAP) * 3)
    first.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if tick <= largest * 3]))
    first.xaxis.set_minor_locator(NullLocator())
    first.xaxis.set_major_formatter(FuncFormatter(lambda gap, _: f"{100 * gap:g}%"))
    figure.supxlabel("cost above the proven lower bound (logarithmic beyond 0.1 %)", fontsize=9)
    return figure


def _methods_by_gap(comparison: Comparison) -> list[str]:
    """Return the methods, those first that ended nearest to the bound over all problems."""
    gaps: dict[str, list[float]] = {}
    for summaries in comparison.summaries.values():
        for summary in summaries:
            gaps.setdefault(summary.method, []).append(_gap(summary))
    return sorted(
        gaps, key=lambda method: (gaps[method].count(math.inf), statistics.median(gaps[method]), method)
    )


def _gap(summary: MethodSummary) -> float:
    """Return the gap of the typical search, infinite where there is no plan."""
    return math.inf if summary.typical is None else summary.typical.plan.optimality_gap


def _draw_panel(axes: Axes, summaries: dict[str, MethodSummary], methods: Sequence[str]) -> None:
    for row, method in enumerate(methods):
        summary = summaries[method]
        gaps = [result.plan.optimality_gap for result in summary.results]
        if not gaps:
            axes.text(LINEAR_GAP / 4, row, "no plan", va="center", fontsize=8, color="#777777")
            continue
        axes.hlines(row, 0, _gap(summary), color=DEVICE_COLOURS[0], linewidth=1.6, alpha=0.6)
        axes.plot(gaps, [row] * len(gaps), "o", color=DEVICE_COLOURS[0], markersize=5, alpha=0.7)
    axes.axvline(0, color=DEVICE_COLOURS[2], linestyle="--", linewidth=1.0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
