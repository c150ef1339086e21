import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from heterps_core.device_types import DEVICE_TYPES, get_device_type
from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.hardware import InstanceOffer, InstanceType, Market, family_of
from infra.prices.price_catalogue import PriceCatalogue
from tests.infra.builders import offer_named


def instance_type(
    name: str, *, vcpus: int = 4, accelerator: str | None = None, count: int = 0
) -> InstanceType:
    return InstanceType(
        name=name,
        vcpus=vcpus,
        memory_bytes=8 * 1024**3,
        accelerator_name=accelerator,
        accelerator_count=count,
        accelerator_memory_bytes_each=0,
        network_bandwidth_bytes_per_s=0.0,
    )


def offer(price_usd_per_hour: float = 1.0, *, as_of: str = "2026-07-20") -> InstanceOffer:
    return InstanceOffer(
        instance_type=instance_type("c7i.xlarge"),
        region="us-east-1",
        zone=None,
        market=Market.ON_DEMAND,
        price_usd_per_hour=price_usd_per_hour,
        price_as_of=as_of,
        price_source="test",
    )


@pytest.mark.parametrize(
    ("device_type", "machine", "units"),
    [
        ("cpu-c7i", instance_type("c7i.xlarge", vcpus=4), 2),  # two threads a core
        ("cpu-m7a", instance_type("m7a.xlarge", vcpus=4), 4),  # one thread a core
        ("cpu-c7i", instance_type("m7a.xlarge", vcpus=4), 0),
        ("gpu-t4", instance_type("g4dn.12xlarge", vcpus=48, accelerator="t4", count=4), 4),
        ("gpu-t4", instance_type("g5.xlarge", accelerator="a10g", count=1), 0),
        ("gpu-l4", instance_type("g6.xlarge", accelerator="t4", count=1), 0),
    ],
)
def test_units_of_an_instance(device_type, machine, units):
    assert DEVICE_TYPES[device_type].units_of(machine) == units


@pytest.mark.parametrize("price_usd_per_hour", [-1.0, float("nan"), float("inf")])
def test_refuses_an_offer_without_a_real_price(price_usd_per_hour):
    with pytest.raises(ConfigurationError, match=r"price of c7i\.xlarge must be a number"):
        offer(price_usd_per_hour)


def test_price_age_counts_from_midnight_utc_of_a_bare_date():
    now = datetime(2026, 7, 22, 12, tzinfo=UTC)

    assert offer(as_of="2026-07-20").price_age(now) == timedelta(days=2, hours=12)


def test_refuses_a_price_without_a_readable_date():
    with pytest.raises(ConfigurationError, match="ISO 8601"):
        offer(as_of="last week")


def test_unknown_device_type_is_answered_with_the_near_one():
    with pytest.raises(UnknownNameError, match="Did you mean 'gpu-t4'"):
        get_device_type("gpu-t5")


@pytest.mark.parametrize(
    ("instance_type", "units"),
    # Mbit/s for each card in the snapshot: 5,000, 20,000, 50,000, and 50,000 for four.
    [("g4dn.xlarge", 0), ("g4dn.4xlarge", 1), ("g4dn.8xlarge", 1), ("g4dn.12xlarge", 0)],
)
def test_a_type_with_a_fast_network_is_carried_only_by_sizes_that_have_it(instance_type, units):
    offer = offer_named(instance_type, PriceCatalogue())

    assert DEVICE_TYPES["gpu-t4-20gbit"].units_of(offer.instance_type) == units


def test_a_device_type_on_spot_is_the_same_hardware_bought_otherwise():
    spot = get_device_type("gpu-t4-spot")

    assert spot.market is Market.SPOT
    assert spot.in_market(Market.ON_DEMAND) == get_device_type("gpu-t4") == DEVICE_TYPES["gpu-t4"]
    on_demand = offer_named("g4dn.xlarge", PriceCatalogue())
    assert (get_device_type("gpu-t4").units_in(on_demand), spot.units_in(on_demand)) == (1, 0)
    with pytest.raises(UnknownNameError, match="'gpu-t5-spot' is not"):
        get_device_type("gpu-t5-spot")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("c7i.48xlarge", "c7i"),
        ("g2-standard-4", "g2-standard"),
        ("solo", "solo"),
    ],
)
def test_the_family_is_the_name_without_its_size(name, family):
    assert family_of(name) == family


def test_refuses_negative_interruptions():
    with pytest.raises(ConfigurationError, match="0 or more per hour"):
        dataclasses.replace(offer(1.0), interruptions_per_hour=-1.0)
