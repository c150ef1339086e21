"""How a node starts: what it is told, and the script that it runs first, as a process or as a machine."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.bootstrap.node_wheel import NodeWheel

BOOTSTRAP_SCRIPT = Path(__file__).with_name("bootstrap.sh")

TRAINING_NODE = ("-m", "heterps_core.training.node")
"""Arguments of Python that make a process a training node."""

DEFAULT_LIFETIME_S = 6 * 3600
"""After this a node ends itself at the latest; `infra.machines.lifecycle` sets less by plan and caps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bootstrap:
    """What every node of a run is told when it starts."""

    run_directory: str
    """Where the flow's host and the nodes meet: a local path, or a URI such as s3://bucket/prefix."""

    python: str
    """Path of the interpreter on the node, with torch, numpy and pyarrow; and heterps, where there is no wheel."""

    arguments: tuple[str, ...] = TRAINING_NODE
    """Arguments of Python."""

    lifetime_s: int = DEFAULT_LIFETIME_S
    run_key: bytes = field(default=b"", repr=False)
    """Authenticates the checkpoints of the run; empty where nodes write none."""

    wheel: NodeWheel | None = None
    """The code that the node takes from the run directory; None takes what is installed on it."""


def node_environment(
    bootstrap: Bootstrap, *, run_id: str, lease_s: float, is_process: bool, is_dry_run: bool
) -> dict[str, str]:
    """Return the environment variables that every node starts with, the same on every provider.

    Everything else it learns from cluster.json in the run directory; also who it is, where the provider
    starts many alike and does not set HETERPS_NODE_ID.
    """
    variables = {
        "HETERPS_NODE_IS": "process" if is_process else "machine",
        "HETERPS_DRY_RUN": str(int(is_dry_run)),
        "HETERPS_RUN_ID": run_id,
        "HETERPS_RUN_DIR": bootstrap.run_directory,
        "HETERPS_PYTHON": bootstrap.python,
        "HETERPS_LIFETIME_S": str(bootstrap.lifetime_s),
        "HETERPS_LEASE_S": str(math.ceil(lease_s)),
    }
    if bootstrap.run_key:
        variables["HETERPS_RUN_KEY"] = bootstrap.run_key.hex()
    if bootstrap.wheel is not None:
        variables["HETERPS_WHEEL"] = bootstrap.wheel.key
        variables["HETERPS_WHEEL_SHA256"] = bootstrap.wheel.sha256
    return variables


def user_data(environment: Mapping[str, str], arguments: tuple[str, ...]) -> str:
    """Return the bootstrap script with its variables and arguments written in, for a cloud's first boot."""
    script = BOOTSTRAP_SCRIPT.read_text()
    shebang, _, body = script.partition("\n")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return "\n".join([shebang, *exports, f"set -- {shlex.join(arguments)}", body])
