"""Refusals that pass within two minutes end no launch; those that stay end it and leave nothing."""

import threading
import time
from contextlib import nullcontext

import pytest
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError, SSLError

from heterps_core.errors import ProvisioningError
from infra.providers.aws import passing
from infra.providers.aws.passing import PASSING
from infra.providers.base import EndedAtStartError, InsufficientCapacityError
from tests.infra.builders import plan
from tests.infra.faults import provider_with_roles
from tests.infra.moto_ec2 import Wire, unreadable
from tests.tiers import weekly_after

REPETITIONS = 3
PAUSES_S = passing.PAUSES_S

PLACES = [(operation, entry) for entry in PASSING for operation in entry.operations] + [
    ("CreateSecurityGroup", entry) for entry in PASSING if not entry.operations
]
INSIDE_FLEETS = [entry for entry in PASSING if "CreateFleet" in entry.operations] + [
    entry for entry in PASSING if not entry.operations
]
NUM_OPERATIONS = sum(bool(entry.operations) for entry in PASSING)


@pytest.fixture
def provider(client):
    return provider_with_roles(client)


@pytest.fixture
def wire(provider):
    wire = Wire()
    wire.attach(provider.client, provider.iam)
    return wire


def refuse_first(wire, operation, answer, *, times):
    """Let the first requests of an operation be refused."""
    wire.refuse = lambda form: (
        answer if form["Action"] == operation and len(wire.of(operation)) <= times else None
    )


def words_of(entry):
    return f"Value (heterps-r1) is invalid. {entry.words.title() or 'as the test wants it'}"


@pytest.mark.parametrize(
    "place", weekly_after(NUM_OPERATIONS + 2, PLACES), ids=lambda place: f"{place[0]} {place[1].code}"
)
def test_a_refusal_of_the_table_is_waited_out(wire, launch, server, place):
    operation, entry = place
    refuse_first(wire, operation, (entry.code, words_of(entry)), times=REPETITIONS)

    cluster = launch(plan())

    assert len(cluster.nodes) == len(server.instances()) == 2
    assert len(wire.of(operation)) >= 1 + REPETITIONS


@pytest.mark.parametrize(
    "entry", weekly_after(5, INSIDE_FLEETS), ids=lambda entry: f"{entry.code} {entry.words}"
)
def test_a_refusal_inside_the_answer_of_a_fleet_is_waited_out_under_new_tokens(wire, launch, server, entry):
    wire.refused_fleets = {0: entry.code, 1: entry.code}
    wire.refusal_message = words_of(entry)

    cluster = launch()

    tokens = [request["ClientToken"] for request in wire.of("CreateFleet")]
    assert len(cluster.nodes) == len(server.instances()) == 2
    assert len(tokens) == len(set(tokens)) == 4  # to one that it knows EC2 would answer as before


def test_a_fleet_that_may_have_been_made_is_asked_for_under_the_same_token(wire, launch, server):
    refuse_first(wire, "CreateFleet", ("InternalError", "an error of the server"), times=REPETITIONS)

    launch()

    tokens = [request["ClientToken"] for request in wire.of("CreateFleet")]
    assert (len(tokens), len(set(tokens))) == (2 + REPETITIONS, 2)


def test_a_gateway_before_a_service_that_is_away_is_waited_out(wire, provider):
    wire.answer = lambda url: unreadable(url) if len(wire.requests) <= REPETITIONS else None

    assert provider.list_instances() == ()
    assert len(wire.requests) == 1 + REPETITIONS


@pytest.mark.parametrize("num_answered", [0, 1])
def test_a_network_that_goes_away_is_waited_out_and_one_that_never_answered_is_not(
    wire, provider, monkeypatch, num_answered
):
    """Before the first answer the address may be wrong, and a person waits."""
    monkeypatch.setattr(passing, "_was_answered", threading.Event())

    def lose():
        if num_answered < len(wire.requests) <= num_answered + REPETITIONS:
            raise EndpointConnectionError(endpoint_url="http://ec2")

    wire.before = lose
    for _ in range(num_answered):
        provider.list_instances()

    with nullcontext() if num_answered else pytest.raises(ProvisioningError, match="check the region's name"):
        provider.list_instances()

    assert len(wire.requests) == (2 + REPETITIONS if num_answered else 1)


def test_a_call_whose_attempts_time_out_ends_two_minutes_after_its_first_failure(wire, provider, monkeypatch):
    """Time is pretended: attempts of 30 s with pauses of 1, 2, 4 and 5 s fail at 30, 61, 93, 127 and 162 s."""
    provider.list_instances()
    monkeypatch.setattr(passing, "PAUSES_S", PAUSES_S)
    now_s = [0.0]
    monkeypatch.setattr(time, "sleep", lambda seconds: now_s.append(now_s[-1] + seconds))
    monkeypatch.setattr(passing, "monotonic", lambda: now_s[-1])

    def time_out():
        now_s.append(now_s[-1] + 30.0)
        raise ReadTimeoutError(endpoint_url="http://ec2")

    wire.before = time_out
    with pytest.raises(ProvisioningError, match="check the network"):
        provider.list_instances()

    assert (len(wire.requests), now_s[-1]) == (1 + 5, 162.0)


