"""Terminates orphaned machines (lease expired or owner dead), and charges their cost to their runs.

The third of the four layers of teardown. It trusts nothing but what the provider says of each machine's state, so it
works when the flow, its host, Prefect, the ledger and the run's own files are all gone. The flow sweep-orphans runs
it, and `heterps sweep` from plain cron.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from heterps_core.errors import HeterpsError, LedgerError, ProvisioningError
from infra.billing.budget import spent_usd
from infra.ledger.ledger import NO_MACHINE, EndReason, EntryState, Ledger, LedgerEntry
from infra.ledger.ledger_entry import Instance
from infra.ledger.ledger_file import readable_entries, set_aside_if_damaged
from infra.providers import PROVIDERS, Provider, get_provider, provider_of
from infra.workspace import Workspace, region_of_run_store

logger = logging.getLogger(__name__)

_STILL_LISTED = timedelta(minutes=2)
"""Longest time after its end in which a machine may be listed as alive: lists of EC2 lag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweptMachine:
    """A machine that the sweep ended, or found gone, or could not end."""

    run_id: str
    node_id: str
    provider_instance_id: str
    reason: EndReason
    usd: float
    """Its whole cost, which its run is charged; 0 where neither it nor the ledger has a price."""

    problem: str | None = None
    is_booked: bool = True
    """Whether the ledger says so, as far as it has a price; the next sweep writes down what is missing."""

    def __str__(self) -> str:
        verb = "ended" if self.problem is None else "could not end"
        text = f"{verb} {self.provider_instance_id} of run {self.run_id}: {self.reason}, {self.usd:.6f} USD in all"
        if self.problem is not None:
            return f"{text}; left to the next sweep: {self.problem}"
        return text if self.is_booked else f"{text}; not written down"


