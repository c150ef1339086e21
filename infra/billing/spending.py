"""The cost of a run's machines so far, by cluster, ledger and provider, and by a steady clock.

A ledger can be damaged, a cloud may not answer, and a clock can be set while a run lives. Each machine counts once
with the longest life that any of them tells; what was seen once counts on, also while nothing can be seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from heterps_core.cluster import Cluster
from heterps_core.errors import LedgerError, ProvisioningError
from heterps_core.units import SECONDS_PER_HOUR
from infra.billing.budget import Spending, spent_usd, start_of_month
from infra.ledger.ledger import LedgerEntry
from infra.ledger.ledger_entry import Instance
from infra.providers.base import Provider

PROVIDER_INTERVAL_S = 30.0
"""Between questions to the provider: its machines change in minutes, and EC2 counts calls."""

ANSWER_WAIT_S = 5.0
"""For an answer; a later one is heard later, and the count goes on meanwhile."""


@dataclass(kw_only=True, slots=True)
class _Machine:
    """A machine of the run."""

    usd_per_hour: float
    """With its disk and address."""

    launched_at: datetime
    first_seen_s: float
    ended_at: datetime | None = None
    is_listed: bool = False
    """By the provider, as alive: it knows better than a ledger that says that it has ended."""

    listed_at: datetime | None = None


class SpendingMeter:
    """Adds up the cost of a run; call it again and again.

    Args:
        provider: Of the machines; asked every `PROVIDER_INTERVAL_S`.
        belongs: Tells of a launch id whether it is one of the run's.
        bucket_usd: What the run will pay for its bucket whatever its length; counts from the start.
        steady_s: A clock that is never set, in seconds.
    """

    def __init__(
        self,
        provider: Provider,
        cluster: Cluster,
        *,
        entries: Callable[[], Sequence[LedgerEntry]],
        belongs: Callable[[str], bool],
        bucket_usd: float = 0.0,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._provider = provider
        self._entries = entries
        self._belongs = belongs
        self._bucket_usd = bucket_usd
        self._steady_s = steady_s
        self._began_s = steady_s()
        self._began_at: datetime | None = None
        self._question: threading.Thread | None = None
        self._asked_s = self._began_s - PROVIDER_INTERVAL_S
        self._answer: tuple[Instance, ...] | None = None
        self._provider_problem: str | None = None
        self._others_usd = 0.0
        self._month = datetime.min.replace(tzinfo=UTC)
        self._ask_provider()
        # By this machine's clock at both ends: what it has waited for the machines to be up.
        waited = max(datetime.now(UTC) - datetime.fromisoformat(cluster.created_at), timedelta())
        self._machines = {
            node.provider_instance_id: _Machine(
                usd_per_hour=self._billed(node.price_usd_per_hour + node.disk_usd_per_hour),
                launched_at=self._now() - waited,
                first_seen_s=self._began_s - waited.total_seconds(),
            )
            for node in cluster.nodes
        }

    def __call__(self) -> Spending:
        """Return the spending until now, with `blind_because` where neither ledger nor provider could be read."""
        self._ask_provider()
        now = self._now()
        answer, self._answer = self._answer, None
        if answer is not None:
            self._learn_instances(answer, now=now)
        ledger_problem: str | None = None
        try:
            self._learn_entries(self._entries(), now=now)
        except (LedgerError, OSError) as problem:
            ledger_problem = str(problem)
        run_usd = sum(self._cost_usd(machine, now=now) for machine in self._machines.values())
        month_usd = self._others_usd + sum(
            self._cost_usd(machine, now=now, since=start_of_month(now)) for machine in self._machines.values()
        )
        return Spending(
            run_usd=run_usd + self._bucket_usd,
            month_usd=month_usd + self._bucket_usd,
            blind_because=f"{ledger_problem}; {self._provider_problem}"
            if ledger_problem and self._provider_problem
            else None,
        )

    def _ask_provider(self) -> None:
        """Ask in a thread: a network that does not answer must not stop the count."""
        if self._steady_s() - self._asked_s < PROVIDER_INTERVAL_S:
            return
        if self._question is None or not self._question.is_alive():
            self._asked_s = self._steady_s()
            self._provider_problem = f"{self._provider.name} has not answered"
            self._question = threading.Thread(target=self._hear_provider, name="spending", daemon=True)
            self._question.start()
            self._question.join(ANSWER_WAIT_S)

    def _hear_provider(self) -> None:
        try:
            answer = self._provider.list_instances()
            if self._began_at is None:
                self._began_at, self._began_s = self._provider.now(), self._steady_s()
        except (ProvisioningError, OSError) as problem:
            self._provider_problem = str(problem)
        else:
            self._answer, self._provider_problem = answer, None

    def _now(self) -> datetime:
        """Return the time by the provider's clock when it first answered, counted on by the steady one."""
        if self._began_at is None:
            return datetime.now(UTC)
        return self._began_at + timedelta(seconds=self._steady_s() - self._began_s)

    def _learn_entries(self, entries: Sequence[LedgerEntry], *, now: datetime) -> None:
        others: list[LedgerEntry] = []
        for entry in entries:
            if entry.provider != self._provider.name or entry.launched_at is None:
                continue
            if not self._belongs(entry.run_id):
                others.append(entry)
                continue
            price = entry.price_usd_per_hour + entry.disk_usd_per_hour
            machine = self._machine(entry.provider_instance_id or "", price, entry.launched_at)
            machine.usd_per_hour = self._billed(price)
            if machine.is_listed or entry.ended_at is None:
                machine.ended_at = None
            else:
                machine.ended_at = max(entry.ended_at, machine.listed_at or entry.ended_at)
        month = start_of_month(now)
        others_usd = spent_usd(others, self._provider, now=now, since=month)
        # What a rebuilt ledger has lost was spent all the same.
        self._others_usd = others_usd if month != self._month else max(others_usd, self._others_usd)
        self._month = month

    def _learn_instances(self, instances: Sequence[Instance], *, now: datetime) -> None:
        for machine in self._machines.values():
            machine.is_listed = False
        for instance in instances:
            is_known = instance.provider_instance_id in self._machines
            if not is_known and (instance.terms is None or not self._belongs(instance.run_id)):
                continue
            terms = instance.terms
            price = 0.0 if terms is None else terms.price_usd_per_hour + terms.disk_usd_per_hour
            machine = self._machine(instance.provider_instance_id, price, instance.launched_at)
            machine.is_listed, machine.listed_at, machine.ended_at = True, now, None

    def _machine(
        self, provider_instance_id: str, price_usd_per_hour: float, launched_at: datetime
    ) -> _Machine:
        machine = self._machines.get(provider_instance_id)
        if machine is None:
            machine = _Machine(
                usd_per_hour=self._billed(price_usd_per_hour),
                launched_at=launched_at,
                first_seen_s=self._steady_s(),
            )
            self._machines[provider_instance_id] = machine
        machine.launched_at = min(machine.launched_at, launched_at)
        return machine

    def _billed(self, price_usd_per_hour: float) -> float:
        return price_usd_per_hour + self._provider.services_usd_per_machine_hour()

    def _cost_usd(self, machine: _Machine, *, now: datetime, since: datetime | None = None) -> float:
        lived_s = ((machine.ended_at or now) - machine.launched_at).total_seconds()
        if machine.ended_at is None:
            lived_s = max(lived_s, self._steady_s() - machine.first_seen_s)
        seconds = max(lived_s, self._provider.minimum_billed_s)
        if since is not None and machine.launched_at < since:
            seconds = max(seconds - (since - machine.launched_at).total_seconds(), 0.0)
        return seconds / SECONDS_PER_HOUR * machine.usd_per_hour
