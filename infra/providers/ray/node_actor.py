"""The actor that runs a node as a process on a machine of Ray."""

from __future__ import annotations

import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

END_LIMIT_S = 60.0
NODE_END_S = 8.0
"""Longest life of a node without its actor or raylet, of which Ray itself takes a second to notice."""

WITH_ACTOR = """
(
  trap '' TERM USR1
  read -r _
  kill -TERM -- -$$
  for _ in {1..20}; do kill -0 $$ && sleep 0.25; done
  kill -KILL -- -$$
) <&0 >/dev/null 2>&1 &
exec "$@" </dev/null
"""
"""Starts a command that ends when its input does, which its actor holds: Ray kills an actor's own children alone."""


def node_class() -> type:
    """Return the class of an actor; local, so that its code goes to the machines, which do not have heterps."""

    class Node:
        """Runs a node as a process that ends with it, and passes a drain on to it as a notice."""

        def __init__(
            self,
            instance_type: str,
            command: list[str],
            environment: dict[str, str],
            console: Path,
            lease_until: datetime,
        ) -> None:
            import subprocess
            import sys
            import threading

            import ray

            self.lease_until = lease_until
            self.facts = {
                "instance_type": instance_type,
                "launched_at": datetime.now(UTC),
                "address": ray.util.get_node_ip_address(),
            }
            with console.open("ab") as said:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=said,
                    stderr=said,
                    env={**os.environ, **environment, "HETERPS_PYTHON": sys.executable},
                    start_new_session=True,
                )
            threading.Thread(target=self.watch_drain, daemon=True).start()

        def watch_drain(self) -> None:
            """Give the notice of a batch system where this machine is drained."""
            import ray

            own = ray.get_runtime_context().get_node_id()
            while own not in ray._private.state.state.get_draining_nodes():
                time.sleep(5.0)
            os.killpg(self.process.pid, signal.SIGUSR1)

        def describe(self) -> dict[str, Any]:
            is_alive = self.process.poll() is None
            return {**self.facts, "lease_until": self.lease_until, "is_alive": is_alive}

        def renew(self, until: datetime) -> None:
            self.lease_until = until

        def end(self) -> None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(END_LIMIT_S)

    return Node
