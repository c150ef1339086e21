"""A machine as its provider knows it: what the sweeper and the ledger have when everything else is lost."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from heterps_core.hardware import Market, Price


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchTerms(Price):
    """What a machine was launched for and at which price, as it stands on the machine itself."""

    attempt: int
    """Which attempt of its run launched it, counted from 1."""

    stage: int
    device_type: str
    market: Market
    region: str
    intended_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """A machine that exists, or existed a short while ago, as found from the provider alone."""

    provider_instance_id: str
    run_id: str
    """Empty where the machine has lost its tags and was found by its id."""

    node_id: str | None
    """None where only the ledger and cluster.json know: the machines of one fleet request are alike."""

    instance_type: str
    launched_at: datetime
    is_ended: bool
    ended_at: datetime | None
    """None while it exists, and where the provider does not tell."""

    lease_until: datetime | None
    """None where the lease cannot be read; it counts as expired once the machine is old enough to show it."""

    is_owner_dead: bool
    """Known to be so; a provider that cannot see the owner says False and trusts the lease."""

    terms: LaunchTerms | None
    """None where the provider keeps none."""


def moment_or_none(text: str) -> datetime | None:
    """Read a time with a zone; None where the text is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else None
