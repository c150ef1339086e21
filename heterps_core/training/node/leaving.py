"""What a node does when the cloud takes it back: it says so and asks all workers for a checkpoint and an end.

A spot instance is told two minutes ahead, time enough for a checkpoint; without it the run would lose the steps since
the last one and find out by a silence. The flow sees why training ended and goes on with other machines. A rebalance
recommendation is only written down: most machines that get one live on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from heterps_core.instance_metadata import InstanceMetadata, LeavingNotice
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.submission import request_stop

POLL_INTERVAL_S = 5.0
"""As AWS recommends for the notice of an interruption."""

NODES = "nodes"
LEAVING = "leaving.json"

logger = logging.getLogger(__name__)


@contextmanager
def watch_notices(
    run: RunDirectory,
    node_id: str,
    *,
    metadata: InstanceMetadata | None = None,
    poll_interval_s: float = POLL_INTERVAL_S,
) -> Iterator[None]:
    """Ask for notices from a thread while the block runs."""
    service = metadata or InstanceMetadata()
    is_over = threading.Event()

    def watch() -> None:
        noted: LeavingNotice | None = None
        while not is_over.wait(poll_interval_s):
            try:
                notice = service.leaving_notice()
                if notice is not None and notice != noted:
                    noted = notice
                    _pass_on(run, node_id, notice)
            except (OSError, ValueError, KeyError) as problem:
                logger.warning("the cloud's notices could not be read, trying again: %s", problem)

    thread = threading.Thread(target=watch, name="notices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def leaving_nodes(run: RunDirectory) -> dict[str, str]:
    """Return the nodes that were told of an interruption, with the time at which each ends."""
    found = {}
    for node_id in run.names(NODES):
        notice = run.read_json(f"{NODES}/{node_id}/{LEAVING}")
        if notice is not None and notice["kind"] == "spot interruption":
            found[node_id] = notice["at"]
    return found


def _pass_on(run: RunDirectory, node_id: str, notice: LeavingNotice) -> None:
    logger.warning("node %s: %s, %s", node_id, notice.kind, notice.at)
    run.write_json(f"{NODES}/{node_id}/{LEAVING}", {**asdict(notice), "noticed_at_s": time.time()})
    if notice.kind == "spot interruption":
        request_stop(run)
