"""Spending caps that refuse a plan before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass

from heterps_core.errors import BudgetExceededError, ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """What may be spent; None is no cap."""

    max_usd_per_hour: float | None = None
    max_usd_per_run: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_usd_per_hour", "max_usd_per_run"):
            cap = getattr(self, name)
            if cap is not None and not cap > 0:
                raise ConfigurationError(f"{name} must be positive, or left out for no cap, got {cap}")


def check_caps(*, price_usd_per_hour: float, predicted_cost_usd: float, caps: Caps) -> None:
    """Check a plan against the caps.

    Args:
        price_usd_per_hour: Of all instances that would be bought.
        predicted_cost_usd: Of the whole run.
        caps: What may be spent.

    Raises:
        BudgetExceededError: A cap is exceeded; the message says by how much.
    """
    _check("USD per hour", price_usd_per_hour, caps.max_usd_per_hour, "a lower throughput floor")
    _check("USD per run", predicted_cost_usd, caps.max_usd_per_run, "fewer epochs or samples")


def _check(unit: str, amount: float, cap: float | None, way_out: str) -> None:
    # `not <=` also refuses a figure that is not a number.
    if cap is not None and not amount <= cap:
        raise BudgetExceededError(
            f"the plan must stay within {cap:.4g} {unit}, but takes {amount:.4g}: {amount - cap:.4g} "
            f"({amount / cap - 1:.0%}) too much; nothing was launched. Raise the cap or ask for {way_out}"
        )
