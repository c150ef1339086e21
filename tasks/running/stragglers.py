"""A machine that has become slow leaves the fleet as a lost one does, at a step boundary and with nothing redone.

Workers wait for one another at each step, so the slowest sets the pace of all, and times of steps do not name it.
Each rented machine therefore times a fixed piece of work at each sign of life, beside its workers. It is slow where
this takes `SLOW_FACTOR` times as long as at its best, and as much longer than on the others: what slows all of them,
such as the next phase of a training, is no ground to replace one. Slow networks and disks are not seen.
"""

from __future__ import annotations

import time
from statistics import median

from heterps_core.cluster import Cluster
from heterps_core.training.node.node_life import HEARTBEAT, node_key
from heterps_core.training.outcome import MachinesLost
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.units import SECONDS_PER_MINUTE
from tasks.running.progress import log_step

STOP_REASON = "straggler"
"""In the mark of a stop behind which the run goes on."""

SLOW_FACTOR = 2.0
"""One machine at half its speed costs a fleet as much as half of the others."""

LOOK_INTERVAL_S = 30.0
"""Each look reads a small file of each machine."""

LOOKS = 4
"""In a row in which a machine is slow before it leaves: spells of a minute are not worth a start of two."""


class Stragglers:
    """Looks now and then whether a machine of a run has become slow.

    Args:
        run: Whose training is asked to stop then.
        interval_s: Between two looks.
    """

    def __init__(self, run: RunDirectory, *, interval_s: float = LOOK_INTERVAL_S) -> None:
        self._run, self._interval_s = run, interval_s
        self._next_look_s = time.monotonic() + interval_s
        self._best_s: dict[str, float] = {}
        self._num_slow: dict[str, int] = {}
        self.left: MachinesLost | None = None
        """The machine that leaves; to be set to None where others have gone on."""

    def look(self, cluster: Cluster) -> None:
        """Look at the machines of a generation, where it is time to, and where none leaves already."""
        if self.left is not None or time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + self._interval_s
        slowness = self._slowness(cluster)
        for name, times in slowness.items():
            others = [slowness[other] for other in slowness if other != name]
            is_slow = bool(others) and times >= SLOW_FACTOR * median(others)
            self._num_slow[name] = self._num_slow.get(name, 0) + 1 if is_slow else 0
            if is_slow:
                log_step("slow", f"{name} takes {times:.1f} times its best time, others {median(others):.1f}")
        slowest = max(slowness, key=lambda name: slowness[name], default="")
        if self._num_slow.get(slowest, 0) >= LOOKS and self._run.stop_reason() is None:
            self._num_slow.clear()
            minutes = LOOKS * self._interval_s / SECONDS_PER_MINUTE
            self.left = MachinesLost(
                message=f"a machine must keep its speed, but for {minutes:.0f} min all others waited for {slowest}, "
                f"which takes {slowness[slowest]:.1f} times its best time",
                node_ids=(slowest,),
            )
            self._run.request_stop(STOP_REASON)

    def _slowness(self, cluster: Cluster) -> dict[str, float]:
        """Return by node id how many times its best time each machine last took, as far as it tells."""
        found = {}
        for node in cluster.nodes:
            seconds = (self._run.read_json(node_key(node.node_id, HEARTBEAT)) or {}).get("probe_seconds")
            if seconds:
                machine = node.provider_instance_id
                self._best_s[machine] = min(seconds, self._best_s.get(machine, seconds))
                found[node.node_id] = seconds / self._best_s[machine]
        return found
