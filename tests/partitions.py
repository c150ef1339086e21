"""All ways to divide a chain of layers into stages on device types, one by one: for tests that try every plan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel


def all_partitions(problem: SchedulingProblem) -> Iterator[tuple[tuple[int, int, str], ...]]:
    """Yield first layer, last layer and device type of the stages of each partition that the contract allows."""
    end = problem.num_layers
    for num_stages in range(1, end + 1):
        for cuts in combinations(range(1, end), num_stages - 1):
            runs = [(first, stop - 1) for first, stop in pairwise((0, *cuts, end))]
            for types in product(problem.device_types, repeat=num_stages):
                if problem.step_model is StepModel.TRAINER or all(a != b for a, b in pairwise(types)):
                    yield tuple((*run, name) for run, name in zip(runs, types, strict=True))
