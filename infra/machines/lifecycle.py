"""Machines for as long as a block of code runs, and not a moment longer.

The first of the four layers of teardown: it ends the machines on return, on an error, on an interrupt and
on SIGTERM. What it cannot outlive (SIGKILL, a lost host) the leases, the sweeper and the nodes themselves answer for.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from types import FrameType

from heterps_core.cluster import Cluster
from heterps_core.errors import ProvisioningError
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.training.node.node_life import CLUSTER_TIMEOUT_S, repeated
from heterps_core.training.storage.run_directory import LEASES, RunDirectory
from heterps_core.units import SECONDS_PER_HOUR, ratio
from infra.billing.caps import NOTHING_SPENT, Caps, Spent
from infra.bootstrap.node_start import Bootstrap
from infra.ledger.ledger import EndReason, Ledger
from infra.providers.base import Provider

logger = logging.getLogger(__name__)

_TERMINATE_ATTEMPTS = 3
TERMINATE_PAUSE_S = 1.0
_RENEWALS_PER_LEASE = 3
"""Two renewals in a row may fail before a lease ends."""

_LIFETIME_PER_PLANNED = 2.0
"""A run that takes twice as long as planned is not the run that was planned."""

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def running_cluster(
    provider: Provider,
    plan: ProvisioningPlan,
    *,
    run_id: str,
    bootstrap: Bootstrap,
    ledger: Ledger,
    caps: Caps,
    predicted_cost_usd: float,
    spent: Callable[[], Spent] = lambda: NOTHING_SPENT,
) -> Iterator[Cluster]:
    """Launch a plan, yield the cluster when it is up, end it whatever happens.

    Args:
        run_id: New for each launch; found again on every machine.
        caps: Refuse the plan before anything is launched, and each further attempt to launch it.
        spent: Tells what was spent before, failed attempts included; asked before each machine is asked for.

    Raises:
        BudgetExceededError: A cap is exceeded; nothing was launched, or what was is ended.
        ProvisioningError: Machines are not available, or could not be terminated.
    """
    price_usd_per_hour = provider.billed_usd_per_hour(plan)

    def check() -> None:
        caps.check(
            price_usd_per_hour=price_usd_per_hour, predicted_cost_usd=predicted_cost_usd, spent=spent()
        )

    check()
    run = RunDirectory(bootstrap.run_location)
    if not provider.is_dry_run:
        bootstrap = replace(
            bootstrap,
            lifetime_s=_node_lifetime_s(
                longest_s=bootstrap.lifetime_s,
                planned_s=ratio(predicted_cost_usd, price_usd_per_hour, otherwise=math.inf)
                * SECONDS_PER_HOUR,
                start_s=provider.ready_timeout_s + CLUSTER_TIMEOUT_S,
                price_usd_per_hour=price_usd_per_hour,
                caps=caps,
            ),
        )
    with _ending_signals_raise():
        try:
            # From before the launch: the first machines may wait for the last longer than a lease lasts.
            with _lease_renewed(provider, run_id, run):
                cluster = provider.launch(
                    plan,
                    run_id=run_id,
                    lease_until=_lease_end(provider),
                    bootstrap=bootstrap,
                    ledger=ledger.checked(check),
                )
                timeout_s = min(provider.ready_timeout_s, caps.payable_s(price_usd_per_hour, spent()))
                provider.wait_until_ready(cluster, timeout_s=timeout_s)
                logger.info(
                    "run %s: %d nodes are up, %.4g USD/hour",
                    run_id,
                    len(cluster.nodes),
                    cluster.price_usd_per_hour,
                )
                yield cluster
        finally:
            terminate_run(provider, run_id, ledger=ledger)


def terminate_run(provider: Provider, run_id: str, *, ledger: Ledger) -> tuple[str, ...]:
    """End all machines of a run, look again, and close the run in the ledger; may be called again.

    Also what hooks call that find a crashed or cancelled run: the id is all it needs.

    Returns:
        The provider's ids of the machines that this call ended.

    Raises:
        ProvisioningError: Machines are left; their leases end them.
    """
    with _ending_signals_wait():
        for attempt in range(1, _TERMINATE_ATTEMPTS + 1):
            try:
                return provider.end_run(run_id, ledger=ledger, reason=EndReason.RUN_ENDED)
            except ProvisioningError as error:
                problem = str(error)
            logger.warning("run %s: attempt %d to end its machines: %s", run_id, attempt, problem)
            if attempt < _TERMINATE_ATTEMPTS:
                time.sleep(TERMINATE_PAUSE_S * attempt)
    raise ProvisioningError(
        f"the machines of run {run_id} must be ended and {_TERMINATE_ATTEMPTS} attempts failed: {problem}; the "
        f"sweeper ends them when their leases end, within {provider.lease_s:.0f} s: see that it runs"
    )


def _node_lifetime_s(
    *, longest_s: int, planned_s: float, start_s: float, price_usd_per_hour: float, caps: Caps
) -> int:
    """Return after how many seconds a node ends itself at the latest: min(longest, 2 x planned, cap / price).

    The fourth layer of teardown needs neither the flow nor a sweeper nor a cloud: the bootstrap script sets the
    machine's own shutdown by it, and ends it sooner where its lease no longer changes.
    Twice the plan is at least what a fleet is waited for at its start, however short the plan.

    Example:
        Planned for 20 minutes at 3 USD an hour under a cap of 1.5 USD: the least of 6 h, 40 min and 30 min.
    """
    by_plan_s = max(_LIFETIME_PER_PLANNED * planned_s, start_s)
    return max(1, int(min(longest_s, by_plan_s, caps.payable_s(price_usd_per_hour, NOTHING_SPENT))))


def _lease_end(provider: Provider) -> datetime:
    return provider.now() + timedelta(seconds=provider.lease_s)


def _lease_renewed(provider: Provider, run_id: str, run: RunDirectory) -> AbstractContextManager[None]:
    """Renew the leases of a run from a thread while the block runs: where its nodes look, and on its machines.

    The machines are born with a lease on them; where the nodes look, the first is written at once.
    """

    def renew() -> None:
        until = _lease_end(provider)
        for where, write in (
            # Nodes look whether the text has changed.
            (
                "in the run directory",
                partial(run.write_json, f"{LEASES}/{run_id}", {"until": until.isoformat()}),
            ),
            ("on the machines", partial(provider.renew_lease, run_id, until=until)),
        ):
            try:
                write()
            except (ProvisioningError, OSError) as problem:
                logger.warning(
                    "run %s: the lease %s could not be renewed, trying again: %s", run_id, where, problem
                )

    return repeated(renew, interval_s=provider.lease_s / _RENEWALS_PER_LEASE, name=f"lease of {run_id}")


@contextmanager
def _ending_signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that the block is left as by an error.

    A handler that someone else has set is left alone, and threads cannot set any.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    ours = tuple(number for number in _ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL)
    with _handlers(leave, ours):
        yield


@contextmanager
def _ending_signals_wait() -> Iterator[None]:
    """Keep a signal from cutting the teardown short, and deliver it afterwards.

    Teardown takes seconds; what it leaves costs for hours.
    """
    noted: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        logger.warning("signal %d noted: the machines are being ended, this takes some seconds", signum)
        noted.append(signum)

    try:
        with _handlers(note, (*_ENDING_SIGNALS, signal.SIGINT)):
            yield
    finally:
        if noted:
            signal.raise_signal(noted[0])


@contextmanager
def _handlers(
    handler: Callable[[int, FrameType | None], None], numbers: tuple[signal.Signals, ...]
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            # None stands for a handler that was not set from Python and cannot be set again from it.
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)
