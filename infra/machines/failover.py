"""The first cluster that can be had of several purchases for the same plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from heterps_core.cluster import Cluster
from heterps_core.errors import ProvisioningError
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from infra.billing.caps import NOTHING_SPENT, Caps, Spent
from infra.bootstrap.node_start import Bootstrap
from infra.ledger.ledger import Ledger
from infra.machines.lifecycle import running_cluster
from infra.providers.base import InsufficientCapacityError, Provider, QuotaExceededError

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
) -> Iterator[Cluster]:
    """Try purchases in order until one can be had; see `infra.machines.lifecycle.running_cluster`.

    Only for want of capacity or of quota is another one tried: a wrong credential is wrong in every zone. Where a
    quota stood in the way, those are left out that ask as much of it. Each try has its own launch id, so that what a
    failed one cost stays in the bill.

    Args besides those of `running_cluster`:
        plans: At least one.
        new_launch_id: Called before each try.
        predicted_cost_usd: Of the whole run as it was planned; a more expensive purchase is charged in proportion.

    Raises:
        BudgetExceededError: A cap is exceeded by the purchase whose turn it is.
        ProvisioningError: None could be had; says why the last one could not.
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
                        * provider.billed_usd_per_hour(plan)
                        / planned_usd_per_hour,
                        spent=spent,
                    )
                )
                break
            except (InsufficientCapacityError, QuotaExceededError) as error:
                problem = error
            if isinstance(problem, QuotaExceededError):
                left = [other for other in left if provider.asks_less(other, plan, problem.quotas)]
            if not left:
                raise ProvisioningError(
                    f"{num_tried} of {len(plans)} purchases were tried for this plan and none could be had; the "
                    f"last: {problem}"
                ) from problem
            logger.warning(
                "purchase %d could not be had, %d are left to try: %s", num_tried, len(left), problem
            )
        yield cluster
