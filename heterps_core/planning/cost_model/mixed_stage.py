r"""The time of a stage with replicas on two device types, by the trainer's step (`step_model.py`).

A replica of type i that takes r of the R rows of a micro-batch needs ET_i(K, r): R / r stands for k in all that grows
with its rows, and K, the replicas of both types, in what it exchanges with the others and sums with them. Rows are
whole, and split so that the slower type is as fast as can be:

    ET = min over r_1, r_2 >= 1 with n_1 r_1 + n_2 r_2 >= R  of  max(ET_1(K, r_1), ET_2(K, r_2))

Each replica holds 1 / K of the sharded state, whatever its rows; none keeps rows of tables on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.cost_model.run_tables import plan_table
from heterps_core.planning.cost_model.stage_table import StageTable
from heterps_core.planning.cost_model.step_model import StageSeconds
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.scheduling_plan import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanParts:
    """The replicas of a plan by stage and device type; arrays of shape (P,)."""

    parts: tuple[Stage, ...]
    table: StageTable
    replicas: Floats
    in_stage: Floats
    """K of their stages where these have two device types, else 0."""

    rows: Ints
    """Of a micro-batch, those of each replica; 0 where all of the stage have the same."""

    spans: tuple[slice, ...]
    """Parts of each stage."""

    @classmethod
    def of(cls, problem: SchedulingProblem, stages: Sequence[Stage], *, num_microbatches: int) -> PlanParts:
        """Return the parts of a plan."""
        parts = tuple(part for stage in stages for part in stage.parts)
        table = plan_table(problem, parts, num_microbatches=num_microbatches)
        replicas = np.array([float(part.num_replicas) for part in parts])
        in_stage, rows = np.zeros(len(parts)), np.zeros(len(parts), dtype=np.int64)
        spans, end = [], 0
        for stage in stages:
            spans.append(span := slice(end, end := end + len(stage.parts)))
            if stage.second_device_type:
                in_stage[span] = stage.num_replicas
                rows[span] = split_rows(table.at((np.arange(span.start, end),)), replicas[span])
        return cls(
            parts=parts, table=table, replicas=replicas, in_stage=in_stage, rows=rows, spans=tuple(spans)
        )

    def terms(self, table: StageTable, replicas: Floats) -> StageSeconds:
        """Return the terms of a table with these stages, where parts of one device type have so many replicas."""
        if not self.in_stage.any():
            return table.terms(replicas)
        assert table.trainer is not None
        is_shared = self.rows > 0
        pacing = np.where(is_shared, table.trainer.microbatch_rows / np.maximum(self.rows, 1), replicas)
        return table.terms(pacing, np.where(is_shared, self.in_stage, replicas))

    def slowest(self, seconds: Floats) -> Ints:
        """Return the slower part of each stage, shape (S,)."""
        return np.array([span.start + int(seconds[span].argmax()) for span in self.spans])


def rows_seconds(table: StageTable, rows: Floats, in_stage: Floats) -> Floats:
    """Return ET_i(K, r), elementwise."""
    assert table.trainer is not None
    return table.terms(table.trainer.microbatch_rows / rows, in_stage).total


def most_rows(table: StageTable, in_stage: Floats, stage_seconds: float) -> Floats:
    """Return the most rows with ET_i(K, r) <= x, elementwise; 0 where one row takes longer."""
    assert table.trainer is not None
    shape = np.broadcast_shapes(table.compute_seconds.shape, np.shape(in_stage))
    # ET_i rises with r: halve the range of its answer.
    low, high = np.zeros(shape), np.full(shape, float(table.trainer.microbatch_rows))
    while (low < high).any():
        middle = np.ceil((low + high) / 2)
        keeps = rows_seconds(table, np.maximum(middle, 1.0), in_stage) <= stage_seconds
        low, high = np.where(keeps, middle, low), np.where(keeps, high, middle - 1)
        low = np.minimum(low, high)
    return low


def split_rows(table: StageTable, num_replicas: Floats) -> Ints:
    """Return the rows of a micro-batch of each replica of both types, shape (2,), as the table and the replicas."""
    assert table.trainer is not None
    num_rows, (first, second) = table.trainer.microbatch_rows, num_replicas.tolist()
    of_first = np.arange(1.0, max(1.0, np.ceil((num_rows - second) / first)) + 1)
    of_second = np.maximum(1.0, np.ceil((num_rows - first * of_first) / second))
    in_stage = np.array(first + second)
    seconds = [
        rows_seconds(table.at((np.array([index]),)), rows, in_stage)
        for index, rows in enumerate((of_first, of_second))
    ]
    best = int(np.maximum(*seconds).argmin())
    return np.array([of_first[best], of_second[best]], dtype=np.int64)
