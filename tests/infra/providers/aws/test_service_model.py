"""Each call of whole lives against the model of its service: names, types, enumerations, ranges and patterns."""

import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from botocore.validate import ParamValidator

from heterps_core.hardware import Market
from heterps_core.plans.provisioning_plan import TableDisk
from infra.ledger.ledger import EndReason
from infra.machines.sweeper import sweep
from infra.providers.aws.prices import AwsPrices
from infra.providers.aws.queries import vcpus_in_use
from tests.infra.builders import bootstrap, plan, with_disks
from tests.infra.faults import in_bucket, provider_with_roles, unlike_plan
from tests.infra.providers.aws.set_up import SERVICES, set_up
from tests.infra.providers.aws.test_architectures import mixed_plan
from tests.moto_server import REGION


def of_python(pattern):
    """Return a pattern of Java's as one of Python's, which has no names of Unicode categories."""
    for java, python in {"p{L}": "w", "p{Z}": "s", "p{N}": "d"}.items():
        pattern = pattern.replace("\\" + java, "\\" + python)
    return pattern


def violations(value, shape, place):
    """Yield what boto3 lets pass: values of enumerations, upper bounds and patterns."""
    if shape.type_name == "structure":
        for name, each in value.items():
            yield from violations(each, shape.members[name], f"{place}.{name}")
    elif shape.type_name == "list":
        for each in value:
            yield from violations(each, shape.member, place)
    text = str(value)
    if shape.type_name == "string":
        if shape.enum and text not in shape.enum:
            yield f"{place}: {text} is none of {shape.enum}"
        pattern = shape.metadata.get("pattern")
        if pattern and not re.fullmatch(of_python(pattern), text):
            yield f"{place}: {text} does not match {pattern}"
    size = len(value) if shape.type_name in ("string", "list") else value
    if isinstance(size, int | float):
        bounds = {bound: shape.metadata[bound] for bound in ("min", "max") if bound in shape.metadata}
        if not bounds.get("min", size) <= size <= bounds.get("max", size):
            yield f"{place}: {size} is not within {bounds}"


@pytest.fixture
def watched(client):
    """A provider, and its calls: operation, parameters, and what violates the model."""
    provider = provider_with_roles(client)
    calls, found = [], []

    def judge(params, model, **_):
        calls.append(model.name)
        report = ParamValidator().validate(params, model.input_shape).generate_report()
        found.extend([report] if report else violations(params, model.input_shape, model.name))

    for each in (provider.client, provider.iam):
        each.meta.events.register("before-parameter-build", judge)
    return provider, calls, found, judge


def test_a_value_outside_the_model_is_a_violation(watched):
    provider, _, found, _ = watched
    provider.client.describe_instances(MaxResults=5)
    assert found == []

    shape = provider.client.meta.service_model.operation_model("CreateFleet").input_shape
    bad = {"Type": "at once", "TargetCapacitySpecification": {"DefaultTargetCapacityType": "spott"}}

    assert [text.partition(":")[0] for text in violations(bad, shape, "CreateFleet")] == [
        "CreateFleet.Type",
        "CreateFleet.TargetCapacitySpecification.DefaultTargetCapacityType",
    ]


def ask_prices(ec2, server, judge):
    """Ask what a plan asks before it; moto has no products."""
    pricing = server.client("pricing")
    pricing.meta.events.register("before-parameter-build", judge)
    pricing.meta.events.register(
        "before-call.pricing.GetProducts", lambda **_: (SimpleNamespace(status_code=200), {"PriceList": []})
    )
    prices, now = AwsPrices(pricing, lambda region: ec2), datetime.now(UTC)
    prices.on_demand(REGION)
    prices.rates(REGION, now=now)
    prices.spot(REGION, ["c7i.large", "g4dn.xlarge"], since=now - timedelta(hours=1))
    prices.sizes(REGION, ["c7i", "c8g", "g4dn", "i4i"])


@pytest.mark.slow
def test_no_call_of_lives_with_processors_cards_spot_disks_and_arm_violates_the_model(
    watched, launch, ledger, server, tmp_path
):
    provider, calls, found, judge = watched
    server.add_arm_image()
    disk = TableDisk(gigabytes=300, mib_per_s=850, usd_per_hour=0.04)
    plans = (
        unlike_plan(Market.ON_DEMAND),
        unlike_plan(Market.SPOT),
        with_disks(plan(), disk, disk),
        mixed_plan(),
    )

    ask_prices(provider.client, server, judge)
    provider.missing_images()
    provider.all_regions()
    with set_up(server) as account:
        for service in SERVICES:
            account.listen(service, "before-parameter-build", judge)
        list(account.checks())
    for number, each in enumerate(plans):
        run_id = f"night-{number}"
        with provider.prepared(run_id, in_bucket(bootstrap(tmp_path), run_id)):
            cluster = launch(each, provider=provider, run_id=run_id)
        provider.wait_until_ready(cluster, timeout_s=10)
        assert sum(vcpus_in_use(provider.client).values()) > 0
        provider.renew_lease(run_id, until=datetime.now(UTC) + timedelta(seconds=600))
        provider.end_run(run_id, ledger=ledger, reason=EndReason.RUN_ENDED)
    sweep(provider, now=datetime.now(UTC) + timedelta(hours=2), ledger=ledger)
    provider.spot_prices(ledger.entries())

    assert found == []
    assert {
        "CreateFleet",
        "CreateLaunchTemplate",
        "CreateRole",
        "DescribeInstanceTypes",
        "DescribeSpotPriceHistory",
        "GetProducts",
        "TerminateInstances",
        "GetPolicy",
        "GetServiceQuota",
    } <= set(calls)
