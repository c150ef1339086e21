"""The bill of a run: machines, services, and the part of it that bought no training."""

from __future__ import annotations

from collections.abc import Sequence

from heterps_core.text_table import Table, labelled_lines
from infra.billing.bill import Bill, BillLine, WasteLine
from infra.prices.service_charges import ServiceLine


def machines_table(bills: Sequence[Bill]) -> Table:
    """Return the machines of launches, each with its price and its end."""
    first, total_usd = bills[0], sum(bill.total_usd for bill in bills)
    charged = "list prices of a dry run: nothing is charged" if first.is_dry_run else "charged"
    launches = ", ".join(bill.run_id for bill in bills)
    return Table(
        caption=f"Launch {launches}, provider {first.provider}, {charged}: {total_usd:.6f} USD",
        columns={
            "stage": "d",
            "instance": "",
            "market": "",
            "count": "d",
            "instance-seconds": ",.1f",
            "USD/hour each": ".4f",
            "USD": ".6f",
            "ended because": "",
        },
        rows=[
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
            for bill in bills
            for line in bill.lines
        ],
    )


def bill_text(bill: Bill) -> str:
    """Return a launch's machines and services, their sum, and how old its prices are, for a terminal."""
    lines = machines_table([bill]).captioned_lines()
    if bill.services:
        services = Table(
            caption="Services, part of the same sum",
            columns={"service": "", "quantity": ",.4f", "unit": "", "USD each": ".4f", "USD": ".6f"},
            rows=[
                (line.service, line.quantity, line.unit, line.usd_per_unit, line.usd)
                for line in bill.services
            ],
        )
        lines += ["", *services.captioned_lines()]
    failed = f", of it {bill.failed_launches_usd:.6f} USD for launches that failed"
    priced: list[BillLine | ServiceLine] = [*bill.lines, *bill.services]
    dates = sorted({f"{line.price_as_of} ({line.price_source})" for line in priced})
    total = f"{bill.total_usd:.6f} USD{failed if bill.failed_launches_usd > 0 else ''}"
    return "\n".join(
        [*lines, *labelled_lines([("total", total), *(("prices as of", date) for date in dates)])]
    )


def waste_text(waste: Sequence[WasteLine]) -> str:
    """Return what bought no training; each line is a part of the total, none is charged besides."""
    if not waste:
        return "  Nothing was paid while nothing was trained."
    table = Table(
        caption="Waste, each a part of the bill",
        columns={"paid while nothing was trained": "", "USD": ".6f", "of the bill": ".1%"},
        rows=[(line.cause, line.usd, line.share) for line in waste],
    )
    return "\n".join(["", *table.captioned_lines()])
