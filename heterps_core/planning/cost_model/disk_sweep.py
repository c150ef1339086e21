"""The third term of a stage's time: the sweep over table rows that lie on disk, as memory does not hold them all.

A replica has all rows of its shard in a file, and goes through it once in n steps, a part beside each window of
batches: it writes the rows back that are not looked up any more, and gathers those that are coming
(`swept/row_windows.py`). Memory holds the rows of w n steps. With k replicas of a stage, a share h of the rows
of its tables used so often that they stay, and C(h) bytes of other rows looked up by a batch (all replicas together),

    n(k, h) = (k (U - R) - M - b S - f h S) / (w f C(h)),      ST(k, h) = 2 S / k / d / n(k, h)

as a step bears its share of a pass that reads and writes the file: U is what state may fill of one unit, R what each
replica holds whole, M what replicas divide and keep in memory, S what they divide and may keep on disk, d the disk's
bytes per second, read or written, f and b the memory of a row that is in memory, and of any row, over the row itself.
The trainer has no fixed share of rows that stay; what it holds is at most that of any h, so a stage takes the h that
makes it fastest. A share fits where n >= 1 and the file is within the disk D.

Rows that come and leave are copied, and batches that wait for them packed, by the worker's own cores: that adds
GT(k, h) = g C(h) / k to what it computes, with g seconds for each byte. The replica with most rows of a batch sets
the pace here too: k is that of CT (`step_model.py`).

Where memory holds all, ST is 0. It falls with k, so the least k that keeps a time x is the larger root of
k (k (U - R) - M - b S - f h S) = 2 w f S C(h) / (d x). C counts a row of several samples once for each, which errs on
the slow side.

Shapes: N candidate stages, H shares, X times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from heterps_core.embeddings.swept.sweep_memory import (
    BITS_PER_ROW,
    INDEX_BYTES_PER_SLOT,
    NUM_PARTS,
    PARTS_OF_MEMORY,
)
from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.cost_model.stage_cost import is_within
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem

_BYTES_PER_GB = 1e9

ROW_BYTES = 68
"""Bytes of a row of 16 numbers with an accumulator."""

SLOT_FACTOR = 1 + 3 / PARTS_OF_MEMORY + INDEX_BYTES_PER_SLOT / ROW_BYTES
"""f."""

ROW_SHARE = BITS_PER_ROW / 8 / ROW_BYTES
"""b."""

SWEEPS_IN_MEMORY = (NUM_PARTS + 1) / NUM_PARTS
"""w."""

_NEAR_INTEGER = 1e-7


class Sweep(NamedTuple):
    """How a stage keeps rows of its tables on disk."""

    seconds: float
    """ST, for one training batch."""

    worker_seconds: float
    """g C(h): what a worker would compute for it if it were the only one."""

    hot_share: float
    steps_per_sweep: float
    disk_bytes: float
    """Of each replica."""

    usd_per_hour: float
    """Price of the disks of all replicas."""

    disk_name: str = ""

    def __str__(self) -> str:
        """Say what lies where, for people."""
        return (
            f"{self.hot_share:.3g} of the rows stay in memory, {self.disk_bytes / 1e9:,.1f} GB of rows lie on the "
            f"{self.disk_name or 'disk'} of each replica, read and written in order once in "
            f"{self.steps_per_sweep:,.0f} steps"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTerms:
    """What the sweeps of candidate stages take; every array broadcasts to N."""

    held_shares: tuple[float, ...]
    """b + f h, of which a stage takes one."""

    spare_bytes: Floats
    """U - R, of one unit."""

    resident_bytes: Floats
    """M."""

    table_bytes: Floats
    """S."""

    cold_bytes: tuple[Floats, ...]
    """w f C(h) for each share, for one training batch."""

    disk_bytes: Floats
    """D of one unit, 0 where it has none."""

    disk_bytes_per_s: Floats

    worker_seconds: tuple[Floats, ...]
    """g C(h) for each share."""

    room_usd_per_hour: Floats
    """Price of room for S."""

    speed_usd_per_hour: Floats
    """Price of the speed of one unit's disk."""

    @property
    def has_prices(self) -> bool:
        """Whether some disk is bought."""
        return bool((self.room_usd_per_hour > 0).any() or (self.speed_usd_per_hour > 0).any())

    def usd_per_hour(self, num_replicas: Floats) -> Floats:
        """Return the price of the disks of k replicas that sweep, elementwise; of no meaning for infinite k."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.room_usd_per_hour + self.speed_usd_per_hour * num_replicas)

    def seconds(self, num_replicas: Floats) -> Floats:
        """Return ST(k, h) of all shares, infinite where it does not fit; (1, *N) or (H, *N) -> (H, *N)."""
        steps = self.steps_per_sweep(num_replicas)
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds = 2 * self.table_bytes / num_replicas / self.disk_bytes_per_s / steps
        fits = (steps >= 1) & (self.disk_bytes > 0)
        return np.where(fits & is_within(self.table_bytes / num_replicas, self.disk_bytes), seconds, np.inf)

    def steps_per_sweep(self, num_replicas: Floats) -> Floats:
        """Return n(k, h) of all shares, below 1 where it does not fit; (1, *N) or (H, *N) -> (H, *N)."""
        ndim = num_replicas.ndim
        held_bytes = of_shares(self.held_shares, ndim) * self.table_bytes
        left_bytes = num_replicas * self.spare_bytes - self.resident_bytes - held_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.where(left_bytes > 0, left_bytes / of_shares(self.cold_bytes, ndim), 0.0))

    def least_replicas(self, x: Floats) -> Floats:
        """Return the least whole k with ST(k, h) <= x of all shares, infinite where there is none.

        Times x, of shape (1, ...), broadcast against (H, *N); an infinite one asks for the fewest that memory and
        disk allow.
        """
        held_bytes = self.resident_bytes + of_shares(self.held_shares, x.ndim) * self.table_bytes
        cold_bytes = of_shares(self.cold_bytes, x.ndim)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            swept = 2 * self.table_bytes * cold_bytes / (self.disk_bytes_per_s * x)
            root = (held_bytes + np.sqrt(held_bytes * held_bytes + 4 * self.spare_bytes * swept)) / (
                2 * self.spare_bytes
            )
            enough = np.maximum(root, (held_bytes + cold_bytes) / self.spare_bytes)
            enough = np.maximum(enough, self.table_bytes / self.disk_bytes)
        enough = np.where((self.spare_bytes > 0) & np.isfinite(enough), np.maximum(enough, 1.0), np.inf)
        # Rounding may have moved a quotient across a whole number; the time itself decides.
        least = np.ceil(enough * (1 - _NEAR_INTEGER))
        seconds = self.seconds(least)
        return np.where(np.isfinite(seconds) & (seconds <= x), least, least + 1)

    def sweep(self, index: int, share: int, num_replicas: Floats, hot_shares: Sequence[float]) -> Sweep:
        """Return how one of the stages sweeps with a share of hot rows; N is one axis."""
        return Sweep(
            seconds=float(self.seconds(num_replicas[None])[share, index]),
            worker_seconds=float(self.worker_seconds[share][index]),
            hot_share=hot_shares[share],
            steps_per_sweep=float(self.steps_per_sweep(num_replicas[None])[share, index]),
            disk_bytes=float((self.table_bytes / num_replicas)[index]),
            usd_per_hour=float(self.usd_per_hour(num_replicas)[index]),
        )


def of_shares(values: Sequence[Floats | float], num_axes: int) -> Floats:
    """Return the values of H shares as an array of so many axes, the shares first."""
    stacked = np.array(values)
    return stacked.reshape(len(values), *(1,) * (num_axes - stacked.ndim), *stacked.shape[1:])


def sweep_terms(problem: SchedulingProblem, sums: Callable[[Sequence[float]], Floats]) -> SweepTerms | None:
    """Return the terms of runs of layers on every device type, shape (runs, T); None where no type has a disk.

    `sums` adds a value of each layer up over each run.
    """
    units = tuple(problem.device_types.values())
    if not problem.hot_shares or all(unit.disk_bytes == 0 for unit in units):
        return None

    def of_runs(values: Sequence[float]) -> Floats:
        return sums(values)[:, None]

    def of_types(values: Sequence[float]) -> Floats:
        return np.array(values, dtype=np.float64)

    layers = problem.layers
    table_bytes = of_runs([layer.state_bytes * bool(layer.cold_bytes_per_sample) for layer in layers])
    cold_bytes = [
        problem.batch_size
        * of_runs([sum(layer.cold_bytes_per_sample[share : share + 1]) for layer in layers])
        for share in range(len(problem.hot_shares))
    ]
    return SweepTerms(
        held_shares=tuple(ROW_SHARE + SLOT_FACTOR * share for share in problem.hot_shares),
        spare_bytes=of_types([unit.usable_bytes for unit in units])
        - of_runs([layer.state_bytes * (not layer.is_sharded) for layer in layers]),
        resident_bytes=of_runs(
            [layer.state_bytes * (layer.is_sharded and not layer.cold_bytes_per_sample) for layer in layers]
        ),
        table_bytes=table_bytes,
        cold_bytes=tuple(SWEEPS_IN_MEMORY * SLOT_FACTOR * each for each in cold_bytes),
        worker_seconds=tuple(
            of_types([unit.sweep_seconds_per_byte for unit in units]) * each for each in cold_bytes
        ),
        disk_bytes=of_types([unit.disk_bytes for unit in units]),
        disk_bytes_per_s=of_types([unit.disk_bytes_per_s for unit in units]),
        room_usd_per_hour=table_bytes
        / _BYTES_PER_GB
        * of_types([unit.disk_usd_per_gb_hour for unit in units]),
        speed_usd_per_hour=of_types([unit.disk_usd_per_hour for unit in units]),
    )
