"""EC2 as moto serves it over HTTP, in a process of its own, with what moto lacks.

A process of its own may be asked by processes that are killed; `reset` makes it new without starting it again.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import boto3
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config
from botocore.httpsession import URLLib3Session

from infra.workspace import free_loopback_port
from tests.moto_server import REGION

START_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class MotoServer:
    """A server at an address."""

    url: str

    def client(
        self,
        service: str = "ec2",
        *,
        attempts: int = 1,
        key: tuple[str, str] = ("test", "test"),
        region: str = REGION,
    ) -> Any:
        """Return a new client of a service, with an access key and its secret; `attempts` counts the first."""
        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name=region,
            aws_access_key_id=key[0],
            aws_secret_access_key=key[1],
            config=Config(retries={"mode": "standard", "total_max_attempts": attempts}),
        )

    @property
    def environment(self) -> dict[str, str]:
        """What leads boto3 there from a shell."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @cached_property
    def own_client(self) -> Any:
        """A client for looking on, which nobody breaks."""
        return self.client()

    @cached_property
    def own_iam(self) -> Any:
        """A client of IAM for looking on."""
        return self.client("iam")

    def num_roles_and_profiles(self) -> int:
        """Return how many roles and instance profiles there are."""
        return sum(
            len(page[key])
            for call, key in (("list_roles", "Roles"), ("list_instance_profiles", "InstanceProfiles"))
            for page in self.own_iam.get_paginator(call).paginate()
        )

    def reset(self) -> None:
        """Forget everything, and have an image for nodes again."""
        with urllib.request.urlopen(f"{self.url}/moto-api/reset", data=b""):
            pass
        self.own_client.register_image(
            Name="heterps-node-1", Architecture="x86_64", RootDeviceName="/dev/sda1"
        )

    def add_arm_image(self) -> str:
        """Have an image of arm64 for nodes too, and return its id; moto knows the architecture of copies alone."""
        images = self.own_client.describe_images(Owners=["amazon"])["Images"]
        source = next(image["ImageId"] for image in images if image.get("Architecture") == "arm64")
        copied = self.own_client.copy_image(
            SourceImageId=source, SourceRegion=REGION, Name="heterps-node-arm64"
        )
        return str(copied["ImageId"])

    def set_unchecked_requests(self, count: int) -> None:
        """Let only so many requests pass from now on before IAM's policies are asked."""
        request = urllib.request.Request(
            f"{self.url}/moto-api/reset-auth",
            data=str(count).encode(),
            headers={"Content-Type": "text/plain"},
        )
        with urllib.request.urlopen(request):
            pass

    def instances(self) -> list[dict[str, Any]]:
        """Return every instance that was ever launched since the reset."""
        pages = self.own_client.get_paginator("describe_instances").paginate()
        return [i for page in pages for reservation in page["Reservations"] for i in reservation["Instances"]]


@contextlib.contextmanager
def moto_process(**environment: str) -> Iterator[MotoServer]:
    """Start a server in a process of its own with more environment variables, and end it."""
    port = free_loopback_port()
    server = MotoServer(url=f"http://127.0.0.1:{port}")
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                server.reset()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait()


