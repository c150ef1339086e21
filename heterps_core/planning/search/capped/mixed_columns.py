"""Stages of one or two device types that keep a longest stage time, as candidates of a search.

For a count of one type the least count of the other follows, as each replica of either takes so many rows in that
time (`mixed_stage.py`). Only what a plan below the best one may have is listed: a stage costs no more than what the
cheapest stages before and after it leave.

Shape legend: G = runs of layers, T = device types, n = candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterps_core.planning.cost_model.arrays import Floats, Ints, run_layers
from heterps_core.planning.cost_model.mixed_stage import most_rows, rows_seconds
from heterps_core.planning.cost_model.stage_table import StageTable
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.scheduling_plan import Stage

MOST_CANDIDATES = 300_000
"""Memory of about 1 kB for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShares:
    """How many rows of a micro-batch a replica of each type takes in a longest stage time; arrays of shape (G, T)."""

    table: StageTable
    """Without disks."""

    seconds: float
    rows: Floats
    """With one other replica in the stage: more than one of them lets none take more. 0 where memory holds none."""

    unit_seconds: Floats
    """Seconds of one replica for all rows, at these; infinite without."""

    fewest: Floats
    """Replicas of a stage, of whatever type, with which one fits into memory and is ready in time."""

    @classmethod
    def of(cls, table: StageTable, seconds: float) -> RowShares:
        """Return the shares of all stages of a table."""
        rows = np.where(np.isfinite(table.fewest_replicas), most_rows(table, np.array(2.0), seconds), 0.0)
        assert table.trainer is not None
        least = np.maximum(rows, 1.0)
        whole = rows_seconds(table, least, np.array(2.0)) * table.trainer.microbatch_rows / least
        return cls(
            table=table,
            seconds=seconds,
            rows=rows,
            unit_seconds=np.where(rows > 0, whole, np.inf),
            fewest=table.fewest_replicas,
        )

    @property
    def num_rows(self) -> int:
        """R."""
        assert self.table.trainer is not None
        return self.table.trainer.microbatch_rows

    @property
    def least_units(self) -> Floats:
        """Units of one type alone that all rows take, not rounded; infinite without."""
        with np.errstate(divide="ignore"):
            return self.num_rows / self.rows


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedColumns:
    """Stages of two device types; arrays of shape (n,) and (n, 2)."""

    runs: Ints
    types: Ints
    counts: Floats

    @classmethod
    def of(cls, first: MixedColumns, second: MixedColumns) -> MixedColumns:
        """Return both together."""
        return cls(
            runs=np.concatenate([first.runs, second.runs]),
            types=np.concatenate([first.types, second.types]),
            counts=np.concatenate([first.counts, second.counts]),
        )

    def take(self, chosen: NDArray[np.bool_] | Ints) -> MixedColumns:
        """Return some of them."""
        return MixedColumns(runs=self.runs[chosen], types=self.types[chosen], counts=self.counts[chosen])

    def taken_units(self, table: StageTable) -> Floats:
        """Return the units of each type that are taken from its cap, shape (T, n)."""
        taken = np.zeros((table.max_units.size, self.runs.size))
        units = table.at((self.runs[:, None], self.types)).taken_units(self.counts)
        np.add.at(taken, (self.types, np.arange(self.runs.size)[:, None]), units)
        return taken

    def stages(self, problem: SchedulingProblem, rows: Ints) -> tuple[Stage, ...]:
        """Return the stages of some of them."""
        names, (first, last) = problem.device_type_names, run_layers(self.runs)
        return tuple(
            Stage(int(first[row]), int(last[row]), "any", 1).on(
                {
                    names[kind]: int(count)
                    for kind, count in zip(self.types[row], self.counts[row], strict=True)
                    if count
                }
            )
            for row in rows.tolist()
        )


def mixed_columns(
    shares: RowShares, slack: Floats, unit_prices: Floats, kinds: NDArray[np.bool_]
) -> MixedColumns | None:
    """Return the stages of two types of a kind, each of which costs less than `slack` of its run; None for too many.

    Args:
        slack: Shape (G,).
        unit_prices: No less is charged for a unit of each type, shape (T,).
        kinds: Shape (T,).
    """
    first, second = np.nonzero(np.triu(kinds[:, None] == kinds, 1))
    runs, pairs = np.nonzero(
        (shares.rows[:, first] > 0)
        & (shares.rows[:, second] > 0)
        & (unit_prices[first] + unit_prices[second] < slack[:, None])
    )
    types = np.stack([first[pairs], second[pairs]], axis=1)
    caps = np.broadcast_to(shares.table.max_units, shares.rows.shape[1:])[types]
    affordable = (slack[runs, None] - unit_prices[types[:, ::-1]]) / unit_prices[types]
    most = np.floor(np.minimum(np.minimum(caps, affordable), shares.num_rows)).astype(np.int64)
    # The type of which there are fewer is counted through.
    swapped = most[:, 0] > most[:, 1]
    types[swapped], most = types[swapped, ::-1], most.min(axis=1)
    if most.sum() > MOST_CANDIDATES:
        return None
    counted = np.repeat(np.arange(runs.size), most)
    starts = np.cumsum(most) - most
    counts = np.stack([np.arange(counted.size) - starts[counted] + 1.0, np.ones(counted.size)], axis=1)
    found = MixedColumns(runs=runs[counted], types=types[counted], counts=counts)
    found = _completed(found, shares, slack, unit_prices)
    same = (found.runs[1:] == found.runs[:-1]) & (found.types[1:] == found.types[:-1]).all(axis=1)
    is_dominated = same & (found.counts[1:, 1] >= found.counts[:-1, 1])
    return found.take(np.append(np.ones(min(1, found.runs.size), dtype=bool), ~is_dominated))


def _completed(columns: MixedColumns, shares: RowShares, slack: Floats, unit_prices: Floats) -> MixedColumns:
    """Return the columns with the least counts of their second types, without those that cost too much.

    More replicas let each take no more rows, so the least count is approached from below.
    """
    caps = np.broadcast_to(shares.table.max_units, shares.rows.shape[1:])
    in_stage: Floats | None = None
    while True:
        at = columns.runs[:, None], columns.types
        rows = shares.rows[at]
        if in_stage is not None:
            part = shares.table.at(at)
            rows = most_rows(part, np.broadcast_to(in_stage[:, None], rows.shape), shares.seconds)
        fewest = shares.fewest[at].max(axis=1)
        with np.errstate(divide="ignore"):
            left = np.ceil((shares.num_rows - columns.counts[:, 0] * rows[:, 0]) / rows[:, 1])
        second = np.maximum(np.maximum(columns.counts[:, 1], fewest - columns.counts[:, 0]), left)
        is_settled = in_stage is not None and bool((second == columns.counts[:, 1]).all())
        counts = np.stack([columns.counts[:, 0], second], axis=1)
        possible = (rows > 0).all(axis=1) & (second <= caps[columns.types[:, 1]])
        possible &= counts.sum(axis=1) <= shares.num_rows
        possible &= (counts * unit_prices[columns.types]).sum(axis=1) < slack[columns.runs]
        columns = MixedColumns(runs=columns.runs, types=columns.types, counts=counts).take(possible)
        if is_settled or not columns.runs.size:
            return columns
        in_stage = columns.counts.sum(axis=1)
