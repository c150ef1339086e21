"""Device types against published figures, against the raw table, and against the twelve that stood here by hand."""

import csv
import gzip
from collections import defaultdict
from dataclasses import replace

import pytest

from heterps_core.device_types import (
    DEVICE_TYPES,
    HARDWARE,
    NETWORK_STEP,
    TOLERANCE,
    derived,
    left_out,
    matching,
)
from heterps_core.errors import ConfigurationError
from heterps_core.hardware import DeviceKind, family_of
from infra.prices.price_catalogue import PriceCatalogue
from tests.infra.builders import PRICE_SOURCE

BY_HAND = {
    # name: float32 and bfloat16 FLOP/s, memory bytes/s, memory bytes, network Mbit/s, families, equal families
    "cpu-c5": (217.6e9, None, 5.8667e9, 4294967296, 500, ("c5",), ("c5d",)),
    "cpu-c7i": (204.8e9, 3276.8e9, 6.4e9, 4294967296, 520.833, ("c7i",), ("m7i", "r7i")),
    "cpu-r6in": (224e9, None, 6.4e9, 17179869184, 3125, ("r6in",), ("r6idn",)),
    "cpu-m7a": (118.4e9, 236.8e9, 4.8e9, 4294967296, 260.417, ("m7a",), ("r7a",)),
    "gpu-t4": (8100e9, None, 320e9, 17179869184, 5000, ("g4dn",), ()),
    "gpu-t4-20gbit": (8100e9, None, 320e9, 17179869184, 20000, ("g4dn",), ()),
    "gpu-a10g": (31200e9, 62400e9, 600e9, 23999807488, 2500, ("g5",), ()),
    "gpu-l4": (30300e9, 121000e9, 300e9, 23999807488, 2500, ("g6",), ("gr6",)),
    "gpu-l40s": (91600e9, 362050e9, 864e9, 47999614976, 2500, ("g6e",), ()),
    "gpu-v100": (15700e9, None, 900e9, 17179869184, 2500, ("p3",), ()),
    "gpu-a100": (19500e9, 312000e9, 1555e9, 42949672960, 50000, ("p4d",), ()),
    "gpu-h100": (67000e9, 989500e9, 3350e9, 85899345920, 100000, ("p5",), ()),
}
"""The figures of data sheets that stood here before types were derived."""

EXPLAINED = {("gpu-v100", 3), ("gpu-v100", 4)}
"""Figures that differ: p3 has no sizes in the table, so gpu-v100 is p3dn (a note in hardware.toml)."""


def table():
    with gzip.open(PRICE_SOURCE, "rt") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", BY_HAND)
def test_derived_figures_are_those_of_the_data_sheets(name):
    device = DEVICE_TYPES[name]
    figures = (
        device.peak_fp32_flops_per_s,
        device.peak_bf16_flops_per_s,
        device.memory_bandwidth_bytes_per_s,
        device.memory_bytes,
        device.network_bandwidth_bytes_per_s / 125_000,
    )

    for index, (figure, by_hand) in enumerate(zip(figures, BY_HAND[name], strict=False)):
        if (name, index) not in EXPLAINED:
            assert figure == (by_hand and pytest.approx(by_hand, rel=1e-4)), index


def units_by_hand(name, machine, families):
    """Return the units of a machine by the figures that stood here by hand."""
    network_mbit_per_s = BY_HAND[name][4]
    if machine.family not in families:
        return 0
    cores = machine.vcpus if name == "cpu-m7a" else machine.vcpus // 2
    units = cores if name.startswith("cpu") else machine.accelerator_count
    share = machine.network_bandwidth_bytes_per_s / 125_000 / units
    return units if share > 0.99 * network_mbit_per_s else 0


@pytest.mark.parametrize("name", sorted(BY_HAND.keys() - {"gpu-v100"}))
def test_every_offer_carries_as_many_units_as_by_hand(name):
    families, equal = BY_HAND[name][5:]
    device = DEVICE_TYPES[name]
    carried = 0
    for offer in PriceCatalogue().offers(region="us-east-1"):
        machine = offer.instance_type
        # gr6 has the card of g6 beside more memory: an equal family by hand, one of the type's own now.
        own = (*families, *equal) if name == "gpu-l4" else families
        assert device.units_of(machine) == units_by_hand(name, machine, own), machine.name
        assert device.equal_units_of(machine) == units_by_hand(name, machine, (*families, *equal)), (
            machine.name
        )
        carried += device.units_of(machine) > 0
    assert carried > 0


def test_every_family_of_the_table_has_a_device_type_or_a_reason():
    families = {family_of(row["instance_type"]) for row in table()}
    used = [family for device in DEVICE_TYPES.values() for family in device.instance_families]
    by_hardware = [
        family
        for tables in (HARDWARE.processors, HARDWARE.cards)
        for each in tables.values()
        for family in each.families
    ]

    assert len(DEVICE_TYPES) >= 60
    assert len(families) == 189
    assert set(used) | left_out().keys() == families
    assert not set(used) & left_out().keys()
    by_block = {"p5e", "p5en", "p6-b200", "p6-b300"}
    assert sorted(by_hardware) == sorted({*used, *by_block})
    assert {family for family, reason in left_out().items() if "Capacity Block" in reason} == by_block
    assert all("add it" not in reason for reason in left_out().values())


def test_left_out_for_their_hypervisor_are_those_on_xen():
    on_xen = {row["family"] for row in table() if row["hypervisor"] == "xen"}
    (said,) = (set(families) for reason, families in HARDWARE.left_out.items() if "Xen" in reason)

    assert on_xen <= said
    # Of the others the table has a price alone.
    assert not (said - on_xen) & {row["family"] for row in table()}