@dataclass
class Wire:
    """What goes between clients and EC2 or IAM: sees every request, may break it, and makes client tokens count.

    EC2 answers a token that it knows with what it answered before; moto would launch again.
    """

    before: Callable[[], None] = lambda: None
    """Called before each request is sent; may raise."""

    after: Callable[[], None] = lambda: None
    """Called after a request was executed and before its answer is seen; may raise."""

    refused_fleets: dict[int, str] = field(default_factory=dict)
    """Which fleet requests, counted from 0 without repetitions, are answered with an error code and no machines;
    several codes stand with '+' between them."""

    hides_tags: bool = False
    """Instances are found by their id alone, and carry no tags: EC2's index of tags lags after a launch."""

    refusal_message: str = "as the test wants it"

    refuse: Callable[[dict[str, str]], tuple[str, str] | None] = lambda form: None
    """Returns the code and the message that a request is refused with, or None."""

    answer: Callable[[str], AWSResponse | None] = lambda url: None
    """Returns the answer to a request that never comes to EC2, or None."""

    requests: list[dict[str, str]] = field(default_factory=list)
    """As they stood in the body."""

    _answers: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)

    def attach(self, *clients: Any) -> None:
        """Put this wire between clients and their server."""
        for client in clients:
            service = client.meta.service_model.service_name
            client.meta.events.register(f"before-send.{service}", self._send)

    def _send(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        body = request.body.decode() if isinstance(request.body, bytes) else str(request.body)
        form = dict(urllib.parse.parse_qsl(body))
        token = form.get("ClientToken")
        self.requests.append(form)
        self.before()
        if refused := self.refuse(form):
            return refusal(request.url, *refused)
        if answered := self.answer(request.url):
            return answered
        fleets = list(dict.fromkeys(fleet["ClientToken"] for fleet in self.of("CreateFleet")))
        code = self.refused_fleets.get(fleets.index(token)) if token in fleets else None
        if code is not None:
            self.after()
            return refused_fleet(request.url, code, message=self.refusal_message)
        if token is not None and token in self._answers:
            answer = self._answers[token]
        else:
            real = URLLib3Session().send(request)
            answer = real.status_code, dict(real.headers), real.content
            if token is not None and real.status_code == 200:
                self._answers[token] = answer
            if self.hides_tags and form["Action"] == "DescribeInstances":
                is_by_tag = any(
                    value.startswith("tag") for key, value in form.items() if key.endswith(".Name")
                )
                hidden = _RESERVATIONS if is_by_tag else _TAGS
                answer = answer[0], answer[1], hidden.sub(b"", answer[2])
        self.after()
        return _Answer(request.url, *answer)

    def of(self, operation: str) -> list[dict[str, str]]:
        """Return the requests of one operation."""
        return [request for request in self.requests if request["Action"] == operation]


_REFUSAL = """<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>
<RequestID>1</RequestID></Response>"""


def refusal(url: str, code: str, message: str) -> AWSResponse:
    """Return an error as EC2 answers it; boto3 reads it as one of IAM, too."""
    return _Answer(url, 400, {}, _REFUSAL.format(code=code, message=message).encode())


def unreadable(url: str, *, status: int = 503) -> AWSResponse:
    """Return what a gateway before a service that is away answers, or with status 200 the page of a portal."""
    return _Answer(url, status, {}, b"<html><body><br>\nHttp/1.1 Service Unavailable\n</body></html>")


_REFUSED_FLEET = """<CreateFleetResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">
<requestId>1</requestId><fleetId>fleet-1</fleetId><errorSet>{errors}</errorSet></CreateFleetResponse>"""
"""What EC2 answers to a fleet of type instant that it cannot fill: a success without machines."""

_FLEET_ERROR = "<item><errorCode>{code}</errorCode><errorMessage>{message}</errorMessage></item>"

_TAGS = re.compile(rb"<tagSet>.*?</tagSet>", re.DOTALL)
_RESERVATIONS = re.compile(rb"(?<=<reservationSet>).*(?=</reservationSet>)", re.DOTALL)


def refused_fleet(url: str, code: str, *, message: str) -> AWSResponse:
    """Return what EC2 answers to a fleet that it cannot fill; several codes stand with '+' between them."""
    errors = "".join(_FLEET_ERROR.format(code=each, message=message) for each in code.split("+"))
    return _Answer(url, 200, {}, _REFUSED_FLEET.format(errors=errors).encode())


class _Answer(AWSResponse):
    """A response that has been read."""

    def __init__(self, url: str, status: int, headers: dict[str, str], content: bytes) -> None:
        super().__init__(url, status, headers, None)
        self._content = content
