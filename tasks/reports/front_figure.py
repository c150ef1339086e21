"""The picture of what throughput costs: the cheapest plan for each, and what its money is spent on."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from heterps_core.planning.explain.explanation import PlanExplanation
from heterps_core.planning.explain.throughput_front import FrontPoint
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from tasks.reports.figures import device_colours

DECADE = 10.0
"""Axes that span more than this ratio are logarithmic."""

CHOSEN_COLOUR = "#D55E00"


def front_figure(problem: SchedulingProblem, explanation: PlanExplanation) -> Figure:
    """Draw the front of cost against throughput, and below it each plan's price by device type.

    The front is a staircase: the plan of a corner is the cheapest for all throughputs down to the corner before.

    Args:
        problem: What was planned.
        explanation: In full, so that it has a front.
    """
    figure = Figure(figsize=(10.0, 6.6), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    front = explanation.front
    _draw_front(above, problem, explanation)
    _draw_shares(below, problem, front)
    speeds = [point.throughput_samples_per_s for point in front]
    if speeds[-1] > DECADE * speeds[0]:
        below.set_xscale("log")
        below.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        below.xaxis.set_minor_formatter(NullFormatter())
    below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    below.set_xlabel("throughput (samples/s)")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
    return figure


def _draw_front(axes: Axes, problem: SchedulingProblem, explanation: PlanExplanation) -> None:
    front = explanation.front
    speeds = [point.throughput_samples_per_s for point in front]
    costs = [point.cost_usd for point in front]
    axes.step(speeds, costs, where="pre", color="#444444", linewidth=1.2, zorder=2)
    axes.scatter(speeds, costs, s=26, color="#444444", zorder=3, label="cheapest plan")
    axes.scatter(
        explanation.throughput_samples_per_s,
        explanation.cost_usd,
        s=150,
        facecolor="none",
        edgecolor=CHOSEN_COLOUR,
        linewidth=2.2,
        zorder=4,
        label="this plan",
    )
    if problem.throughput_floor_samples_per_s:
        floor = problem.throughput_floor_samples_per_s
        axes.axvline(floor, color="#444444", linestyle=":", linewidth=1.4, label=f"floor {floor:,.0f}")
    if costs[-1] > DECADE * costs[0]:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.set_ylabel("cost of the run (USD)")
    axes.set_title(f"{problem.model}: what throughput costs", fontsize=10, loc="left")
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)


def _draw_shares(axes: Axes, problem: SchedulingProblem, front: Sequence[FrontPoint]) -> None:
    """Stack each device type's share of the price over the throughputs for which a plan is the cheapest."""
    # A step is as wide as the way from the corner before; the first corner has none, so it gets a short one.
    speeds = [0.96 * front[0].throughput_samples_per_s, *(point.throughput_samples_per_s for point in front)]
    totals = [sum(point.usd_per_hour_of_types.values()) for point in front]
    colours = device_colours(problem)
    bottoms = [0.0] * len(front)
    for name in problem.device_type_names:
        shares = [
            100 * point.usd_per_hour_of_types.get(name, 0.0) / total
            for point, total in zip(front, totals, strict=True)
        ]
        if not any(shares):
            continue
        tops = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
        axes.fill_between(
            speeds,
            [bottoms[0], *bottoms],
            [tops[0], *tops],
            step="pre",
            color=colours[name],
            linewidth=0,
            label=name,
        )
        bottoms = tops
    axes.set_ylim(0, 100)
    axes.set_ylabel("share of the price (%)")
