"""The one place where market policies are listed.

A new policy is one file in this folder and one line in `MARKET_POLICIES`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from heterps_core.errors import UnknownNameError

if TYPE_CHECKING:
    from heterps_core.spot.policies.base import MarketPolicy

__all__ = ["MARKET_POLICIES", "get_market_policy"]

MARKET_POLICIES = {
    "expected-cost": "heterps_core.spot.policies.expected_cost:ExpectedCostPolicy",
    "greedy": "heterps_core.spot.policies.greedy:GreedyPolicy",
    "on-demand": "heterps_core.spot.policies.on_demand:OnDemandPolicy",
    "spot-only": "heterps_core.spot.policies.spot_only:SpotOnlyPolicy",
    "uniform-progress": "heterps_core.spot.policies.uniform_progress:UniformProgressPolicy",
}


def get_market_policy(name: str) -> MarketPolicy:
    """Return a market policy with its default settings.

    Raises:
        UnknownNameError: No policy has this name; the message lists the known ones.
    """
    if name not in MARKET_POLICIES:
        raise UnknownNameError("market policy", name, MARKET_POLICIES)
    module_name, class_name = MARKET_POLICIES[name].split(":")
    policy: MarketPolicy = getattr(import_module(module_name), class_name)()
    return policy
