"""How the flow's host follows nodes that measure: each by itself, as one that fails takes nothing from the others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import ConfigurationError, TrainingError
from heterps_core.profiling.profiles.device_profile import DeviceProfile, hardware_name
from heterps_core.profiling.profiling_node import profile_key
from heterps_core.training.monitor import (
    BOOT_LIMIT_S,
    BUCKET_POLL_INTERVAL_S,
    POLL_INTERVAL_S,
    SILENCE_LIMIT_S,
    Pulse,
)
from heterps_core.training.node.node_life import EXIT, HEARTBEAT, node_key
from heterps_core.training.storage.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilingResults:
    """What came of each node."""

    measured: Mapping[str, DeviceProfile]
    """By node id."""

    problems: Mapping[str, str]
    """Why a node has none."""


def follow_profiling(run: RunDirectory, cluster: Cluster, *, time_limit_s: float) -> ProfilingResults:
    """Wait until each node has ended, has fallen silent, or the time is over."""
    pulse = Pulse(first_limit_s=SILENCE_LIMIT_S if run.is_local else BOOT_LIMIT_S)
    deadline_s = time.monotonic() + time_limit_s
    measured: dict[str, DeviceProfile] = {}
    problems: dict[str, str] = {}
    nodes = {node.node_id: node for node in cluster.nodes}
    waiting = set(nodes)
    while waiting:
        stamps = run.stamps("nodes")
        for node_id in sorted(waiting):
            try:
                if node_key(node_id, EXIT) in stamps:
                    measured[node_id] = _result_of(run, nodes[node_id])
                elif time.monotonic() > deadline_s:
                    raise TrainingError(f"it has not ended within {time_limit_s:.0f} s")
                else:
                    pulse.check(node_id, stamps.get(node_key(node_id, HEARTBEAT)))
                    continue
            except (TrainingError, ConfigurationError) as error:
                problems[node_id] = str(error)
            waiting.discard(node_id)
        if waiting:
            time.sleep(POLL_INTERVAL_S if run.is_local else BUCKET_POLL_INTERVAL_S)
    return ProfilingResults(measured=measured, problems=problems)


def _result_of(run: RunDirectory, node: Node) -> DeviceProfile:
    end = run.require_json(node_key(node.node_id, EXIT))
    if end["exit_status"] != 0:
        # Of a traceback only what it says in the end; the whole of it is in the file.
        said = end["log_tail"].strip().splitlines()[-1:]
        raise TrainingError(f"it ended with status {end['exit_status']}: {' '.join(said)}")
    result = DeviceProfile.from_json(run.require_json(profile_key(node.node_id)))
    # Files are named after it, and plans rest on it: a rented machine does not choose it.
    if result.device_type != hardware_name(node.device_type):
        raise TrainingError(
            f"it must have measured a {node.device_type}, but says that it measured {result.device_type!r}"
        )
    return result
