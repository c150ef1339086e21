"""All plans of a tiny problem, one by one: what explanations are checked against."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.extra_costs import ExtraCosts, InstanceSize
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem
from tests.partitions import all_partitions


def tiny_problem(seed, *, num_layers=3, num_types=3, max_units=4, floor_samples_per_s=2_000.0):
    """A random problem whose plans can be counted."""
    problem = make_problem(
        seed, num_layers=num_layers, num_types=num_types, scarce=True, floor_samples_per_s=floor_samples_per_s
    )
    units = {name: replace(unit, max_units=max_units) for name, unit in problem.device_types.items()}
    return replace(problem, device_types=units)


def with_all_costs(problem):
    """The same problem with every extra cost, interruptions, and units sold in whole instances."""
    units = {
        name: replace(
            unit,
            interruptions_per_hour=0.05 * index,
            instances=(
                InstanceSize(name="small", units=1, price_usd_per_hour=1.1 * unit.price_usd_per_hour),
                InstanceSize(name="large", units=3, price_usd_per_hour=3 * unit.price_usd_per_hour),
            ),
        )
        for index, (name, unit) in enumerate(problem.device_types.items())
    }
    extra = ExtraCosts(
        startup_seconds=300.0,
        teardown_seconds=60.0,
        search_and_profiling_usd=0.1,
        storage_usd_per_hour=0.05,
        checkpoint_seconds=5.0,
        restart_seconds=120.0,
    )
    return replace(problem, device_types=units, extra_costs=extra)


def with_spread(problem, spreads, *, communication=0.0):
    """The same problem with a spread of compute times by device type, and one of all communication."""
    units = {
        name: replace(unit, communication_relative_spread=communication)
        for name, unit in problem.device_types.items()
    }
    layers = tuple(replace(layer, compute_relative_spread=spreads) for layer in problem.layers)
    return replace(problem, layers=layers, device_types=units)


def with_times(problem, *, computing=None, communication=None):
    """The same problem with the times of some device types multiplied by a factor."""
    computing, communication = computing or {}, communication or {}

    def scaled(seconds, factors):
        return {name: value * factors.get(name, 1.0) for name, value in seconds.items()}

    layers = tuple(
        replace(
            layer,
            compute_seconds=scaled(layer.compute_seconds, computing),
            communication_seconds=scaled(layer.communication_seconds, communication),
        )
        for layer in problem.layers
    )
    units = {
        name: replace(unit, bandwidth_bytes_per_s=unit.bandwidth_bytes_per_s / communication.get(name, 1.0))
        for name, unit in problem.device_types.items()
    }
    return replace(problem, layers=layers, device_types=units)


def placement_of(stages):
    return tuple(
        stage.device_type for stage in stages for _ in range(stage.first_layer, stage.last_layer + 1)
    )


def feasible_plans(problem):
    """Return (placement, stages, cost) of every plan that keeps all constraints."""
    plans = []
    for runs in all_partitions(problem):
        most = [problem.device_types[name].max_units for _, _, name in runs]
        for counts in product(*(range(1, units + 1) for units in most)):
            stages = tuple(Stage(*run, count) for run, count in zip(runs, counts, strict=True))
            evaluation = evaluate(problem, stages)
            if not evaluation.violations:
                plans.append((placement_of(stages), stages, evaluation.cost_usd))
    return plans


def cheapest_by_trying_all(problem):
    """Return (placement, stages, cost) of the cheapest plan, or None."""
    return min(feasible_plans(problem), key=lambda plan: plan[2], default=None)
