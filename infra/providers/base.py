"""The interface of a provider of machines.

What only some of them can answer, such as prices of now or quotas, has a default.

Whatever a provider starts carries its run id and a lease from the very call that starts it, because anything added
in a second call is missing when the first process dies in between.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar, NamedTuple, Self

from heterps_core.cluster import Cluster
from heterps_core.device_types import OWN_DEVICE_TYPES
from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.hardware import InstanceOffer
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from infra.bootstrap.node_start import DEFAULT_LIFETIME_S, Bootstrap
from infra.checks import Check
from infra.inventory import MachineKind, inventory_path, read_inventory
from infra.ledger.ledger import NO_MACHINE, EndReason, Ledger, LedgerEntry
from infra.ledger.ledger_entry import Instance
from infra.prices.live_prices import LivePrices
from infra.prices.price_catalogue import BUNDLED_SNAPSHOT, PriceFile
from infra.prices.service_charges import usd_per_machine_hour
from infra.prices.spot_charges import SpotHistory
from infra.workspace import Workspace, check_run_id, has_run_store, location_in_store

REGION = "us-east-1"
"""The region of the bundled prices and, where a run names no other, of machines, whatever AWS_DEFAULT_REGION says."""


class InsufficientCapacityError(ProvisioningError):
    """The machines are not available there and now; another zone may have them."""


class EndedAtStartError(InsufficientCapacityError):
    """The provider ended machines while they started; the same purchase may succeed at the second try."""


class QuotaExceededError(ProvisioningError):
    """The account's quota does not allow the machines; it may allow a purchase that asks less of it."""

    def __init__(self, message: str, *, quotas: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.quotas = quotas


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What all machines of a launch have in common."""

    run_id: str
    lease_until: datetime
    bootstrap: Bootstrap
    ledger: Ledger


class UnitLimits(NamedTuple):
    """The most units that an account may rent."""

    most: Mapping[str, int]
    """By device type, of each alone; one that is missing has no limit."""

    sharing: Mapping[str, Collection[str]]
    """The device types that count against a quota together, by its name."""

    text: str
    """The quotas with the vCPUs that are left of them, for people; empty where none is known."""


class Provider(ABC):
    """Launches, finds and ends the machines of a run.

    Life cycle: `launch`, `wait_until_ready`, then `renew_lease` again and again while the run lives, then
    `end_run`. `remembered_instances`, `terminate_instances` and `remove_leftovers` belong to the sweeper, which
    knows nothing but the provider. All of them may be called again at any time, from any process:

    - `launch` with the same run id and plan adopts what is there and buys nothing twice;
    - what `launch` started is ended before an error leaves it;
    - renewing or ending what is gone is not an error.
    """

    name: ClassVar[str]
    is_dry_run: ClassVar[bool] = False
    """This machine stands for those of the plan: the bill is in list prices, and nothing is paid."""

    has_inventory: ClassVar[bool] = False
    """Its machines are those that people have: the inventory lists them with its name as their home."""

    machines_text: ClassVar[str] = "rented machines"
    """Its machines, for reports."""

    runs_here: ClassVar[bool] = False
    """Its nodes are processes of this machine, and meet the flow's host in a folder of the workspace. Others meet in
    the run store and take their code from there."""

    node_python: ClassVar[str] = sys.executable
    region: ClassVar[str] = REGION
    """Where machines are rented, unless another region is asked for."""

    has_regions: ClassVar[bool] = False
    """Each of them is asked by itself, and does not know the machines of another."""

    price_file: ClassVar[PriceFile] = BUNDLED_SNAPSHOT
    """Prices for plans; newer answers of `live_prices` replace them."""

    live_prices: ClassVar[type[LivePrices] | None] = None
    """Asked for prices of now before machines are rented; None where the provider has no such service."""

    lease_s: ClassVar[float] = 60.0
    """Length of a lease; a live run renews it three times in this time.

    It stands on the machine, for the sweeper, and in the run directory, where the node itself looks for it.
    """

    ready_timeout_s: ClassVar[float] = 300.0
    """Longest wait for machines that were launched; an EC2 instance runs within about a minute."""

    lifetime_s: ClassVar[int] = DEFAULT_LIFETIME_S
    """After this a node ends itself at the latest; caps and plan may set less."""

    minimum_billed_s: ClassVar[float] = 0.0
    tags_grace_s: ClassVar[float] = 0.0
    """Age of a machine until its tags can be read; 0 where they are there from the first moment."""

    disk_gb_each: ClassVar[float] = 0.0
    """Size of the disk that an instance is given, in 1e9 bytes; 0 where it has none of its own."""

    charges_services: ClassVar[bool] = False
    """Disks, addresses and the run store are charged besides the machines' own price."""

    @classmethod
    @abstractmethod
    def for_workspace(cls, workspace: Workspace, *, region: str) -> Self:
        """Make the provider of the machines of a workspace, by its own variables of the environment.

        Raises:
            ProvisioningError: It cannot be set up, or the region's name cannot be one.
        """

    @classmethod
    def run_location(cls, workspace: Workspace, run_id: str) -> str:
        """Return where the flow's host and the nodes of a run meet: a folder here, or a URI in the run store.

        Machines that people have may share the folder of the workspace; they meet there where no run store is named.

        Raises:
            ConfigurationError: There is no run store that the nodes could reach, or its URI holds credentials.
        """
        is_folder = cls.runs_here or (cls.has_inventory and not has_run_store())
        return str(workspace.run_folder(run_id)) if is_folder else location_in_store(run_id)

    @staticmethod
    def is_set_up() -> bool:
        """Tell whether it may have been used on this machine: then it is swept also where the ledger is lost."""
        return True

    @staticmethod
    def is_beside_store() -> bool:
        """Tell whether this very machine is where traffic to the run store is free."""
        return False

    @classmethod
    def found_machines(cls, workspace: Workspace) -> tuple[MachineKind, ...]:
        """Ask its home for the kinds of machines that are there, as `heterps inventory` writes them; none if rented.

        Raises:
            ProvisioningError: The home does not answer.
        """
        return ()

    @classmethod
    def kinds(cls, workspace: Workspace) -> tuple[MachineKind, ...]:
        """Return its kinds of machines, whose device types plans may name from then on: listed ones, else found ones.

        Raises:
            ConfigurationError: The inventory cannot be used, or there is no machine.
            ProvisioningError: The home does not answer.
        """
        listed = tuple(kind for kind in read_inventory(workspace) if kind.home == cls.name)
        kinds = listed or cls.found_machines(workspace)
        if cls.has_inventory and not kinds:
            raise ConfigurationError(
                f"provider {cls.name} needs machines, but {inventory_path(workspace)} lists none with home = "
                f'"{cls.name}" and none was found; see docs/HOMES.md'
            )
        OWN_DEVICE_TYPES.update({each.name: each for kind in kinds for each in kind.device_types()})
        return kinds

    def missing_images(self) -> dict[str, str]:
        """Return the architectures that no machine image boots, and how to make or name one; none without images.

        Raises:
            ProvisioningError: The provider does not answer.
        """
        return {}

    def zones(self) -> Collection[str] | None:
        """Return the zones in which machines can be launched; None for all.

        Raises:
            ProvisioningError: The provider does not answer.
        """
        return None

    def unit_limits(self, device_types: Iterable[str], offers: Iterable[InstanceOffer]) -> UnitLimits:
        """Return the most units of device types that the account's quotas allow of each alone."""
        return UnitLimits({}, {}, "")

    def check_quotas(self, plan: ProvisioningPlan) -> None:  # noqa: B027
        """Check that the account's quotas allow all machines of a plan together, beside those that run.

        Raises:
            QuotaExceededError: They do not; names the way out.
        """

    @staticmethod
    def asks_less(plan: ProvisioningPlan, of: ProvisioningPlan, quotas: Iterable[str]) -> bool:
        """Tell whether a plan asks less than another, or nothing, of each of the quotas that refused that one."""
        return False

    @classmethod
    def services_usd_per_machine_hour(cls) -> float:
        """Return the hourly cost of a machine besides its own price, for its disk and address."""
        return usd_per_machine_hour(disk_gb_each=cls.disk_gb_each) if cls.charges_services else 0.0

    @classmethod
    def billed_usd_per_hour(cls, plan: ProvisioningPlan) -> float:
        """Return the hourly bill of all machines of a plan, with their disks and addresses."""
        num_machines = sum(group.count for group in plan.groups)
        services_usd_per_hour = num_machines * cls.services_usd_per_machine_hour()
        return plan.price_usd_per_hour + services_usd_per_hour + plan.disk_usd_per_hour

    def now(self) -> datetime:
        """Return the time by the clock that the provider dates its machines with."""
        return datetime.now(UTC)

    def looks_after(self, entry: LedgerEntry) -> bool:
        """Tell whether a machine of the ledger is one that this provider would find."""
        return entry.provider == self.name

    def all_regions(self) -> tuple[str, ...]:
        """Return every region in which the account may have machines.

        Raises:
            ProvisioningError: The provider does not answer.
        """
        return (self.region,)

    def checks(self) -> Iterator[Check]:
        """Yield the checks of launching from this machine, for `heterps doctor`; nothing is bought or made."""
        return iter(())

    def check_run_directory(self, location: str) -> None:  # noqa: B027
        """Check, before anything is launched, that nodes can be let into a run directory.

        Raises:
            ConfigurationError: Something is missing for it.
        """

    def prepared(self, run_id: str, bootstrap: Bootstrap) -> AbstractContextManager[object]:
        """Make, while a launch is planned in the block, the parts of it that the provider knows with a delay.

        Where the block raises they are removed again, else by the end of the launch, or by the sweep.

        Raises:
            ConfigurationError: Something is missing for them.
            ProvisioningError: One cannot be made.
        """
        return nullcontext()

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
            run_id: At most 64 letters, digits, '.', '_' and '-'; one id stands for one plan.
            lease_until: With a time zone; after it the sweeper ends the machines.

        Raises:
            ProvisioningError: A machine is not available; those that were launched are terminated.
        """
        check_run_id(run_id)
        launch = Launch(run_id=run_id, lease_until=lease_until, bootstrap=bootstrap, ledger=ledger)
        return self.launched(plan, launch)

    @abstractmethod
    def launched(self, plan: ProvisioningPlan, launch: Launch) -> Cluster:
        """Start every machine of a plan, or none; see `launch`."""

    @abstractmethod
    def wait_until_ready(self, cluster: Cluster, *, timeout_s: float) -> None:
        """Return once all machines are up.

        Raises:
            ProvisioningError: One ended, or is not up in time.
        """

    @abstractmethod
    def renew_lease(self, run_id: str, *, until: datetime) -> None:
        """Move the lease of all machines of a run."""

    def terminate(self, run_id: str) -> tuple[str, ...]:
        """End all machines of a run and return the provider's ids of those that this call ended.

        Raises:
            ProvisioningError: A machine could not be ended.
        """
        check_run_id(run_id)
        instances = self.list_instances(run_id)
        self.terminate_instances(instances)
        return tuple(instance.provider_instance_id for instance in instances)

    @abstractmethod
    def terminate_instances(self, instances: Sequence[Instance]) -> None:
        """End machines of one run.

        Raises:
            ProvisioningError: One could not be ended.
        """

    @abstractmethod
    def list_instances(self, run_id: str | None = None) -> tuple[Instance, ...]:
        """Return the machines of one run, or of all, that exist and are not ending."""

    def remembered_instances(self, provider_instance_ids: Collection[str]) -> tuple[Instance, ...]:
        """Return all machines that the provider still knows of, ended ones with the time of their end too.

        They are looked for by id too, in case they have lost their tags.
        """
        return self.list_instances()

    def spot_prices(self, entries: Collection[LedgerEntry]) -> dict[str, SpotHistory]:
        """Return the price history of each spot machine, by the provider's ids, without machines that it forgot.

        Raises:
            ProvisioningError: It does not answer.
        """
        return {}

    def remove_leftovers(self, *, now: datetime) -> tuple[str, ...]:
        """Remove the leftovers of runs without machines, and return their names."""
        return ()

    def end_run(
        self, run_id: str, *, ledger: Ledger, reason: EndReason, problem: str = NO_MACHINE
    ) -> tuple[str, ...]:
        """End all machines of a run and write each down, also one whose launch was not; may be called again.

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
