"""A run's life while something passes: AWS knows a part late, is away, ends pending machines, or has full zones.

Time is pretended: the pauses of the code and of boto3 make it pass, so that two minutes of repetitions take none.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError
from botocore.retries import bucket

from heterps_core.hardware import Market
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from infra.billing.caps import Caps
from infra.ledger.ledger import Ledger
from infra.machines.failover import first_running_cluster
from infra.providers.aws.passing import PASSING
from infra.providers.aws.provider import AwsEc2Provider, _config
from tasks.clusters import next_launch_id, spent_before_launch
from tests.infra.builders import bootstrap
from tests.infra.fault_cases import Case, Kind
from tests.infra.faults import MACHINES, RUN_ID, in_bucket, note, provider_with_roles, unlike_plan
from tests.infra.moto_ec2 import MotoServer, Wire, unreadable
from tests.moto_server import REGION

_REQUEST_S = 0.1

LATE_ANSWERS = [(operation, entry) for entry in PASSING for operation in entry.operations] + [
    (operation, entry)
    for entry in PASSING
    if not entry.operations
    for operation in ("CreateSecurityGroup", "CreateRole", "CreateFleet", "CreateLaunchTemplate")
]
OUTAGES = ("throttled", "server error", "gateway", "no connection", "answers lost")
END_REASONS = (
    "Server.InsufficientInstanceCapacity",
    "Server.InternalError",
    "Server.SpotInstanceTermination",
)


@dataclass
class PretendedTime:
    """Time by the pauses of this process alone."""

    now_s: float = 0.0

    def sleep(self, seconds: float) -> None:
        """Let it pass."""
        self.now_s += seconds

    def install(self) -> None:
        """Let the code and boto3 pause by it, for good: the process is a child that ends."""

        class Condition(threading.Condition):
            def wait(condition, timeout: float | None = None) -> bool:  # noqa: N805
                self.sleep((timeout or 0.0) + 1e-3)
                return False

        time.sleep = self.sleep  # type: ignore[assignment]
        bucket.Clock.current_time = lambda clock: self.now_s  # type: ignore[method-assign]
        bucket.threading = SimpleNamespace(Lock=threading.Lock, Condition=Condition)  # type: ignore[assignment]


@dataclass
class Trouble:
    """What stands between a run and AWS, from its first moment for as long as it lasts."""

    case: Case
    clock: PretendedTime
    server: MotoServer
    wire: Wire = field(default_factory=Wire)
    begun_s: float | None = None
    num_fleets: int = 0
    num_looks: int = 0
    num_met: int = 0
    """How often the run met it."""

    ended: list[str] = field(default_factory=list)
    doomed: list[str] = field(default_factory=list)

    def attach(self, provider: AwsEc2Provider) -> None:
        """Put it there, by its kind."""
        kind, wire = self.case.kind, self.wire
        events = provider.client.meta.events
        wire.before = self._pass
        if kind is Kind.LATE_ANSWER:
            self._answer_late()
        elif kind is Kind.OUTAGE:
            self._be_away()
        elif kind is Kind.LATE_MACHINES:
            events.register("after-call.ec2.CreateFleet", self._begin_again)
            events.register("after-call.ec2.DescribeInstances", self._hide)
        elif kind is Kind.ENDED_PENDING:
            events.register("after-call.ec2.CreateFleet", self._doom)
            events.register("after-call.ec2.DescribeInstances", self._end_pending)
        elif kind is Kind.FULL_ZONES:
            wire.refused_fleets = dict.fromkeys(range(1, 2 * self.case.zones, 2), "UnfulfillableCapacity")
        elif kind is Kind.SPOT_SUBNETS:
            wire.refused_fleets = dict.fromkeys(range(self.case.zones), "InsufficientInstanceCapacity")
        wire.attach(provider.client, provider.iam)

    @property
    def lasts(self) -> bool:
        """It has begun, and not passed."""
        if self.begun_s is None:
            self.begun_s = self.clock.now_s
        has_met = self.clock.now_s < self.begun_s + self.case.lasts_s
        self.num_met += has_met
        return has_met

    def _pass(self) -> None:
        self.clock.sleep(_REQUEST_S)

    def _answer_late(self) -> None:
        operation, entry = _of(LATE_ANSWERS, self.case.choice)
        message = f"Value (heterps) is invalid. {entry.words.title()}"
        if operation == "CreateFleet" and self.case.step % 2:
            # Inside the answer of a fleet, which is a success.
            self.wire.refusal_message = message
            self.wire.refused_fleets = _WhileItLasts(self, entry.code)
            return
        self.wire.refuse = lambda form: (
            (entry.code, message) if form["Action"] == operation and self.lasts else None
        )

    def _be_away(self) -> None:
        form = _of(OUTAGES, self.case.choice)

        def is_away() -> bool:
            return len(self.wire.requests) > self.case.step and self.lasts

        def refuse(request: dict[str, str]) -> tuple[str, str] | None:
            if not is_away():
                return None
            return ("RequestLimitExceeded", "too many") if form == "throttled" else ("InternalError", "ours")

        def before() -> None:
            self._pass()
            if is_away():
                raise EndpointConnectionError(endpoint_url="http://ec2")

        def after() -> None:
            if is_away():
                raise ReadTimeoutError(endpoint_url="http://ec2")

        if form == "no connection":
            self.wire.before = before
        elif form == "answers lost":
            self.wire.after = after
        elif form == "gateway":
            self.wire.answer = lambda url: unreadable(url) if is_away() else None
        else:
            self.wire.refuse = refuse

    def _begin_again(self, **_: object) -> None:
        self.begun_s = self.clock.now_s

    def _hide(self, parsed: Any, **_: object) -> None:
        if self.begun_s is not None and self.lasts:
            parsed["Reservations"] = []

    def _doom(self, parsed: Any, **_: object) -> None:
        ids = [each for launched in parsed.get("Instances", ()) for each in launched["InstanceIds"]]
        is_second = self.case.choice % 2
        if self.num_fleets == is_second:
            self.doomed = ids if is_second else ids[:1]
        self.num_fleets += bool(ids)

    def _end_pending(self, parsed: Any, **_: object) -> None:
        if self.doomed and self.num_looks >= self.case.step % 2:
            # Really ended, so that nothing runs on unpaid.
            self.server.own_client.terminate_instances(InstanceIds=self.doomed)
            self.num_met += len(self.doomed)
            self.ended, self.doomed = self.ended + self.doomed, []
        self.num_looks += bool(self.doomed)
        for reservation in parsed.get("Reservations", ()):
            for instance in reservation["Instances"]:
                if instance["InstanceId"] in self.ended:
                    code = _of(END_REASONS, self.case.choice // 2)
                    instance["State"] = {"Code": 48, "Name": "terminated"}
                    instance["StateReason"] = {"Code": code, "Message": f"{code}: ended"}


class _WhileItLasts(dict[int, str]):
    """Refuses every fleet while the trouble lasts."""

    def __init__(self, trouble: Trouble, code: str) -> None:
        super().__init__()
        self._trouble, self._code = trouble, code

    def get(self, *_: Any) -> Any:
        return self._code if self._trouble.lasts else None


def live_through(server: MotoServer, case: Case, ledger_path: Path, clock: PretendedTime) -> None:
    """Launch with every purchase there is, renew and end a run, while something passes; notes whether it was met."""
    client = boto3.client(
        "ec2",
        endpoint_url=server.url,
        region_name=REGION,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=_config(),
    )
    plans: list[ProvisioningPlan] = [unlike_plan(case.market), unlike_plan(Market.ON_DEMAND)]
    machines = MACHINES
    if case.kind is Kind.SPOT_SUBNETS:
        subnets = server.own_client.describe_subnets()["Subnets"][: case.zones + 1]
        machines = replace(machines, subnet_ids=tuple(each["SubnetId"] for each in subnets))
        plans = [in_zone(plans[0], each["AvailabilityZone"]) for each in subnets]
    provider = provider_with_roles(client, machines)
    provider.missing_images()  # as for the plan
    trouble = Trouble(case, clock, server)
    trouble.attach(provider)
    ledger = Ledger(ledger_path)
    of_nodes = bootstrap(ledger_path.parent / "run")
    with (
        provider.prepared(RUN_ID, in_bucket(of_nodes, RUN_ID)),
        first_running_cluster(
            provider,
            plans,
            new_launch_id=lambda: next_launch_id(ledger, RUN_ID),
            bootstrap=of_nodes,
            ledger=ledger,
            caps=Caps(),
            predicted_cost_usd=0.02,
            spent=lambda: spent_before_launch(provider, ledger, RUN_ID),
        ) as cluster,
    ):
        until = provider.now()
        provider.renew_lease(cluster.run_id, until=until)
    num_refused = len({fleet["ClientToken"] for fleet in trouble.wire.of("CreateFleet")}) - 2
    is_about_zones = case.kind in (Kind.FULL_ZONES, Kind.SPOT_SUBNETS)
    note(ledger_path, met=num_refused if is_about_zones else trouble.num_met, waited_s=clock.now_s)


def in_zone(plan: ProvisioningPlan, zone: str) -> ProvisioningPlan:
    """Return the purchase of a plan in one zone."""
    groups = (
        replace(
            group,
            offer=replace(group.offer, zone=zone),
            alternatives=tuple(replace(each, zone=zone) for each in group.alternatives),
        )
        for group in plan.groups
    )
    return replace(plan, groups=tuple(groups))


def _of(forms: Any, choice: int) -> Any:
    return forms[choice % len(forms)]
