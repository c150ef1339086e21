"""What of a bill bought no training, line by line: each a part of the total, none of it besides.

A run's machines cost the same whether they train, boot or wait. What was paid while no step ran, for steps that were
done again, and for workers that waited for others is what a better plan or a quieter night would save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.billing.bill import Bill


@dataclass(frozen=True, kw_only=True, slots=True)
class WasteLine:
    """A part of a bill that bought nothing."""

    cause: str
    usd: float
    share: float
    """Of the bill's total, in [0, 1]."""


def waste_lines(
    bills: Sequence[Bill],
    *,
    trained_seconds: float,
    repeated_seconds: float,
    idle_shares: Mapping[int, float],
) -> tuple[WasteLine, ...]:
    """Split the bills of a run into what trained and what did not.

    Args:
        bills: Of all its launches, which have ended.
        trained_seconds: In which its workers ran steps, by the clock.
        repeated_seconds: Of these, for steps that were done again.
        idle_shares: By stage, in [0, 1]: of the steps' time, in which its workers waited for other stages.

    Returns:
        Lines without those of 0 USD. They add up to no more than the total.
    """
    lived = [[line for line in bill.lines if not line.is_waste and line.count] for bill in bills]
    # Machines of a launch live equally long but for seconds; the longest stands for the launch.
    lived_s = sum(max((line.instance_seconds / line.count for line in lines), default=0.0) for lines in lived)
    machines = [line for lines in lived for line in lines]
    if not lived_s:
        return ()
    usd_per_s = sum(line.usd for line in machines) / lived_s
    idle_usd_per_s = sum(line.usd * idle_shares.get(line.stage, 0.0) for line in machines) / lived_s
    trained_s = min(trained_seconds, lived_s)
    repeated_s = min(repeated_seconds, trained_s)
    causes = {
        "launches that failed": sum(bill.failed_launches_usd for bill in bills),
        "start-up, evaluation and teardown": (lived_s - trained_s) * usd_per_s,
        "steps done again": repeated_s * usd_per_s,
        "workers that waited for others": (trained_s - repeated_s) * idle_usd_per_s,
    }
    total_usd = sum(bill.total_usd for bill in bills)
    return tuple(
        WasteLine(cause=cause, usd=usd, share=usd / total_usd) for cause, usd in causes.items() if usd > 0
    )
