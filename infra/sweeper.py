"""Ends machines that nobody answers for any more, and charges their dollars to their runs.

The third of the four layers of teardown. It trusts nothing but what the provider says of each machine's state, so it
works when the flow, its host, Prefect, the ledger and the run's own files are all gone. The flow sweep-orphans runs
it, and `heterps sweep` from plain cron.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from heterps_core.errors import HeterpsError, ProvisioningError
from infra.budget import spent_usd
from infra.instances import Instance
from infra.ledger import NO_MACHINE, EndReason, EntryState, Ledger, LedgerEntry
from infra.providers import Provider, provider_for
from infra.workspace import Workspace

logger = logging.getLogger(__name__)

_OPEN_STATES = (EntryState.INTENDED, EntryState.LAUNCHED)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweptMachine:
    """A machine that the sweep ended, or found gone, or could not end."""

    run_id: str
    node_id: str
    provider_instance_id: str
    reason: EndReason
    usd: float
    """That its run is charged for it in all; 0 where the machine carries no price and the ledger knows none."""

    problem: str | None = None
    """Why it is still there; None where it is gone."""

    def __str__(self) -> str:
        verb = "ended" if self.problem is None else "could not end"
        text = f"{verb} {self.provider_instance_id} of run {self.run_id}: {self.reason}, {self.usd:.6f} USD in all"
        return text if self.problem is None else f"{text}; left to the next sweep: {self.problem}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What a sweep over several providers did."""

    machines: tuple[SweptMachine, ...]
    problems: tuple[str, ...]
    """Of providers that did not answer."""

    @property
    def is_clean(self) -> bool:
        """Every provider was swept, and nothing is left that should have ended."""
        return not self.problems and all(machine.problem is None for machine in self.machines)


def sweep_workspace(workspace: Workspace, names: Sequence[str], *, region: str) -> Sweep:
    """Sweep the providers of a workspace by name; one that does not answer does not keep the others."""
    ledger = Ledger(workspace.ledger_path)
    machines: list[SweptMachine] = []
    problems: list[str] = []
    for name in names:
        try:
            provider = provider_for(name, workspace, region=region)
            machines += sweep(provider, now=datetime.now(UTC), ledger=ledger)
        except HeterpsError as problem:
            problems.append(f"{name} was not swept: {problem}")
    return Sweep(machines=tuple(machines), problems=tuple(problems))


def sweep(provider: Provider, *, now: datetime, ledger: Ledger) -> list[SweptMachine]:
    """End every machine whose lease is over or whose owner is dead, and write it down.

    Machines that are no more, though nobody ended them (a spot interruption, their own shutdown timer, a process
    killed between the call and its record), are closed as gone at the time that the provider gives. A machine that
    the ledger does not know gets an entry from its tags. One that cannot be ended now does not keep the others alive.

    Args:
        provider: Whose machines to look at.
        now: With a time zone.
        ledger: Is brought up to date.

    Raises:
        ProvisioningError: The provider does not answer.
    """
    known_ids = [
        entry.provider_instance_id
        for entry in _open_entries(ledger, provider)
        if entry.provider_instance_id is not None
    ]
    instances = provider.remembered_instances(known_ids)
    swept = [_look_at(provider, instance, now=now, ledger=ledger) for instance in instances]
    gone = _close_gone(provider, instances, now=now, ledger=ledger)
    try:
        for name in provider.remove_leftovers(now=now):
            logger.info("deleted %s", name)
    except ProvisioningError as problem:
        logger.warning("leftovers that cost nothing stay to the next sweep: %s", problem)
    return [machine for machine in swept if machine is not None] + gone


def reason_to_end(instance: Instance, *, now: datetime, tags_grace_s: float) -> EndReason | None:
    """Return why a machine should be ended, or None where it should live.

    Args:
        instance: As the provider shows it.
        now: With a time zone.
        tags_grace_s: A machine whose lease cannot be read lives until it is so old: a provider may show a machine
            before what it carries. One that seems launched later than that from now has a wrong clock against it.
    """
    if instance.is_owner_dead:
        return EndReason.OWNER_DEAD
    if instance.lease_until is None:
        is_young = abs((now - instance.launched_at).total_seconds()) < tags_grace_s
        return None if is_young else EndReason.LEASE_UNREADABLE
    return EndReason.LEASE_EXPIRED if instance.lease_until < now else None


