"""The front of cost against throughput as a table of a few rows."""

from __future__ import annotations

import textwrap

from heterps_core.planning.explain.amounts import usd_text
from heterps_core.planning.explain.explanation import PlanExplanation
from heterps_core.planning.explain.placement import plan_text
from heterps_core.planning.explain.throughput_front import FrontPoint, placement_changes
from heterps_core.text_table import WIDTH

MAX_ROWS = 6


def front_lines(explanation: PlanExplanation) -> list[str]:
    """Return the plan itself, the ends of the front, and where the placement changes, some of it at most."""
    rows = [("samples/s", "USD", "")]
    for point in _shown_points(explanation):
        cost = usd_text(point.cost_usd).removesuffix(" USD")
        rows.append((f"{point.throughput_samples_per_s:,.0f}", cost, _point_text(explanation, point)))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [
        line
        for speed, cost, plan in rows
        for line in textwrap.wrap(
            plan,
            WIDTH,
            initial_indent=f"  {speed:>{widths[0]}}  {cost:>{widths[1]}}  ",
            subsequent_indent=" " * (sum(widths) + 6),
            break_on_hyphens=False,
        )
        or [f"  {speed:>{widths[0]}}  {cost:>{widths[1]}}"]
    ]


def _point_text(explanation: PlanExplanation, point: FrontPoint) -> str:
    mark = "* " if point.stages == explanation.stages else ""
    return f"{mark}{plan_text(point.stages)}{'' if point.is_proven else ' (not proven)'}"


def _shown_points(explanation: PlanExplanation) -> list[FrontPoint]:
    """Return the plan itself and points where the placement changes, some at even distances if they are many."""
    points = placement_changes(explanation.front, explanation.stages)
    if len(points) <= MAX_ROWS:
        return list(points)
    step = (len(points) - 1) / (MAX_ROWS - 1)
    kept = {round(index * step) for index in range(MAX_ROWS)}
    mine = next((index for index, point in enumerate(points) if point.stages == explanation.stages), 0)
    # The plan takes the place of its nearest neighbour, never that of an end.
    if mine not in kept:
        kept.remove(min(kept - {0, len(points) - 1}, key=lambda index: abs(index - mine)))
    return [points[index] for index in sorted({*kept, mine})]
