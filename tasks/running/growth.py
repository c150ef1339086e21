"""Launches the machines that a fleet lacks while the rest of it trains.

It does so if that pays, or if the night would be late without them. Once they are up, the training stops at a step
boundary after a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from typing import Self

from heterps_core.cluster import Cluster
from heterps_core.errors import BudgetExceededError, ProvisioningError
from heterps_core.training.storage.run_directory import RunDirectory
from infra.machines.failover import SPOT_RETRY_S
from tasks.provisioning import Provisioning
from tasks.running.fleet_decision import Decision, Way
from tasks.running.progress import log_step

STOP_REASON = "growth"
"""In the mark of a stop behind which the run goes on."""


def with_missing(cluster: Cluster, whole: Cluster) -> Cluster:
    """Return a fleet as it is now with the machines that it lacks in their places."""
    present = {node.node_id: node for node in cluster.nodes}
    return replace(cluster, nodes=tuple(present.get(node.node_id, node) for node in whole.nodes))


class Growth:
    """Decides now and then whether a fleet grows, from when it shrank until it has grown, or is planned again.

    As a context it ends once nothing is decided any more.

    Args:
        run: Whose training is asked to stop then.
        num_missing: Machines that the fleet lacks; a whole fleet has nothing to decide.
        decide: Says what is wanted; told which ways failed, and why. Searching and asking for prices take seconds, so
            a look begins it in a thread of its own, and a later one takes the answer.
        launch: Launches so many of them; returns the cluster that goes on, and its purchase. Where not all can be
            launched, half of them are tried, and so on: capacity returns piece by piece.
        interval_s: Between two looks; the first is at once.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        num_missing: int,
        decide: Callable[[Mapping[Way, str]], Decision],
        launch: Callable[[int], tuple[Cluster, Provisioning]],
        interval_s: float = SPOT_RETRY_S,
    ) -> None:
        self._run, self._decide, self._launch, self._interval_s = run, decide, launch, interval_s
        self._num_missing = num_missing
        self._next_look_s = time.monotonic()
        self.grown: tuple[Cluster, Provisioning] | None = None
        """The cluster that goes on, and what it was bought by; None until its machines are up."""

        self.wants_replan = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="growth")
        self._deciding: Future[Decision] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # Behind an error the machines are to end at once.
        self._thread.shutdown(wait=kind is None)

    @property
    def is_deciding(self) -> bool:
        """A look has begun, and its answer is not there yet."""
        return self._deciding is not None and not self._deciding.done()

    def look(self) -> None:
        """Look, where it is time to; the training goes on meanwhile, and is not followed while machines start."""
        if not self._num_missing or self.grown is not None or self.wants_replan or self.is_deciding:
            return
        if self._deciding is None:
            if time.monotonic() >= self._next_look_s:
                self._begin_to_decide({})
            return
        decision, self._deciding = self._deciding.result(), None
        count = self._num_missing
        way = _way_of(decision)
        while self.grown is None and way is Way.GROW:
            try:
                self.grown = self._launch(count)
            except (ProvisioningError, BudgetExceededError) as problem:
                count //= 2
                if not count:
                    self._begin_to_decide({way: str(problem)})
                    return
        self.wants_replan = way is Way.REPLAN
        log_step("growth", decision.reason)
        if (self.grown is not None or self.wants_replan) and self._run.stop_reason() is None:
            self._run.request_stop(STOP_REASON)
        self._next_look_s = time.monotonic() + self._interval_s

    def _begin_to_decide(self, refused: Mapping[Way, str]) -> None:
        # Lines of a run are told by its context.
        self._deciding = self._thread.submit(copy_context().run, self._decide, refused)

    def is_end_asked_for(self) -> bool:
        """Return whether the run is to end, as far as its mark of a stop says, which a later one overwrites."""
        return self._run.stop_reason() not in (None, STOP_REASON)


def _way_of(decision: Decision) -> Way | None:
    return None if decision.chosen is None else decision.chosen.way
