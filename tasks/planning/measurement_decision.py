"""Whether a machine of a device type is rented to be measured: what that may save against what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from heterps_core.device_types import get_device_type
from heterps_core.errors import ProvisioningError
from heterps_core.hardware import DeviceKind, InstanceOffer, Market, hardware_name
from heterps_core.models.model_graph import ModelGraph
from heterps_core.planning.explain.cost_range import MeasurementWorth, worth_of_measuring
from heterps_core.planning.problem.estimates import Estimate, Quantity
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.offer_choice import choose_instances
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.device_profile import DeviceProfile
from heterps_core.units import BYTES_PER_GIB
from tasks.planning.extra_costs import STARTUP_SECONDS, TEARDOWN_SECONDS
from tasks.provisioning import usd_for

MEASURING_SECONDS = 30.0
"""Assumed: the repeats take 3 s, loading torch and making tables three to ten times as long on a small instance."""

FREE_MEMORY_BYTES = 2 * BYTES_PER_GIB
"""Assumed beside the tables, in a machine and on a card: system, torch and batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementDecision:
    """One device type, and what speaks for and against renting it."""

    worth: MeasurementWorth
    nights: int
    """Runs that a measurement serves before it expires."""

    instance_type: str | None
    """That would be rented; None where none holds the tables."""

    cost_usd: float
    """Of the shortest rent: boot, measurement and end, or the least that is billed."""

    measured: DeviceProfile | None
    """A measurement that still counts."""

    @property
    def device_type(self) -> str:
        """The hardware."""
        return self.worth.device_type

    @property
    def saving_usd(self) -> float:
        """Expected over all nights."""
        return self.nights * self.worth.expected_usd

    @property
    def is_rented(self) -> bool:
        """It is worth its cost, and can be done."""
        return self._obstacle is None and (self.worth.may_break or self.saving_usd > self.cost_usd)

    @property
    def text(self) -> str:
        """The decision with its figures, in one line."""
        if self.measured is not None:
            return f"not rented: {self.measured}, which counts until {self.measured.expires_at:%Y-%m-%d}"
        if not self.worth.can_change_choice:
            return (
                f"not rented: whatever its true speed within ±{self.worth.largest_spread:.0%}, the plan stays the "
                f"same, with the others as estimated; measuring it costs {self.cost_usd:.4f} USD"
            )
        saving = (
            f"may save up to {self.worth.most_usd:.4g} USD a night, {self.worth.expected_usd:.4g} expected "
            f"({self.saving_usd:.4g} in {self.nights} nights), costs {self.cost_usd:.4f} USD"
        )
        if self.worth.may_break:
            saving += f"; within ±{self.worth.largest_spread:.0%} the plan may break a constraint"
        if self._obstacle is not None:
            return f"not rented: {self._obstacle}; {saving}"
        return f"rented as {self.instance_type}: {saving}" if self.is_rented else f"not rented: {saving}"

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain JSON values."""
        return {
            **asdict(self.worth),
            "nights": self.nights,
            "instance_type": self.instance_type,
            "cost_usd": self.cost_usd,
            "is_rented": self.is_rented,
            "text": self.text,
        }

    @property
    def _obstacle(self) -> str | None:
        if self.measured is not None:
            return "it is measured"
        if self.instance_type is None:
            return "none of its instances, or its cards, holds the tables of the data"
        return None


@task(name="weigh measurements", cache_policy=NO_CACHE)
def decide_measurements(
    problem: SchedulingProblem,
    graph: ModelGraph,
    offers: Sequence[InstanceOffer],
    *,
    measured: Mapping[str, DeviceProfile],
    nights: int,
    minimum_billed_s: float,
) -> tuple[MeasurementDecision, ...]:
    """Weigh a measurement of each device type of a problem, by itself: the others are as they are estimated.

    Args:
        problem: With the spread of each time.
        graph: Of the model, with the tables that are looked up while it is measured.
        offers: What may be rented.
        measured: Device types with a measurement that still counts.
        nights: Runs that a measurement serves before it expires.
        minimum_billed_s: Shortest time that an instance is charged for.

    Raises:
        InfeasiblePlanError: There is no plan at all.
    """
    stages = find_optimum(problem).stages
    seconds = max(STARTUP_SECONDS + MEASURING_SECONDS + TEARDOWN_SECONDS, minimum_billed_s)
    decisions = []
    for hardware in dict.fromkeys(map(hardware_name, problem.device_types)):
        computing = Estimate(device_type=hardware, quantity=Quantity.COMPUTING)
        plan = _plan_or_none(hardware, offers, graph)
        decisions.append(
            MeasurementDecision(
                worth=worth_of_measuring(problem, stages, computing),
                nights=nights,
                instance_type=None if plan is None else plan.groups[0].offer.instance_type.name,
                cost_usd=0.0 if plan is None else usd_for(plan.price_usd_per_hour, seconds),
                measured=next(
                    (kept for name, kept in measured.items() if hardware_name(name) == hardware), None
                ),
            )
        )
    return tuple(decisions)


def measuring_plan(
    device_types: Sequence[str], offers: Sequence[InstanceOffer], graph: ModelGraph
) -> ProvisioningPlan:
    """Return the cheapest on-demand machines to measure each device type on one, each a stage of its own.

    Raises:
        ProvisioningError: No offer carries a type with enough memory, or no zone has all of them.
    """
    least_bytes = graph.state_bytes + FREE_MEMORY_BYTES
    able = [
        offer
        for offer in offers
        if offer.market is Market.ON_DEMAND and offer.instance_type.memory_bytes >= least_bytes
    ]
    return choose_instances([Stage(0, 0, name, 1) for name in device_types], able)


def _plan_or_none(
    device_type: str, offers: Sequence[InstanceOffer], graph: ModelGraph
) -> ProvisioningPlan | None:
    card = get_device_type(device_type)
    if card.kind is DeviceKind.GPU and card.memory_bytes < graph.state_bytes + FREE_MEMORY_BYTES:
        return None
    try:
        return measuring_plan([device_type], offers, graph)
    except ProvisioningError:
        return None