def test_a_family_without_figures_is_left_out_with_the_way_out(monkeypatch):
    monkeypatch.setattr(
        "heterps_core.device_types.HARDWARE",
        replace(HARDWARE, left_out={}),
    )

    assert left_out()["f2"] == "no figures; add it to a processor or card of hardware.toml"


def test_a_family_without_sizes_is_refused_in_one_line():
    card = replace(HARDWARE.cards["t4"], families=("g4dn", "g4dm"))

    with pytest.raises(ConfigurationError, match=r"g4dm has none; add them, or move the family to left_out$"):
        derived(replace(HARDWARE, cards={"t4": card}))


def test_a_family_more_is_one_word_more():
    rome = HARDWARE.processors["rome"]
    types = derived(replace(HARDWARE, processors={"rome": replace(rome, families=("c5a", "g4ad"))}, cards={}))

    assert {name: each.instance_families for name, each in types.items()} == {
        "cpu-c5a": ("c5a",),
        "cpu-g4ad": ("g4ad",),
    }


def test_memory_and_network_of_a_unit_are_the_least_share_in_the_table():
    """Recomputed from the raw file, for every type."""
    rows = defaultdict(list)
    for row in table():
        rows[row["family"]].append(row)
    for device in DEVICE_TYPES.values():
        memory_mib, network_mbps = [], []
        for row in (row for family in device.instance_families for row in rows[family]):
            is_cpu = device.kind is DeviceKind.CPU
            units = int(row["vcpus"]) // device.vcpus_per_unit if is_cpu else int(row["gpu_count"])
            memory_mib.append(int(row["memory_mib"]) / units if is_cpu else int(row["gpu_memory_mib_each"]))
            if row["network_bandwidth_mbps"]:
                network_mbps.append(float(row["network_bandwidth_mbps"]) / units)
        if device.name.endswith("gbit"):
            least = DEVICE_TYPES[device.name.rpartition("-")[0]].network_bandwidth_bytes_per_s
            network_mbps = [share for share in network_mbps if share * 125_000 >= NETWORK_STEP * least]
        assert device.memory_bytes == int(min(memory_mib) * 2**20), device.name
        assert device.network_bandwidth_bytes_per_s == pytest.approx(min(network_mbps) * 125_000), device.name


def test_clock_times_width_gives_the_peak_of_a_core():
    clock_hz = {row["instance_type"]: float(row["cpu_clock_mhz"] or 0) * 1e6 for row in table()}

    # AVX-512 with two units: 64 operations a cycle; Zen 4 with two 256-bit pipes, and Neoverse V2 with four of
    # 128 bits: 32.
    assert DEVICE_TYPES["cpu-c5"].peak_fp32_flops_per_s == pytest.approx(64 * clock_hz["c5.xlarge"])
    assert DEVICE_TYPES["cpu-c7i"].peak_fp32_flops_per_s == pytest.approx(64 * clock_hz["c7i.xlarge"])
    assert DEVICE_TYPES["cpu-c7i"].peak_bf16_flops_per_s == pytest.approx(1024 * clock_hz["c7i.xlarge"])
    assert DEVICE_TYPES["cpu-m7a"].peak_fp32_flops_per_s == pytest.approx(32 * clock_hz["m7a.xlarge"])
    assert DEVICE_TYPES["cpu-r8g"].peak_fp32_flops_per_s == pytest.approx(
        32 * min(clock_hz["r8g.xlarge"], 2.7e9)
    )


def test_families_of_a_device_type_agree_and_equal_ones_have_no_less():
    """Size by size from the raw file: a substitute of an instance must be as fast."""
    rows = {row["instance_type"]: row for row in table() if row["vcpus"]}
    compared = 0
    for device in (each for each in DEVICE_TYPES.values() if each.kind is DeviceKind.CPU):
        first, *others = device.instance_families
        for name, row in rows.items():
            if row["family"] != first:
                continue
            size = name.partition(".")[2]
            for family in others:
                if other := rows.get(f"{family}.{size}"):
                    compared += 1
                    for column in ("cpu_clock_mhz", "memory_mib", "network_bandwidth_mbps"):
                        assert float(other[column]) == pytest.approx(float(row[column]), rel=TOLERANCE)
            for family in device.equal_families:
                if other := rows.get(f"{family}.{size}"):
                    compared += 1
                    assert other["vcpus"] == row["vcpus"]
                    assert int(other["memory_mib"]) >= 0.99 * int(row["memory_mib"]), (name, family)
    assert compared > 400


@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
def test_the_architecture_is_that_of_the_table(architecture):
    raw = {"x86_64": "amd64", "arm64": "arm64"}[architecture]
    families = {row["family"] for row in table() if row["arch"] == raw}

    types = [each for each in DEVICE_TYPES.values() if each.architecture == architecture]

    assert len(types) > 30
    assert all(set(each.instance_families) <= families for each in types)


def test_every_figure_has_a_source():
    for tables in (HARDWARE.processors, HARDWARE.cards):
        for name, each in tables.items():
            bf16 = getattr(each, "bf16_flops_per_cycle", None) or getattr(each, "peak_bf16_flops_per_s", None)
            assert each.sources["flops"], name
            assert each.sources["memory"], name
            assert ("bf16" in each.sources) == (bf16 is not None), name


def test_patterns_are_those_of_a_shell_and_other_names_stay():
    assert matching(["gpu-l4*", "cpu-c7i", "cpu-c7i", "gpu-t5"]) == [
        "gpu-l4",
        "gpu-l4-10gbit",
        "gpu-l40s",
        "gpu-l40s-20gbit",
        "cpu-c7i",
        "gpu-t5",
    ]
