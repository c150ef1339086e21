"""An account in which a night can run, as moto serves it, with answers by hand where moto gives none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest

from infra.checks import Check, CheckState
from infra.providers.aws.access_checks import access_checks
from infra.providers.aws.account import Account
from infra.providers.aws.bucket_questions import BUCKET_QUESTIONS, STORE_QUESTION
from infra.providers.aws.launch import MachineSettings
from infra.providers.aws.launch_questions import LAUNCH_QUESTIONS
from infra.providers.aws.node_role import _POLICY_FILE
from tests.infra.moto_ec2 import MotoServer

BOUNDARY = "arn:aws:iam::123456789012:policy/heterps-node"
UPLOADS = {"ID": "uploads", "Status": "Enabled", "Filter": {"Prefix": ""}}
SERVICES = ("ec2", "iam", "kms", "s3", "service-quotas", "sts")
_QUESTIONS = {each.what: each for each in (*LAUNCH_QUESTIONS, *BUCKET_QUESTIONS, STORE_QUESTION)}
ABORTED = {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}


@cache
def _client(server: MotoServer, service: str) -> Any:
    """Return the one client of a service: each takes a third of a second to make."""
    return server.client(service)


@dataclass(kw_only=True)
class SetUp:
    """The account, and the settings of a person who rents there."""

    server: MotoServer
    shell: pytest.MonkeyPatch
    settings: dict[str, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    """What was asked, as IAM names it: the prefix of the service, and the operation."""

    client_of: Callable[[str], Any] = field(init=False)
    """Returns the client of a service, the same one each time."""

    _answers: dict[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    _handlers: list[tuple[Any, str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client_of = partial(_client, self.server)
        for service in SERVICES:
            prefix = self.client_of(service).meta.service_model.signing_name

            def note(model: Any, prefix: str = prefix, **_: object) -> None:
                self.calls.append(f"{prefix}:{model.name}")

            self.listen(service, "before-parameter-build", note)

    def listen(self, service: str, event: str, handler: Any) -> None:
        """Let a handler hear an event of a service's client until the end of the test."""
        events = self.client_of(service).meta.events
        events.register(event, handler)
        self._handlers.append((events, event, handler))

    def close(self) -> None:
        """Leave the clients as they were."""
        for events, event, handler in self._handlers:
            events.unregister(event, handler)

    def answer(
        self, service: str, operation: str, give: Callable[[Mapping[str, Any]], Any], *, status: int = 200
    ) -> None:
        """Let an operation be answered by hand; `give` gets the body of the request."""
        event = f"before-call.{service}.{operation}"
        if event not in self._answers:
            self.listen(service, event, lambda params, **_: self._answers[event](params["body"]))
        self._answers[event] = lambda body: (SimpleNamespace(status_code=status), give(body))

    def refuse(self, service: str, operation: str, code: str, message: str = "as the test wants it") -> None:
        """Let an operation be refused."""
        error = {"Error": {"Code": code, "Message": message}}
        self.answer(service, operation, lambda body: error, status=400)

    def alter(self, operation: str, change: Callable[[Any], object]) -> None:
        """Change what EC2 answers to an operation."""
        self.listen("ec2", f"after-call.ec2.{operation}", lambda parsed, **_: change(parsed))

    def set_lifecycle(self, *rules: Mapping[str, Any]) -> None:
        """Give the bucket lifecycle rules."""
        self.client_of("s3").put_bucket_lifecycle_configuration(
            Bucket="runs", LifecycleConfiguration={"Rules": [{**UPLOADS, **rule} for rule in rules]}
        )

    def set_quota(self, code: str, vcpus: float) -> None:
        """Let Service Quotas name a quota."""
        self.answer(
            "service-quotas",
            "GetServiceQuota",
            lambda body: {"Quota": {"Value": vcpus if code.encode() in body else 192.0}},
        )

    def checks(self) -> Iterator[Check]:
        """Ask what the doctor asks, one after the other."""
        return access_checks(MachineSettings(**self.settings), client_of=self.client_of)

    def check(self, what: str) -> Check:
        """Ask one question of the doctor."""
        if question := _QUESTIONS.get(what):
            return question.check(
                Account(client_of=self.client_of, machines=MachineSettings(**self.settings))
            )
        return next(check for check in self.checks() if check.what == what)

    def made(self) -> tuple[int, ...]:
        """Return how many machines, groups, templates, roles and profiles there are."""
        ec2 = self.server.own_client
        return (
            len(self.server.instances()),
            len(ec2.describe_security_groups()["SecurityGroups"]),
            len(ec2.describe_launch_templates()["LaunchTemplates"]),
            self.server.num_roles_and_profiles(),
        )


@contextmanager
def set_up(server: MotoServer) -> Iterator[SetUp]:
    """Yield an account in which nothing is missing."""
    with pytest.MonkeyPatch.context() as shell:
        account = _set_up(server, shell)
        yield account
        account.close()


def _set_up(server: MotoServer, shell: pytest.MonkeyPatch) -> SetUp:
    account = SetUp(server=server, shell=shell, settings={"node_boundary": BOUNDARY})
    address = server.url.removeprefix("http://")
    shell.setenv(
        "HETERPS_RUN_STORE", f"s3://runs/heterps?region=us-east-1&scheme=http&endpoint_override={address}"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        shell.setenv(name, "test")
    account.client_of("s3").create_bucket(Bucket="runs")
    account.set_lifecycle(ABORTED)
    server.own_iam.create_policy(PolicyName="heterps-node", PolicyDocument=_POLICY_FILE.read_text())
    account.answer("ec2", "GetEbsDefaultKmsKeyId", lambda body: {"KmsKeyId": "alias/aws/ebs"})
    account.set_quota("none", 0.0)
    give_internet(server.own_client)
    account.calls.clear()
    return account


def main_table(client: Any) -> str:
    """Return the route table of the default network."""
    (table,) = client.describe_route_tables()["RouteTables"]
    return str(table["RouteTableId"])


def give_internet(client: Any) -> None:
    """Give the default network a way out, as AWS's has one."""
    gateway = client.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    (network,) = client.describe_vpcs()["Vpcs"]
    client.attach_internet_gateway(InternetGatewayId=gateway, VpcId=network["VpcId"])
    client.create_route(RouteTableId=main_table(client), DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)


_OTHER_NAMES = {
    "s3:HeadBucket": "s3:ListBucket",
    "s3:GetBucketEncryption": "s3:GetEncryptionConfiguration",
    "s3:GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
}
"""What IAM calls an operation where it has another name."""


def rights_of_the_doctor(server: MotoServer) -> set[str]:
    """Return the actions that IAM is asked for where volumes have a key of one's own."""
    server.reset()
    with set_up(server) as account:
        key = account.client_of("kms").create_key()["KeyMetadata"]["Arn"]
        account.answer("ec2", "GetEbsDefaultKmsKeyId", lambda body: {"KmsKeyId": key})
        account.calls.clear()
        assert {check.state for check in account.checks()} <= {CheckState.OK, CheckState.NOTE}
    return {_OTHER_NAMES.get(call, call) for call in account.calls}
