"""The first available cluster of several purchases for the same plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta

from heterps_core.cluster import Cluster
from heterps_core.errors import ProvisioningError
from heterps_core.hardware import Market
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.units import ratio
from infra.billing.caps import NOTHING_SPENT, Caps, Spent
from infra.bootstrap.node_start import Bootstrap
from infra.ledger.ledger import Ledger
from infra.machines.lifecycle import running_cluster
from infra.providers.base import EndedAtStartError, InsufficientCapacityError, Provider, QuotaExceededError

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
    """Try purchases in order until one is available; see `infra.machines.lifecycle.running_cluster`.

    Another one is tried only if capacity or quota is missing: a wrong credential is wrong in every zone. After a
    refusal by a quota, purchases that ask as much of it are left out. Machines that end while they start are bought a
    second time. A night with time to spare waits for spot, at a third of the price, instead of going on-demand at
    once. Each try has its own launch id, so that the cost of a failed one stays in the bill.

    Args besides those of `running_cluster`:
        plans: At least one.
        new_launch_id: Called before each try.
        predicted_cost_usd: Of the whole run by the first plan; a more expensive purchase is charged in proportion.
        spot_until: Until when purchases on spot are tried again, before one on-demand is.
        retry_s: Between two rounds of tries.

    Raises:
        BudgetExceededError: The next purchase exceeds a cap.
        InsufficientCapacityError: None is available; names the reason of the last.
        ProvisioningError: The provider failed otherwise.
    """
    planned_usd_per_hour = provider.billed_usd_per_hour(plans[0])
    left = list(plans)
    num_tried = 0
    repeated: ProvisioningPlan | None = None
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
            except InsufficientCapacityError as error:
                problem: ProvisioningError = error
                if isinstance(error, EndedAtStartError) and plan is not repeated:
                    repeated = plan
                    left.insert(0, plan)
                if spot_until is not None and _waits(provider, plan, left, retry_s, spot_until, problem):
                    left = list(plans)
                    continue
            except QuotaExceededError as error:
                problem = error
                left = [other for other in left if provider.asks_less(other, plan, error.quotas)]
            if not left:
                # Whatever refused single ones, all of them together are treated as missing capacity.
                raise InsufficientCapacityError(
                    f"{num_tried} of {len(plans)} purchases were tried for this plan and none is available; the "
                    f"last: {problem}"
                ) from problem
            logger.warning(
                "purchase %d is not available, %d are left to try: %s", num_tried, len(left), problem
            )
        yield cluster


def _waits(
    provider: Provider,
    plan: ProvisioningPlan,
    left: Sequence[ProvisioningPlan],
    retry_s: float,
    until: datetime,
    problem: ProvisioningError,
) -> bool:
    """Wait for spot machines where there is time, before the first plan on-demand; return whether it did."""
    is_last_on_spot = _is_on_spot(plan) and not any(map(_is_on_spot, left))
    if not is_last_on_spot or provider.now() + timedelta(seconds=retry_s) >= until:
        return False
    logger.info(
        "no spot machines are available; the next try is in %.0f s, the last before %s: %s",
        retry_s,
        until.isoformat(timespec="minutes"),
        problem,
    )
    time.sleep(retry_s)
    return True


def _is_on_spot(plan: ProvisioningPlan) -> bool:
    return any(group.offer.market is Market.SPOT for group in plan.groups)
