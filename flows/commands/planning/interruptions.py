"""`heterps interruptions`: how often a spot pool takes instances back, counted in traces, for planning."""

from __future__ import annotations

import argparse
from pathlib import Path

from heterps_core.planning.provisioning.interruption_rate import pooled_rate, rate_of_trace
from infra.prices.interruptions import keep_counted
from infra.workspace import Workspace

HELP = """\
Count interruptions in traces of a spot pool, per instance-hour, with the range that so few of them leave.

A trace has counts of instances over time (SkyPilot, Sailor, Bamboo) or spot prices as EC2 lists them. A price above
--on-demand-price is an interruption; AWS takes instances back at any price since 2017, so newer prices show too few.
With --use-for the rate is kept, and plans count with it: for cloud/type/zone, cloud/type or cloud/family.

examples:
  heterps interruptions us-east-1a_v100_1.json.gz
  heterps interruptions trace-1.json trace-2.json --use-for aws/g4dn.xlarge/us-east-1a

exit status: 0; 2 where a file cannot be read or shows no instance at any time.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("traces", nargs="+", type=Path, metavar="FILE", help="traces of one pool")
    parser.add_argument("--on-demand-price", type=float, metavar="USD", help="per hour, for traces of prices")
    parser.add_argument("--use-for", metavar="POOL", help="keep the rate and plan with it")


def run(options: argparse.Namespace) -> None:
    """Print the rates.

    Raises:
        DataError: A file is no trace.
        ConfigurationError: A trace shows no rate, or the pool has another form.
    """
    from heterps_core.planning.provisioning.spot_trace import read_trace
    from tasks.prices import price_folder

    rates = {
        path: rate_of_trace(read_trace(path), ceiling_usd_per_hour=options.on_demand_price)
        for path in options.traces
    }
    for path, rate in rates.items():
        print(f"{path.name}: {rate}")
    together = pooled_rate(rates.values())
    if len(rates) > 1:
        print(f"together: {together}")
    if options.use_for is not None:
        source = "counted in " + ", ".join(path.name for path in rates)
        path = keep_counted(price_folder(Workspace.locate()), options.use_for, together, source=source)
        print(f"plans count with this for {options.use_for}: {path}")
