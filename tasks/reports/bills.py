"""The bill of a run: what was paid for, and what of it bought no training."""

from __future__ import annotations

from collections.abc import Sequence

from heterps_core.text_table import Table
from infra.billing.bill import Bill, BillLine, WasteLine
from infra.prices.service_charges import ServiceLine
from tasks.reports.document import Block, Facts, terminal_lines

BILL_COLUMNS = {
    "stage": "d",
    "instance": "",
    "market": "",
    "count": "d",
    "instance-seconds": ",.1f",
    "USD/hour each": ".4f",
    "USD": ".6f",
    "ended because": "",
}
SERVICE_COLUMNS = {"service": "", "quantity": ",.4f", "unit": "", "USD each": ".4f", "USD": ".6f"}
WASTE_COLUMNS = {"paid while nothing was trained": "", "USD": ".6f", "of the bill": ".1%"}


def bill_text(bill: Bill) -> str:
    """Return a bill for a terminal."""
    return "\n".join(terminal_lines(bill_blocks(bill)))


def bill_blocks(bill: Bill) -> list[Block]:
    """Return the tables of a launch's machines and services, their sum, and how old its prices are."""
    charged = "list prices of a dry run: nothing is charged" if bill.is_dry_run else "charged"
    machines = [
        (
            line.stage,
            line.instance_type,
            line.market,
            line.count,
            line.instance_seconds,
            line.price_usd_per_hour,
            line.usd,
            f"{line.ended_because}{' (waste)' if line.is_waste else ''}",
        )
        for line in bill.lines
    ]
    services = [
        (line.service, line.quantity, line.unit, line.usd_per_unit, line.usd) for line in bill.services
    ]
    failed = f", of it {bill.failed_launches_usd:.6f} USD for launches that failed"
    priced: list[BillLine | ServiceLine] = [*bill.lines, *bill.services]
    dates = {f"{line.price_as_of} ({line.price_source})" for line in priced}
    blocks: list[Block] = [
        Table(
            caption=f"Launch {bill.run_id}, provider {bill.provider}, {charged}: {bill.total_usd:.6f} USD",
            columns=BILL_COLUMNS,
            rows=machines,
        )
    ]
    if services:
        blocks.append(Table(caption="Services, part of the same sum", columns=SERVICE_COLUMNS, rows=services))
    total = f"{bill.total_usd:.6f} USD{failed if bill.failed_launches_usd > 0 else ''}"
    return [*blocks, Facts(pairs=[("total", total), *(("prices as of", date) for date in sorted(dates))])]


def waste_block(waste: Sequence[WasteLine]) -> Block:
    """Return what bought no training; each line is a part of the total, none is charged besides."""
    if not waste:
        return "Nothing was paid for nothing."
    rows = [(line.cause, line.usd, line.share) for line in waste]
    return Table(caption="Waste, each a part of the bill", columns=WASTE_COLUMNS, rows=rows)
