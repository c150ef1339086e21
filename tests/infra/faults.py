"""A run's life with one fault in it, then the sweep, then the account: what lives, and what was not charged.

The fault hits one step: a request to EC2 or a write to the ledger, before or after it is executed. A process that is
killed is really killed; EC2 is moto in another process.
"""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import sqlite3
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from botocore.exceptions import EndpointConnectionError, ReadTimeoutError
from botocore.retries.standard import ExponentialBackoff

import infra.lifecycle
from heterps_core.errors import HeterpsError
from heterps_core.hardware import Market
from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan
from infra.caps import Caps
from infra.ledger import EntryState, Ledger
from infra.lifecycle import running_cluster
from infra.providers.aws.provider import AwsEc2Provider
from infra.sweeper import sweep
from tests.infra.builders import bootstrap, offer
from tests.infra.moto_ec2 import MotoServer, Wire

RUN_ID = "night-1"


class Fault(StrEnum):
    """What happens at a step."""

    RAISE = "raise"
    """The request never arrives, and neither do its repetitions."""

    TIME_OUT = "time out"
    """It is executed and its answer is lost; the repetition arrives."""

    TIME_OUT_FOR_GOOD = "time out for good"
    """It is executed and its answer is lost, those of its repetitions too."""

    KILL_BEFORE = "kill -9 before"
    KILL_AFTER = "kill -9 after"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One fault, drawn from a seed."""

    fault: Fault
    step: int
    market: Market
    zones: int
    """Zones that have no capacity for the second part of the plan, before one that has."""

    is_ledger_lost: bool
    """Before the sweep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What is left after the sweep."""

    launched: int
    live: int
    unaccounted_s: float
    wrong_prices: int
    leftovers: int
    """Launch templates and security groups, after a sweep when the machines have gone."""

    survived: bool
    """The block was left without an error."""

    @property
    def is_clean(self) -> bool:
        return self.live == 0 and self.unaccounted_s == 0 and self.wrong_prices == 0 and self.leftovers == 0


PRICES = {"c7i.large": 0.09, "m7i.large": 0.1, "g4dn.xlarge": 0.526}


def draw(seed: int, *, steps: Mapping[int, Sequence[bool]]) -> Case:
    """Return the case of a seed.

    Args:
        seed: Of the case.
        steps: By the number of full zones, for each step of a life without a fault whether it is a request.
    """
    generator = random.Random(seed)
    fault = generator.choice(list(Fault))
    zones = generator.choice(sorted(steps))
    only_requests = fault in (Fault.TIME_OUT, Fault.TIME_OUT_FOR_GOOD)
    possible = [i for i, is_request in enumerate(steps[zones]) if is_request or not only_requests]
    return Case(
        fault=fault,
        step=generator.choice(possible),
        market=generator.choice(list(Market)),
        zones=zones,
        is_ledger_lost=generator.random() < 0.25,
    )


def unlike_plan(market: Market) -> ProvisioningPlan:
    """Two cards, and two processors for which there is an alternative."""
    card = offer("g4dn.xlarge", price_usd_per_hour=PRICES["g4dn.xlarge"], market=market)
    processor = offer("c7i.large", price_usd_per_hour=PRICES["c7i.large"], market=market)
    other = offer("m7i.large", price_usd_per_hour=PRICES["m7i.large"], market=market)
    return ProvisioningPlan(
        replicas=(2, 2),
        groups=(
            InstanceGroup(
                stage=0,
                device_type="cpu-c7i",
                offer=processor,
                count=2,
                units_per_instance=1,
                alternatives=(other,),
            ),
            InstanceGroup(stage=1, device_type="gpu-t4", offer=card, count=2, units_per_instance=1),
        ),
        planned_price_usd_per_hour=1.0,
    )


class Steps:
    """Counts requests and ledger accesses, and lets the fault happen at its step."""

    def __init__(self, case: Case | None) -> None:
        self.case = case
        self.are_requests: list[bool] = []

    def before(self, *, is_request: bool = False) -> None:
        self.are_requests.append(is_request)
        if self.is_now(Fault.KILL_BEFORE):
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self) -> None:
        if self.is_now(Fault.KILL_AFTER):
            os.kill(os.getpid(), signal.SIGKILL)

    def before_request(self) -> None:
        self.before(is_request=True)
        if self.is_now(Fault.RAISE):
            raise EndpointConnectionError(endpoint_url="http://ec2")

    def after_request(self) -> None:
        if self.is_now(Fault.TIME_OUT, Fault.TIME_OUT_FOR_GOOD):
            raise ReadTimeoutError(endpoint_url="http://ec2")
        self.after()

    def is_now(self, *faults: Fault) -> bool:
        return (
            self.case is not None
            and self.case.fault in faults
            and self.case.step == len(self.are_requests) - 1
        )


class BreakingLedger(Ledger):
    """A ledger whose disk may be full, and whose process may be killed around an access."""

    def __init__(self, path: Path, steps: Steps) -> None:
        self.steps = steps
        super().__init__(path)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self.steps.before()
        if self.steps.is_now(Fault.RAISE):
            raise sqlite3.OperationalError("database or disk is full")
        with super()._transaction() as database:
            yield database
        self.steps.after()


def live(client: Any, steps: Steps, ledger_path: Path, *, market: Market, zones: int) -> Wire:
    """Launch, renew and end a run, with the fault of `steps` in it; returns what was sent."""
    wire = Wire(
        before=steps.before_request,
        after=steps.after_request,
        refused_fleets=dict.fromkeys(range(1, 1 + zones), "UnfulfillableCapacity"),
    )
    wire.attach(client)
    provider = AwsEc2Provider(client)
    with running_cluster(
        provider,
        unlike_plan(market),
        run_id=RUN_ID,
        bootstrap=bootstrap(ledger_path.parent / "run"),
        ledger=BreakingLedger(ledger_path, steps),
        caps=Caps(),
        predicted_cost_usd=1.0,
    ):
        provider.renew_lease(RUN_ID, until=datetime.now(UTC) + timedelta(seconds=provider.lease_s))
    return wire


def sweep_with(client: Any, steps: Steps, ledger_path: Path) -> None:
    """Sweep when every lease is over, with the fault of `steps` in it."""
    Wire(before=steps.before_request, after=steps.after_request).attach(client)
    provider = AwsEc2Provider(client)
    now = datetime.now(UTC) + timedelta(seconds=provider.lease_s + 30.0)
    sweep(provider, now=now, ledger=BreakingLedger(ledger_path, steps))


def steps_of_a_life(server: MotoServer, folder: Path) -> dict[int, list[bool]]:
    """Return, by the number of full zones, for each step whether it is a request."""
    found = {}
    for zones in (0, 1):
        server.reset()
        steps = Steps(None)
        live(server.client(), steps, folder / f"{zones}.sqlite", market=Market.ON_DEMAND, zones=zones)
        found[zones] = steps.are_requests
    return found


def account_after(case: Case, server: MotoServer, ledger_path: Path) -> Account:
    """Live through a case in a process of its own, sweep when its lease is over, and draw up the account."""
    server.reset()
    # A fault that lasts hits every repetition: none is left to be made.
    client = server.client(attempts=2) if case.fault is Fault.TIME_OUT else server.own_client
    status = in_a_child(lambda: live(client, Steps(case), ledger_path, market=case.market, zones=case.zones))
    if case.is_ledger_lost:
        ledger_path.unlink(missing_ok=True)
    return account_of(server, ledger_path, survived=status == 0)


def account_of(server: MotoServer, ledger_path: Path, *, survived: bool) -> Account:
    """Sweep when every lease is over, and draw up the account."""
    provider, ledger = AwsEc2Provider(server.own_client), Ledger(ledger_path)
    after_lease = datetime.now(UTC) + timedelta(seconds=provider.lease_s + 60.0)
    sweep(provider, now=after_lease, ledger=ledger)
    swept_again = sweep(provider, now=after_lease + timedelta(minutes=5), ledger=ledger)
    instances = server.instances()
    return Account(
        launched=len(instances),
        live=sum(instance["State"]["Name"] != "terminated" for instance in instances) + len(swept_again),
        unaccounted_s=sum(_unaccounted_s(instance, ledger) for instance in instances),
        wrong_prices=sum(
            entry.price_usd_per_hour != PRICES[entry.instance_type] for entry in ledger.entries()
        ),
        leftovers=_leftovers(server),
        survived=survived,
    )


def in_a_child(act: Callable[[], object]) -> int:
    """Return 0 where it went well, 1 where it ended with an error that users see, below 0 where it was killed."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            infra.lifecycle.TERMINATE_PAUSE_S = 0.0
            ExponentialBackoff.delay_amount = lambda self, context: 0.0  # type: ignore[method-assign]
            logging.disable()
            act()
            status = 0
        except (HeterpsError, sqlite3.Error):
            status = 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1, -signal.SIGKILL)
    return status


def _unaccounted_s(instance: dict[str, Any], ledger: Ledger) -> float:
    """Return the seconds of an instance that no entry with a price stands for, by EC2's own words."""
    said = re.search(r"\((.*) UTC\)", instance["StateTransitionReason"])
    ended_at = datetime.fromisoformat(said[1]).replace(tzinfo=UTC) if said else datetime.now(UTC)
    entries = [e for e in ledger.entries() if e.provider_instance_id == instance["InstanceId"]]
    if len(entries) != 1 or entries[0].state is not EntryState.ENDED:
        return max(1.0, (ended_at - instance["LaunchTime"]).total_seconds())
    (entry,) = entries
    assert entry.run_id == RUN_ID
    late_start_s = (entry.launched_at - instance["LaunchTime"]).total_seconds()
    early_end_s = (ended_at - entry.ended_at).total_seconds()
    return max(0.0, late_start_s) + max(0.0, early_end_s)


def _leftovers(server: MotoServer) -> int:
    client = server.own_client
    groups = client.describe_security_groups()["SecurityGroups"]
    return len(client.describe_launch_templates()["LaunchTemplates"]) + sum(
        group["GroupName"] != "default" for group in groups
    )
