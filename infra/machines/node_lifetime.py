"""When a node ends itself: its lease in the run directory, and the longest that it may live.

The fourth layer of teardown, which needs neither the flow nor a sweeper nor a cloud's answer: the node's bootstrap
script looks whether the lease still changes, and sets the machine's own shutdown by its lifetime.
"""

from __future__ import annotations

from datetime import datetime

from heterps_core.training.node.node_life import CLUSTER_TIMEOUT_S
from heterps_core.training.storage.run_directory import LEASES, RunDirectory
from heterps_core.units import SECONDS_PER_HOUR
from infra.billing.caps import Caps

LIFETIME_PER_PLANNED = 2.0
"""A run that takes twice as long as planned is not the run that was planned."""

READY_TIMEOUT_S = 300.0
"""An EC2 instance runs within about a minute; five leave room for a slow day."""


def node_lifetime_s(*, longest_s: int, planned_s: float, price_usd_per_hour: float, caps: Caps) -> int:
    """Return after how many seconds a node ends itself at the latest: min(longest, 2 x planned, cap / price).

    Twice the plan is at least what a fleet is waited for at its start, however short the plan.

    Args:
        longest_s: Whatever the plan.
        planned_s: Of the whole run, with start and end.
        price_usd_per_hour: Of all machines, with their disks and addresses; above 0.
        caps: Of the run and of the month; one that is not set is no limit.

    Example:
        Planned for 20 minutes at 3 USD an hour under a cap of 1.5 USD: the least of 6 h, 40 min and 30 min.
    """
    by_plan_s = max(LIFETIME_PER_PLANNED * planned_s, READY_TIMEOUT_S + CLUSTER_TIMEOUT_S)
    by_caps_s = [
        cap / price_usd_per_hour * SECONDS_PER_HOUR
        for cap in (caps.max_usd_per_run, caps.max_usd_per_month)
        if cap is not None
    ]
    return max(1, int(min(longest_s, by_plan_s, *by_caps_s)))


def renew_lease_in(run: RunDirectory, launch_id: str, *, until: datetime) -> None:
    """Write the lease of a launch where its nodes look; that the text is another one is what renews it.

    Raises:
        OSError: The store does not answer.
    """
    run.write_json(f"{LEASES}/{launch_id}", {"until": until.isoformat()})
