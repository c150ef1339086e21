"""Threads that share the cores of one machine, simulated from event to event.

A thread is a generator that yields what it does next. As a scheduler does, a thread that wakes is put on the core
with the fewest, stays there while it works, and gets an equal part of the core; a core that has rested for a while
takes a thread from the fullest one. So of three threads that work on two cores one has a core to itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Hashable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from heterps_core.errors import ConfigurationError

LEAST_SECONDS = 1e-12
"""What is left of a piece of work below this is rounding."""


@dataclass(frozen=True, slots=True)
class Work:
    """Something that needs a core for so long, 0 or more."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Until an event has happened; it may have already."""

    event: Hashable


Thread = Generator[Work | Wait, None, None]


@dataclass(slots=True)
class _Running:
    thread: Thread
    left_seconds: float
    core: int


class SharedCores:
    """A machine, and the time on it.

    Args:
        wake_seconds: From an event until a thread that waited for it works.
        balance_seconds: For which a core rests before it takes a thread from another; threads that wake come to it
            at once.

    Raises:
        ConfigurationError: There is no core.
    """

    def __init__(self, num_cores: int, *, wake_seconds: float = 0.0, balance_seconds: float = 0.0) -> None:
        if num_cores < 1:
            raise ConfigurationError(f"num_cores must be at least 1, got {num_cores}")
        self.now_seconds = 0.0
        self._num_cores = num_cores
        self._wake_seconds = wake_seconds
        self._balance_seconds = balance_seconds
        self._rest_since: list[float | None] = [0.0] * num_cores

        self._waking: list[tuple[float, int, Thread]] = []
        self._num_woken = 0
        self._running: list[_Running] = []
        self._last_cores: WeakKeyDictionary[Thread, int] = WeakKeyDictionary()
        self._waiting: dict[Hashable, list[Thread]] = {}
        self._happened: set[Hashable] = set()

    def start(self, thread: Thread) -> None:
        """Begin with a thread now."""
        self._go_on(thread)

    def happen(self, event: Hashable) -> None:
        """Let those go on that wait for an event, now and later."""
        self._happened.add(event)
        for thread in self._waiting.pop(event, []):
            self._num_woken += 1
            heapq.heappush(self._waking, (self.now_seconds + self._wake_seconds, self._num_woken, thread))
        self._wake()

    def has_happened(self, event: Hashable) -> bool:
        """Tell whether `Wait(event)` would be over at once."""
        return event in self._happened

    def run(self) -> None:
        """Let all threads run to their ends.

        Raises:
            ConfigurationError: Threads wait for events that never happen.
        """
        while self._running or self._waking:
            next_balance = self._balance()
            rates = self._rates()
            finish = min(
                (running.left_seconds / rate for running, rate in zip(self._running, rates, strict=True)),
                default=math.inf,
            )
            wake = self._waking[0][0] - self.now_seconds if self._waking else math.inf
            passed = max(min(finish, wake, next_balance - self.now_seconds), 0.0)
            self.now_seconds += passed
            done: list[_Running] = []
            still: list[_Running] = []
            for running, rate in zip(self._running, rates, strict=True):
                running.left_seconds -= passed * rate
                (done if running.left_seconds <= LEAST_SECONDS else still).append(running)
            self._running = still
            for running in done:
                self._go_on(running.thread, core=running.core)
            self._wake()
        if self._waiting:
            raise ConfigurationError(f"threads wait for ever, for {next(iter(self._waiting))}")

    def _wake(self) -> None:
        """Run the threads whose time to wake has come."""
        while self._waking and self._waking[0][0] <= self.now_seconds:
            self._go_on(heapq.heappop(self._waking)[2])

    def _balance(self) -> float:
        """Fill cores that have rested long enough; return when the next one will have, if there is work for it."""
        while True:
            loads = self._loads()
            for core, load in enumerate(loads):
                rested_since = self._rest_since[core]
                self._rest_since[core] = (
                    None if load else self.now_seconds if rested_since is None else rested_since
                )
            rests = [(since, core) for core, since in enumerate(self._rest_since) if since is not None]
            if not rests or max(loads) < 2:
                return math.inf
            since, core = min(rests)
            if since + self._balance_seconds > self.now_seconds:
                return since + self._balance_seconds
            fullest = loads.index(max(loads))
            moved = next(running for running in reversed(self._running) if running.core == fullest)
            moved.core = core

    def _rates(self) -> list[float]:
        """Return for each thread that works what part of a core it has."""
        loads = self._loads()
        return [1.0 / loads[running.core] for running in self._running]

    def _loads(self) -> list[int]:
        """Return how many threads work on each core."""
        loads = [0] * self._num_cores
        for running in self._running:
            loads[running.core] += 1
        return loads

    def _core_for(self, thread: Thread) -> int:
        """Return where a thread that wakes will work: where it was, unless another core has clearly less to do."""
        loads = self._loads()
        last = self._last_cores.get(thread, 0)
        least = min(loads)
        is_clear = loads[last] > least and (least == 0 or loads[last] > least + 1)
        return loads.index(least) if is_clear else last

    def _go_on(self, thread: Thread, *, core: int | None = None) -> None:
        """Run a thread up to the next thing that takes time; `core`: where it just worked, if it did."""
        for request in thread:
            if isinstance(request, Work):
                if request.seconds > 0:
                    own = self._core_for(thread) if core is None else core
                    self._last_cores[thread] = own
                    self._running.append(_Running(thread, request.seconds, own))
                    return
            elif request.event not in self._happened:
                self._waiting.setdefault(request.event, []).append(thread)
                return
