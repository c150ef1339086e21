"""The planning contract a second time, for proofs: stage times by its formulas, all plans by brute force, and a MILP.

Nothing here uses the cost model or the search of `heterps_core`. Problems are plain: one price a unit, no extra
costs. Of the trainer's step it has the formula of delayed updates, where stages do not wait for one another.

Shape legend: G = runs of layers, T = device types, K = largest cap on units, X = stage times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby, pairwise, product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel, UnitType
from tests.partitions import all_partitions

ROUNDING = 1e-12
"""Relative slack of limits, as the contract's implementation allows it."""


def microbatches_of(problem: SchedulingProblem, num_stages: int) -> int:
    """Return m: the least divisor of the batch that is at least 4 (S - 1); 1 in the papers' step."""
    if problem.step_model is StepModel.PAPERS:
        return 1
    least = max(4 * (num_stages - 1), 1)
    return next(m for m in range(1, problem.batch_size + 1) if problem.batch_size % m == 0 and m >= least)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Seconds of a stage for a profiling batch on one unit."""

    computing: float
    exchanging: float
    summing: float
    across: float
    num_sharded: int
    exchanged_bytes: float
    gradient_bytes: float
    num_boundaries: int
    crossing_bytes: float
    """Of a sample, both directions and boundaries."""
    reads_later: bool
    """It is not the first stage, and has tables or the labels."""
    reading: float


def _papers_seconds(
    problem: SchedulingProblem, unit: UnitType, work: _Work, counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the longer of computing and communicating, by Amdahl's law."""
    scale = problem.batch_size / problem.profile_batch_size
    traffic = (work.exchanging + work.summing) * ((counts > 1) | problem.single_replica_communicates)
    alpha, beta = unit.compute_parallel_fraction, unit.communication_parallel_fraction
    return np.maximum(
        work.computing * scale * (1 - alpha + alpha / counts),
        (traffic + work.across) * scale * (1 - beta + beta / counts),
    )


def _trainers_seconds(
    problem: SchedulingProblem,
    unit: UnitType,
    work: _Work,
    pace: NDArray[np.float64],
    m: int,
    *,
    replicas: int | None = None,
) -> NDArray[np.float64]:
    """Return the exchange and, after it, the longer of computing and links, or reading.

    Args:
        pace: Rows of a micro-batch over those of a replica.
        replicas: Of a stage of two device types; by default as many as the pace.
    """
    samples = problem.batch_size / problem.profile_batch_size
    peers = (pace if replicas is None else np.full(pace.shape, float(replicas))) - 1
    elsewhere, meets = peers / (peers + 1), peers > 0
    if problem.single_replica_communicates:
        elsewhere, meets = np.ones(pace.size), np.ones(pace.size, dtype=bool)
    alpha, beta = unit.compute_parallel_fraction, unit.communication_parallel_fraction
    shrunk = 1 - beta + beta * samples / pace
    carried = elsewhere * work.exchanging * shrunk
    has_rows, requests = work.num_sharded > 0, problem.batch_size / 4096
    meeting = has_rows * unit.exchange_seconds * (2 + requests / pace)
    meeting = meeting + has_rows * unit.exchange_seconds_per_peer * (2 * peers + requests)
    meeting = meeting + work.num_sharded * unit.exchange_seconds_per_table
    if work.gradient_bytes:
        meeting = meeting + unit.sum_seconds_per_peer * peers
        meeting = meeting + 2 * elsewhere * work.gradient_bytes * unit.sum_seconds_per_byte
    handled = work.exchanged_bytes * unit.exchange_seconds_per_byte * shrunk
    computing = work.computing * (m * (1 - alpha) + alpha * samples / pace)
    computing += m * work.num_boundaries * unit.boundary_seconds
    computing += work.crossing_bytes * problem.batch_size / pace * unit.boundary_seconds_per_byte
    if work.reads_later:
        computing += unit.later_reading_seconds
        computing += problem.batch_size / pace * unit.later_reading_seconds_per_sample
    links = work.across * samples / pace + elsewhere * work.summing * samples
    seconds = carried + meets * (meeting + handled) + np.maximum(computing, links)
    return np.maximum(seconds, work.reading * samples / pace)


