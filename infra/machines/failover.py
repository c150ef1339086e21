"""The first cluster that can be had of several purchases for the same plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta

from heterps_core.cluster import Cluster
from heterps_core.hardware import Market
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.units import ratio
from infra.billing.caps import NOTHING_SPENT, Caps, Spent
from infra.bootstrap.node_start import Bootstrap
from infra.ledger.ledger import Ledger
from infra.machines.lifecycle import running_cluster
from infra.providers.base import InsufficientCapacityError, Provider, QuotaExceededError

SPOT_RETRY_S = 180.0
"""Spells without capacity last from minutes to hours (skypilot-org/spot-traces), and each try is some requests."""

logger = logging.getLogger(__name__)


@contextmanager
def first_running_cluster(
    provider: Provider,
    plans: Sequence[ProvisioningPlan],
    *,
    new_launch_id: Callable[[], str],
    bootstrap: Bootstrap,
    ledger: Ledger,
    caps: Caps,
    predicted_cost_usd: float,
    spent: Callable[[], Spent] = lambda: NOTHING_SPENT,
    spot_until: datetime | None = None,
    retry_s: float = SPOT_RETRY_S,
) -> Iterator[Cluster]:
    """Try purchases in order until one can be had; see `infra.machines.lifecycle.running_cluster`.

    Only for want of capacity or of quota is another one tried: a wrong credential is wrong in every zone. Where a
    quota stood in the way, those are left out that ask as much of it. A night with time to spare waits for spot, at a
    third of the price, instead of going on-demand at once. Each try has its own launch id, so that what a
    failed one cost stays in the bill.

    Args besides those of `running_cluster`:
        plans: At least one.
        new_launch_id: Called before each try.
        predicted_cost_usd: Of the whole run as it was planned; a more expensive purchase is charged in proportion.
        spot_until: Until when purchases on spot are tried again for want of capacity, before one on-demand is.
        retry_s: Between two rounds of tries.

    Raises:
        BudgetExceededError: A cap is exceeded by the purchase whose turn it is.
        InsufficientCapacityError: None could be had; says why the last one could not.
        ProvisioningError: The provider failed otherwise.
    """
    planned_usd_per_hour = provider.billed_usd_per_hour(plans[0])
    left = list(plans)
    num_tried = 0
    with ExitStack() as stack:
        while True:
            plan = left.pop(0)
            num_tried += 1
            try:
                cluster = stack.enter_context(
                    running_cluster(
                        provider,
                        plan,
                        run_id=new_launch_id(),
                        bootstrap=bootstrap,
                        ledger=ledger,
                        caps=caps,
                        predicted_cost_usd=predicted_cost_usd
                        * ratio(provider.billed_usd_per_hour(plan), planned_usd_per_hour, otherwise=1.0),
                        spent=spent,
                    )
                )
                break
            except (InsufficientCapacityError, QuotaExceededError) as error:
                problem = error
            if (
                isinstance(problem, InsufficientCapacityError)
                and spot_until is not None
                and _is_on_spot(plan)
                and not any(_is_on_spot(other) for other in left)
                and provider.now() + timedelta(seconds=retry_s) < spot_until
            ):
                logger.info(
                    "no spot machines can be had; they are asked for again in %.0f s, until %s: %s",
                    retry_s,
                    spot_until.isoformat(timespec="minutes"),
                    problem,
                )
                time.sleep(retry_s)
                left = list(plans)
                continue
            if isinstance(problem, QuotaExceededError):
                left = [other for other in left if provider.asks_less(other, plan, problem.quotas)]
            if not left:
                # Whatever stood in the way of single ones, for all that is left it is a want of machines.
                raise InsufficientCapacityError(
                    f"{num_tried} of {len(plans)} purchases were tried for this plan and none could be had; the "
                    f"last: {problem}"
                ) from problem
            logger.warning(
                "purchase %d could not be had, %d are left to try: %s", num_tried, len(left), problem
            )
        yield cluster


def _is_on_spot(plan: ProvisioningPlan) -> bool:
    return any(group.offer.market is Market.SPOT for group in plan.groups)
