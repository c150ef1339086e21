"""Figures with their intervals, and what a challenger's are beside a champion's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure with the ends of its two-sided confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedComparison:
    """Figures of a challenger less those of a champion, on the same rows."""

    auc_difference: Estimate
    """Above 0 where the challenger ranks better."""

    log_loss_difference: Estimate
    """Nats per row; below 0 where the challenger is better."""
