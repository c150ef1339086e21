"""The program of a node that is rented to be measured, and how the flow's host follows it.

In the run directory the node reads profile_job.json, a `ProfileRequest`, and writes profiles/<node id>.json.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import ConfigurationError, HeterpsError, TrainingError
from heterps_core.hardware import hardware_name, is_gpu
from heterps_core.profiling.device_profile import DeviceProfile
from heterps_core.profiling.measuring_process import (
    ProfileRequest,
    measure_in_fresh_process,
    measure_replica_path,
)
from heterps_core.training.monitor import (
    BOOT_LIMIT_S,
    BUCKET_POLL_INTERVAL_S,
    POLL_INTERVAL_S,
    SILENCE_LIMIT_S,
    Pulse,
)
from heterps_core.training.node.node_life import (
    HEARTBEAT,
    exit_key,
    heartbeat,
    node_key,
    own_node,
    own_run_directory,
    runs_here_as_dry_run,
    wait_for_cluster,
    write_end,
)
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.storage.verified_files import read_signed_json

logger = logging.getLogger(__name__)

PROFILE_JOB = "profile_job.json"


def _profile_key(node_id: str) -> str:
    """Return the key of a node's profile in the run directory."""
    return f"profiles/{node_id}.json"


def main() -> int:
    """Measure on this node; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    run = own_run_directory()
    try:
        node = own_node(wait_for_cluster(run))
    except HeterpsError as error:
        # The node is not part of the cluster, so its files are not read: this is for its own log.
        logger.error("%s", error)
        return error.exit_status
    status, log_tail = 0, ""
    with heartbeat(run, node.node_id):
        try:
            request = ProfileRequest.from_json(read_signed_json(run, PROFILE_JOB))
            measured = _measure_node(request, node, is_dry_run=runs_here_as_dry_run())
            run.write_json(_profile_key(node.node_id), measured.to_json())
        except HeterpsError as error:
            logger.error("%s", error)
            status, log_tail = error.exit_status, str(error)
    write_end(run, node.node_id, exit_status=status, log_tail=log_tail)
    return status


def _measure_node(request: ProfileRequest, node: Node, *, is_dry_run: bool) -> DeviceProfile:
    """Measure one unit of a node: its first card, or a core. In a dry run a core of this machine stands for both.

    Raises:
        HeterpsError: The measurement failed, or torch sees no card on a node that was rented for it.
    """
    is_on_card = is_gpu(node.device_type) and not is_dry_run
    (profile,) = measure_in_fresh_process(replace(request, device="cuda" if is_on_card else "cpu"))
    stands_for = " (dry run: not the device type)" if is_dry_run else ""
    return DeviceProfile(
        device_type=hardware_name(node.device_type),
        instance_type=node.instance_type,
        is_dry_run=is_dry_run,
        profile=replace(
            profile,
            device_type=node.device_type,
            # This machine's own is measured once for all runs.
            measured_replica_path=None if is_dry_run else measure_replica_path(),
            hardware=f"{node.instance_type}: {profile.hardware}{stands_for}",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilingResults:
    """Profiles and problems by node."""

    measured: Mapping[str, DeviceProfile]
    problems: Mapping[str, str]


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
                if exit_key(node_id) in stamps:
                    measured[node_id] = _result_of(run, nodes[node_id])
                elif time.monotonic() > deadline_s:
                    problems[node_id] = f"it has not ended within {time_limit_s:.0f} s"
                elif silence := pulse.silence(node_id, stamps.get(node_key(node_id, HEARTBEAT))):
                    problems[node_id] = silence
                else:
                    continue
            except (TrainingError, ConfigurationError) as error:
                problems[node_id] = str(error)
            waiting.discard(node_id)
        if waiting:
            time.sleep(POLL_INTERVAL_S if run.is_local else BUCKET_POLL_INTERVAL_S)
    return ProfilingResults(measured=measured, problems=problems)


def _result_of(run: RunDirectory, node: Node) -> DeviceProfile:
    end = run.require_json(exit_key(node.node_id))
    if end["exit_status"] != 0:
        # The last line of a traceback says enough; the whole traceback is in the file.
        said = end["log_tail"].strip().splitlines()[-1:]
        raise TrainingError(f"it ended with status {end['exit_status']}: {' '.join(said)}")
    result = DeviceProfile.from_json(run.require_json(_profile_key(node.node_id)))
    # Files are named after it, and plans rest on it: a rented machine does not choose it.
    if result.device_type != hardware_name(node.device_type):
        raise TrainingError(
            f"it must have measured a {node.device_type}, but says that it measured {result.device_type!r}"
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
