"""Device types as columns of a stage table, where a plan needs a machine on-demand or has reserved ones.

A plan that is all on spot buys one machine on-demand, in the stage where that adds least. A search that adds up over
stages sees such a stage as one of another type: each type on spot has a second column, at the price with a machine
on-demand, and some stage must be of a column with one. A type with n reserved machines has n further columns, for
stages with 1..n of them, which are a resource of the plan and stay, as those on-demand do. The columns of a type
share its cap.

Shape legend: C = columns, T = device types, L = layers, n = candidate stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from heterps_core.planning.cost_model.arrays import Floats, Ints, run_layers
from heterps_core.planning.cost_model.instance_cover import NO_STAIRS, PriceStairs
from heterps_core.planning.cost_model.objective import Objective
from heterps_core.planning.cost_model.stage_table import StageTable
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.capped.capped_chain import prices_of_differing_neighbours


@dataclass(frozen=True, kw_only=True, slots=True)
class StageColumns:
    """The columns of a problem: its device types, then those on spot with a machine on-demand, or reserved ones."""

    num_types: int
    types: Ints
    """Device type of each column, shape (C,)."""

    has_on_demand: NDArray[np.bool_]
    """Whether stages of a column have a machine on-demand, shape (C,)."""

    reserved: Ints
    """Reserved machines of a column's stages, shape (C,)."""

    pools: Mapping[str, tuple[int, NDArray[np.bool_]]]
    """Name of reserved machines -> how many there are, and which columns have some."""

    neighbours_differ: bool
    """Whether neighbouring stages must be of different types."""

    @classmethod
    def of(cls, problem: SchedulingProblem) -> StageColumns:
        """Return the columns of a problem."""
        units = tuple(problem.device_types.values())
        further = [
            (index, machines)
            for index, unit in enumerate(units)
            for machines in (range(1, unit.reserved.count + 1) if unit.reserved else (0,))
            if unit.reserved or unit.on_demand_instances
        ]
        types = np.array([*range(len(units)), *(index for index, _ in further)])
        names = np.array([unit.reserved.name if unit.reserved else "" for unit in units])[types]
        return cls(
            num_types=len(units),
            types=types,
            has_on_demand=np.array(
                [*(unit.on_demand_instances is None for unit in units), *(True for _ in further)]
            ),
            reserved=np.array([*(0 for _ in units), *(machines for _, machines in further)]),
            pools={each.name: (each.count, names == each.name) for unit in units if (each := unit.reserved)},
            neighbours_differ=problem.neighbours_differ,
        )

    @property
    def num_columns(self) -> int:
        """C."""
        return self.types.size

    def of_rows(self, rows: Ints) -> Ints:
        """Return flat indices run * C + column for those of device types, run * T + type."""
        runs, types = np.divmod(rows, self.num_types)
        return np.asarray(runs * self.num_columns + types)

    def with_on_demand(self, device_type: int) -> int:
        """Return the column of a type's stages that have a machine on-demand."""
        return int(np.flatnonzero((self.types == device_type) & self.has_on_demand)[0])

    def table(self, table: StageTable) -> StageTable:
        """Return a table of shape (G, T) with the columns in place of types."""
        if self.num_columns == self.num_types:
            return table
        indices = np.arange(self.num_columns)
        shape = (len(table.compute_seconds), self.num_columns)
        bought = table.covers.by_type
        covers = {
            column: table.reserved.prices[device_type][machines]
            if device_type in table.reserved.prices
            else bought[device_type]
            + (table.on_demand_usd.by_type[device_type] if column >= self.num_types else 0.0)
            for column, (device_type, machines) in enumerate(
                zip(self.types.tolist(), self.reserved.tolist(), strict=True)
            )
            if device_type in bought
        }
        return replace(
            table.at(np.ix_(np.arange(shape[0]), self.types)),
            type_indices=np.broadcast_to(indices, shape),
            covers=PriceStairs(covers),
            on_demand_usd=NO_STAIRS,
        )

    def objective(self, objective: Objective) -> Objective:
        """Return the objective with the columns in place of types."""
        return replace(objective, interruptions_per_hour=objective.interruptions_per_hour[self.types])

    def change_prices(self, num_layers: int) -> Floats | None:
        """Return prices of boundaries, infinite between stages that may be no neighbours; see `CappedChain`."""
        return prices_of_differing_neighbours(self.types, num_layers) if self.neighbours_differ else None

    def limits(self, rows: Ints, units: Floats, caps: Floats, num_layers: int) -> list[tuple[Floats, float]]:
        """Return what each candidate takes of further resources, and their caps.

        A plan's stages have L layers together, so that of layers less stages with a machine on-demand there may be
        L - 1. The units of all columns of a type are one resource, and so are reserved machines of a name.
        """
        runs, columns = np.divmod(rows, self.num_columns)
        limits: list[tuple[Floats, float]] = []
        if not self.has_on_demand.all():
            firsts, lasts = run_layers(runs)
            taken = np.asarray(lasts - firsts + 1.0 - self.has_on_demand[columns])
            limits.append((taken, num_layers - 1.0))
        for device_type in dict.fromkeys(self.types[self.num_types :].tolist()):
            limits.append((units * (self.types[columns] == device_type), float(caps[device_type])))
        for number, has_some in self.pools.values():
            limits.append((np.where(has_some, self.reserved, 0.0)[columns], float(number)))
        return limits
