"""The bill of a run on its page: what was paid for, and what of it bought no training."""

from __future__ import annotations

from tasks.reports.pages import Block, Table, Text
from tasks.reports.run_report import RunReport

BILL_HEADER = [
    "stage",
    "instance",
    "market",
    "count",
    "instance-seconds",
    "USD/hour each",
    "USD",
    "ended because",
]
SERVICE_HEADER = ["service", "quantity", "unit", "USD each", "USD"]
WASTE_HEADER = ["paid while nothing was trained", "USD", "of the bill"]


def bill_blocks(report: RunReport) -> list[Block]:
    """Return a table for each launch, its services, the waste, and what the whole plan would cost."""
    blocks: list[Block] = []
    for bill in report.bills:
        rows = [
            [
                str(line.stage),
                line.instance_type,
                line.market,
                str(line.count),
                f"{line.instance_seconds:,.1f}",
                f"{line.price_usd_per_hour:.4f}",
                f"{line.usd:.6f}",
                f"{line.ended_because}{' (waste)' if line.is_waste else ''}",
            ]
            for line in bill.lines
        ]
        charged = "list prices of a rehearsal: nothing is charged" if bill.is_rehearsal else "charged"
        blocks.append(
            Table(
                caption=f"Launch {bill.run_id}, {charged}: {bill.total_usd:.6f} USD",
                header=BILL_HEADER,
                rows=rows,
                text_columns=frozenset({0, 1, 2, 7}),
            )
        )
        if bill.services:
            services = [
                [
                    line.service,
                    f"{line.quantity:,.4f}",
                    line.unit,
                    f"{line.usd_per_unit:.4f}",
                    f"{line.usd:.6f}",
                ]
                for line in bill.services
            ]
            blocks.append(
                Table(
                    caption="Services, part of the same sum",
                    header=SERVICE_HEADER,
                    rows=services,
                    text_columns=frozenset({0, 2}),
                )
            )
    waste = [[line.cause, f"{line.usd:.6f}", f"{line.share:.1%}"] for line in report.waste]
    if waste:
        blocks.append(Table(caption="Waste, each a part of the bill", header=WASTE_HEADER, rows=waste))
    else:
        blocks.append(Text(text="Nothing was paid for nothing."))
    blocks.append(
        Text(
            text=f"The whole plan in instances of a cloud: {report.provisioning.cloud_plan.price_usd_per_hour:.4f} "
            f"USD/hour, {report.provisioning.predicted_cost_usd:.6f} USD for the run."
        )
    )
    return blocks
