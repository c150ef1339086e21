"""A run's life with one fault in it, then the sweep, then the account: what lives, and what was not charged.

The fault hits one step: a request to EC2 or a write to the ledger, before or after it is executed. A process that is
killed is really killed; EC2 is moto in another process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError
from botocore.retries.standard import ExponentialBackoff

import infra.machines.lifecycle
from heterps_core.cluster import Cluster
from heterps_core.errors import HeterpsError, LedgerError
from heterps_core.hardware import Market
from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan
from heterps_core.units import SECONDS_PER_HOUR
from infra.billing.budget import BudgetWatch
from infra.billing.caps import Caps
from infra.billing.spending import SpendingMeter
from infra.bootstrap.node_start import Bootstrap
from infra.ledger.ledger import Ledger
from infra.machines.lifecycle import running_cluster
from infra.machines.sweeper import sweep
from infra.providers.aws import passing
from infra.providers.aws.launch import MachineSettings
from infra.providers.aws.provider import AwsEc2Provider
from infra.workspace import run_of_launch
from tasks.clusters import spent_before_launch
from tests.infra.builders import bootstrap, offer
from tests.infra.fault_cases import WATCHED, Case, Fault, Kind
from tests.infra.moto_ec2 import MotoServer, Wire
from tests.moto_server import REGION

RUN_ID = "night-1"
MACHINES = MachineSettings(node_boundary="arn:aws:iam::123456789012:policy/heterps-node")
SPENDING_S = 900.0
"""Of the whole fleet, that the cap of a run which is watched pays for."""

LOOK_S = 30.0


PRICES = {"c7i.large": 0.09, "m7i.large": 0.1, "g4dn.xlarge": 0.526}


class BucketProvider(AwsEc2Provider):
    """Machines that meet in a bucket, so that they need a role; the flow's host writes its leases into a folder.

    Arrow's client of S3 has threads, and a process that has them must not fork.
    """

    def launch(
        self,
        plan: ProvisioningPlan,
        *,
        run_id: str,
        lease_until: datetime,
        bootstrap: Bootstrap,
        ledger: Ledger,
    ) -> Cluster:
        of_nodes = in_bucket(bootstrap, run_id)
        return super().launch(plan, run_id=run_id, lease_until=lease_until, bootstrap=of_nodes, ledger=ledger)


def in_bucket(bootstrap: Bootstrap, run_id: str) -> Bootstrap:
    """Return settings of nodes with a run directory in a bucket."""
    return replace(bootstrap, run_location=f"s3://runs/heterps/{run_id}")


def provider_with_roles(client: Any, machines: MachineSettings = MACHINES) -> AwsEc2Provider:
    """Return a provider that makes roles, with a client of IAM like that of EC2."""
    credentials = client._request_signer._credentials
    iam = boto3.client(
        "iam",
        endpoint_url=client.meta.endpoint_url,
        region_name=client.meta.region_name,
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        config=Config(retries=client.meta.config.retries),
    )
    return BucketProvider(client, machines, iam=iam)


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
            raise LedgerError("database or disk is full")
        with super()._transaction() as database:
            yield database
        self.steps.after()


def live(
    client: Any,
    steps: Steps,
    ledger_path: Path,
    *,
    market: Market,
    zones: int,
    kind: Kind = Kind.PLAIN,
    kept_share: float = 1.0,
    cap_usd: float | None = None,
) -> Wire:
    """Launch, renew and end a run, with the fault of `steps` and the circumstances in it; returns what was sent."""
    if kind in (Kind.CLOCK_BEHIND, Kind.CLOCK_AHEAD):
        set_clock(timedelta(hours=-2 if kind is Kind.CLOCK_BEHIND else 2))
    code = (
        "InvalidFleetConfiguration+UnfulfillableCapacity"
        if kind is Kind.MIXED_CODES
        else "UnfulfillableCapacity"
    )
    refused = range(1, 100, 2) if kind is Kind.FAILED_LAUNCHES else range(1, 1 + zones)
    wire = Wire(
        before=steps.before_request, after=steps.after_request, refused_fleets=dict.fromkeys(refused, code)
    )
    provider = provider_with_roles(client)
    wire.attach(provider.client, provider.iam)
    ledger = BreakingLedger(ledger_path, steps)
    of_nodes = bootstrap(ledger_path.parent / "run")
    with (
        provider.prepared(RUN_ID, in_bucket(of_nodes, RUN_ID)),
        running_cluster(
            provider,
            unlike_plan(market),
            run_id=RUN_ID,
            bootstrap=of_nodes,
            ledger=ledger,
            caps=Caps(max_usd_per_run=cap_usd),
            predicted_cost_usd=0.02,
            spent=lambda: spent_before_launch(provider, ledger, RUN_ID),
        ) as cluster,
    ):
        provider.renew_lease(RUN_ID, until=provider.now() + timedelta(seconds=provider.lease_s))
        if kind is Kind.TAGS_LATE:
            sweep_before_tags_are_seen(client, ledger_path)
            left = provider.list_instances(RUN_ID)
            note(ledger_path, healthy_ended=len(cluster.nodes) - len(left))
        if kind in WATCHED:
            spend_to_the_cap(provider, cluster, ledger_path, kind=kind, kept_share=kept_share)
    return wire


def spend_to_the_cap(
    provider: AwsEc2Provider, cluster: Cluster, ledger_path: Path, *, kind: Kind, kept_share: float
) -> None:
    """Let a fleet whose workers do not obey run against a cap of a quarter of an hour, by a clock of its own."""
    passed_s = 0.0
    price_usd_per_hour = provider.billed_usd_per_hour(unlike_plan(cluster.nodes[0].market))
    watch = BudgetWatch(
        caps=Caps(max_usd_per_run=price_usd_per_hour * SPENDING_S / SECONDS_PER_HOUR),
        spending=SpendingMeter(
            provider,
            entries=lambda: Ledger(ledger_path).entries(),
            belongs=lambda launch_id: run_of_launch(launch_id) == RUN_ID,
            steady_s=lambda: passed_s,
        ),
        price_usd_per_hour=price_usd_per_hour,
        on_warning=lambda text: None,
        on_stop=lambda: None,
        on_end=lambda: None,
    )
    while not watch.has_ended_machines and passed_s < 8 * SPENDING_S:
        passed_s += LOOK_S
        if kind is Kind.LEDGER_TRUNCATED and passed_s == SPENDING_S / 3:
            truncate(ledger_path, kept_share)
        watch.look()
    note(ledger_path, cap_excess_minutes=(passed_s - SPENDING_S) / 60)


def sweep_before_tags_are_seen(client: Any, ledger_path: Path) -> None:
    """Sweep from another process of the same workspace, a moment after the launch."""
    other = boto3.client(
        "ec2",
        endpoint_url=client.meta.endpoint_url,
        region_name=REGION,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    provider = provider_with_roles(other)
    Wire(hides_tags=True).attach(other)
    sweep(provider, now=provider.now(), ledger=Ledger(ledger_path))


def set_clock(by: timedelta) -> None:
    """Set the clock of this process, as everything of the project reads it."""

    class AnyDatetime(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, datetime)

    class Shifted(datetime, metaclass=AnyDatetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(time.time(), tz) + by

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("infra", "tasks") and getattr(module, "datetime", None) is datetime:
            module.datetime = Shifted  # type: ignore[attr-defined]


def truncate(path: Path, kept_share: float) -> None:
    """Cut a file off."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(int(path.stat().st_size * kept_share))


def note(ledger_path: Path, **figures: float) -> None:
    """Write down what only the process of the run sees; one that is killed writes nothing."""
    ledger_path.with_name("notes.json").write_text(json.dumps(figures))


def sweep_with(client: Any, steps: Steps, ledger_path: Path) -> None:
    """Sweep when every lease is over, with the fault of `steps` in it."""
    provider = provider_with_roles(client)
    Wire(before=steps.before_request, after=steps.after_request).attach(provider.client, provider.iam)
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


def in_a_child(act: Callable[[], object], *, without_pauses: bool = True) -> int:
    """Return 0 where it went well, 1 where it ended with an error that users see, below 0 where it was killed."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            if without_pauses:
                infra.machines.lifecycle.TERMINATE_PAUSE_S = 0.0
                # A fault that lasts hits every repetition: none is left to be made.
                passing.PAUSES_S = ()
                ExponentialBackoff.delay_amount = lambda self, context: 0.0  # type: ignore[method-assign]
            logging.disable()
            act()
            status = 0
        except (HeterpsError, sqlite3.Error) as problem:
            if not without_pauses:
                print(f"ended: {problem}", file=sys.stderr)
            status = 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1, -signal.SIGKILL)
    return status