class UnbookedError(LedgerError):
    """Machines were swept, but not all of it could be written down."""

    def __init__(self, problem: LedgerError, machines: list[SweptMachine]) -> None:
        super().__init__(str(problem))
        self.machines = machines


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What a sweep over several providers did."""

    machines: tuple[SweptMachine, ...]
    problems: tuple[str, ...]
    """Providers that did not answer, and a ledger that could not be used."""

    places: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def check_clean(self) -> None:
        """Check that every provider was swept, and that all ended that should, and was written down.

        Raises:
            ProvisioningError: Not so; names the machines that are left and the providers that did not answer.
        """
        machines = (str(m) for m in self.machines if m.problem is not None or not m.is_booked)
        if left := [*machines, *self.problems]:
            raise ProvisioningError("; ".join(left))


def sweep_workspace(
    workspace: Workspace, names: Sequence[str] | None = None, *, region: str | None = None
) -> Sweep:
    """Sweep the providers of a workspace; nothing that fails in one place keeps the others, or the machines, alive.

    Args:
        names: Of the providers; None for those in use, which are all where the ledger cannot tell.
        region: Of a cloud, besides those that runs rent in and that the ledger names.
    """
    problems: list[str] = []
    notes: list[str] = []
    ledger: Ledger | None = None
    entries: tuple[LedgerEntry, ...] | None = None
    try:
        ledger, note = usable_ledger(workspace)
        notes += [note] if note else []
        entries = ledger.entries()
    except (LedgerError, OSError) as problem:
        problems.append(
            f"machines are ended, and what became of them may be missing in the ledger: {problem}"
        )
    if names is None:
        names = possible_providers() if entries is None or notes else providers_in_use(entries)
    machines: list[SweptMachine] = []
    places: list[str] = []
    for name in names:
        for place in regions_of(workspace, name, None if notes else entries, configured=region):
            where = f"{name} in {place}" if place else name
            try:
                provider = provider_of(workspace, name, region=place)
                machines += sweep(provider, now=provider.now(), ledger=ledger)
                places.append(where)
            except UnbookedError as problem:
                machines += problem.machines
                places.append(where)
                problems.append(f"{where} was swept and is not all written down: {problem}")
            except (HeterpsError, OSError) as problem:
                problems.append(f"{where} was not swept: {problem}")
    return Sweep(machines=tuple(machines), problems=tuple(problems), places=tuple(places), notes=tuple(notes))


def usable_ledger(workspace: Workspace) -> tuple[Ledger, str | None]:
    """Return a readable ledger, with a note where a damaged file was set aside.

    The new one has what could still be read; what is missing, a sweep writes down from the machines' tags.

    Raises:
        LedgerError: It can neither be used nor replaced now: another process holds it, or its disk is full.
    """
    path = workspace.ledger_path
    with set_aside_if_damaged(path, now=datetime.now(UTC)) as aside:
        if aside is None:
            return Ledger(path), None
        ledger = Ledger(path)
        readable = readable_entries(aside)
        ledger.restore(readable)
    note = (
        f"the ledger was damaged and is kept as {aside}; {len(readable)} machines could be read of it, others are "
        f"written down from their tags"
    )
    logger.warning("%s", note)
    return ledger, note


def sweep(provider: Provider, *, now: datetime, ledger: Ledger | None) -> list[SweptMachine]:
    """End every machine whose lease is over or whose owner is dead, and write it down.

    Machines that have ended by themselves (a spot interruption, their own shutdown timer, a process
    killed between the call and its record), are closed as gone at the time that the provider gives. A machine that
    the ledger does not know gets an entry from its tags, and one that it holds for ended is launched again. All
    that must end is ended first, each in an attempt of its own; only then is anything written down.

    Without a ledger nothing is written down, and after its first error nothing more.

    Raises:
        ProvisioningError: The provider does not answer.
        UnbookedError: All were asked to end, and it could not be written down; the next sweep does it.
    """
    instances = provider.remembered_instances(_known_ids(ledger, provider))
    began_s = time.monotonic()
    looks = [_look_at(provider, instance, now=now, began_s=began_s) for instance in instances]
    swept: list[SweptMachine] = []
    unbooked: LedgerError | None = None
    for look in looks:
        machine = _reported(provider, look, None)
        try:
            if ledger is not None:
                machine = _booked(provider, look, now=now, ledger=ledger)
        except LedgerError as problem:
            # What is wrong with it for one machine (held, full) is so for all, and each would wait for its lock.
            ledger, unbooked = None, problem
        if machine is not None:
            swept.append(replace(machine, is_booked=ledger is not None))
    try:
        if ledger is not None:
            swept.extend(_close_gone(provider, instances, now=now, ledger=ledger))
    except LedgerError as problem:
        unbooked = problem
    try:
        for name in provider.remove_leftovers(now=now):
            logger.info("deleted %s", name)
    except ProvisioningError as problem:
        logger.warning("leftovers that cost nothing stay to the next sweep: %s", problem)
    if unbooked is not None:
        raise UnbookedError(unbooked, swept) from unbooked
    return swept


def reason_to_end(instance: Instance, *, now: datetime, tags_grace_s: float) -> EndReason | None:
    """Return why a machine should be ended, or None where it should live.

    Args:
        tags_grace_s: A machine whose lease cannot be read lives until it is so old: a provider may show a machine
            before what it carries. One that seems launched later than that from now has a wrong clock against it.
    """
    if instance.is_owner_dead:
        return EndReason.OWNER_DEAD
    if instance.lease_until is None:
        is_young = abs((now - instance.launched_at).total_seconds()) < tags_grace_s
        return None if is_young else EndReason.LEASE_UNREADABLE
    return EndReason.LEASE_EXPIRED if instance.lease_until < now else None


def regions_of(
    workspace: Workspace, name: str, entries: Iterable[LedgerEntry] | None, *, configured: str | None = None
) -> list[str]:
    """Return where machines of a provider may be: where runs rent, where the ledger has had some, and one more.

    Entries that are over count too: one may have been closed by mistake. A provider without regions has one place
    without a name.

    Args:
        entries: Of the whole ledger; None where it cannot tell, and all regions of the account count.
    """
    provider = get_provider(name)
    if not provider.has_regions:
        return [""]
    places = {region for region in (provider.region, region_of_run_store(), configured) if region}
    if entries is not None:
        return sorted(places | {entry.region for entry in entries if entry.provider == name})
    try:
        places |= {*provider_of(workspace, name).all_regions()}
    except ProvisioningError as problem:
        logger.warning("machines are looked for in %s alone: %s", ", ".join(sorted(places)), problem)
    return sorted(places)


def possible_providers() -> list[str]:
    """Return the providers that may have machines of a workspace whose ledger is lost.

    A cloud may be set up in other shells than this one; a cluster whose commands are not here was never used.
    """
    return sorted(name for name, each in PROVIDERS.items() if each.has_regions or each.is_set_up())


def providers_in_use(entries: Iterable[LedgerEntry]) -> list[str]:
    """Return the providers with open machines in the ledger, and those that are set up here.

    The latter whatever a lost ledger says.
    """
    names = {entry.provider for entry in entries if entry.is_open}
    return sorted({*names, *(name for name, provider in PROVIDERS.items() if provider.is_set_up())})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """A machine with the decision of the sweep."""

    instance: Instance
    reason: EndReason | None
    """Why it is over or must be; None where it should live."""

    problem: str | None
    over_at: datetime


def _look_at(provider: Provider, instance: Instance, *, now: datetime, began_s: float) -> _Look:
    """End a machine if it should be; `now` was when the steady clock stood at `began_s`."""
    if instance.is_ended:
        over_at = instance.ended_at or now
        return _Look(instance=instance, reason=instance.end_reason, problem=None, over_at=over_at)
    reason = reason_to_end(instance, now=now, tags_grace_s=provider.tags_grace_s)
    problem: str | None = None
    if reason is not None:
        try:
            provider.terminate_instances([instance])
        except (HeterpsError, OSError) as error:
            problem = str(error)
    # Ending the machines before this one took its time, in which it was billed.
    over_at = now + timedelta(seconds=time.monotonic() - began_s)
    return _Look(instance=instance, reason=reason, problem=problem, over_at=over_at)


def _booked(provider: Provider, look: _Look, *, now: datetime, ledger: Ledger) -> SweptMachine | None:
    """Write down the end of a machine; None where there is nothing to report."""
    instance = look.instance
    if look.reason is None:
        _keep_in_books(provider, instance, now=now, ledger=ledger)
        return None
    entry = ledger.recover(provider.name, instance)
    if entry is not None and entry.state is EntryState.LAUNCHED and look.problem is None:
        return _close(provider, entry, reason=look.reason, at=look.over_at, ledger=ledger)
    return _reported(provider, look, entry)


def _reported(provider: Provider, look: _Look, entry: LedgerEntry | None) -> SweptMachine | None:
    """Return the report of a machine whose entry in the ledger, where it has one, stays as it is."""
    instance = look.instance
    if look.reason is None or instance.is_ended:
        return None
    return SweptMachine(
        run_id=instance.run_id if entry is None else entry.run_id,
        node_id=(instance.node_id or instance.provider_instance_id) if entry is None else entry.node_id,
        provider_instance_id=instance.provider_instance_id,
        reason=look.reason,
        usd=0.0 if entry is None else _cost_usd(provider, entry, at=look.over_at),
        problem=look.problem,
    )


def _keep_in_books(provider: Provider, instance: Instance, *, now: datetime, ledger: Ledger) -> None:
    """See that the ledger has a living machine as launched, unless a launch or an end is being written right now."""
    entries = ledger.entries(run_id=instance.run_id)
    own = [entry for entry in entries if entry.provider_instance_id == instance.provider_instance_id]
    is_being_launched = any(entry.state is EntryState.INTENDED for entry in entries)
    is_just_ended = any(entry.ended_at is not None and now - entry.ended_at < _STILL_LISTED for entry in own)
    if not is_being_launched and not is_just_ended:
        ledger.recover(provider.name, instance)


def _close_gone(
    provider: Provider, instances: Sequence[Instance], *, now: datetime, ledger: Ledger
) -> Iterator[SweptMachine]:
    """Close the open entries that no machine answers to, and yield those that had one."""
    ids = {instance.provider_instance_id for instance in instances}
    nodes = {(instance.run_id, instance.node_id) for instance in instances}
    for entry in _open_entries(ledger, provider):
        is_old = (now - entry.intended_at).total_seconds() > provider.lease_s
        # A young one may have been launched after the provider was asked.
        if entry.provider_instance_id in ids or (entry.run_id, entry.node_id) in nodes or not is_old:
            continue
        if entry.state is EntryState.INTENDED:
            ledger.failed(entry.run_id, entry.node_id, reason=f"{NO_MACHINE} by the sweep", at=now)
        else:
            # It ended some time before; counting to now errs on the expensive side.
            yield _close(provider, entry, reason=EndReason.GONE, at=now, ledger=ledger)


def _known_ids(ledger: Ledger | None, provider: Provider) -> list[str]:
    try:
        entries = [] if ledger is None else _open_entries(ledger, provider)
    except LedgerError as problem:
        logger.warning("machines are looked for by their tags alone: %s", problem)
        return []
    return [entry.provider_instance_id for entry in entries if entry.provider_instance_id is not None]


def _open_entries(ledger: Ledger, provider: Provider) -> list[LedgerEntry]:
    return [entry for entry in ledger.entries() if provider.looks_after(entry) and entry.is_open]


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


def _cost_usd(provider: Provider, entry: LedgerEntry, *, at: datetime) -> float:
    return spent_usd([replace(entry, ended_at=entry.ended_at or at)], provider, now=at)
