"""When the machines of a stage are ready, and how long they write after the last step.

A worker of a device type can load u seconds after its launch, and needs r seconds for each byte of its tables, read
before the first step and written after the last one; more where its rows lie on disk. With k replicas that divide S
bytes,

    U(k) = u + r S / k

and all machines of a plan are paid until the slowest stage is ready and has written: the largest U counts. It falls
with k, so the fewest k with U(k) <= y follow in closed form. Dense parameters, some megabytes, are left out.

U and y are spread over the steps of a run, as x0 in `objective.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats

_NEAR_INTEGER = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class StartTerms:
    """The terms of candidate stages; every array broadcasts to N."""

    fixed_seconds: Floats
    """u."""

    shared_seconds: Floats
    """r S where memory holds all rows."""

    shared_on_disk: Floats
    """r S where it does not; no less."""

    memory_replicas: Floats
    """Least replicas whose memory holds all rows."""

    def seconds(self, num_replicas: Floats) -> Floats:
        """Return U(k), elementwise."""
        shared = np.where(num_replicas < self.memory_replicas, self.shared_on_disk, self.shared_seconds)
        return np.asarray(self.fixed_seconds + shared / num_replicas)

    def least_replicas(self, limit_seconds: float) -> Floats:
        """Return the least whole k with U(k) <= y, infinite where there is none."""
        slack = limit_seconds - self.fixed_seconds
        found = []
        for shared in (self.shared_on_disk, self.shared_seconds):
            with np.errstate(divide="ignore", invalid="ignore"):
                least = np.ceil(shared / slack * (1 - _NEAR_INTEGER))
                least = np.where(slack >= 0, np.fmax(least, 1.0), np.inf)
                least = np.where(self.fixed_seconds + shared / least <= limit_seconds, least, least + 1)
            found.append(least)
        on_disk, in_memory = found
        held = np.maximum(in_memory, self.memory_replicas)
        return np.where(on_disk < self.memory_replicas, np.minimum(on_disk, held), held)
