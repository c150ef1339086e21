"""What runs on a node that is rented to be measured: times the layers of a model and writes their profile.

Started by the bootstrap script as the training node is (`python -m heterps_core.profiling.profiling_node`). In the
run directory it reads profile_job.json, a `ProfileRequest`, and writes profiles/<node id>.json, a `DeviceProfile`.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

from heterps_core.cluster import Node
from heterps_core.device_types import get_device_type
from heterps_core.errors import ConfigurationError, HeterpsError
from heterps_core.hardware import DeviceKind
from heterps_core.profiling.measuring_process import ProfileRequest, measure_in_fresh_process
from heterps_core.profiling.profiles.device_profile import DeviceProfile, hardware_name
from heterps_core.training.node.node_life import (
    heartbeat,
    own_node,
    own_run_directory,
    runs_here_as_dry_run,
    wait_for_cluster,
    write_end,
)

logger = logging.getLogger(__name__)

PROFILE_JOB = "profile_job.json"


def profile_key(node_id: str) -> str:
    """Return the key of a node's profile in the run directory."""
    return f"profiles/{node_id}.json"


def can_be_measured(device_type: str) -> bool:
    """Tell whether the profiler can time layers on a device type: it runs them on a processor."""
    return get_device_type(device_type).kind is DeviceKind.CPU


def main() -> int:
    """Measure on this node; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    run = own_run_directory()
    try:
        node = own_node(wait_for_cluster(run))
    except HeterpsError as error:
        # Nobody knows this node by name, so nobody reads what it writes: this is for its own log.
        logger.error("%s", error)
        return error.exit_status
    status, log_tail = 0, ""
    with heartbeat(run, node.node_id):
        try:
            request = ProfileRequest.from_json(run.require_json(PROFILE_JOB))
            measured = measure_node(request, node, is_dry_run=runs_here_as_dry_run())
            run.write_json(profile_key(node.node_id), measured.to_json())
        except HeterpsError as error:
            logger.error("%s", error)
            status, log_tail = error.exit_status, str(error)
    write_end(run, node.node_id, exit_status=status, log_tail=log_tail)
    return status


def measure_node(request: ProfileRequest, node: Node, *, is_dry_run: bool) -> DeviceProfile:
    """Measure one core of a node.

    Raises:
        ConfigurationError: The node has a card; a core of its host must not pass for it.
        HeterpsError: The measurement failed.
    """
    if not can_be_measured(node.device_type) and not is_dry_run:
        raise ConfigurationError(
            f"layers are timed on processors, but {node.node_id} is of {node.device_type}; plan with its estimate"
        )
    profile = measure_in_fresh_process(request)
    stands_for = " (dry run: not the device type)" if is_dry_run else ""
    return DeviceProfile(
        device_type=hardware_name(node.device_type),
        instance_type=node.instance_type,
        is_dry_run=is_dry_run,
        profile=replace(
            profile,
            device_type=node.device_type,
            hardware=f"{node.instance_type}: {profile.hardware}{stands_for}",
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
