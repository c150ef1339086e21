"""What a provider of machines must do, and the words that go in and out.

One contract for a laptop and a cloud lets the same flow, sweeper and tests run against both. Whatever
a provider starts carries its run id and a lease from the very call that starts it, because anything added
in a second call is missing when the first process dies in between.
"""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from heterps_core.cluster import Cluster
from heterps_core.errors import ConfigurationError
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from infra.ledger import Ledger

BOOTSTRAP_SCRIPT = Path(__file__).parent.parent / "bootstrap" / "bootstrap.sh"

TRAINING_NODE = ("-m", "heterps_core.training.node")
"""Arguments of Python that make a process a training node."""

DEFAULT_LIFETIME_S = 6 * 3600
"""After this a node ends itself, whatever became of its owner; a nightly run takes far less."""

# Part of file names, tags and client tokens alike.
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bootstrap:
    """What every node of a run is told when it starts."""

    run_directory: str
    """Where the flow's host and the nodes meet: a local path, or a URI such as s3://bucket/prefix."""

    python: str
    """Path of the interpreter on the node, with heterps installed."""

    arguments: tuple[str, ...] = TRAINING_NODE
    """Arguments of Python."""

    lifetime_s: int = DEFAULT_LIFETIME_S


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderSettings:
    """What providers are made from; each takes what it needs."""

    state_directory: Path
    """Local: where leases are kept, the same for all runs that one sweeper looks after."""

    region: str
    """AWS: region of the instances."""

    image_id: str | None = None
    """AWS: machine image; None takes the newest own one by name."""

    subnet_id: str | None = None
    """AWS: None takes the default network."""

    instance_profile: str | None = None
    """AWS: name of the instance profile that lets nodes read and write the run store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveInstance:
    """A machine that exists, as found from the provider alone."""

    provider_instance_id: str
    run_id: str
    node_id: str
    instance_type: str
    launched_at: datetime
    lease_until: datetime | None
    """None where the lease cannot be read; it then counts as expired."""

    is_owner_dead: bool
    """Known to be so; a provider that cannot see the owner says False and trusts the lease."""


class Provider(ABC):
    """Launches, finds and ends the machines of a run.

    Life cycle: `launch`, `wait_until_ready`, then `renew_lease` again and again while the run lives, then
    `terminate`. `list_instances` and `terminate_instance` belong to the sweeper, which knows nothing but
    the provider. All of them may be called again at any time, from any process:

    - `launch` with the same run id and plan adopts what is there and starts only what is missing;
    - what `launch` started is ended before an error leaves it;
    - renewing or ending what is gone is not an error.
    """

    name: ClassVar[str]
    charges_money: ClassVar[bool]
    """False for a rehearsal: its bill is in list prices, and nobody pays it."""

    lease_s: ClassVar[float]
    """Length of a lease; a live run renews it three times in this time."""

    minimum_billed_s: ClassVar[float]
    """Shortest time that an instance is charged for."""

    @abstractmethod
    def launch(
        self,
        plan: ProvisioningPlan,
        *,
        run_id: str,
        lease_until: datetime,
        bootstrap: Bootstrap,
        ledger: Ledger,
    ) -> Cluster:
        """Start every machine of a plan, or none.

        Args:
            plan: What to start.
            run_id: At most 64 letters, digits, '.', '_' and '-'; one id stands for one plan.
            lease_until: With a time zone; after it the sweeper ends the machines.
            bootstrap: What the nodes are told.
            ledger: Written before and after each start.

        Raises:
            ProvisioningError: A machine could not be had; those that were are ended.
        """

    @abstractmethod
    def wait_until_ready(self, cluster: Cluster, *, timeout_s: float) -> None:
        """Return once all machines are up.

        Raises:
            ProvisioningError: One ended, or is not up in time.
        """

    @abstractmethod
    def renew_lease(self, run_id: str, *, until: datetime) -> None:
        """Move the lease of all machines of a run."""

    @abstractmethod
    def terminate(self, run_id: str) -> tuple[str, ...]:
        """End all machines of a run and return the provider's ids of those that this call ended.

        Raises:
            ProvisioningError: A machine could not be ended.
        """

    @abstractmethod
    def terminate_instance(self, instance: LiveInstance) -> None:
        """End one machine.

        Raises:
            ProvisioningError: It could not be ended.
        """

    @abstractmethod
    def list_instances(self, run_id: str | None = None) -> tuple[LiveInstance, ...]:
        """Return the machines of one run, or of all, that exist and are not ending."""


def check_run_id(run_id: str) -> None:
    """Check that a run id can be a file name, a tag and a token.

    Raises:
        ConfigurationError: It cannot.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigurationError(
            f"a run id must be 1 to 64 letters, digits, '.', '_' or '-' and start with a letter or digit, "
            f"got {run_id!r}"
        )


def node_environment(node_id: str, *, provider: str, run_id: str, bootstrap: Bootstrap) -> dict[str, str]:
    """Return the environment variables that a node starts with, the same on every provider.

    Everything else it learns from cluster.json in the run directory.
    """
    return {
        "HETERPS_PROVIDER": provider,
        "HETERPS_RUN_ID": run_id,
        "HETERPS_NODE_ID": node_id,
        "HETERPS_RUN_DIR": bootstrap.run_directory,
        "HETERPS_PYTHON": bootstrap.python,
        "HETERPS_LIFETIME_S": str(bootstrap.lifetime_s),
    }


def user_data(environment: Mapping[str, str], arguments: tuple[str, ...]) -> str:
    """Return the bootstrap script with its variables and arguments written in, for a cloud's first boot."""
    script = BOOTSTRAP_SCRIPT.read_text()
    shebang, _, body = script.partition("\n")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return "\n".join([shebang, *exports, f"set -- {shlex.join(arguments)}", body])
