"""What a stage exchanges and sums in the trainer's step, as arrays over candidate stages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats

NEAR_INTEGER = 1e-7
"""Replica counts this near (relatively) to a whole number are settled by computing the time itself."""


@dataclass(frozen=True, slots=True)
class DrainedPath:
    """Passes and messages of a stage, one after the other: e XT(k) + p CT(k) + Y / k + AT(k) + c."""

    exchange_share: Floats | float
    """e."""

    compute_share: Floats | float
    """p."""

    links_seconds: Floats | float
    """Y, on one unit."""

    sums: float
    """1 where AT follows, 0 where stages before this one take longer."""

    others_seconds: Floats | float
    """c, of the stages before this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerTerms:
    """Further terms of the trainer's step, see `step_model.py`.

    XT(k) = (fixed + shared / k) (k - 1) / k + meeting + peer (k - 1) + work / k, with nothing for one replica, and
    AT(k) = sum (k - 1) / k.
    """

    fixed_seconds: Floats
    """E (1 - beta) + 2 Q D."""

    shared_seconds: Floats
    meeting_seconds: Floats
    """2 F + c P + G t + W (1 - beta)."""

    peer_seconds: Floats
    """2 P + Z."""

    work_seconds: Floats
    """W beta s + c F."""

    sum_seconds: Floats
    boundary_fixed_seconds: Floats
    """m b H + r J."""

    boundary_shared_seconds: Floats
    """C V + r K B, on one unit."""

    reading_seconds: Floats
    """I s: IT on one unit."""

    single_replica_communicates: bool
    """Without the factors (k - 1) / k."""

    microbatch_rows: int
    """R, the most replicas of a stage."""

    drained_paths: tuple[DrainedPath, ...] = ()
    """Empty where updates are delayed."""

    def exchange_seconds(self, num_replicas: Floats, in_stage: Floats) -> Floats:
        """Return XT(k) of replicas among so many in a stage, elementwise."""
        crossing = self._crossing(in_stage) * (self.fixed_seconds + self.shared_seconds / num_replicas)
        work = self.meeting_seconds + self.peer_seconds * (in_stage - 1) + self.work_seconds / num_replicas
        exchanges = True if self.single_replica_communicates else in_stage > 1
        return np.asarray(crossing + work * exchanges)

    def boundary_seconds(self, num_replicas: Floats) -> Floats:
        """Return the processor time that boundaries and reading after the first stage add to CT(k), elementwise."""
        return self.boundary_fixed_seconds + self.boundary_shared_seconds / num_replicas

    def gradient_sum_seconds(self, in_stage: Floats) -> Floats:
        """Return AT(k), elementwise."""
        return np.asarray(self._crossing(in_stage) * self.sum_seconds)

    def drained_seconds(self, compute: Floats, num_replicas: Floats, in_stage: Floats) -> Floats | float:
        """Return DT(k), the least time of a step that fills and drains around a stage, elementwise; 0 without."""
        exchange = self.exchange_seconds(num_replicas, in_stage)
        summed = self.gradient_sum_seconds(in_stage)
        longest: Floats | float = 0.0
        for path in self.drained_paths:
            own = path.exchange_share * exchange + path.compute_share * compute
            after = path.links_seconds / num_replicas + path.sums * summed
            longest = np.maximum(longest, own + after + path.others_seconds)
        return longest

    def _crossing(self, num_replicas: Floats) -> Floats | float:
        return 1.0 if self.single_replica_communicates else 1 - 1 / num_replicas

    def whole(self, pacing: Floats) -> Floats:
        """Return the least whole k with R / ceil(R / k) at least so large, infinite where there is none."""
        rows = np.floor(self.microbatch_rows / pacing * (1 + NEAR_INTEGER))
        return np.where(rows >= 1, np.ceil(self.microbatch_rows / np.maximum(rows, 1.0)), np.inf)

    def next_whole(self, replicas: Floats) -> Floats:
        """Return the least k whose slowest replica has a row less, infinite where there is none."""
        rows = np.ceil(self.microbatch_rows / replicas) - 1
        return np.where(rows >= 1, np.ceil(self.microbatch_rows / np.maximum(rows, 1.0)), np.inf)
