"""A plan's explanation in words, for people who pay for it: at most a screen, every number with its unit."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from heterps_core.planning.explain.changes import (
    MOST_FACTOR,
    FloorPrice,
    PriceFlip,
    PriceOfThroughput,
)
from heterps_core.planning.explain.explanation import Detail, PlanExplanation
from heterps_core.planning.explain.placement import layers_text, moves_text, plan_text
from heterps_core.planning.explain.reasons import RunnerUp, TypeRole
from heterps_core.planning.explain.variants import SAME_COST
from heterps_core.text_table import WIDTH, labelled_lines, usd_text
from heterps_core.units import ratio

LEAST_SPEED_RATIO = 1.5
"""Least ratio of the speeds of two units that is a reason for a choice."""


_Line = tuple[str, str]


def explanation_text(explanation: PlanExplanation) -> str:
    """Return the whole explanation for a terminal of 100 columns."""
    blocks = [
        [
            f"Why this plan (+USD: what the whole run would cost more than {usd_text(explanation.cost_usd)})",
            *labelled_lines(_reason_lines(explanation)),
        ],
        ["What would change it", *labelled_lines(_change_lines(explanation))],
    ]
    if explanation.detail is Detail.SHORT:
        left_out = (
            "Left out, as it takes one search for each layer: the next best plan, and the next price at which the "
            "choice changes. Ask for it with --explain full."
        )
        blocks.append(textwrap.wrap(left_out, WIDTH))
    return "\n".join("\n".join(block) for block in blocks)


def essential_facts(explanation: PlanExplanation) -> list[tuple[str, str]]:
    """Return what a report has room for: next best plan, next price flip, step of throughput, spreads of times."""
    lines: list[_Line] = [*_reading_lines(explanation), *_nearest_lines(explanation)]
    if explanation.runner_up is not None:
        lines.append(("next best", _runner_up_text(explanation, explanation.runner_up)))
    lines += [(flip.device_type, _flip_text(flip)) for flip in explanation.price_flips]
    lines.append(("10 % more", _throughput_text(explanation, explanation.ten_percent_more)))
    return [*lines, *_spread_lines(explanation)]


def _reason_lines(explanation: PlanExplanation) -> Iterator[_Line]:
    if explanation.chosen_extra_usd > 0:
        moved = f", {moves_text(explanation.chosen_moves)}" if explanation.chosen_moves else ""
        yield (
            "note",
            f"the plan above is not the cheapest: {_extra_text(explanation, explanation.chosen_extra_usd)}. The "
            f"cheapest has {plan_text(explanation.stages)}{moved}. All below is about "
            f"that one; --scheduler exact returns it",
        )
    if explanation.region:
        yield "region", explanation.region
    for role in explanation.roles:
        yield role.device_type, _role_text(role)
    yield from _reading_lines(explanation)
    yield from _nearest_lines(explanation)
    if explanation.runner_up is not None:
        yield "next best", _runner_up_text(explanation, explanation.runner_up)
    no_bound = math.inf if explanation.cost_usd else 1.0
    gap = ratio(explanation.cost_usd, explanation.cost_lower_bound_usd, otherwise=no_bound) - 1
    proof = "no plan is cheaper" if gap == 0 else f"no plan is more than {gap:.2%} cheaper"
    yield "price", f"{usd_text(explanation.usd_per_million_samples)} for a million samples; proven: {proof}"


def _reading_lines(explanation: PlanExplanation) -> Iterator[_Line]:
    if explanation.reading_limit:
        yield "reading", explanation.reading_limit


def _nearest_lines(explanation: PlanExplanation) -> Iterator[_Line]:
    parts = [
        f"without {each.hardware} {_extra_text(explanation, each.extra_usd)}: {plan_text(each.stages)}"
        for each in explanation.nearest
    ]
    if parts:
        yield "nearest", "; ".join(parts)
    other = explanation.not_rentable
    if other is not None:
        share = _percent_text(ratio(other.extra_usd, explanation.cost_usd, otherwise=0.0))
        saving = f"-{usd_text(-other.extra_usd)} ({share}): {plan_text(other.stages)}"
        yield "no image", f"with machines that have no image (heterps doctor names it), {saving}"


def _change_lines(explanation: PlanExplanation) -> Iterator[_Line]:
    for flip in explanation.price_flips:
        yield flip.device_type, _flip_text(flip)
    if explanation.detail is Detail.FULL and not explanation.price_flips:
        yield "prices", f"no price within {MOST_FACTOR:.0f} times today's, up or down, changes the placement"
    if explanation.floor_price is not None:
        yield "limit", _floor_text(explanation.floor_price, explanation)
    yield "10 % more", _throughput_text(explanation, explanation.ten_percent_more)
    yield from _spread_lines(explanation)


def _role_text(role: TypeRole) -> str:
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
    return "; ".join(parts)


def _runner_up_text(explanation: PlanExplanation, runner_up: RunnerUp) -> str:
    return f"{moves_text(runner_up.moves)}: {_extra_text(explanation, runner_up.extra_usd)}"


def _flip_text(flip: PriceFlip) -> str:
    offer = f"for a {flip.offer or 'unit'}"
    change = flip.flip_usd_per_hour / flip.price_usd_per_hour - 1
    return (
        f"{'above' if flip.is_used else 'below'} {flip.flip_usd_per_hour:.3g} USD/hour {offer} (today "
        f"{flip.price_usd_per_hour:.3g}, {_percent_text(change)}): {moves_text(flip.moves)}"
    )


def _floor_text(floor: FloorPrice, explanation: PlanExplanation) -> str:
    return (
        f"without the floor of {floor.floor_samples_per_s:,.0f} samples/s -{usd_text(floor.saving_usd)} "
        f"({_percent_text(ratio(-floor.saving_usd, explanation.cost_usd, otherwise=0.0))}): {plan_text(floor.stages)}"
    )


def _throughput_text(explanation: PlanExplanation, price: PriceOfThroughput) -> str:
    what = f"{price.floor_samples_per_s:,.0f} samples/s"
    if price.extra_usd is None:
        return f"{what} is out of reach, the most is {price.highest_samples_per_s:,.0f}"
    return f"{what} {_extra_text(explanation, price.extra_usd)}"


def _spread_lines(explanation: PlanExplanation) -> Iterator[_Line]:
    alike: dict[str, list[str]] = {}
    for name, spread in sorted(explanation.spreads.items(), key=lambda item: -item[1]):
        alike.setdefault(f"±{spread:.0%}", []).append(name)
    if alike:
        yield "times", "; ".join(f"{spread} for {', '.join(names)}" for spread, names in alike.items())


def _extra_text(explanation: PlanExplanation, extra_usd: float) -> str:
    if extra_usd <= explanation.cost_usd * SAME_COST:
        return "costs the same"
    share = f" ({_percent_text(extra_usd / explanation.cost_usd)})" if explanation.cost_usd else ""
    return f"+{usd_text(extra_usd)}{share}"


def _percent_text(share: float) -> str:
    """Return a difference as a share in percent with its sign, with a decimal where it is small, as in +3.4%."""
    return f"{share:+.1%}" if abs(share) < 0.1 else f"{share:+,.0%}"
