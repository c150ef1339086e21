"""The least time of a step that begins and ends with an empty pipeline: paths of passes and messages in turn.

A path goes through one stage, so that a search over stages can charge it: of other stages it knows the layers before,
each on the type and with the most replicas with which it takes least. Such a step is simulated in the end
(`simulate/pipeline_simulation.py`), and no simulated step is shorter than any of these paths.

Shape legend: L = layers, T = device types, G = runs of layers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from heterps_core.models.model_graph import LayerKind
from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.cost_model.step_model import (
    FORWARD_SHARE,
    WEIGHT_GRADIENT_SHARE,
    scale_and_fraction,
)
from heterps_core.planning.cost_model.trainer_terms import DrainedPath
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem


def drained_paths(
    problem: SchedulingProblem,
    num_microbatches: int,
    first: Ints,
    last: Ints,
    by_type: Callable[[Callable[[LayerCosts, str], float]], Floats],
) -> tuple[DrainedPath, ...]:
    """Return the paths through runs of layers first..last, whose arrays broadcast to (G, T).

    From step to step a worker has all its passes and the sum of gradients to do. Or the first stage does: it sends a
    micro-batch forward to this stage, whose worker has all passes but the weight gradients, and takes the last one
    back. The same two ways lead over the link of a stage, with the messages of all m micro-batches. The first stage
    has a forward pass before and a backward pass after them, the last one both after its last input, and one between
    others a backward pass after its last gradient has come. No stage waits for the weight gradients and sums of later
    ones: it begins the next step beside them.

    Args:
        by_type: Adds a value of layers on a type up over each run, (layer, type) -> (G, T).
    """
    compute = by_type(lambda layer, name: layer.compute_seconds[name])
    connected = by_type(lambda layer, name: layer.compute_seconds[name] * _is_connected(layer))
    with np.errstate(invalid="ignore"):
        put_off = np.where(compute > 0, connected / compute, 0.0) * WEIGHT_GRADIENT_SHARE
    cut_bytes = np.array([0.0, *(layer.output_bytes_per_sample for layer in problem.layers[:-1]), 0.0])
    bandwidth = np.array([unit.bandwidth_bytes_per_s for unit in problem.device_types.values()])
    # Seconds of one unit for a batch, in one direction.
    crossing = 2 * problem.batch_size * cut_bytes[:, None] / bandwidth
    gradient = crossing[first] / num_microbatches
    messages = crossing[first] + crossing[last + 1] + gradient
    is_at_end = ((first == 0) | (last == problem.num_layers - 1))[:, None]
    exchanges = np.where(is_at_end, 1.0, 0.5) / num_microbatches
    passes = (np.where(is_at_end, 1.0, 1 - FORWARD_SHARE) - put_off) / num_microbatches
    before = _seconds_before(problem, num_microbatches)[first][:, None]
    return (
        DrainedPath(1.0, 1.0, 0.0, 1.0, 0.0),
        DrainedPath(1.0, 1 - put_off, gradient, 0.0, before),
        DrainedPath(exchanges, passes, messages, 1.0, 0.0),
        DrainedPath(exchanges, passes, messages, 0.0, before),
    )


def _seconds_before(problem: SchedulingProblem, num_microbatches: int) -> Floats:
    """Return the least time of a micro-batch's passes forward and backward through all layers before each; (L,)."""
    units = tuple(problem.device_types.values())
    num_rows = problem.batch_size // num_microbatches
    most_replicas = np.array([min(unit.max_units, num_rows) for unit in units])
    scale, fraction = scale_and_fraction(
        problem, np.array([unit.compute_parallel_fraction for unit in units]), num_microbatches
    )
    # The replica with fewest rows: a path may go through that one.
    scale = scale * (1 - fraction + fraction * (num_rows // most_replicas) / num_rows)
    layers = np.array(
        [[layer.compute_seconds[name] for name in problem.device_types] for layer in problem.layers]
    )
    least = (layers * scale).min(axis=1) / num_microbatches
    least *= 1 - np.array([_is_connected(layer) for layer in problem.layers]) * WEIGHT_GRADIENT_SHARE
    return np.asarray(np.cumsum(least) - least)


def _is_connected(layer: LayerCosts) -> bool:
    return layer.kind == LayerKind.FULLY_CONNECTED
