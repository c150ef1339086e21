"""What a cloud can be asked for: its prices of now, how they moved on spot, and the sizes of its machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar, Self

from heterps_core.hardware import InstanceType

LAST_CHANGE = timedelta(hours=1)
"""How far back the spot history is asked for; the price in force at its start is always in the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotHistory:
    """Price changes of one instance type in one zone, oldest first."""

    times: tuple[datetime, ...]
    prices_usd_per_hour: tuple[float, ...]

    @property
    def last_usd_per_hour(self) -> float:
        """The price that holds now."""
        return self.prices_usd_per_hour[-1]


class LivePrices(ABC):
    """Asks one cloud; each method is one kind of question, and raises ProvisioningError without an answer."""

    cloud: ClassVar[str]
    on_demand_source: ClassVar[str]
    """Who publishes the prices on-demand, as offers carry it."""

    spot_source: ClassVar[str]

    @classmethod
    @abstractmethod
    def with_own_clients(cls) -> Self:
        """Return one with the cloud's own search for credentials.

        Raises:
            ProvisioningError: A client cannot be made.
        """

    @staticmethod
    @abstractmethod
    def check_regions(names: Sequence[str]) -> None:
        """Check, without asking the cloud, that it has regions of these names.

        Raises:
            UnknownNameError: There is no such region.
        """

    @abstractmethod
    def on_demand(self, region: str, *, instance_type: str | None = None) -> Mapping[str, float]:
        """Return the USD per hour of each instance type of a region, or of one type alone."""

    @abstractmethod
    def spot(
        self, region: str, instance_types: Sequence[str], *, since: datetime
    ) -> Mapping[tuple[str, str], SpotHistory]:
        """Return the history of each instance type and zone."""

    @abstractmethod
    def sizes(self, region: str, families: Iterable[str]) -> Mapping[str, InstanceType]:
        """Return what each instance type of some families is, by its name."""
