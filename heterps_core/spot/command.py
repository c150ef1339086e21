"""`heterps replay`: what a nightly job with a deadline would have cost on recorded spot markets."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterps_core.errors import ConfigurationError
from heterps_core.json_file import write_json
from heterps_core.text_table import aligned

if TYPE_CHECKING:
    from heterps_core.spot.comparison import Comparison

HELP = """\
Replay a nightly job with a deadline over recorded spot markets, under every market policy, and print what each one
costs over what hindsight would have paid, and the share of deadlines that it misses.

A trace is a file of SkyPilot's or Sailor's JSON, Bamboo's CSV or text, or an EC2 price history as CSV; each may be
gzipped. Every night that ends --hours-between hours after another is replayed. Times are in whole minutes.

examples:
  heterps replay us-east-1a_v100_1.json.gz
  heterps replay us-east-1a_v100_1.json.gz us-east-1c_v100_1.json.gz --together --work-hours 8 --slack 1.25
  heterps replay p3-trace.csv --instances 16 --work-hours 4 --slack 1.5
  heterps replay history.csv.gz --on-demand-usd 2.6

exit status: 0 with a result; 2 where a file or an argument cannot be used.
"""

BESIDE_ALL_OTHERS = "expected-cost"
"""The policy that is compared with the cheapest of the others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "traces", type=Path, nargs="+", metavar="TRACE", help="files, each a market of its own"
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="the traces are pools of one market that begin at the same moment; the job may move between them",
    )
    add_number = partial(parser.add_argument, type=float, metavar="X")
    add_number("--work-hours", default=4.0, help="of progress that the job needs (default: %(default)s)")
    add_number("--slack", default=1.5, help="deadline over work (default: %(default)s)")
    add_number(
        "--startup-seconds",
        default=360.0,
        help="from asking for an instance to the first progress on it (default: %(default)s)",
    )
    add_number(
        "--checkpoint-seconds",
        default=600.0,
        help="between checkpoints; an interruption loses what came after the last one (default: %(default)s)",
    )
    parser.add_argument(
        "--instances",
        type=int,
        default=1,
        metavar="N",
        help="that the job needs together, where a trace has counts (default: %(default)s)",
    )
    add_number("--on-demand-usd", default=1.0, help="per instance and hour (default: %(default)s)")
    add_number(
        "--spot-usd",
        default=0.3,
        help="per instance and hour, where a trace has no prices (default: %(default)s)",
    )
    add_number("--hours-between", default=6.0, help="from night to night (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the interval (default: 0)")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the figures here too")


def run(options: argparse.Namespace) -> None:
    """Replay, print the figures, and write them if asked.

    Raises:
        HeterpsError: A file or an argument cannot be used, or the output cannot be written.
    """
    from heterps_core.spot.comparison import compare_policies
    from heterps_core.spot.job import nightly_job
    from heterps_core.spot.policies import MARKET_POLICIES
    from heterps_core.spot.trace import market_of
    from heterps_core.spot.trace_files import read_trace

    if options.seed < 0:
        raise ConfigurationError(f"--seed must not be negative, got {options.seed}")
    if not 1 <= options.hours_between * 60 < 1e9:
        raise ConfigurationError(f"--hours-between must be at least one minute, got {options.hours_between}")
    job = nightly_job(
        work_hours=options.work_hours,
        slack=options.slack,
        startup_seconds=options.startup_seconds,
        checkpoint_interval_seconds=options.checkpoint_seconds,
    )
    traces = [read_trace(path) for path in options.traces]
    pools = [traces] if options.together else [[trace] for trace in traces]
    markets = [
        market_of(
            members,
            name=" + ".join(trace.name for trace in members),
            num_instances=options.instances,
            on_demand_usd_per_hour=options.on_demand_usd,
            spot_usd_per_hour=options.spot_usd,
        )
        for members in pools
    ]
    comparison = compare_policies(
        markets,
        [job],
        sorted(MARKET_POLICIES),
        ticks_between_nights=round(options.hours_between * 60),
    )
    figures = comparison_to_json(comparison, seed=options.seed)
    if options.output is not None:
        write_json(options.output, figures)
    print(comparison_text(figures))


def comparison_to_json(comparison: Comparison, *, seed: int) -> dict[str, Any]:
    """Return the figures of a comparison as plain JSON values."""
    figures: dict[str, Any] = {
        "num_nights": len(comparison.bound_shares),
        "bound_over_on_demand": float(comparison.bound_shares.mean()),
        "policies": {
            name: {
                "cost_over_clairvoyant": comparison.cost_over_bound(name),
                "cost_over_on_demand": comparison.cost_over_on_demand(name),
                "share_missed": comparison.share_missed(name),
                "interruptions_per_night": float(nights.num_interruptions.mean()),
            }
            for name, nights in comparison.policies.items()
        },
    }
    peer = comparison.best_peer(BESIDE_ALL_OTHERS)
    if peer is not None:
        excess, low, high = comparison.excess_over(BESIDE_ALL_OTHERS, peer, seed=seed)
        figures["best_peer"] = {"name": peer, "excess": excess, "excess_low": low, "excess_high": high}
    return figures


def comparison_text(figures: dict[str, Any]) -> str:
    """Return the figures as a table for people."""
    rows = [("policy", "over clairvoyant", "over on-demand", "missed", "interruptions")]
    ranked = sorted(figures["policies"].items(), key=lambda item: item[1]["cost_over_clairvoyant"])
    for name, values in sorted(ranked, key=lambda item: item[1]["share_missed"] > 0):
        rows.append(
            (
                name,
                f"{values['cost_over_clairvoyant']:.3f}",
                f"{values['cost_over_on_demand']:.3f}",
                f"{values['share_missed']:.1%}",
                f"{values['interruptions_per_night']:.2f}",
            )
        )
    lines = [
        f"{figures['num_nights']} nights; costs of a policy that misses are those paid by the deadline",
        "",
    ]
    lines += aligned(rows, words=[0])
    if "best_peer" in figures:
        peer = figures["best_peer"]
        lines += [
            "",
            f"{BESIDE_ALL_OTHERS} costs {peer['excess']:+.2%} against {peer['name']}, the cheapest other that keeps "
            f"deadlines (95 %: {peer['excess_low']:+.2%} to {peer['excess_high']:+.2%}, by days)",
        ]
    return "\n".join(lines)
