"""The batches of one replica, read and cut into micro-batches on a thread while the step before runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

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

    def __iter__(self) -> Generator[tuple[Position, Batch], None, None]:
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