def test_a_certificate_that_is_refused_is_not_asked_for_again(wire, provider):
    provider.list_instances()

    def refuse():
        raise SSLError(endpoint_url="https://ec2", error="certificate verify failed")

    wire.before = refuse
    with pytest.raises(ProvisioningError, match="AWS_CA_BUNDLE"):
        provider.list_instances()

    assert len(wire.requests) == 1 + 1


@pytest.mark.parametrize("operation", ["CreateFleet", "PutRolePolicy", "AuthorizeSecurityGroupIngress"])
def test_a_refusal_that_never_passes_ends_the_launch_and_leaves_nothing(wire, launch, server, operation):
    entry = next(entry for entry in PASSING if operation in entry.operations)
    refuse_first(wire, operation, (entry.code, words_of(entry)), times=1_000)

    with pytest.raises(ProvisioningError, match=f"{entry.code}: .*try again in a minute"):
        launch()

    assert len(wire.of(operation)) == 1 + len(PAUSES_S)
    assert server.num_roles_and_profiles() == len(server.instances()) == 0


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        ("CreateRole", "NoSuchEntity"),
        ("CreateFleet", "InvalidParameterValue"),
        ("CreateFleet", "UnauthorizedOperation"),
    ],
)
def test_a_refusal_that_stays_is_not_repeated(wire, launch, operation, code):
    refuse_first(wire, operation, (code, "as the test wants it"), times=1_000)

    with pytest.raises(ProvisioningError, match=code):
        launch()

    assert len(wire.of(operation)) == 1


def test_every_entry_names_its_source_and_passes_before_the_repetitions_end():
    assert all(entry.source and 0 < entry.longest_s <= sum(PAUSES_S) for entry in PASSING)
    assert sum(PAUSES_S) == pytest.approx(120, abs=5)


@pytest.mark.parametrize("first_request", weekly_after(2, [0, 8, 4, 11]))
def test_a_storm_of_throttling_of_a_minute_ends_no_launch(server, launch, monkeypatch, first_request):
    """Time is that of the pauses: the storm begins with some request and lasts 60 s of them."""
    monkeypatch.setattr(passing, "PAUSES_S", PAUSES_S)
    now_s = [0.0]
    monkeypatch.setattr(time, "sleep", lambda seconds: now_s.append(now_s[-1] + seconds))
    provider = provider_with_roles(server.client(attempts=5))
    wire = Wire()
    ends_s = []

    def storm(form):
        if len(wire.requests) <= first_request:
            return None
        ends_s.append(now_s[-1] + 60.0)
        return ("RequestLimitExceeded", "too many") if now_s[-1] < ends_s[0] else None

    wire.refuse = storm
    wire.attach(provider.client, provider.iam)

    cluster = launch(provider=provider)

    assert len(cluster.nodes) == len(server.instances()) == 2
    assert now_s[-1] >= 60.0


START_FAILURES = [
    ("Server.InsufficientInstanceCapacity", EndedAtStartError, "ask for another instance type or zone"),
    ("Server.InternalError", EndedAtStartError, "ask for another instance type or zone"),
    ("Server.SpotInstanceTermination", EndedAtStartError, "ask for another instance type or zone"),
    ("Client.VolumeLimitExceeded", InsufficientCapacityError, "L-7A658B76"),
    ("Client.InternalError", ProvisioningError, "KMS key"),
    ("Client.InvalidSnapshot.NotFound", ProvisioningError, "make the machine image again"),
]


def end_at_start(client, code, is_dead=lambda instance: True):
    """Let EC2 say of machines that it ended them while they were pending."""

    def say_why(parsed, **_):
        for reservation in parsed.get("Reservations", ()):
            for instance in filter(is_dead, reservation["Instances"]):
                instance["State"] = {"Code": 48, "Name": "terminated"}
                instance["StateReason"] = {"Code": code, "Message": f"{code}: as the test wants it"}

    client.meta.events.register("after-call.ec2.DescribeInstances", say_why)


@pytest.mark.parametrize("is_seen_late", [False, True])
@pytest.mark.parametrize(("code", "kind", "way_out"), START_FAILURES)
def test_a_machine_that_ends_while_it_starts_says_why_and_whether_another_try_helps(
    provider, launch, code, kind, way_out, is_seen_late
):
    if is_seen_late:
        cluster = launch()
    end_at_start(provider.client, code)

    with pytest.raises(ProvisioningError, match=f"i-.* {code}: as the test wants it; .*{way_out}") as raised:
        provider.wait_until_ready(cluster, timeout_s=10) if is_seen_late else launch()

    assert type(raised.value) is kind
