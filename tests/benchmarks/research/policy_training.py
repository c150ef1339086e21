"""Train the policy that `reinforce` starts from: `python -m tests.benchmarks.research.policy_training`.

Imitation: the policy raises the likelihood of near-optimal placements of 40,000 random problems of 8 to 40 layers and
2 to 8 device types. Their seeds are from `FIRST_SEED` on; tests and benchmarks draw others. On one thread, so that
the same processor and versions give the same file; about 25 minutes of processor time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from heterps_core.planning.cost_model.run_tables import segment_layers, segment_table
from heterps_core.planning.cost_model.step_model import num_microbatches_of
from heterps_core.planning.problem.extra_costs import ExtraCosts
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel, UnitType
from heterps_core.planning.provisioning.replica_balance import fixed_stages
from heterps_core.planning.search.capped.feasibility import stage_time_range
from heterps_core.planning.search.learned.placement_policy import (
    POLICY_FILE,
    PlacementPolicy,
    policy_features,
)
from heterps_core.planning.search.schedulers.policy_gradient import descend
from heterps_core.plans.scheduling_plan import Stage
from tests.benchmarks.research.chain_partition import cheapest_partitions
from tests.builders import make_problem

FIRST_SEED = 1_000_000_000
NUM_PROBLEMS = 40_000
MIDDLING_STAGES = 4
"""Stages whose number of micro-batches stands for those of all plans while placements are sought."""

NUM_STAGE_TIMES = 20
NUM_PRICE_ROUNDS = 8

NUM_HIDDEN = 48
NUM_EPOCHS = 12
BATCH_SIZE = 32
LEARNING_RATES = (3e-3, 6e-5)
"""First and last, half a cosine between them."""


def draw(seed: int) -> SchedulingProblem:
    """Return a random problem: half have the shape of a click model, others scarce units, extra costs or spot."""
    random = np.random.default_rng(seed)
    problem = make_problem(
        seed,
        num_layers=int(random.integers(8, 41)),
        num_types=int(random.integers(2, 9)),
        max_units=round(math.exp(random.uniform(math.log(30), math.log(600)))),
        scarce=bool(random.random() < 0.4),
    )
    if random.random() < 0.5:
        problem = _shaped(problem, random)
    units = problem.device_types
    if random.random() < 0.5:
        units = {
            name: replace(unit, price_usd_per_hour=unit.price_usd_per_hour * math.exp(random.normal(0, 0.5)))
            for name, unit in units.items()
        }
    no_floor = random.random() < 0.2
    problem = replace(
        problem,
        device_types=units,
        throughput_floor_samples_per_s=0.0 if no_floor else math.exp(random.uniform(7, 12)),
        single_replica_communicates=bool(random.random() < 0.6),
        step_model=StepModel.TRAINER if random.random() < 0.2 else StepModel.PAPERS,
    )
    return _charged(problem, random) if random.random() < 0.2 else problem


def _shaped(problem: SchedulingProblem, random: np.random.Generator) -> SchedulingProblem:
    """Return the problem with its tables first, and each type faster than "cpu" by about one factor in other layers.

    The second type may be another CPU.
    """
    units = dict(problem.device_types)
    factors = {name: math.exp(random.uniform(1.5, 5.3)) for name in units if name != "cpu"}
    if random.random() < 0.5:
        name = problem.device_type_names[1]
        factors[name] = math.exp(random.uniform(-0.5, 0.5))
        units[name] = replace(
            units["cpu"],
            price_usd_per_hour=units["cpu"].price_usd_per_hour
            * factors[name]
            * math.exp(random.normal(0, 0.2)),
            bandwidth_bytes_per_s=units[name].bandwidth_bytes_per_s,
        )
    layers = [
        layer
        if layer.is_sharded
        else replace(
            layer,
            compute_seconds={"cpu": layer.compute_seconds["cpu"]}
            | {
                name: layer.compute_seconds["cpu"] / factor / math.exp(random.normal(0, 0.3))
                for name, factor in factors.items()
            },
        )
        for layer in problem.layers
    ]
    ordered = sorted(layers, key=lambda layer: not layer.is_sharded)
    return replace(problem, layers=tuple(ordered), device_types=units)


def _charged(problem: SchedulingProblem, random: np.random.Generator) -> SchedulingProblem:
    """Return the problem with extra costs and types on spot."""

    def on_spot(unit: UnitType) -> UnitType:
        return replace(unit, interruptions_per_hour=float(random.choice([0.0, 0.02, 0.2])))

    return replace(
        problem,
        device_types={name: on_spot(unit) for name, unit in problem.device_types.items()},
        extra_costs=ExtraCosts(
            startup_seconds=float(random.uniform(60, 600)),
            teardown_seconds=30.0,
            storage_usd_per_hour=float(random.uniform(0, 0.2)),
            checkpoint_seconds=float(random.choice([0.0, 20.0])),
            restart_seconds=180.0,
        ),
    )


def good_placement(problem: SchedulingProblem) -> NDArray[np.int64] | None:
    """Return the type of each layer in the cheapest of some plans, or None where none of them keeps the constraints.

    For each of some stage times the cheapest partition, with exact replicas. Where a type has too few units for it,
    its price rises and the partition is made again: a few rounds of the ascent on unit prices that `exact` makes,
    without its proof, which may take seconds.
    """
    names, num_types = problem.device_type_names, len(problem.device_types)
    table = segment_table(problem, num_microbatches=num_microbatches_of(problem, MIDDLING_STAGES))
    low_seconds, high_seconds = stage_time_range(problem, table)
    high_seconds = min(high_seconds, problem.stage_seconds_limit)
    if low_seconds > high_seconds:
        return None
    replicas = table.least_replicas(np.geomspace(low_seconds, high_seconds, NUM_STAGE_TIMES))  # (X, G, T)
    flat_replicas = replicas.reshape(NUM_STAGE_TIMES, -1)
    prices = table.usd_per_hour(replicas)
    factors = np.ones((NUM_STAGE_TIMES, num_types))
    partitions = set()
    for _ in range(NUM_PRICE_ROUNDS):
        rows = cheapest_partitions(prices * factors[:, None]).rows
        partitions |= {tuple(each[each >= 0][::-1].tolist()) for each in rows if each[0] >= 0}
        # Of each type, over what there is; (X, T).
        counts = np.where(rows >= 0, np.take_along_axis(flat_replicas, np.maximum(rows, 0), axis=1), 0.0)
        types = rows % num_types
        used = np.stack([(counts * (types == index)).sum(axis=1) for index in range(num_types)], axis=1)
        excess = used / table.max_units
        if (excess <= 1).all():
            break
        # Slower down than up: what has become too expensive is still wanted for something.
        factors = (factors * np.where(excess > 1, excess, excess**0.3).clip(0.5, 2)).clip(1)
    best_product, best_runs = np.inf, None
    for partition in sorted(partitions):
        runs = [Stage(*segment_layers(row // num_types), names[row % num_types], 1) for row in partition]
        _, product = fixed_stages(problem, runs).cheapest_replicas(
            limit_seconds=problem.stage_seconds_limit, below_product=best_product
        )
        if product < best_product:
            best_product, best_runs = product, runs
    if best_runs is None:
        return None
    return np.repeat(
        [names.index(run.device_type) for run in best_runs],
        [run.last_layer - run.first_layer + 1 for run in best_runs],
    )


@dataclass(frozen=True, slots=True)
class Example:
    """A problem's features, shape (L, T, F), and the type of each layer in a good plan, shape (L,)."""

    features: Tensor
    placement: Tensor


