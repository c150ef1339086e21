"""Ends machines that nobody answers for any more.

The third of the four layers of teardown. It trusts nothing but what the provider lists, so it works when
the flow, its host, Prefect and the run's own files are all gone; plain cron can call it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime

from heterps_core.errors import ProvisioningError
from infra.ledger import EndReason, EntryState, Ledger
from infra.providers.base import LiveInstance, Provider

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweptMachine:
    """A machine that the sweep ended, or found gone."""

    run_id: str
    node_id: str
    provider_instance_id: str
    reason: EndReason


def sweep(provider: Provider, *, now: datetime, ledger: Ledger) -> list[SweptMachine]:
    """End every machine whose lease is over or whose owner is dead, and write it down.

    Entries of the ledger whose machine is no more, though nobody ended it (a spot interruption, its own
    shutdown timer), are closed as gone. A machine that cannot be ended now does not keep the others alive:
    it is logged and left to the next sweep.

    Args:
        provider: Whose machines to look at.
        now: With a time zone.
        ledger: Is brought up to date; machines it does not know are ended all the same.
    """
    instances = provider.list_instances()
    swept: list[SweptMachine] = []
    for instance in instances:
        reason = reason_to_end(instance, now=now)
        if reason is None:
            continue
        try:
            provider.terminate_instance(instance)
        except ProvisioningError as problem:
            logger.error(
                "run %s: %s is left to the next sweep: %s", instance.run_id, instance.node_id, problem
            )
            continue
        # The launching process may have died between the call and its record.
        ledger.launched(
            instance.run_id,
            instance.node_id,
            provider_instance_id=instance.provider_instance_id,
            at=instance.launched_at,
        )
        ledger.ended(instance.run_id, instance.node_id, reason=reason, at=now)
        logger.warning("run %s: ended %s: %s", instance.run_id, instance.provider_instance_id, reason)
        swept.append(_swept(instance, reason))
    return swept + _close_gone(provider, instances, now=now, ledger=ledger)


def reason_to_end(instance: LiveInstance, *, now: datetime) -> EndReason | None:
    """Return why a machine should be ended, or None where it should live."""
    if instance.is_owner_dead:
        return EndReason.OWNER_DEAD
    if instance.lease_until is None:
        return EndReason.LEASE_UNREADABLE
    return EndReason.LEASE_EXPIRED if instance.lease_until < now else None


def _close_gone(
    provider: Provider, instances: tuple[LiveInstance, ...], *, now: datetime, ledger: Ledger
) -> list[SweptMachine]:
    """Close the open entries that no machine answers to."""
    live = {(instance.run_id, instance.node_id) for instance in instances}
    gone: list[SweptMachine] = []
    for entry in ledger.entries():
        is_old = (now - entry.intended_at).total_seconds() > provider.lease_s
        # A young one may have been launched after the provider was asked.
        if entry.provider != provider.name or (entry.run_id, entry.node_id) in live or not is_old:
            continue
        ledger.failed(entry.run_id, entry.node_id, reason="no machine was found by the sweep", at=now)
        if entry.state is EntryState.LAUNCHED and entry.provider_instance_id is not None:
            # It ended some time before; counting to now errs on the dear side.
            ledger.ended(entry.run_id, entry.node_id, reason=EndReason.GONE, at=now)
            gone.append(
                SweptMachine(
                    run_id=entry.run_id,
                    node_id=entry.node_id,
                    provider_instance_id=entry.provider_instance_id,
                    reason=EndReason.GONE,
                )
            )
    return gone


def _swept(instance: LiveInstance, reason: EndReason) -> SweptMachine:
    return SweptMachine(
        run_id=instance.run_id,
        node_id=instance.node_id,
        provider_instance_id=instance.provider_instance_id,
        reason=reason,
    )
