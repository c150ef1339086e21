"""The seconds that the proofs of one planning share: of zones, of floors, with and without spot machines."""

from __future__ import annotations

import time

from heterps_core.planning.search.optimum import MAX_SECONDS


class PlanningTime:
    """Time that begins to run when it is made.

    Args:
        seconds: Of wall time for all proofs together.
    """

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._ends_s = time.perf_counter() + seconds

    def share(self, num_proofs: int) -> float:
        """Return the seconds of the next proof where so many are still to be made; what one saves others have."""
        return max(self._ends_s - time.perf_counter(), 0.0) / num_proofs