def batches_of(examples: Sequence[Example], random: np.random.Generator) -> list[list[Example]]:
    """Return the examples in random order, in batches of one number of layers and types."""
    by_shape: dict[tuple[int, ...], list[Example]] = {}
    for index in random.permutation(len(examples)):
        by_shape.setdefault(tuple(examples[index].features.shape), []).append(examples[index])
    batches = [
        members[start : start + BATCH_SIZE]
        for members in by_shape.values()
        for start in range(0, len(members), BATCH_SIZE)
    ]
    return [batches[index] for index in random.permutation(len(batches))]


def surprise(policy: PlacementPolicy, batch: Sequence[Example]) -> Tensor:
    """Return the mean of -log P of the placements, in nats per layer."""
    log_tables = policy(torch.stack([each.features for each in batch]))  # (P, L, T + 1, T)
    num_problems, num_layers, _, num_types = log_tables.shape
    types = torch.stack([each.placement for each in batch])
    before = torch.cat([torch.full((num_problems, 1), num_types), types[:, :-1]], dim=1)
    problems, layers = torch.arange(num_problems)[:, None], torch.arange(num_layers)
    return -log_tables[problems, layers, before, types].mean()


def imitate(policy: PlacementPolicy, examples: Sequence[Example], random: np.random.Generator) -> None:
    """Raise the likelihood of the placements; every twentieth example is only reported."""
    held_out, seen = examples[::20], [each for index, each in enumerate(examples) if index % 20]
    optimizer = torch.optim.Adam(policy.parameters(), fused=True)
    first_rate, last_rate = LEARNING_RATES
    for epoch in range(NUM_EPOCHS):
        losses = []
        for index, batch in enumerate(batches := batches_of(seen, random)):
            progress = (epoch + index / len(batches)) / NUM_EPOCHS
            share = (1 + math.cos(math.pi * progress)) / 2
            optimizer.param_groups[0]["lr"] = last_rate + (first_rate - last_rate) * share
            loss = surprise(policy, batch)
            descend(optimizer, loss)
            losses.append(loss.item())
        with torch.no_grad():
            others = [surprise(policy, batch).item() for batch in batches_of(held_out, random)]
        print(
            f"epoch {epoch + 1} of {NUM_EPOCHS}: {np.mean(losses):.4f} nats a layer, "
            f"held out {np.mean(others):.4f}",
            flush=True,
        )


def main() -> None:
    """Draw the problems, train and write the policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=POLICY_FILE, metavar="FILE")
    output = parser.parse_args().output
    torch.set_num_threads(1)
    torch.manual_seed(0)
    examples = []
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_PROBLEMS):
        problem = draw(seed)
        placement = good_placement(problem)
        if placement is not None:
            examples.append(Example(policy_features(problem), torch.from_numpy(placement)))
        if seed % 1_000 == 999:
            print(f"{len(examples):,} of {seed - FIRST_SEED + 1:,} problems have a plan", flush=True)
    policy = PlacementPolicy(examples[0].features.shape[2], NUM_HIDDEN)
    imitate(policy, examples, np.random.default_rng(0))
    save_file({name: tensor.half() for name, tensor in policy.state_dict().items()}, output)


if __name__ == "__main__":
    main()
