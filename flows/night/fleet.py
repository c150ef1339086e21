"""The machines of a night while it trains: which it goes on with where some are lost or cannot be had."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from flows.night.plan import NightPlan, OpenedRun
from heterps_core.cluster import Cluster
from heterps_core.device_types import get_device_type
from heterps_core.errors import BudgetExceededError, ProvisioningError
from heterps_core.hardware import Market
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.training.outcome import MachinesLost
from heterps_core.training.step_metrics import read_progress
from infra.billing.caps import Caps
from infra.ledger.ledger import EndReason
from infra.providers.base import InsufficientCapacityError
from tasks.clusters import with_causes
from tasks.prices import recheck_prices
from tasks.provisioning import Provisioning
from tasks.records.mlflow_store import client_of
from tasks.records.runs import utc_now
from tasks.running.budget import spending_of, spent_this_month_usd
from tasks.running.fleet_decision import (
    Decision,
    Rest,
    Way,
    decide_on_growth,
    decide_on_loss,
)
from tasks.running.growth import Growth, with_missing
from tasks.running.losses import (
    LOSSES_FILE,
    losses_document,
    note_decision,
    note_loss,
    restart_budget,
    slowness_of,
)
from tasks.running.progress import log_step
from tasks.running.replacement import (
    end_nodes,
    forget_lost,
    replaced_machines,
    smaller,
)
from tasks.training import write_job

_Launched = TypeVar("_Launched")


@dataclass(frozen=True, kw_only=True, slots=True)
class Replan:
    """The fleet is ended, and the rest of the night is to be planned again."""

    without: frozenset[str] = frozenset()
    """Device types that could not be had."""


def plan_without(plan: NightPlan, problem: InsufficientCapacityError) -> Replan:
    """Return what to plan without where a launch could not have its machines, in no zone and no market.

    Raises:
        InsufficientCapacityError: No other device types are left.
    """
    tried = {get_device_type(stage.device_type) for stage in plan.report.provisioning.launch_stages}
    without = frozenset(hardware.in_market(market).name for hardware in tried for market in Market)
    if not set(plan.report.problem.device_types) - without:
        raise problem
    log_step("replan", f"without {', '.join(sorted(without))}: {problem}")
    return Replan(without=without)


def fleet_after_loss(
    fleet: ExitStack,
    run: OpenedRun,
    plan: NightPlan,
    provisioning: Provisioning,
    cluster: Cluster,
    lost: MachinesLost,
) -> tuple[Cluster, Provisioning] | Replan:
    """Note a loss, decide how the run goes on, and return the cluster that does, with what it was bought by.

    Args:
        fleet: Ends what is launched.
        provisioning: What the cluster was bought by.

    Raises:
        TrainingError: The run may not restart again.
    """
    loss = note_loss(
        run.workspace,
        run.run_id,
        with_causes(run.workspace, cluster, lost),
        run_directory=run.directory,
        launch_id=cluster.run_id,
        usd_per_hour=cluster.price_usd_per_hour,
        max_restarts_per_hour=restart_budget(
            run.asked.max_restarts_per_hour,
            interruptions_per_hour=provisioning.launch_plan.interruptions_per_hour,
        ),
        now=utc_now(),
        slowness=_slowness_of(run, plan, provisioning),
    )
    log_step("preempted" if loss.is_noticed else "lost", loss.summary)
    if not lost.node_ids:
        return cluster.next_generation(), provisioning
    rest = _rest_of(run, plan, provisioning, step=loss.checkpoint_step)
    refused: dict[Way, str] = {}
    without: frozenset[str] = frozenset()
    try:
        bought = at_prices_of_now(run, provisioning)
    except BudgetExceededError as problem:
        bought, refused = provisioning, dict.fromkeys((Way.REPLACE, Way.GROW), str(problem))
    while True:
        decision = decide_on_loss(rest, bought, cluster, lost.node_ids, refused=refused, without=without)
        following: tuple[Cluster, Provisioning] | Replan = Replan(without=without)
        chosen = decision.chosen
        try:
            if chosen is not None and chosen.way is Way.REPLACE:
                following = (
                    fleet.enter_context(_launch_of(run, replaced_machines)(cluster, lost, bought)),
                    bought,
                )
            elif chosen is not None and chosen.way in (Way.SHRINK, Way.GROW):
                following = _shrunk(run, plan, bought, cluster, lost)
            break
        except (ProvisioningError, BudgetExceededError) as problem:
            assert chosen is not None
            refused[chosen.way] = str(problem)
            if isinstance(problem, InsufficientCapacityError):
                without |= {node.device_type for node in cluster.nodes if node.node_id in lost.node_ids}
    log_step("decided", decision.reason)
    is_smaller = chosen is not None and chosen.way in (Way.SHRINK, Way.GROW)
    note_decision(run.workspace, run.run_id, decision.reason, is_of_other_size=is_smaller)
    client_of(run.workspace).log_dict(
        run.tracked.mlflow_run_id, losses_document(run.workspace, run.run_id), LOSSES_FILE
    )
    if not isinstance(following, Replan):
        log_step("fleet", f"{', '.join(lost.node_ids)} lost; {len(following[0].nodes)} machines go on")
    return following


def _shrunk(
    run: OpenedRun, plan: NightPlan, provisioning: Provisioning, cluster: Cluster, lost: MachinesLost
) -> tuple[Cluster, Provisioning]:
    found = smaller(provisioning, cluster, lost.node_ids)
    end_nodes(run.workspace, cluster, lost.node_ids, run_id=run.run_id, reason=EndReason.GONE)
    forget_lost(run.directory, lost)
    write_job_of(run, plan, found, is_under_way=True)
    return cluster.next_generation(without=lost.node_ids), found


def growth_of(
    fleet: ExitStack,
    run: OpenedRun,
    plan: NightPlan,
    present: tuple[Provisioning, Cluster],
    launched: tuple[Provisioning, Cluster],
) -> Growth:
    """Return the monitor that decides whether a fleet that shrank grows to its former size.

    Args:
        fleet: Ends what is launched.
        present: The fleet as it is, and what it was bought by.
        launched: The same as it was launched at first.
    """
    (now, cluster), (planned, first) = present, launched
    whole = with_missing(cluster, first)
    missing = [node for node in whole.nodes if node not in cluster.nodes]

    def decide(refused: Mapping[Way, str]) -> Decision:
        return decide_on_growth(
            _rest_of(run, plan, now, step=_last_step(run)),
            now=now,
            cluster=cluster,
            planned=planned,
            whole=whole,
            refused=refused,
            without={node.device_type for node in missing} if refused else (),
        )

    def launch(count: int) -> tuple[Cluster, Provisioning]:
        bought = at_prices_of_now(run, planned)
        left_out = [node.node_id for node in missing[count:]]
        grown = replace(whole, nodes=tuple(node for node in whole.nodes if node.node_id not in left_out))
        if left_out:
            bought = smaller(bought, whole, left_out)
        absent = MachinesLost(message="", node_ids=tuple(node.node_id for node in missing[:count]))
        return fleet.enter_context(_launch_of(run, replaced_machines)(grown, absent, bought)), bought

    return Growth(run.directory, num_missing=len(missing), decide=decide, launch=launch)


def _last_step(run: OpenedRun) -> int:
    progress = read_progress(run.directory)
    return 0 if progress is None else progress.step


def _launch_of(
    run: OpenedRun, launch: Callable[..., AbstractContextManager[_Launched]]
) -> Callable[..., AbstractContextManager[_Launched]]:
    """Return a launch beside a fleet with what it needs of a run."""
    return partial(
        launch,
        run.workspace,
        run_id=run.run_id,
        run_directory=run.directory,
        model=run.asked.sized_model,
        caps=run.asked.caps,
    )


def _rest_of(
    run: OpenedRun,
    plan: NightPlan,
    provisioning: Provisioning,
    *,
    step: int,
) -> Rest:
    """Return what is left behind a step, at the speed that the run was measured at.

    A dry run decides for the night that it stands for: of that neither speed nor spending is measured.
    """
    caps = run.asked.caps
    num_steps = run.dataset.num_batches(run.batch_size) * run.asked.epochs
    usd_left = math.inf
    if not run.is_dry_run and caps.max_usd_per_run is not None:
        spent = spending_of(run.workspace, run.asked.provider, run.run_id, now=utc_now())
        usd_left = caps.max_usd_per_run - spent.run_usd
    return Rest.of(
        plan.report.problem,
        share_left=max(num_steps - step, 1) / num_steps,
        slowness=_slowness_of(run, plan, provisioning),
        seconds_left=math.inf if plan.deadline is None else plan.deadline.seconds_left(utc_now()),
        usd_left=usd_left,
    )


def _slowness_of(run: OpenedRun, plan: NightPlan, provisioning: Provisioning) -> float:
    if run.is_dry_run:
        return 1.0
    planned = evaluate(plan.report.problem, provisioning.launch_stages).throughput_samples_per_s
    return slowness_of(run.workspace, run.run_id, run.directory, planned_samples_per_s=planned)


def write_job_of(
    run: OpenedRun, plan: NightPlan, provisioning: Provisioning, *, is_under_way: bool = False
) -> None:
    """Write the job of a night for the machines of a purchase; see `tasks.training.write_job`."""
    write_job(
        run.directory,
        run_id=run.run_id,
        model=run.asked.sized_model,
        dataset=run.dataset,
        provisioning=provisioning,
        config=plan.config,
        start=run.start,
        is_under_way=is_under_way,
    )


def at_prices_of_now(run: OpenedRun, provisioning: Provisioning) -> Provisioning:
    """Return a purchase at the prices of now; those of a dry run stay.

    Raises:
        BudgetExceededError: It exceeds a cap.
    """
    if run.is_dry_run:
        return provisioning
    rechecked = recheck_prices(
        provisioning,
        provider=run.asked.provider,
        caps=run.asked.caps,
        spent_this_month_usd=spent_this_month_usd(run.workspace, run.asked.provider),
    )
    log_step("prices", rechecked.summary)
    if run.asked.caps == Caps():
        log_step("caps", "no cap set; set max_usd_per_run or max_usd_per_month")
    return rechecked
