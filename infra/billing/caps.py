"""Spending caps: a plan that breaks one is refused before anything is launched.

What is spent while a run lives is held against the same caps by `infra/billing/budget.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from heterps_core.errors import BudgetExceededError
from heterps_core.units import SECONDS_PER_HOUR, ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """What may be spent; None is no cap."""

    max_usd_per_hour: float | None = None
    max_usd_per_run: float | None = None
    max_usd_per_month: float | None = None
    """By all runs of a workspace in a calendar month, UTC."""

    def check(self, *, price_usd_per_hour: float, predicted_cost_usd: float, spent: Spent) -> None:
        """Check a plan.

        Raises:
            BudgetExceededError: A cap is exceeded; the message says by how much.
        """
        failed_usd, month_usd = spent.failed_launches_usd, spent.month_usd
        failed = f"{failed_usd:.4g} USD went to launches that failed: " if failed_usd else ""
        fewer = "Raise the cap or ask for fewer epochs or samples (of a dry-run plan: planned_samples)"
        spent_text = f"{month_usd:.4g} USD of the month are spent: raise the cap or wait for the next month"
        lower = "Raise the cap or ask for a lower throughput floor"
        _check("USD per hour", price_usd_per_hour, self.max_usd_per_hour, lower)
        _check("USD per run", failed_usd + predicted_cost_usd, self.max_usd_per_run, failed + fewer)
        _check("USD per month", month_usd + predicted_cost_usd, self.max_usd_per_month, spent_text)

    def payable_s(self, price_usd_per_hour: float, spent: Spent) -> float:
        """Return how long machines at a price can be paid before a cap of USD is reached; infinite without caps."""
        caps = ((self.max_usd_per_run, spent.failed_launches_usd), (self.max_usd_per_month, spent.month_usd))
        left_usd = min((cap - before for cap, before in caps if cap is not None), default=math.inf)
        return ratio(left_usd, price_usd_per_hour, otherwise=math.inf) * SECONDS_PER_HOUR


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """USD before a launch, by machines that have ended."""

    failed_launches_usd: float = 0.0
    month_usd: float = 0.0
    """By all runs of the calendar month, those launches included."""


NOTHING_SPENT = Spent()


def _check(unit: str, amount: float, cap: float | None, way_out: str) -> None:
    # `not <=` also refuses a figure that is not a number.
    if cap is not None and not amount <= cap:
        raise BudgetExceededError(
            f"the plan must stay within {cap:.4g} {unit}, but takes {amount:.4g}: {amount - cap:.4g} "
            f"({amount / cap - 1:.0%}) too much; nothing was launched. {way_out}"
        )
