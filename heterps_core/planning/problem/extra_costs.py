"""What a run is charged besides the time of its units, and the sizes in which units are sold.

Every term is off at 0. The terms stand inside the objective (`cost_model/objective.py`), so that a plan
which saves on compute and pays for it at start-up, on the network or in lost work is not preferred.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from heterps_core.field_rules import NotNegative, Text, count
from heterps_core.hardware import MAX_RESERVED, MAX_UNITS_PER_INSTANCE
from heterps_core.json_codec import JsonDocument, JsonForm, check_fields

MAX_INSTANCE_SIZES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceSize:
    """An instance that is sold, as a carrier of units of one device type."""

    name: Text
    units: Annotated[int, count(MAX_UNITS_PER_INSTANCE)]
    price_usd_per_hour: NotNegative
    """0 for a machine that is owned or reserved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """Instances that are reserved or paid for already, which a plan takes at no price before others."""

    name: Text
    """Device types with one name here share them."""

    units: Annotated[int, count(MAX_UNITS_PER_INSTANCE)]
    """Of one instance."""

    count: Annotated[int, count(MAX_RESERVED)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraCosts(JsonDocument):
    """Terms of a run's cost besides its units' time; 0 leaves a term out.

    Raises:
        MalformedDocumentError: A value is negative or no number.
    """

    json_form = JsonForm(is_strict=True, former_names=("transfer_usd_per_gb",))

    startup_seconds: NotNegative = 0.0
    """From the launch of the fleet to its first step; all units are billed."""

    teardown_seconds: NotNegative = 0.0
    """From the last step to the end of the instances; all units are billed."""

    search_and_profiling_usd: NotNegative = 0.0
    """Spent before the run, whatever the plan."""

    storage_usd_per_hour: NotNegative = 0.0
    """Checkpoints, data and whatever else is kept while the run lasts."""

    machine_usd_per_hour: NotNegative = 0.0
    """Price of the one machine that all stages share, whatever their units."""

    crossing_usd: NotNegative = 0.0
    """Price of the bytes that cross between the region of the data and that of the machines, whatever the plan."""

    checkpoint_seconds: NotNegative = 0.0
    """delta: how long training pauses for one checkpoint."""

    restart_seconds: NotNegative = 0.0
    """From an interruption to the first step after it, all units billed."""

    def __post_init__(self) -> None:
        check_fields(self, "extra_costs")

    @property
    def fixed_usd(self) -> float:
        """The part of the cost that no plan changes."""
        return self.search_and_profiling_usd + self.crossing_usd


NO_EXTRA_COSTS = ExtraCosts()
