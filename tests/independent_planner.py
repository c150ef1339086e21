"""The planning contract a second time, for proofs: stage times by its formulas, all plans by brute force, and a MILP.

Nothing here uses the cost model or the search of `heterps_core`. Problems are plain: one price a unit, no extra
costs.

Shape legend: G = runs of layers, T = device types, K = largest cap on units, X = stage times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem

ROUNDING = 1e-12
"""Relative slack of limits, as the contract's implementation allows it."""


@dataclass(frozen=True, kw_only=True)
class CandidateStages:
    """Every run of layers on every device type with every count of replicas."""

    problem: SchedulingProblem
    runs: tuple[tuple[int, int], ...]
    seconds: NDArray[np.float64]
    """ET, infinite where memory or the type's own cap forbids the count; index k is count k + 1; shape (G, T, K)."""

    prices: NDArray[np.float64]
    """USD per hour of one unit, shape (T,)."""

    caps: NDArray[np.float64]

    @classmethod
    def of(cls, problem: SchedulingProblem) -> CandidateStages:
        """Return the stages of a problem."""
        layers, units = problem.layers, list(problem.device_types.values())
        runs = tuple((first, last) for first in range(len(layers)) for last in range(first, len(layers)))
        counts = np.arange(1, max(unit.max_units for unit in units) + 1)
        seconds = np.empty((len(runs), len(units), counts.size))
        scale = problem.batch_size / problem.profile_batch_size
        for index, (first, last) in enumerate(runs):
            inside = layers[first : last + 1]
            cut = (layers[first - 1].output_bytes_per_sample if first else 0) + (
                inside[-1].output_bytes_per_sample if last + 1 < len(layers) else 0
            )
            sharded = sum(layer.state_bytes for layer in inside if layer.is_sharded)
            whole = sum(layer.state_bytes for layer in inside if not layer.is_sharded)
            for column, (name, unit) in enumerate(problem.device_types.items()):
                work = sum(layer.compute_seconds[name] for layer in inside)
                traffic = sum(layer.communication_seconds[name] for layer in inside)
                traffic = traffic * ((counts > 1) | problem.single_replica_communicates)
                traffic = traffic + 2 * problem.profile_batch_size * cut / unit.bandwidth_bytes_per_s
                alpha, beta = unit.compute_parallel_fraction, unit.communication_parallel_fraction
                times = np.maximum(
                    work * scale * (1 - alpha + alpha / counts),
                    traffic * scale * (1 - beta + beta / counts),
                )
                fits = whole + sharded / counts <= (unit.memory_bytes - unit.reserved_bytes) * (1 + ROUNDING)
                seconds[index, column] = np.where(fits & (counts <= unit.max_units), times, np.inf)
        return cls(
            problem=problem,
            runs=runs,
            seconds=seconds,
            prices=np.array([unit.price_usd_per_hour for unit in units]),
            caps=np.array([float(unit.max_units) for unit in units]),
        )

    @cached_property
    def limit_seconds(self) -> float:
        """The longest stage time that the floor allows."""
        floor = self.problem.throughput_floor_samples_per_s
        return self.problem.batch_size / floor * (1 + ROUNDING) if floor > 0 else math.inf

    @cached_property
    def usd_per_product(self) -> float:
        """What a second of a step costs at a price of 1 USD per hour."""
        steps = self.problem.num_epochs * self.problem.num_samples / self.problem.batch_size
        return steps / 3600

    def brute_force_usd(self) -> float:
        """Return the cost of the cheapest plan, infinite where there is none, by trying them all."""
        row_of = {run: index for index, run in enumerate(self.runs)}
        best = math.inf
        for types in product(range(self.prices.size), repeat=self.problem.num_layers):
            groups = [list(members) for _, members in groupby(enumerate(types), key=lambda item: item[1])]
            times = np.array(
                [self.seconds[row_of[group[0][0], group[-1][0]], group[0][1]] for group in groups]
            )
            on = np.array([group[0][1] for group in groups])
            best = min(best, self._cheapest_counts(times, on))
        return best * self.usd_per_product

    def _cheapest_counts(self, times: NDArray[np.float64], on: NDArray[np.int64]) -> float:
        """Return the least seconds times USD per hour of fixed stages: times (S, K), device types (S,)."""
        longest = np.unique(times)
        longest = longest[np.isfinite(longest) & (longest <= self.limit_seconds)]
        if not longest.size:
            return math.inf
        fast_enough = times[None] <= longest[:, None, None]  # (X, S, K)
        counts = fast_enough.argmax(axis=2) + 1.0
        counts[~fast_enough.any(axis=2)] = np.inf
        units = np.stack([counts[:, on == index].sum(axis=1) for index in range(self.prices.size)], axis=1)
        products = longest * (counts @ self.prices[on])
        products[(units > self.caps).any(axis=1)] = np.inf
        return float(products.min())


