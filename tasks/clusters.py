"""Machines for a run, and their end: the context manager for a flow, and the same by id for its hooks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from heterps_core.cluster import Cluster
from heterps_core.errors import ConfigurationError, UnknownNameError
from infra.billing import Bill, bill_for_run
from infra.caps import Caps
from infra.ledger import EntryState, Ledger
from infra.lifecycle import running_cluster, terminate_run
from infra.providers import PROVIDERS, Bootstrap, Provider, ProviderSettings, get_provider
from infra.sweeper import SweptMachine, sweep
from infra.workspace import Workspace
from tasks.provisioning import LOCAL_PROVIDER, REGION, Provisioning

RUN_STORE_VARIABLE = "HETERPS_RUN_STORE"
"""Where the flow's host and rented machines meet, for instance s3://bucket/heterps; not needed locally."""

NODE_PYTHON = "/opt/heterps/bin/python"
"""On the machine image of rented nodes."""

ATTEMPT_SEPARATOR = "."

logger = logging.getLogger(__name__)


def check_provider(workspace: Workspace, provider: str) -> None:
    """Check, before any work, that a provider is known and has what it needs.

    Raises:
        UnknownNameError: No such provider; names the known ones.
        ConfigurationError: It needs a place to meet its nodes, and none is given.
    """
    if provider not in PROVIDERS:
        raise UnknownNameError("provider", provider, PROVIDERS)
    run_location(workspace, provider, "check")


def run_location(workspace: Workspace, provider: str, run_id: str) -> str:
    """Return where the flow's host and the nodes of a run meet: a folder here, or a URI in the store.

    Raises:
        ConfigurationError: A rented node cannot reach a folder of this machine, and no store is set.
    """
    if provider == LOCAL_PROVIDER:
        return str(workspace.run_directory(run_id))
    store = os.environ.get(RUN_STORE_VARIABLE, "").rstrip("/")
    if "://" not in store:
        raise ConfigurationError(
            f"the provider {provider!r} needs a place that this machine and its nodes reach, "
            f"got {RUN_STORE_VARIABLE}={store!r}; set it to a URI such as s3://bucket/heterps"
        )
    return f"{store}/{run_id}"


@contextmanager
def rented_cluster(
    workspace: Workspace,
    provider: str,
    provisioning: Provisioning,
    *,
    run_id: str,
    run_directory: str,
    caps: Caps,
) -> Iterator[Cluster]:
    """Launch a plan, yield its cluster, end it whatever happens; see `infra.lifecycle.running_cluster`."""
    ledger = Ledger(workspace.ledger_path)
    bootstrap = Bootstrap(
        run_directory=run_directory,
        python=sys.executable if provider == LOCAL_PROVIDER else NODE_PYTHON,
    )
    with running_cluster(
        _provider(workspace, provider),
        provisioning.launch_plan,
        run_id=next_launch_id(ledger, run_id),
        bootstrap=bootstrap,
        ledger=ledger,
        caps=caps,
        predicted_cost_usd=provisioning.predicted_cost_usd,
    ) as cluster:
        yield cluster


def next_launch_id(ledger: Ledger, run_id: str) -> str:
    """Return a new id for a launch of a run: the run's own at first, then with a number.

    A launch id stands for one plan in the ledger, and a run that is resumed launches anew.
    """
    used = launch_ids_of(ledger, run_id)
    return run_id if not used else f"{run_id}{ATTEMPT_SEPARATOR}{len(used) + 1}"


def launch_ids_of(ledger: Ledger, run_id: str) -> list[str]:
    """Return the ids of all launches of a run, in order."""
    ids = dict.fromkeys(entry.run_id for entry in ledger.entries())
    return [launch_id for launch_id in ids if run_of_launch(launch_id) == run_id]


def run_of_launch(launch_id: str) -> str:
    """Return the run that a launch belongs to.

    Example:
        >>> run_of_launch("20261121-0430-1a2b3c.2")
        '20261121-0430-1a2b3c'
    """
    return launch_id.partition(ATTEMPT_SEPARATOR)[0]


def end_machines_of(workspace: Workspace, run_id: str) -> int:
    """End what is left of a run's machines, found by its id alone; return how many. May be called again."""
    ledger = Ledger(workspace.ledger_path)
    ended = 0
    for launch_id in launch_ids_of(ledger, run_id):
        providers = {entry.provider for entry in ledger.entries(run_id=launch_id)}
        for provider in providers:
            ended += len(terminate_run(_provider(workspace, provider), launch_id, ledger=ledger))
    return ended


def sweep_all_providers(workspace: Workspace) -> list[SweptMachine]:
    """Sweep the local provider, and every other one that may still have machines of this workspace."""
    ledger = Ledger(workspace.ledger_path)
    open_states = (EntryState.INTENDED, EntryState.LAUNCHED)
    names = {LOCAL_PROVIDER, *(entry.provider for entry in ledger.entries() if entry.state in open_states)}
    now = datetime.now(UTC)
    return [
        machine
        for name in sorted(names)
        for machine in sweep(_provider(workspace, name), now=now, ledger=ledger)
    ]


def live_run_ids(workspace: Workspace) -> set[str]:
    """Return the runs that have machines right now."""
    instances = _provider(workspace, LOCAL_PROVIDER).list_instances()
    return {run_of_launch(instance.run_id) for instance in instances}


def bills_of_run(workspace: Workspace, provider: str, run_id: str) -> tuple[Bill, ...]:
    """Return what each launch of a run cost, from the ledger alone."""
    ledger = Ledger(workspace.ledger_path)
    now = datetime.now(UTC)
    return tuple(
        bill_for_run(_provider(workspace, provider), launch_id, ledger=ledger, now=now)
        for launch_id in launch_ids_of(ledger, run_id)
    )


def _provider(workspace: Workspace, name: str) -> Provider:
    settings = ProviderSettings(
        state_directory=workspace.leases_directory,
        region=REGION,
        image_id=os.environ.get("HETERPS_AWS_IMAGE"),
        subnet_id=os.environ.get("HETERPS_AWS_SUBNET"),
        instance_profile=os.environ.get("HETERPS_AWS_INSTANCE_PROFILE"),
    )
    return get_provider(name, settings)
