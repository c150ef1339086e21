"""The batches of one replica, read, checked and cut into micro-batches on a thread while the step before runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from heterps_core.data.features import FeatureSpec
from heterps_core.errors import DataError

if TYPE_CHECKING:
    # It loads torch, which whoever only plans or serves does not need.
    from heterps_core.data.batch import ClickBatch

BATCHES_AHEAD = 2
"""One that waits and one that is read: a slow read is made up for while the next step runs."""

Position = TypeVar("Position")
Batch = TypeVar("Batch")


class BatchFeed(Generic[Position, Batch]):
    """Iterates over prepared batches; an error while preparing one is raised where its turn comes.

    Args:
        prepare: Makes the batch of a position; called on one other thread, in order.
    """

    def __init__(self, prepare: Callable[[Position], Batch], positions: Iterable[Position]) -> None:
        self._prepare = prepare
        self._positions = iter(positions)
        self.waited_s = 0.0
        """Time for which the training had nothing to do but wait for data."""

    def __iter__(self) -> Iterator[tuple[Position, Batch]]:
        """Yield each position with its batch."""
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
            ahead: deque[tuple[Position, Future[Batch]]] = deque(
                (position, thread.submit(self._prepare, position))
                for position in islice(self._positions, BATCHES_AHEAD)
            )
            while ahead:
                position, future = ahead.popleft()
                started_s = time.perf_counter()
                batch = future.result()
                self.waited_s += time.perf_counter() - started_s
                ahead.extend(
                    (following, thread.submit(self._prepare, following))
                    for following in islice(self._positions, 1)
                )
                yield position, batch


def check_ids(batch: ClickBatch, features: FeatureSpec, source: object) -> None:
    """Check that every id lies in the table of its slot, before anything is looked up with it.

    Raises:
        DataError: An id does not; the message names the slot and the id.
    """
    if not batch.num_rows:
        return
    lowest, highest = (bound.tolist() for bound in batch.ids.aminmax(dim=0))
    for slot, num_rows in enumerate(features.slot_rows):
        outside = lowest[slot] if lowest[slot] < 0 else highest[slot]
        if not 0 <= outside < num_rows:
            raise DataError(
                source,
                f"ids of slot {slot} ({features.slot_names[slot]}) must be in 0..{num_rows - 1}, got {outside}; "
                f"prepare the dataset again",
            )