class CheaperPlanSearch:
    """Looks for a plan below a cost by mixed-integer programs (HiGHS), one for a longest stage time."""

    def __init__(self, stages: CandidateStages) -> None:
        self.stages = stages
        self.num_types = stages.prices.size
        self.structure = self._chain_constraints()
        finite = np.unique(stages.seconds[np.isfinite(stages.seconds)])
        self.times = finite[finite <= stages.limit_seconds]

    def cheapest_below(self, cost_usd: float) -> float:
        """Return the cost of a plan below the given one, or infinity where there is none.

        With R the least price for stages of at most x seconds, a plan whose longest stage takes t <= x seconds costs
        at least t R; so after x only stage times below cost / R are left, which is where the walk goes on.
        """
        target = cost_usd / self.stages.usd_per_product
        left = self.times
        while left.size:
            rate, product = self._cheapest_rate(left[-1])
            if product < target:
                return product * self.stages.usd_per_product
            if not math.isfinite(rate):
                break
            left = left[:-1][left[:-1] * rate < target]
        return math.inf

    def optimum_usd(self) -> float:
        """Return the cost of the cheapest plan, infinite where there is none."""
        best = math.inf
        while True:
            better = self.cheapest_below(best)
            if not math.isfinite(better):
                return best
            best = better

    def _cheapest_rate(self, longest_seconds: float) -> tuple[float, float]:
        """Return a lower bound on the price of any plan of this stage time, and seconds x USD of the plan found."""
        fast_enough = self.stages.seconds <= longest_seconds  # (G, T, K)
        counts = fast_enough.argmax(axis=2) + 1
        is_allowed = fast_enough.any(axis=2)
        rates = np.where(is_allowed, counts * self.stages.prices, 0.0).ravel()
        units = np.where(is_allowed, counts, 0).astype(float)
        caps = np.zeros((self.num_types, rates.size))
        for index in range(self.num_types):
            caps[index, index :: self.num_types] = units[:, index]
        found = milp(
            rates,
            integrality=np.ones(rates.size),
            bounds=Bounds(0, is_allowed.ravel().astype(float)),
            constraints=[*self.structure, LinearConstraint(caps, -np.inf, self.stages.caps)],
            options={"mip_rel_gap": 0.0},
        )
        if found.status == 2:
            return math.inf, math.inf
        if found.status != 0:
            raise RuntimeError(f"HiGHS ended without an answer: {found.message}")
        chosen = np.flatnonzero(np.round(found.x))
        runs, types = np.divmod(chosen, self.num_types)
        reached = self.stages.seconds[runs, types, counts[runs, types] - 1].max()
        used = np.bincount(types, counts[runs, types], minlength=self.num_types)
        assert (used <= self.stages.caps).all()
        return float(min(found.mip_dual_bound, found.fun)), float(reached * rates[chosen].sum())

    def _chain_constraints(self) -> list[LinearConstraint]:
        """Return that the stages follow one another over all layers, each on another type than the one before."""
        num_layers, num_types = self.stages.problem.num_layers, self.num_types
        begins, ends = (
            np.zeros((num_layers + 1, num_types, len(self.stages.runs) * num_types)) for _ in "be"
        )
        for index, (first, last) in enumerate(self.stages.runs):
            for device_type in range(num_types):
                begins[first, device_type, index * num_types + device_type] = 1
                ends[last + 1, device_type, index * num_types + device_type] = 1
        one_begins = begins[0].sum(axis=0)[None]
        flow = (ends - begins).sum(axis=1)[1:num_layers]
        inner = slice(1, num_layers)
        repeats = (begins[inner] + ends[inner] - ends[inner].sum(axis=1, keepdims=True)).reshape(
            -1, begins.shape[2]
        )
        constraints = [LinearConstraint(one_begins, 1, 1)]
        if num_layers > 1:
            constraints += [LinearConstraint(flow, 0, 0), LinearConstraint(repeats, -np.inf, 0)]
        return constraints
