"""Show the device types that plans may use, with on-demand prices, and why other instance families are left out.

A unit is a processor core, or a card with its host. TFLOP/s are published peaks, in float32 and where the hardware
has units for it in bfloat16; a disk is a core's share of its machine's own, read and written by turns. A type without
a price is not sold in the region. Prices are the newest at hand: the bundled file, or the last refresh.

examples:
  heterps catalogue
  heterps catalogue 'gpu-*' cpu-c7i
  heterps catalogue --region eu-west-1

exit status: 0; 2 where the region has no prices, a name is unknown, or a price file cannot be read.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import defaultdict
from datetime import UTC, datetime

from heterps_core.device_types import DEVICE_TYPES, HARDWARE, get_device_type, left_out, matching
from heterps_core.hardware import DeviceType
from heterps_core.planning.provisioning.offer_choice import unit_prices
from heterps_core.text_table import WIDTH, Table
from heterps_core.units import BYTES_PER_GIB, BYTES_PER_S_PER_MBIT_PER_S
from infra.prices.price_catalogue import age_text
from infra.providers.base import REGION
from infra.workspace import Workspace

_MBIT_PER_GBIT = 1e3

COLUMNS = {
    "device type": "",
    "USD/hour": ".4f",
    "GiB": ",.1f",
    "USD/GiB-hour": ".4f",
    "TFLOP/s": ".3f",
    "USD/TFLOP/s-hour": ".3f",
    "bf16 TFLOP/s": ".3f",
    "memory GB/s": ",.1f",
    "Gbit/s": ",.2f",
    "disk GB": ",.0f",
    "disk MB/s": ",.0f",
    "families": "",
}
"""Each of one unit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("device_types", nargs="*", metavar="NAME", help="only these; patterns too")
    parser.add_argument("--region", default=REGION, help="region of the prices (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    """Print the device types, and unless some are asked for, the families that are left out."""
    from tasks.prices import catalogue_of

    offers = catalogue_of(Workspace.locate(), "aws").offers(region=options.region)
    prices = unit_prices(offers)
    shown = [get_device_type(name) for name in matching(options.device_types or ["*"])]
    rows = [_row(each, prices.get(each.name)) for each in sorted(shown, key=lambda each: each.name)]
    ages = age_text(offers, now=datetime.now(UTC))
    print(f"{len(rows)} device types, {ages} in {options.region}; each figure is of one unit")
    print("\n".join(Table(columns=COLUMNS, rows=rows).lines()))
    for disks in HARDWARE.local_disks.values():
        families = [name for each in shown for name in each.instance_families if name in disks.families]
        if disks.is_of_sibling and families:
            print(f"\ndisk MB/s of {', '.join(families)}: {disks.source}")
    if options.device_types:
        return
    by_reason: dict[str, list[str]] = defaultdict(list)
    for family, reason in left_out().items():
        by_reason[reason].append(family)
    num_used = len({family for each in DEVICE_TYPES.values() for family in each.instance_families})
    print(f"\n{num_used} instance families carry them; {len(left_out())} are left out:")
    for reason, names in by_reason.items():
        print(
            textwrap.fill(
                f"{reason}: {', '.join(names)}", WIDTH, initial_indent="  ", subsequent_indent="    "
            )
        )


def _row(device_type: DeviceType, usd_per_hour: float | None) -> list[str | float | None]:
    gib = device_type.memory_bytes / BYTES_PER_GIB
    tflops, bf16 = device_type.peak_fp32_flops_per_s / 1e12, device_type.peak_bf16_flops_per_s
    return [
        device_type.name,
        usd_per_hour,
        gib,
        None if usd_per_hour is None else usd_per_hour / gib,
        tflops,
        None if usd_per_hour is None else usd_per_hour / tflops,
        None if bf16 is None else bf16 / 1e12,
        device_type.memory_bandwidth_bytes_per_s / 1e9,
        device_type.network_bandwidth_bytes_per_s / BYTES_PER_S_PER_MBIT_PER_S / _MBIT_PER_GBIT,
        device_type.local_disk_bytes / 1e9 or None,
        device_type.local_disk_bytes_per_s / 1e6 or None,
        ", ".join(device_type.instance_families),
    ]