@dataclass(frozen=True, kw_only=True)
class CandidateStages:
    """Every run of layers on every device type with every count of replicas."""

    problem: SchedulingProblem
    runs: tuple[tuple[int, int], ...]
    seconds: NDArray[np.float64]
    """ET, infinite where memory or the type's own cap forbids the count; index k is count k + 1; shape (G, T, K)."""

    works: Mapping[tuple[int, int], _Work]
    """By run and device type."""

    prices: NDArray[np.float64]
    """USD per hour of one unit, shape (T,)."""

    caps: NDArray[np.float64]

    num_microbatches: int = 1

    @classmethod
    def of(cls, problem: SchedulingProblem, *, num_microbatches: int = 1) -> CandidateStages:
        """Return the stages of a problem; m matters for the trainer's step alone."""
        layers, units = problem.layers, list(problem.device_types.values())
        runs = tuple((first, last) for first in range(len(layers)) for last in range(first, len(layers)))
        counts = np.arange(1, max(unit.max_units for unit in units) + 1)
        seconds, works = np.empty((len(runs), len(units), counts.size)), {}
        for index, (first, last) in enumerate(runs):
            inside = layers[first : last + 1]
            cut = (layers[first - 1].output_bytes_per_sample if first else 0) + (
                inside[-1].output_bytes_per_sample if last + 1 < len(layers) else 0
            )
            sharded = sum(layer.state_bytes for layer in inside if layer.is_sharded)
            whole = sum(layer.state_bytes for layer in inside if not layer.is_sharded)
            for column, (name, unit) in enumerate(problem.device_types.items()):
                work = _Work(
                    computing=sum(layer.compute_seconds[name] for layer in inside),
                    exchanging=sum(layer.communication_seconds[name] for layer in inside if layer.is_sharded),
                    summing=sum(
                        layer.communication_seconds[name] for layer in inside if not layer.is_sharded
                    ),
                    across=2 * problem.profile_batch_size * cut / unit.bandwidth_bytes_per_s,
                    num_sharded=sum(layer.is_sharded for layer in inside),
                    exchanged_bytes=sum(layer.exchanged_bytes for layer in inside if layer.is_sharded),
                    gradient_bytes=sum(layer.exchanged_bytes for layer in inside if not layer.is_sharded),
                    num_boundaries=(first > 0) + (last + 1 < len(layers)),
                    crossing_bytes=2 * cut,
                    reads_later=first > 0
                    and (last + 1 == len(layers) or any(layer.is_sharded for layer in inside)),
                    reading=sum(layer.reading_seconds.get(name, 0.0) for layer in inside),
                )
                works[index, column] = work
                if problem.step_model is StepModel.PAPERS:
                    times = _papers_seconds(problem, unit, work, counts)
                else:
                    rows = problem.batch_size // num_microbatches
                    pace = np.array([rows / math.ceil(rows / count) for count in counts.tolist()])
                    times = _trainers_seconds(problem, unit, work, pace, num_microbatches)
                    times = np.where(counts <= rows, times, np.inf)
                fits = whole + sharded / counts <= (unit.memory_bytes - unit.reserved_bytes) * (1 + ROUNDING)
                seconds[index, column] = np.where(fits & (counts <= unit.max_units), times, np.inf)
        return cls(
            problem=problem,
            runs=runs,
            seconds=seconds,
            works=works,
            prices=np.array([unit.price_usd_per_hour for unit in units]),
            caps=np.array([float(unit.max_units) for unit in units]),
            num_microbatches=num_microbatches,
        )

    @classmethod
    def of_every_length(cls, problem: SchedulingProblem) -> dict[tuple[int, int], CandidateStages]:
        """Return fewest and most stages of plans with the same m -> the stages of such plans."""
        lengths = range(1, problem.num_layers + 1)
        by_m = groupby(lengths, key=lambda num_stages: microbatches_of(problem, num_stages))
        found = {}
        for m, alike in by_m:
            numbers = list(alike)
            found[numbers[0], numbers[-1]] = cls.of(problem, num_microbatches=m)
        return found

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

    def mixed_brute_force(self) -> tuple[float, float]:
        """Return the costs of the cheapest plans with this m: with one device type a stage, and with up to two."""
        num_layers = self.problem.num_layers
        row_of = {run: index for index, run in enumerate(self.runs)}
        stages_of = [list(self._stages_of(row)) for row in range(len(self.runs))]
        best = [math.inf, math.inf]
        for num_stages in range(1, num_layers + 1):
            if microbatches_of(self.problem, num_stages) != self.num_microbatches:
                continue
            for cuts in combinations(range(1, num_layers), num_stages - 1):
                ends = (0, *cuts, num_layers)
                rows = [row_of[first, stop - 1] for first, stop in pairwise(ends)]
                for plan in product(*(stages_of[row] for row in rows)):
                    seconds = max(each for each, _ in plan)
                    used = np.sum([counts for _, counts in plan], axis=0)
                    if seconds > self.limit_seconds or (used > self.caps).any():
                        continue
                    usd = seconds * float(used @ self.prices) * self.usd_per_product
                    is_mixed = any(np.count_nonzero(counts) > 1 for _, counts in plan)
                    for index in (1,) if is_mixed else (0, 1):
                        best[index] = min(best[index], usd)
        return best[0], best[1]

    def _stages_of(self, row: int) -> Iterator[tuple[float, NDArray[np.float64]]]:
        """Yield the seconds and units of each stage of some layers on one or two device types."""
        num_types = self.prices.size
        for column in range(num_types):
            for index in range(int(self.caps[column])):
                if math.isfinite(seconds := self.seconds[row, column, index]):
                    yield float(seconds), (index + 1) * np.eye(num_types)[column]
        is_cpu = ["cpu" in name for name in self.problem.device_types]
        for columns in combinations(range(num_types), 2):
            if is_cpu[columns[0]] != is_cpu[columns[1]]:
                continue
            for counts in product(*(range(1, int(self.caps[column]) + 1) for column in columns)):
                units = np.zeros(num_types)
                units[list(columns)] = counts
                if math.isfinite(seconds := self._mixed_seconds(row, columns, counts)):
                    yield seconds, units

    def _mixed_seconds(self, row: int, columns: tuple[int, int], counts: tuple[int, int]) -> float:
        """Return the seconds of a stage of two types, by trying each number of rows for a replica of the first."""
        first, last = self.runs[row]
        layers = self.problem.layers[first : last + 1]
        units = [list(self.problem.device_types.values())[column] for column in columns]
        held = sum(layer.state_bytes / (sum(counts) if layer.is_sharded else 1) for layer in layers)
        num_rows = self.problem.batch_size // self.num_microbatches
        if any(held > (each.memory_bytes - each.reserved_bytes) * (1 + ROUNDING) for each in units):
            return math.inf
        best = math.inf
        for rows in range(1, num_rows + 1):
            others = max(1, math.ceil((num_rows - counts[0] * rows) / counts[1]))
            seconds = [
                _trainers_seconds(
                    self.problem,
                    unit,
                    self.works[row, column],
                    np.array([num_rows / each]),
                    self.num_microbatches,
                    replicas=sum(counts),
                )[0]
                for unit, column, each in zip(units, columns, (rows, others), strict=True)
            ]
            best = min(best, max(seconds))
        return best if sum(counts) <= num_rows else math.inf

    def brute_force_usd(self) -> float:
        """Return the cost of the cheapest plan with this m, infinite where there is none, by trying them all."""
        row_of = {run: index for index, run in enumerate(self.runs)}
        names = list(self.problem.device_types)
        best = math.inf
        for stages in all_partitions(self.problem):
            if microbatches_of(self.problem, len(stages)) != self.num_microbatches:
                continue
            on = np.array([names.index(name) for _, _, name in stages])
            rows = [row_of[first, last] for first, last, _ in stages]
            best = min(best, self._cheapest_counts(self.seconds[rows, on], on))
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
    """Looks for a plan below a cost by mixed-integer programs (HiGHS), one for a longest stage time.

    Args:
        lengths: Fewest and most stages of a plan.
    """

    def __init__(self, stages: CandidateStages, lengths: tuple[float, float] = (1, math.inf)) -> None:
        self.stages = stages
        self.num_types = stages.prices.size
        self.structure = self._chain_constraints()
        chosen = np.ones((1, len(stages.runs) * self.num_types))
        self.structure.append(LinearConstraint(chosen, *lengths))
        finite = np.unique(stages.seconds[np.isfinite(stages.seconds)])
        self.times = finite[finite <= stages.limit_seconds]

    def cheapest_below(self, cost_usd: float) -> float:
        """Return the cost of a plan below the given one, or infinity where there is none.

        With R the least price for stages of at most x seconds, a plan whose longest stage takes t <= x seconds costs
        at least t R; so after x only stage times below cost / R are left, which is where the walk goes on.
        """
        # Multiplied and divided by the same number, a plan may look cheaper than itself.
        target = cost_usd / self.stages.usd_per_product * (1 - ROUNDING)
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
        """Return that the stages follow one another over all layers.

        By the papers' step each is on another type than the one before.
        """
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
            constraints.append(LinearConstraint(flow, 0, 0))
            if self.stages.problem.step_model is StepModel.PAPERS:
                constraints.append(LinearConstraint(repeats, -np.inf, 0))
        return constraints
