import csv
import dataclasses
import gzip
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest

from heterps_core.device_types import DEVICE_TYPES, get_device_type
from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.hardware import DeviceKind, InstanceOffer, InstanceType, Market, family_of
from infra.prices.price_catalogue import PriceCatalogue
from tests.infra.builders import PRICE_SOURCE, offer_named


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


@pytest.mark.parametrize("device_type", DEVICE_TYPES.values(), ids=DEVICE_TYPES.keys())
def test_every_figure_has_a_source_and_the_name_says_the_kind(device_type):
    figures = {
        "peak_fp32_flops_per_s",
        "memory_bandwidth_bytes_per_s",
        "memory_bytes",
        "network_bandwidth_bytes_per_s",
        "kernel_launch_seconds",
    }
    if device_type.peak_bf16_flops_per_s is not None:
        figures.add("peak_bf16_flops_per_s")

    assert set(device_type.sources) == figures
    assert all(getattr(device_type, figure) > 0 for figure in figures)
    assert device_type.kind in device_type.name
    assert (device_type.vcpus_per_unit > 0) == (device_type.kind is DeviceKind.CPU)


def test_memory_and_network_of_a_unit_equal_the_least_share_in_the_price_snapshot():
    """Recomputed from the raw file, for every type that it has sizes for."""
    with gzip.open(PRICE_SOURCE, "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["vcpus"]]
    memory_mib, network_mbps = defaultdict(set), defaultdict(set)
    for row in rows:
        for device in DEVICE_TYPES.values():
            if row["family"] not in device.instance_families:
                continue
            if (
                device.name == "gpu-t4-20gbit"
                and float(row["network_bandwidth_mbps"]) / int(row["gpu_count"]) < 20_000
            ):
                continue
            is_cpu = device.kind is DeviceKind.CPU
            units = int(row["vcpus"]) // device.vcpus_per_unit if is_cpu else int(row["gpu_count"])
            memory_mib[device.name].add(
                int(row["memory_mib"]) / units if is_cpu else int(row["gpu_memory_mib_each"])
            )
            network_mbps[device.name].add(float(row["network_bandwidth_mbps"]) / units)

    # p3 stands there with a price alone.
    assert set(memory_mib) == set(DEVICE_TYPES) - {"gpu-v100"}
    for name, shares in memory_mib.items():
        assert DEVICE_TYPES[name].memory_bytes == min(shares) * 2**20, name
        assert DEVICE_TYPES[name].network_bandwidth_bytes_per_s == pytest.approx(
            min(network_mbps[name]) * 125_000
        )


def test_clock_times_width_gives_the_peak_of_a_cpu_unit():
    clock_hz = {}
    with gzip.open(PRICE_SOURCE, "rt") as file:
        for row in csv.DictReader(file):
            clock_hz[row["instance_type"]] = float(row["cpu_clock_mhz"] or 0) * 1e6

    # AVX-512 with two units: 64 operations a cycle; Zen 4 with two 256-bit pipes: 32.
    assert DEVICE_TYPES["cpu-c5"].peak_fp32_flops_per_s == pytest.approx(64 * clock_hz["c5.xlarge"])
    assert DEVICE_TYPES["cpu-c7i"].peak_fp32_flops_per_s == pytest.approx(64 * clock_hz["c7i.xlarge"])
    assert DEVICE_TYPES["cpu-c7i"].peak_bf16_flops_per_s == pytest.approx(1024 * clock_hz["c7i.xlarge"])
    assert DEVICE_TYPES["cpu-m7a"].peak_fp32_flops_per_s == pytest.approx(32 * clock_hz["m7a.xlarge"])


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


def test_equal_families_have_the_clock_and_no_less_memory_and_network_in_the_price_snapshot():
    """Size by size from the raw file: what stands in for an instance must be as fast."""
    with gzip.open(PRICE_SOURCE, "rt") as file:
        rows = {row["instance_type"]: row for row in csv.DictReader(file) if row["vcpus"]}
    compared = 0
    for device in DEVICE_TYPES.values():
        for name, row in rows.items():
            family, _, size = name.partition(".")
            for other in (rows.get(f"{equal}.{size}") for equal in device.equal_families):
                if family != device.instance_families[0] or other is None:
                    continue
                compared += 1
                for column in ("cpu_clock_mhz", "vcpus", "gpu_name", "gpu_count"):
                    assert other[column] == row[column], (name, column)
                assert int(other["memory_mib"]) >= int(row["memory_mib"])
                assert float(other["network_bandwidth_mbps"]) >= float(row["network_bandwidth_mbps"])
    assert compared > 40


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