def providers_in_use(ledger: Ledger) -> list[str]:
    """Return the local provider and those with machines that the ledger does not know to be over."""
    names = {entry.provider for entry in ledger.entries() if entry.state in _OPEN_STATES}
    return sorted({"local", *names})


def _look_at(provider: Provider, instance: Instance, *, now: datetime, ledger: Ledger) -> SweptMachine | None:
    """End a machine if it should be, or close its entry if it has ended; None where there is nothing to do."""
    reason = (
        EndReason.GONE
        if instance.is_ended
        else reason_to_end(instance, now=now, tags_grace_s=provider.tags_grace_s)
    )
    if reason is None:
        return None
    problem: str | None = None
    if not instance.is_ended:
        try:
            # Before the ledger is touched: the machine must end also where that cannot be written.
            provider.terminate_instance(instance)
        except ProvisioningError as error:
            problem = str(error)
    entry = ledger.recover(provider.name, instance)
    if entry is not None and entry.state is EntryState.LAUNCHED and problem is None:
        return _close(provider, entry, reason=reason, at=instance.ended_at or now, ledger=ledger)
    if instance.is_ended:
        return None
    return _swept(provider, instance, entry, reason=reason, at=now, problem=problem)


def _close_gone(
    provider: Provider, instances: Sequence[Instance], *, now: datetime, ledger: Ledger
) -> list[SweptMachine]:
    """Close the open entries that no machine answers to."""
    ids = {instance.provider_instance_id for instance in instances}
    nodes = {(instance.run_id, instance.node_id) for instance in instances}
    gone: list[SweptMachine] = []
    for entry in _open_entries(ledger, provider):
        is_old = (now - entry.intended_at).total_seconds() > provider.lease_s
        # A young one may have been launched after the provider was asked.
        if entry.provider_instance_id in ids or (entry.run_id, entry.node_id) in nodes or not is_old:
            continue
        if entry.state is EntryState.INTENDED:
            ledger.failed(entry.run_id, entry.node_id, reason=f"{NO_MACHINE} by the sweep", at=now)
        else:
            # It ended some time before; counting to now errs on the dear side.
            gone.append(_close(provider, entry, reason=EndReason.GONE, at=now, ledger=ledger))
    return gone


def _open_entries(ledger: Ledger, provider: Provider) -> list[LedgerEntry]:
    return [
        entry for entry in ledger.entries() if entry.provider == provider.name and entry.state in _OPEN_STATES
    ]


def _close(
    provider: Provider, entry: LedgerEntry, *, reason: EndReason, at: datetime, ledger: Ledger
) -> SweptMachine:
    ledger.ended(entry.run_id, entry.node_id, reason=reason, at=at)
    machine = SweptMachine(
        run_id=entry.run_id,
        node_id=entry.node_id,
        provider_instance_id=entry.provider_instance_id or "",
        reason=reason,
        usd=_cost_usd(provider, entry, at=at),
    )
    logger.info("%s", machine)
    return machine


def _swept(
    provider: Provider,
    instance: Instance,
    entry: LedgerEntry | None,
    *,
    reason: EndReason,
    at: datetime,
    problem: str | None = None,
) -> SweptMachine:
    return SweptMachine(
        run_id=instance.run_id if entry is None else entry.run_id,
        node_id=instance.provider_instance_id if entry is None else entry.node_id,
        provider_instance_id=instance.provider_instance_id,
        reason=reason,
        usd=0.0 if entry is None else _cost_usd(provider, entry, at=at),
        problem=problem,
    )


def _cost_usd(provider: Provider, entry: LedgerEntry, *, at: datetime) -> float:
    over = replace(entry, ended_at=entry.ended_at or at)
    return spent_usd(
        [over],
        minimum_billed_s=provider.minimum_billed_s,
        services_usd_per_machine_hour=provider.services_usd_per_machine_hour(),
        now=at,
    )
