"""Where a run may rent machines, and which region's plan costs least with the bytes that cross.

A fleet stands in one region, and there in one zone. Rows and run store stay where they are.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from heterps_core.errors import InfeasiblePlanError, ProvisioningError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.dominance import costs_no_less
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.text_table import usd_text
from heterps_core.units import SECONDS_PER_HOUR
from infra.prices.price_catalogue import refresh_way_out
from infra.prices.region_rates import BETWEEN_REGIONS, names_matching, rates_between
from infra.providers import get_provider
from infra.workspace import Workspace, region_of, region_of_run_store
from tasks.planning.deadline import PlanningTime
from tasks.planning.extra_costs import (
    BYTES_PER_GB,
    CHECKPOINT_INTERVAL_SECONDS,
    NO_CROSSING,
    REGION_BYTES_PER_S,
    Crossing,
)
from tasks.prices import catalogue_of
from tasks.running.progress import log_step
from tasks.scheduling import Searches

Found = tuple[str, SchedulingProblem, Searches]
"""Number format, problem and plans of a search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regions:
    """The regions of a run."""

    rented: tuple[str, ...]
    """Where its machines may be, the region of its rows first."""

    rows: str
    store: str

    @classmethod
    def of(cls, workspace: Workspace, provider: str, patterns: Sequence[str], *, data: str | None) -> Regions:
        """Return the regions that names and patterns stand for; without any, the region of the rows.

        Rows and store are in the region that their URI names, else in one another's, else in the one region that is
        asked for, else in the provider's own. Machines that are not rented, and a dry run without regions and without
        prices of that of the rows, have all in the provider's own.

        Raises:
            UnknownNameError: A name is no region, or there are no prices; with the command that fetches them.
        """
        rented_from, own = get_provider(provider), get_provider(provider).region
        live, known = rented_from.live_prices, catalogue_of(workspace, provider).regions()
        only = patterns[0] if len(patterns) == 1 and not glob.has_magic(patterns[0]) else own
        rows = region_of(data) or region_of_run_store() or only
        if rented_from.has_inventory or not (patterns or live or rows in known):
            return cls(rented=(own,), rows=own, store=own)
        found: list[str] = []
        for pattern in patterns or [rows]:
            if live is not None and not glob.has_magic(pattern):
                # Their prices are asked for before machines are rented.
                found += live.regions_named([pattern])
            else:
                way_out = refresh_way_out(pattern)
                found += names_matching([pattern], known, family="region with prices", way_out=way_out)
        rented = sorted(dict.fromkeys(found), key=lambda region: region != rows)
        return cls(rented=tuple(rented), rows=rows, store=region_of_run_store() or rows)

    def crossing(self, workspace: Workspace, region: str, num_bytes: tuple[float, float, float]) -> Crossing:
        """Return what crosses where the machines of a run are in a region.

        Args:
            num_bytes: Of all rows that are read, of the model that the run begins with, and of its state.
        """
        homes, (rows, start, state) = {self.rows, self.store} - {region}, num_bytes
        if not homes:
            return NO_CROSSING
        rates = (rates_between(workspace.price_folder, region, home) for home in homes)
        usd_per_gb = max(each[BETWEEN_REGIONS].usd_per_unit for each in rates)
        crosses = float(region != self.store)
        before, after = rows * (region != self.rows) + start * crosses, state * crosses
        usd = (before + after) / BYTES_PER_GB * usd_per_gb
        usd_per_hour = after / BYTES_PER_GB * usd_per_gb * SECONDS_PER_HOUR / CHECKPOINT_INTERVAL_SECONDS
        return Crossing(
            usd=usd,
            usd_per_hour=usd_per_hour,
            seconds_before=before / REGION_BYTES_PER_S,
            seconds_after=after / REGION_BYTES_PER_S,
            text=f"{(before + after) / BYTES_PER_GB:.3g} GB cross between regions for {usd_text(usd)}, and "
            f"checkpoints for at most {usd_text(usd_per_hour)} an hour",
        )


class RegionSearch(Protocol):
    """The search for a plan in one region."""

    def first_problems(self) -> list[SchedulingProblem]:
        """Return the problem of each zone."""

    def found(self) -> Found:
        """Search the plan."""


Search = TypeVar("Search", bound=RegionSearch)


def cheapest_region(searches: Mapping[str, Search], planning_time: PlanningTime) -> tuple[Search, Found, str]:
    """Search the regions in turn; return the search with the cheapest plan, what it found, and why, for people.

    A region is not searched where what crosses alone costs as much as a plan that was found, or where each of its
    zones costs no less, plan by plan, than a zone of a region that was (`costs_no_less`). Why is empty where there
    is one region alone.

    Raises:
        InfeasiblePlanError, ProvisioningError: Why the first region has no plan, where none has one.
    """
    found: dict[str, Found] = {}
    costs_usd: dict[str, float] = {}
    left_out: dict[str, list[SchedulingProblem]] = {}
    compared: list[SchedulingProblem] = []
    refused: list[InfeasiblePlanError | ProvisioningError] = []
    for index, (region, search) in enumerate(searches.items()):
        planning_time.num_plans = len(searches) - index
        try:
            problems = search.first_problems() if len(searches) > 1 else []
            if costs_usd and all(
                each.extra_costs.fixed_usd >= min(costs_usd.values())
                or any(costs_no_less(each, other) for other in compared)
                for each in problems
            ):
                left_out[region] = problems
            else:
                found[region] = search.found()
                costs_usd[region] = found[region][2].chosen.plan.cost_usd
                compared += problems
        except (InfeasiblePlanError, ProvisioningError) as problem:
            refused.append(problem)
            if len(searches) > 1:
                log_step("region", f"{region} is left out: {problem}")
    if not found:
        raise refused[0]
    best = min(costs_usd, key=costs_usd.__getitem__)
    why = "" if len(searches) == 1 else f"{best}, the cheapest of {len(searches)}"
    _, chosen, results = found[best]
    stages, best_usd = results.chosen.plan.stages, costs_usd.pop(best)
    used = {name for stage in stages for name in stage.replicas_by_type}
    for region, problems in left_out.items():
        # Stages of two device types are allowed only where units are limited.
        alike = [replace(each, mixes_device_types=chosen.mixes_device_types) for each in problems]
        same = [evaluate(each, stages).cost_usd for each in alike if used <= each.device_types.keys()]
        costs_usd |= {f"{region} with the same machines": min(same)} if same else {}
    if costs_usd:
        nearest = min(costs_usd, key=costs_usd.__getitem__)
        extra_usd = costs_usd[nearest] - best_usd
        share = f" ({extra_usd / best_usd:+.1%})" if best_usd else ""
        why += f"; nearest {nearest}: +{usd_text(extra_usd)}{share}"
    return searches[best], found[best], why
