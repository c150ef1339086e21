"""Costs of many possible stages at once, as arrays, and the least replicas with which each keeps a stage time.

For a fixed longest stage time x the cheapest replica count of a stage depends on nothing outside the stage.
The exact optimum, integer provisioning and batch rating all rest on this one question, asked in bulk.

Shape legend: X = stage times asked for, N = any shape of candidate stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints, taken
from heterps_core.planning.cost_model.disk_sweep import Sweep, SweepTerms, of_shares
from heterps_core.planning.cost_model.instance_cover import NO_STAIRS, PriceStairs
from heterps_core.planning.cost_model.replica_roots import kept_counts
from heterps_core.planning.cost_model.reserved_machines import NO_RESERVED, ReservedMachines
from heterps_core.planning.cost_model.stage_cost import replicated_seconds
from heterps_core.planning.cost_model.start_terms import StartTerms
from heterps_core.planning.cost_model.step_model import StageSeconds, pacing_replicas
from heterps_core.planning.cost_model.trainer_terms import NEAR_INTEGER, TrainerTerms

_NEAR = 1e-6
"""Relative distance of counts from a root of a quadratic equation below which the time itself decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTable:
    """Candidate stages; every array broadcasts to the same shape N."""

    compute_seconds: Floats
    """On one unit, for one training batch."""

    communication_seconds: Floats
    """In the trainer's step, that across the stage's boundaries alone."""

    trainer: TrainerTerms | None = None
    memory_replicas: Floats
    """Least replicas whose memory holds the stage; infinite where none does."""

    sweep: SweepTerms | None = None
    """How fewer replicas keep rows of tables on disk; None where no device type has a disk."""

    compute_parallel_fraction: Floats
    communication_parallel_fraction: Floats
    price_usd_per_hour: Floats
    max_units: Floats
    machine_units: Floats | None = None
    """Units that a stage takes together, of counted machines; None where each is taken by itself."""

    interruptions_per_hour: Floats
    """Interruptions of one unit; 0 where they cost nothing."""

    type_indices: Ints
    single_communication_seconds: Floats | None = None
    """On one unit where it is the only replica; None where that makes no difference."""

    covers: PriceStairs
    """Prices of 0..max_units units of types that are sold in whole instances; all reserved ones are one stage's."""

    reserved: ReservedMachines = NO_RESERVED

    on_demand_usd: PriceStairs = NO_STAIRS
    """What it adds to these prices that one instance is on-demand, of types on spot."""

    start: StartTerms | None = None
    """None where all stages are ready at the same time."""

    latest_start: float = np.inf
    """y: no stage may be ready later, spread over the steps."""

    @property
    def fewest_replicas(self) -> Floats:
        """Least replicas that hold the stage, by memory or disks, and are ready in time; infinite where none do."""
        if self.sweep is None:
            return self._ready(self.memory_replicas)
        swept = self.sweep.least_replicas(np.full((1,) * (self.compute_seconds.ndim + 1), np.inf)).min(axis=0)
        return self._ready(np.asarray(np.minimum(self.memory_replicas, swept)))

    def start_seconds(self, num_replicas: Floats) -> Floats:
        """Return U(k), elementwise; 0 where all stages are ready at the same time."""
        return np.zeros(np.shape(num_replicas)) if self.start is None else self.start.seconds(num_replicas)

    def ready_by(self, latest_start: float) -> StageTable:
        """Return the table of stages that are ready by then."""
        return self if self.start is None else replace(self, latest_start=latest_start)

    def _ready(self, held: Floats) -> Floats:
        """Return the fewest replicas of those from `held` on that are ready in time."""
        if self.start is None or self.latest_start == np.inf:
            return held
        return np.maximum(held, self.start.least_replicas(self.latest_start))

    def seconds(self, num_replicas: Floats) -> Floats:
        """Return ET(k), elementwise; infinite k are allowed."""
        seconds = self._seconds_in_memory(num_replicas)
        if self.sweep is None:
            return seconds
        sweeps = np.nonzero(np.broadcast_to(num_replicas < self.memory_replicas, seconds.shape))
        if sweeps[0].size:
            part = self.at(sweeps[seconds.ndim - self.compute_seconds.ndim :])
            replicas = np.broadcast_to(num_replicas, seconds.shape)[sweeps]
            seconds[sweeps] = part._swept_seconds(replicas).min(axis=0)
        return seconds

    def _swept_seconds(self, num_replicas: Floats) -> Floats:
        """Return ET(k) of stages that sweep, for each share of hot rows; N is one axis, shape (H, N)."""
        assert self.sweep is not None
        working = self.with_work(np.array(self.sweep.worker_seconds))
        return np.maximum(working._seconds_in_memory(num_replicas), self.sweep.seconds(num_replicas[None]))

    def with_work(self, worker_seconds: Floats) -> StageTable:
        """Return the table of stages whose workers compute g C(h) for sweeps, without the time of the disk."""
        computing = self.compute_seconds + worker_seconds
        parallel = self.compute_seconds * self.compute_parallel_fraction + worker_seconds
        with np.errstate(divide="ignore", invalid="ignore"):
            fraction = np.where(worker_seconds > 0, parallel / computing, self.compute_parallel_fraction)
        return replace(self, sweep=None, compute_seconds=computing, compute_parallel_fraction=fraction)

    def _seconds_in_memory(self, num_replicas: Floats) -> Floats:
        return self.terms(self.pacing(num_replicas)).total

    def pacing(self, num_replicas: Floats) -> Floats:
        """Return the replicas that would all be as slow as the one with most rows; see `step_model.py`."""
        if self.trainer is None:
            return num_replicas
        return np.asarray(pacing_replicas(self.trainer.microbatch_rows, num_replicas))

    def terms(self, num_replicas: Floats, in_stage: Floats | None = None) -> StageSeconds:
        """Return the terms of ET(k) where memory holds all rows, elementwise.

        Args:
            in_stage: Replicas of a stage of two device types, of which each of these has 1/k of the rows.
        """
        across = replicated_seconds(
            self.communication_seconds, self.communication_parallel_fraction, num_replicas
        )
        if self.single_communication_seconds is not None:
            alone = replicated_seconds(
                self.single_communication_seconds, self.communication_parallel_fraction, 1
            )
            across = np.where(num_replicas == 1, alone, across)
        compute = replicated_seconds(self.compute_seconds, self.compute_parallel_fraction, num_replicas)
        if self.trainer is None:
            return StageSeconds(compute, 0.0, across, 0.0, 0.0, 0.0)
        in_stage = num_replicas if in_stage is None else in_stage
        compute = compute + self.trainer.boundary_seconds(num_replicas)
        return StageSeconds(
            compute,
            self.trainer.exchange_seconds(num_replicas, in_stage),
            across,
            self.trainer.gradient_sum_seconds(in_stage),
            self.trainer.drained_seconds(compute, num_replicas, in_stage),
            self.trainer.reading_seconds / num_replicas,
        )

    def sweeping(
        self, num_replicas: Floats, hot_shares: Sequence[float]
    ) -> tuple[StageTable, list[Sweep | None]]:
        """Return the stages with the work of their sweeps, and how each keeps rows on disk; N is one axis.

        A stage does not sweep, None, where memory holds all, or disks do not help either.
        """
        if self.sweep is None:
            return self, [None] * num_replicas.size
        seconds = self._swept_seconds(num_replicas)
        is_swept = (num_replicas < self.memory_replicas) & np.isfinite(seconds.min(axis=0))
        sweeps = [
            self.sweep.sweep(index, share, num_replicas, hot_shares) if swept else None
            for index, (share, swept) in enumerate(
                zip(np.argmin(seconds, axis=0).tolist(), is_swept.tolist(), strict=True)
            )
        ]
        work = [0.0 if sweep is None else sweep.worker_seconds for sweep in sweeps]
        return self.with_work(np.array(work)), sweeps

    def fastest_seconds(self) -> Floats:
        """Return a bound below ET(k) for all counts that memory and the cap allow; elementwise.

        In the papers' model it is the least: from two replicas on, more are never slower; one alone may be the
        fastest, as it does not communicate. In the trainer's, exchanges and sums are left out.
        """
        if self.trainer is not None:
            return replace(self, trainer=None).seconds(
                np.minimum(self.max_units, self.trainer.microbatch_rows)
            )
        seconds = self.seconds(self.max_units)
        if self.single_communication_seconds is not None:
            alone = self.seconds(np.ones_like(self.memory_replicas))
            seconds = np.where(self.fewest_replicas <= 1, np.minimum(seconds, alone), seconds)
        return np.asarray(seconds)

    def taken_units(self, num_replicas: Floats) -> Floats:
        """Return the units of whole machines that k replicas take from the cap, elementwise."""
        if self.machine_units is None:
            return num_replicas
        return np.asarray(np.ceil(num_replicas / self.machine_units) * self.machine_units)

    def usd_per_hour(self, num_replicas: Floats) -> Floats:
        """Return what k replicas and their disks are charged, elementwise; infinite where k is."""
        prices = np.asarray(num_replicas * self.price_usd_per_hour)
        where, places = self.covers.places(self.type_indices, num_replicas)
        prices[where] = self.covers.prices[places]
        if self.sweep is not None and self.sweep.has_prices:
            is_swept = num_replicas < self.memory_replicas
            prices = prices + np.where(is_swept, self.sweep.usd_per_hour(num_replicas), 0.0)
        return prices

    def least_usd_per_hour(self, num_replicas: Floats) -> Floats:
        """Return the least that k replicas or more are charged, elementwise.

        More of them cost no less, but for disks that the first ones with enough memory do without.
        """
        prices = self.usd_per_hour(num_replicas)
        if self.sweep is None or not self.sweep.has_prices:
            return prices
        held = np.where(self.memory_replicas <= self.max_units, self.memory_replicas, np.inf)
        return np.minimum(prices, self.usd_per_hour(np.maximum(num_replicas, held)))

    def on_demand_usd_per_hour(self, num_replicas: Floats) -> Floats:
        """Return what it adds to the price of k replicas that one machine is on-demand, elementwise; 0 off spot."""
        added = np.zeros(np.shape(num_replicas))
        where, places = self.on_demand_usd.places(self.type_indices, num_replicas)
        added[where] = self.on_demand_usd.prices[places]
        return added

    def least_usd_seconds(self, num_replicas: Floats, least_seconds: float) -> Floats:
        """Return a bound below price(k') max(x, ET(k')) for all k' >= k, elementwise.

        Without sweeps k ET(k) never falls where k rises: more replicas save less time than they take together. So it
        is at least price(k) x, and that k ET(k) times the least price per unit of k or more.
        """
        rates = np.broadcast_to(self.price_usd_per_hour, num_replicas.shape).copy()
        is_finite = np.isfinite(num_replicas)
        where, places = self.covers.places(self.type_indices, num_replicas)
        rates[where] = self.covers.least_per_unit[places]
        with np.errstate(invalid="ignore"):
            worked = rates * self.pacing(num_replicas) * self._seconds_in_memory(num_replicas)
            usd_seconds = np.maximum(self.least_usd_per_hour(num_replicas) * least_seconds, worked)
        return np.where(is_finite, usd_seconds, np.inf)

    def least_replicas(self, stage_seconds: Floats) -> Floats:
        """Return the least k with ET(k) <= x that memory and the type's cap allow.

        From s (1 - f + f / k) <= x follows k >= s f / (x - s (1 - f)), for computation and communication. Positive x
        of shape (X,) give (X, *N), infinite where no k is allowed.
        """
        x = stage_seconds.reshape(-1, *(1,) * self.compute_seconds.ndim)
        if self.sweep is None:
            return self._least_held(x, self._ready(self.memory_replicas))
        least = replace(self, sweep=None)._least_held(x, self._ready(self.memory_replicas))
        held = self._ready(self.sweep.least_replicas(x[None]))  # (H, X, *N)
        # Rows on disk can only help where fewer replicas hold them.
        share, *place = np.nonzero(held < least)
        if share.size:
            limits = np.broadcast_to(x, least.shape)[tuple(place)]
            part = self.at(tuple(place[1:]))
            work = np.broadcast_to(of_shares(self.sweep.worker_seconds, held.ndim), held.shape)
            swept = part.with_work(work[(share, *place)])
            found = swept._least_held(limits[None], held[(share, *place)])[0]
            np.minimum.at(least, tuple(place), found)
        return least

    def cheapest_replicas(self, stage_seconds: Floats) -> Floats:
        """Return the k of least price with ET(k) <= x, shape (X, *N): the least k, or more that need no disk."""
        least = self.least_replicas(stage_seconds)
        if self.sweep is None or not self.sweep.has_prices:
            return least
        in_memory = replace(self, sweep=None).least_replicas(stage_seconds)
        return np.where(self.usd_per_hour(in_memory) < self.usd_per_hour(least), in_memory, least)

    def _least_held(self, x: Floats, held: Floats) -> Floats:
        """Return the least k with ET(k) <= x of those from `held` on; times x of shape (X, ...) give (X, *N)."""
        if self.trainer is not None:
            replicas = self._least_of_trainer(self.trainer, x, held)
            replicas[replicas > np.minimum(self.max_units, self.trainer.microbatch_rows)] = np.inf
            return replicas
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = np.maximum(
                _amdahl_replicas(self.compute_seconds, self.compute_parallel_fraction, x),
                _amdahl_replicas(self.communication_seconds, self.communication_parallel_fraction, x),
            )
            np.maximum(exact, held, out=exact)
            nearest = np.rint(exact)
            doubtful = np.abs(exact - nearest) <= NEAR_INTEGER * nearest
        replicas = np.ceil(exact)
        where = np.nonzero(doubtful & np.isfinite(exact))
        if where[0].size:
            rounded = nearest[where]
            too_slow = self.at(where[1:]).seconds(rounded) > np.broadcast_to(x, exact.shape)[where]
            replicas[where] = rounded + too_slow
        if self.single_communication_seconds is not None:
            alone = self.seconds(np.ones_like(self.memory_replicas))
            replicas[(alone <= x) & (held <= 1)] = 1.0
        replicas[replicas > self.max_units] = np.inf
        return replicas

    def _least_of_trainer(self, trainer: TrainerTerms, x: Floats, held: Floats) -> Floats:
        """Return the least whole k that keeps x, of those from `held` on.

        Each time of a worker and of its links, and of both where the step drains, keeps x up to some count and again
        from another one on (`replica_roots.py`). So the least k that keeps all is the fewest that are held, or the
        first one after a gap.
        """
        in_series = self.compute_seconds * (1 - self.compute_parallel_fraction)
        in_series = in_series + trainer.boundary_fixed_seconds
        divided = self.compute_seconds * self.compute_parallel_fraction
        divided = divided + trainer.boundary_shared_seconds
        # Share of the exchange, fixed and divided seconds of other work, and the sum of gradients.
        paths: list[tuple[Floats | float, Floats | float, Floats, Floats | float]] = [
            (1.0, 0.0, self.communication_seconds, trainer.sum_seconds)
        ]
        if trainer.reading_seconds.any():
            paths.append((0.0, 0.0, trainer.reading_seconds, 0.0))
        if not trainer.drained_paths:  # the first of which is no shorter
            paths.append((1.0, in_series, divided, 0.0))
        for path in trainer.drained_paths:
            fixed = path.compute_share * in_series + path.others_seconds
            shared = path.compute_share * divided + path.links_seconds
            paths.append((path.exchange_share, fixed, shared, path.sums * trainer.sum_seconds))
        crossing_once = 0.0 if trainer.single_replica_communicates else 1.0
        meeting = trainer.meeting_seconds - trainer.peer_seconds
        divided_exchange = trainer.shared_seconds + trainer.work_seconds
        # Of all paths at once: fixed, shared, saved and per peer.
        terms = np.empty((4, len(paths), 1, *self.compute_seconds.shape))
        for index, (exchanged, fixed_alone, shared, summed) in enumerate(paths):
            crossing = exchanged * trainer.fixed_seconds + summed
            terms[0, index] = fixed_alone + crossing + exchanged * meeting
            terms[1, index] = shared + exchanged * divided_exchange - crossing_once * crossing
            terms[2, index] = crossing_once * exchanged * trainer.shared_seconds
            terms[3, index] = exchanged * trainer.peer_seconds
        smaller, larger = kept_counts(x, *terms)
        least = np.broadcast_to(held, larger.shape[1:])
        least = np.where(self.seconds(least) <= x, least, np.inf)
        replicas = np.maximum(trainer.whole(larger.max(axis=0)), held)
        # What rounding let through has a row more for its slowest replica than the next count.
        for candidates in (replicas, trainer.next_whole(replicas)):
            kept = (candidates < least) & (self.seconds(candidates) <= x)
            least = np.where(kept, candidates, least)
        if trainer.single_replica_communicates:
            return least
        for root in larger:
            replicas = np.maximum(trainer.whole(root), held)
            pace, may_keep = self.pacing(replicas), replicas < least
            for low, high in zip(smaller, larger, strict=True):
                may_keep &= (pace >= high * (1 - _NEAR)) | (pace <= low * (1 + _NEAR))
            where = np.nonzero(may_keep)
            if where[0].size:
                part, limits = self.at(where[1:]), np.broadcast_to(x, least.shape)[where]
                for candidates in (replicas[where], trainer.next_whole(replicas[where])):
                    kept = (candidates < least[where]) & (part.seconds(candidates) <= limits)
                    least[where] = np.where(kept, candidates, least[where])
        return least

    def take(self, rows: Ints) -> StageTable:
        """Return the candidates with these flat indices, as a table of one axis."""
        return self.at(np.unravel_index(rows, self.compute_seconds.shape))

    def at(self, index: tuple[Ints, ...]) -> StageTable:
        """Return the candidates at an index of NumPy's."""
        found: StageTable = taken(self, self.compute_seconds.shape, index)
        return found


def _amdahl_replicas(unit_seconds: Floats, parallel_fraction: Floats, x: Floats) -> Floats:
    serial_seconds = unit_seconds * (1 - parallel_fraction)
    slack_seconds = x - serial_seconds
    replicas = (unit_seconds * parallel_fraction) / slack_seconds
    replicas[np.isnan(replicas)] = np.inf  # 0 / 0: no parallel part and no slack
    replicas[slack_seconds < 0] = np.inf
    # One replica is compared directly: a tiny parallel part would be lost in the slack's rounding.
    replicas[unit_seconds <= x] = 1.0
    return np.maximum(replicas, 1.0, out=replicas)
