"""What a provider of machines must do, and the words that go in and out.

One contract for a laptop and a cloud lets the same flow, sweeper and tests run against both. Whatever
a provider starts carries its run id and a lease from the very call that starts it, because anything added
in a second call is missing when the first process dies in between.
"""

from __future__ import annotations

import math
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from heterps_core.cluster import Cluster
from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from infra.bootstrap.node_wheel import NodeWheel
from infra.instances import Instance
from infra.ledger.ledger import NO_MACHINE, EndReason, Ledger, LedgerEntry
from infra.prices.service_charges import usd_per_machine_hour
from infra.prices.spot_charges import SpotRecord

BOOTSTRAP_SCRIPT = Path(__file__).parent.parent / "bootstrap" / "bootstrap.sh"

TRAINING_NODE = ("-m", "heterps_core.training.node")
"""Arguments of Python that make a process a training node."""

DEFAULT_LIFETIME_S = 6 * 3600
"""After this a node ends itself at the latest; `infra.machines.lifecycle` sets less by plan and caps."""

# Part of file names, tags and client tokens alike.
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


DEFAULT_WORKSPACE = "default"


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

    node_boundary: str | None = None
    """AWS: ARN of the permissions boundary of the roles that let nodes read and write their run directory."""

    key_name: str | None = None
    """AWS: key pair for people who must log in; None puts no key on the instances."""

    workspace: str = DEFAULT_WORKSPACE
    """AWS: whose machines these are, where several share an account; a sweeper looks after its own."""


class Provider(ABC):
    """Launches, finds and ends the machines of a run.

    Life cycle: `launch`, `wait_until_ready`, then `renew_lease` again and again while the run lives, then
    `end_run`. `remembered_instances`, `terminate_instance` and `remove_leftovers` belong to the sweeper, which
    knows nothing but the provider. All of them may be called again at any time, from any process:

    - `launch` with the same run id and plan adopts what is there and buys nothing twice;
    - what `launch` started is ended before an error leaves it;
    - renewing or ending what is gone is not an error.
    """

    name: ClassVar[str]
    charges_money: ClassVar[bool]
    """False for a rehearsal: its bill is in list prices, and nobody pays it."""

    has_regions: ClassVar[bool] = False
    """Each of them is asked by itself, and does not know the machines of another."""

    lease_s: ClassVar[float]
    """Length of a lease; a live run renews it three times in this time.

    It stands on the machine, for the sweeper, and in the run directory, where the node itself looks for it.
    """

    minimum_billed_s: ClassVar[float]
    """Shortest time that an instance is charged for."""

    tags_grace_s: ClassVar[float] = 0.0
    """How old a machine may be before what it carries can be read; 0 where it is there from the first moment."""

    disk_gb_each: ClassVar[float] = 0.0
    """Of the disk that an instance is given, in 1e9 bytes; 0 where it has none of its own."""

    @classmethod
    def services_usd_per_machine_hour(cls) -> float:
        """Return what a machine is billed besides its own price; 0 where nothing is charged."""
        return usd_per_machine_hour(disk_gb_each=cls.disk_gb_each) if cls.charges_money else 0.0

    @classmethod
    def billed_usd_per_hour(cls, plan: ProvisioningPlan) -> float:
        """Return what all machines of a plan are billed, with their disks and addresses."""
        num_machines = sum(group.count for group in plan.groups)
        return plan.price_usd_per_hour + num_machines * cls.services_usd_per_machine_hour()

    def now(self) -> datetime:
        """Return the time by the clock that the provider dates its machines with."""
        return datetime.now(UTC)

    def looks_after(self, entry: LedgerEntry) -> bool:
        """Tell whether a machine of the ledger is one that this provider would find."""
        return entry.provider == self.name

    def check_run_directory(self, location: str) -> None:  # noqa: B027
        """Check, before anything is launched, that nodes can be let into a run directory.

        Raises:
            ConfigurationError: Something is missing for it.
        """

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
    def terminate_instance(self, instance: Instance) -> None:
        """End one machine.

        Raises:
            ProvisioningError: It could not be ended.
        """

    @abstractmethod
    def list_instances(self, run_id: str | None = None) -> tuple[Instance, ...]:
        """Return the machines of one run, or of all, that exist and are not ending."""

    def remembered_instances(self, provider_instance_ids: Collection[str]) -> tuple[Instance, ...]:
        """Return all machines that the provider still knows of, ended ones with the time of their end too.

        Args:
            provider_instance_ids: Machines to look for by id, in case they have lost their tags.
        """
        return self.list_instances()

    def spot_records(self, entries: Collection[LedgerEntry]) -> dict[str, SpotRecord]:
        """Return what the provider says of spot machines that have ended, by its ids, without those that it forgot.

        Raises:
            ProvisioningError: It does not answer.
        """
        return {}

    def remove_leftovers(self, *, now: datetime) -> tuple[str, ...]:
        """Remove what runs without machines left beside them, and return its names; nothing where none is made."""
        return ()

    def end_run(
        self, run_id: str, *, ledger: Ledger, reason: EndReason, problem: str = NO_MACHINE
    ) -> tuple[str, ...]:
        """End all machines of a run and write each down, also one whose launch was not; may be called again.

        Args:
            run_id: Of the run.
            ledger: Is brought up to date.
            reason: Why the machines end.
            problem: Why the launches failed that brought no machine.

        Returns:
            The provider's ids of the machines that this call ended.

        Raises:
            ProvisioningError: Machines are left.
        """
        found = self.list_instances(run_id)
        # Machines first, books second: a ledger that cannot be written must not keep a machine alive.
        ended = self.terminate(run_id)
        for instance in found:
            # The launching process may have died between the call and its record.
            ledger.recover(self.name, instance)
        if left := self.list_instances(run_id):
            names = ", ".join(instance.provider_instance_id for instance in left)
            raise ProvisioningError(f"{names} must end, and were still there after the call that ends them")
        ledger.close_run(run_id, reason=reason, at=self.now(), problem=problem)
        return ended


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


def node_environment(*, provider: str, run_id: str, lease_s: float, bootstrap: Bootstrap) -> dict[str, str]:
    """Return the environment variables that every node starts with, the same on every provider.

    Everything else it learns from cluster.json in the run directory; also who it is, where the provider
    starts many alike and does not set HETERPS_NODE_ID.
    """
    variables = {
        "HETERPS_PROVIDER": provider,
        "HETERPS_RUN_ID": run_id,
        "HETERPS_RUN_DIR": bootstrap.run_directory,
        "HETERPS_PYTHON": bootstrap.python,
        "HETERPS_LIFETIME_S": str(bootstrap.lifetime_s),
        "HETERPS_LEASE_S": str(math.ceil(lease_s)),
    }
    if bootstrap.run_key:
        variables["HETERPS_RUN_KEY"] = bootstrap.run_key.hex()
    if bootstrap.wheel is None:
        return variables
    return {
        **variables,
        "HETERPS_WHEEL": bootstrap.wheel.key,
        "HETERPS_WHEEL_SHA256": bootstrap.wheel.sha256,
    }


def user_data(environment: Mapping[str, str], arguments: tuple[str, ...]) -> str:
    """Return the bootstrap script with its variables and arguments written in, for a cloud's first boot."""
    script = BOOTSTRAP_SCRIPT.read_text()
    shebang, _, body = script.partition("\n")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return "\n".join([shebang, *exports, f"set -- {shlex.join(arguments)}", body])
