"""A plan's explanation in words, for people who pay for it: at most a screen, every number with its unit."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from heterps_core.planning.explain.binding_constraints import THROUGHPUT_FLOOR, UNITS_CAP, BindingConstraint
from heterps_core.planning.explain.cost_range import CostRange, Doubt
from heterps_core.planning.explain.explanation import Detail, PlanExplanation
from heterps_core.planning.explain.placement import layers_text, moves_text, plan_text
from heterps_core.planning.explain.price_flips import LEAST_FACTOR, MOST_FACTOR, PriceFlip
from heterps_core.planning.explain.reasons import TypeRole, TypeWorth
from heterps_core.planning.explain.runner_up import RunnerUp
from heterps_core.planning.explain.throughput_front import (
    MOST_COST_FACTOR,
    FrontPoint,
    PriceOfThroughput,
    placement_changes,
)
from heterps_core.planning.explain.variants import SAME_COST
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.text_table import WIDTH, labelled_lines
from heterps_core.units import MS_PER_S

LEAST_SPEED_RATIO = 1.5
"""Of two units; less is no reason for a choice."""

MAX_SINGLE_TYPES = 3
MAX_FRONT_ROWS = 6

_Line = tuple[str, str]
"""A label and what stands beside it."""


def explanation_text(problem: SchedulingProblem, explanation: PlanExplanation) -> str:
    """Return the whole explanation for a terminal of 100 columns."""
    blocks = [
        [
            f"Why this plan (+USD: what the whole run would cost more than {_usd_text(explanation.cost_usd)})",
            *labelled_lines(_reason_lines(problem, explanation)),
        ],
        ["What would change it", *labelled_lines(_change_lines(explanation))],
    ]
    if explanation.front:
        blocks.append(
            [
                f"What more throughput costs: cheapest plans to about {MOST_COST_FACTOR:.0f} times the least cost "
                f"(* is this plan)",
                *_front_lines(explanation),
            ]
        )
    if explanation.detail is Detail.SHORT:
        left_out = (
            "Left out, as it takes one search for each layer: the next best plan, the prices at which the choice "
            "changes, the price of caps and memory, and what each throughput costs. Ask for it with --explain full."
        )
        blocks.append(textwrap.wrap(left_out, WIDTH))
    return "\n".join("\n".join(block) for block in blocks)


def essential_facts(explanation: PlanExplanation) -> list[tuple[str, str]]:
    """Return what a report has room for: the next best plan, the nearest price flip and the step of throughput."""
    lines: list[_Line] = []
    if explanation.runner_up is not None:
        lines.append(("next best", _runner_up_text(explanation, explanation.runner_up)))
    flips = [flip for flip in explanation.price_flips if flip.flip_usd_per_hour is not None]
    if flips:
        nearest = min(flips, key=_relative_distance)
        lines.append((nearest.device_type, _flip_text(nearest)))
    lines.append(("10 % more", _throughput_text(explanation, explanation.ten_percent_more)))
    if explanation.cost_range is not None:
        lines.append(("cost range", _range_text(explanation, explanation.cost_range)))
    return lines


def _reason_lines(problem: SchedulingProblem, explanation: PlanExplanation) -> Iterator[_Line]:
    if explanation.chosen_extra_usd > 0:
        yield (
            "note",
            f"the plan above is not the cheapest: {_extra_text(explanation, explanation.chosen_extra_usd)}. The "
            f"cheapest has {plan_text(explanation.stages)}{_changed_placement(explanation)}. All below is about "
            f"that one; --scheduler exact returns it",
        )
    worths = {worth.device_type: worth for worth in explanation.worths}
    for role in explanation.roles:
        yield role.device_type, _role_text(role, worths.get(role.device_type), explanation)
    pace = explanation.pace
    yield (
        "pace",
        f"set by {layers_text([(pace.stage.first_layer, pace.stage.last_layer)])} on {pace.stage.num_replicas} x "
        f"{pace.stage.device_type}: {pace.limit} takes {pace.seconds * MS_PER_S:.3g} ms a batch of "
        f"{problem.batch_size:,}",
    )
    yield "one type", _single_types_text(explanation)
    if explanation.runner_up is not None:
        yield "next best", _runner_up_text(explanation, explanation.runner_up)
    yield (
        "price",
        f"{_usd_text(explanation.usd_per_million_samples)} for a million samples; {_proof(explanation)}",
    )


def _change_lines(explanation: PlanExplanation) -> Iterator[_Line]:
    flips = [flip for flip in explanation.price_flips if flip.is_used or flip.flip_usd_per_hour is not None]
    for flip in flips:
        yield flip.device_type, _flip_text(flip)
    never = [flip.device_type for flip in explanation.price_flips if flip not in flips]
    if never:
        yield "not used", f"{', '.join(never)}: no price down to {LEAST_FACTOR:.0%} of today's brings it in"
    for limit in (*explanation.floor_price, *explanation.unit_prices[:1]):
        yield "limit", _limit_text(limit, explanation)
    if explanation.unit_prices[1:]:
        yield "limits", _other_limits_text(explanation)
    if explanation.detail is Detail.FULL and not (explanation.floor_price or explanation.unit_prices):
        yield "limits", "floor, caps and memory cost nothing: without any one of them the cost is the same"
    yield "10 % more", _more_throughput_text(explanation)
    if explanation.cost_range is not None:
        yield "cost range", _range_text(explanation, explanation.cost_range)


def _role_text(role: TypeRole, worth: TypeWorth | None, explanation: PlanExplanation) -> str:
    units = "1 unit" if role.num_units == 1 else f"{role.num_units} units"
    parts = [f"{layers_text(role.runs)} on {units}, {role.price_share:.0%} of the price"]
    if role.next_cost_ratio > 1:
        parts.append(f"their work costs {role.next_cost_ratio:.3g} times as much on {role.next_type}")
    elif role.next_time_ratio >= LEAST_SPEED_RATIO:
        parts.append(f"one unit is as fast as {role.next_time_ratio:.3g} of {role.next_type}")
    if role.num_memory_bound_stages:
        where = (
            "their number"
            if role.num_memory_bound_stages == len(role.runs)
            else f"the number in {role.num_memory_bound_stages} of {len(role.runs)} stages"
        )
        parts.append(f"memory sets {where}, for {role.state_bytes / 1e9:,.3g} GB of weights in all")
    if worth is not None and worth.extra_usd_without is None:
        parts.append(f"without {worth.device_type} there is no plan")
    elif worth is not None and worth.extra_usd_without is not None:
        parts.append(f"without {worth.device_type} {_extra_text(explanation, worth.extra_usd_without)}")
    return "; ".join(parts)


def _single_types_text(explanation: PlanExplanation) -> str:
    used = {stage.device_type for stage in explanation.stages}
    others = [single for single in explanation.single_types if {single.device_type} != used]
    possible = [(single.device_type, single.cost_usd) for single in others if single.cost_usd is not None]
    parts = [
        f"all on {name} {_extra_text(explanation, cost_usd - explanation.cost_usd)}"
        for name, cost_usd in possible[:MAX_SINGLE_TYPES]
    ]
    if len(possible) > MAX_SINGLE_TYPES:
        parts.append(f"on {len(possible) - MAX_SINGLE_TYPES} others still more")
    impossible: dict[str, list[str]] = {}
    for single in others:
        if single.cost_usd is None:
            impossible.setdefault(single.broken_constraint, []).append(single.device_type)
    parts += [f"not possible on {', '.join(names)} ({name})" for name, names in impossible.items()]
    return "; ".join(parts) if parts else "there is no other"


def _proof(explanation: PlanExplanation) -> str:
    gap = explanation.cost_usd / explanation.cost_lower_bound_usd - 1
    return "proven: no plan is cheaper" if gap == 0 else f"proven: no plan is more than {gap:.2%} cheaper"


def _runner_up_text(explanation: PlanExplanation, runner_up: RunnerUp) -> str:
    return f"{moves_text(runner_up.moves)}: {_extra_text(explanation, runner_up.extra_usd)}"


def _flip_text(flip: PriceFlip) -> str:
    offer = f"for a {flip.offer or 'unit'}"
    if flip.flip_usd_per_hour is None:
        today = f"today's {flip.price_usd_per_hour:.3g} USD/hour {offer}"
        return f"no price up to {MOST_FACTOR:.0f} times {today} changes the placement"
    change = flip.flip_usd_per_hour / flip.price_usd_per_hour - 1
    return (
        f"{'above' if flip.is_used else 'below'} {flip.flip_usd_per_hour:.3g} USD/hour {offer} (today "
        f"{flip.price_usd_per_hour:.3g}, {_percent_text(change)}): {moves_text(flip.moves)}"
    )


def _relative_distance(flip: PriceFlip) -> float:
    flip_usd = flip.flip_usd_per_hour or math.inf
    return abs(math.log(flip_usd / flip.price_usd_per_hour))


def _limit_text(limit: BindingConstraint, explanation: PlanExplanation) -> str:
    return (
        f"without {_limit_name(limit)} -{_usd_text(limit.saving_usd)} "
        f"({_percent_text(-limit.saving_usd / explanation.cost_usd)}): {plan_text(limit.stages)}"
    )


def _other_limits_text(explanation: PlanExplanation) -> str:
    others = [
        f"{_limit_name(limit)} {_percent_text(-limit.saving_usd / explanation.cost_usd)}"
        for limit in explanation.unit_prices[1:]
    ]
    return f"without {', '.join(others)}"


def _limit_name(limit: BindingConstraint) -> str:
    if limit.constraint == THROUGHPUT_FLOOR:
        return f"the floor of {limit.limit:,.0f} samples/s"
    if limit.constraint == UNITS_CAP:
        return f"the cap of {limit.limit:,.0f} units of {limit.device_type}"
    return f"the {limit.limit / 1e9:,.3g} GB memory limit of {limit.device_type}"


def _more_throughput_text(explanation: PlanExplanation) -> str:
    more = _throughput_text(explanation, explanation.ten_percent_more)
    floor = explanation.ten_percent_higher_floor
    if floor is None or floor.extra_usd == 0:
        return more
    return f"{more}; a floor of {_throughput_text(explanation, floor)}"


def _throughput_text(explanation: PlanExplanation, price: PriceOfThroughput) -> str:
    what = f"{price.floor_samples_per_s:,.0f} samples/s"
    if price.extra_usd is None:
        return f"{what} cannot be had, the most is {price.highest_samples_per_s:,.0f}"
    return f"{what} {_extra_text(explanation, price.extra_usd)}"


def _range_text(explanation: PlanExplanation, cost: CostRange) -> str:
    text = f"{_usd_text(cost.low_usd)} to {_usd_text(cost.high_usd)} within the spread of the layer times"
    if cost.misses_floor:
        text += (
            f"; at its slow end only {cost.lowest_throughput_samples_per_s:,.0f} samples/s, below the floor"
        )
    if explanation.detail is Detail.SHORT:
        return text
    if not explanation.doubts:
        return f"{text}; the placement stays the cheapest"
    return f"{text}; {_doubt_text(explanation.doubts[0], len(explanation.single_types))}"


def _doubt_text(doubt: Doubt, num_types: int) -> str:
    ends = [
        f"{', '.join(names) if len(names) < num_types else 'all types'} at the {end} end"
        for names, end in ((doubt.slow_types, "slow"), (doubt.fast_types, "fast"))
        if names
    ]
    moved = f"one with {moves_text(doubt.moves)}"
    if doubt.regret_usd is None:
        return f"with {' and '.join(ends)} the placement breaks a limit, and the cheapest is {moved}"
    return f"with {' and '.join(ends)} it costs {_usd_text(doubt.regret_usd)} more than {moved}"


def _changed_placement(explanation: PlanExplanation) -> str:
    return f", {moves_text(explanation.chosen_moves)}" if explanation.chosen_moves else ""


def _extra_text(explanation: PlanExplanation, extra_usd: float) -> str:
    if extra_usd <= explanation.cost_usd * SAME_COST:
        return "costs the same"
    return f"+{_usd_text(extra_usd)} ({_percent_text(extra_usd / explanation.cost_usd)})"


def _front_lines(explanation: PlanExplanation) -> list[str]:
    """Return the plan itself, the ends of the front, and where the placement changes, some of it at most."""
    rows = [("samples/s", "USD", "")]
    for point in _shown_points(explanation):
        cost = _usd_text(point.cost_usd).removesuffix(" USD")
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
    if len(points) <= MAX_FRONT_ROWS:
        return list(points)
    step = (len(points) - 1) / (MAX_FRONT_ROWS - 1)
    kept = {round(index * step) for index in range(MAX_FRONT_ROWS)}
    mine = next((index for index, point in enumerate(points) if point.stages == explanation.stages), 0)
    # The plan takes the place of its nearest neighbour, never that of an end.
    if mine not in kept:
        kept.remove(min(kept - {0, len(points) - 1}, key=lambda index: abs(index - mine)))
    return [points[index] for index in sorted({*kept, mine})]


def _usd_text(usd: float) -> str:
    """Return an amount with cents, or where it is small, with three digits that count.

    Example:
        >>> _usd_text(1234.5), _usd_text(0.01234)
        ('1,234.50 USD', '0.0123 USD')
    """
    return f"{usd:,.2f} USD" if abs(usd) >= 1 or usd == 0 else f"{usd:.3g} USD"


def _percent_text(share: float) -> str:
    """Return a difference as a share in percent with its sign, with a decimal where it is small.

    Example:
        >>> _percent_text(0.034), _percent_text(-0.285)
        ('+3.4%', '-28%')
    """
    return f"{share:+.1%}" if abs(share) < 0.1 else f"{share:+,.0%}"
