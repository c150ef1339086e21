"""The cost of a run's machines so far, by the ledger and a steady clock.

A ledger can be damaged and a clock can be set while a run lives: a machine that was written down once counts on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from heterps_core.errors import LedgerError
from infra.billing.budget import Spending, spent_usd, start_of_month
from infra.ledger.ledger import LedgerEntry
from infra.providers.base import Provider

logger = logging.getLogger(__name__)


class SpendingMeter:
    """Adds up the cost of a run; call it again and again.

    Args:
        provider: Of the machines.
        entries: Reads the ledger.
        belongs: Tells of a launch id whether it is one of the run's.
        bucket_usd: What the run will pay for its bucket whatever its length; counts from the start.
        steady_s: A clock that is never set, in seconds.

    Raises:
        LedgerError: The ledger cannot be read at the start.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        entries: Callable[[], Sequence[LedgerEntry]],
        belongs: Callable[[str], bool],
        bucket_usd: float = 0.0,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._provider, self._entries, self._belongs = provider, entries, belongs
        self._bucket_usd = bucket_usd
        self._steady_s = steady_s
        self._began_s, self._began_at = steady_s(), provider.now()
        self._known: dict[str, LedgerEntry] = {}
        self._has_ledger = True
        self._learn()

    def __call__(self) -> Spending:
        """Return the spending until now; while the ledger cannot be read, its known machines count on."""
        try:
            self._learn()
        except (LedgerError, OSError) as problem:
            if self._has_ledger:
                logger.warning("spending is counted by what the ledger held before: %s", problem)
            self._has_ledger = False
        now = self._began_at + timedelta(seconds=self._steady_s() - self._began_s)
        of_run = [entry for entry in self._known.values() if self._belongs(entry.run_id)]
        month_usd = spent_usd(self._known.values(), self._provider, now=now, since=start_of_month(now))
        return Spending(
            run_usd=spent_usd(of_run, self._provider, now=now) + self._bucket_usd,
            month_usd=month_usd + self._bucket_usd,
        )

    def _learn(self) -> None:
        """Read the ledger; a machine that a new one has lost stays known."""
        for entry in self._entries():
            if entry.provider == self._provider.name and entry.provider_instance_id is not None:
                self._known[entry.provider_instance_id] = entry
        self._has_ledger = True
