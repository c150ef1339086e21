"""Trains a run to its end on a fleet that loses machines: one rule at a loss, and while machines are missing.

The machines that are left go on, missing ones are launched beside them, or the rest is planned again: whichever is
expected to cost least until the end, within caps and deadline (`tasks/running/fleet_decision.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from heterps_core.device_types import get_device_type
from heterps_core.errors import BudgetExceededError, ProvisioningError
from heterps_core.hardware import Market
from heterps_core.planning.calibration import with_scaled_times
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.training.outcome import Complete, Failed, MachinesLost, Stopped
from heterps_core.training.step_metrics import read_progress
from infra.billing.budget import BudgetWatch
from infra.machines.failover import SPOT_RETRY_S
from infra.providers.base import InsufficientCapacityError
from tasks.provisioning import Provisioning
from tasks.records.run_ids import utc_now
from tasks.records.run_record import note_file
from tasks.running.budget import check_not_stopped, spending_of
from tasks.running.fleet import Fleet, FleetRun, end_nodes, replaced, with_causes
from tasks.running.fleet_decision import Rest, Way, decide
from tasks.running.losses import LOSSES_FILE, losses_document, note_decision, note_loss, slowness_of
from tasks.running.progress import log_step
from tasks.training import train

GOES_ON = "growth"
"""In the mark of a stop after which the run goes on."""


@dataclass(frozen=True, slots=True)
class Replan:
    """The machines are terminated, and the rest of the run is to be planned again."""

    without: frozenset[str] = frozenset()
    """Device types that are not available."""


def replan_without(run: FleetRun, bought: Provisioning, problem: InsufficientCapacityError) -> Replan:
    """Return how to plan again after a launch whose machines are available in no zone and no market.

    Raises:
        InsufficientCapacityError: No other device types are left.
    """
    tried = {get_device_type(name) for stage in bought.launch_stages for name in stage.replicas_by_type}
    without = frozenset(hardware.in_market(market).name for hardware in tried for market in Market)
    if not set(run.problem.device_types) - without:
        raise problem
    log_step("replan", f"without {', '.join(sorted(without))}: {problem}")
    return Replan(without)


class NightFleet:
    """The fleet of a run while it trains.

    Args:
        launched: The whole fleet.
        machines: Terminates what is launched beside it.
        interval_s: Between two looks for missing machines; the first is at once.
    """

    def __init__(
        self, run: FleetRun, launched: Fleet, machines: ExitStack, *, interval_s: float = SPOT_RETRY_S
    ) -> None:
        self.run, self.whole, self.present = run, launched, launched
        self._machines, self._interval_s = machines, interval_s
        self._next_look_s = 0.0
        self.following: Fleet | Replan | None = None
        """How the run goes on once its training has stopped; None while it needs no stop."""

    def train(self, watch: BudgetWatch) -> Complete | Failed | Stopped | Replan:
        """Train until the end of the run, or until it is stopped or planned again.

        Raises:
            BudgetExceededError: A cap was reached.
            TrainingError: The run may not restart again.
        """
        while True:
            self.following, self._next_look_s = None, time.monotonic()
            outcome = train(self.run.directory, self.present.cluster, on_progress=self.look)
            if isinstance(outcome, Complete | Failed):
                return outcome
            check_not_stopped(watch, outcome, run_id=self.run.run_id)
            following = self.following
            if isinstance(outcome, Stopped) and (following is None or self._is_end_asked_for()):
                return outcome
            if isinstance(following, Fleet):
                self._adopt(following)
            if isinstance(outcome, MachinesLost):
                following = self._after_loss(outcome)
            if isinstance(following, Replan):
                return following

    def look(self) -> None:
        """Look for missing machines, where it is time to; a training is not followed while machines start."""
        if self.following is not None or time.monotonic() < self._next_look_s:
            return
        present = {node.node_id: node for node in self.present.cluster.nodes}
        nodes = tuple(present.get(node.node_id, node) for node in self.whole.cluster.nodes)
        missing = [node.node_id for node in nodes if node.node_id not in present]
        if missing:
            wanted = Fleet(replace(self.present.cluster, nodes=nodes), self.whole.bought)
            following, reason = self._following(wanted, missing, is_training=True)
            log_step("growth", reason)
            if following is not self.present:
                self.following = following
                if self.run.directory.stop_reason() is None:
                    self.run.directory.request_stop(GOES_ON)
        self._next_look_s = time.monotonic() + self._interval_s

    def _is_end_asked_for(self) -> bool:
        """Return whether the mark of a stop says that the run is to end; a later mark overwrites an earlier one."""
        return self.run.directory.stop_reason() != GOES_ON

    def _adopt(self, fleet: Fleet) -> None:
        self.present = fleet
        self.run.write_job(fleet.bought)

    def _after_loss(self, lost: MachinesLost) -> Replan | None:
        """Note a loss, and let the run go on with the machines that follow.

        Raises:
            TrainingError: The run may not restart again.
        """
        run, cluster = self.run, self.present.cluster
        loss = note_loss(
            run,
            with_causes(run, cluster, lost),
            cluster=cluster,
            interruptions_per_hour=self.present.bought.launch_plan.interruptions_per_hour,
            now=utc_now(),
            slowness=self._slowness(),
        )
        log_step("preempted" if loss.is_noticed else "lost", loss.summary)
        if not lost.node_ids:
            self.present = replace(self.present, cluster=cluster.next_generation())
            return None
        following, reason = self._following(
            self.present, lost.node_ids, is_training=False, step=loss.checkpoint_step
        )
        log_step("decided", reason)
        num_machines = 0 if isinstance(following, Replan) else len(following.cluster.nodes)
        note_decision(
            run.workspace, run.run_id, reason, is_of_other_size=0 < num_machines < len(cluster.nodes)
        )
        note_file(run.workspace, run.run_id, LOSSES_FILE, losses_document(run.workspace, run.run_id))
        if isinstance(following, Replan):
            return following
        self._adopt(following)
        log_step("fleet", f"{', '.join(lost.node_ids)} lost; {num_machines} machines go on")
        return None

    def _following(
        self, wanted: Fleet, missing: Sequence[str], *, is_training: bool, step: int | None = None
    ) -> tuple[Fleet | Replan, str]:
        """Decide how a fleet with missing machines goes on, and launch machines for it; return the reason, too.

        Where the others can train, missing machines are launched beside the training, not before it.
        """
        refused: dict[Way, str] = {}
        without: frozenset[str] = frozenset()
        rest = self._rest(step)
        while True:
            decision = decide(
                rest, wanted, missing, is_training=is_training, refused=refused, without=without
            )
            if decision.way in (None, Way.REPLAN):
                return Replan(without), decision.reason
            if is_training and decision.way is Way.KEEP:
                return self.present, decision.reason
            way = Way.KEEP if not is_training and decision.can(Way.KEEP) else Way.REPLACE
            try:
                if way is Way.REPLACE:
                    return self._launch(wanted, missing), decision.reason
                left = wanted.without(missing)
                end_nodes(self.run, wanted.cluster, missing)
                return replace(left, cluster=left.cluster.next_generation()), decision.reason
            except (ProvisioningError, BudgetExceededError) as problem:
                refused[way] = str(problem)
                if isinstance(problem, InsufficientCapacityError):
                    without |= {node.device_type for node in wanted.cluster.nodes if node.node_id in missing}

    def _launch(self, wanted: Fleet, missing: Sequence[str]) -> Fleet:
        """Launch missing machines; where not all are available, half of them, and so on.

        Raises:
            BudgetExceededError, ProvisioningError: Why not all could be launched; none is.
        """
        first: ProvisioningError | BudgetExceededError | None = None
        count = len(missing)
        while count:
            try:
                fleet = wanted.without(missing[count:]) if missing[count:] else wanted
                return self._machines.enter_context(replaced(self.run, fleet, missing[:count]))
            except (ProvisioningError, BudgetExceededError) as problem:
                first = first or problem
                count //= 2
        assert first is not None
        raise first

    def _rest(self, step: int | None = None) -> Rest:
        """Return the rest after a step, by default the last one, at the speed that the run was measured at.

        A dry run decides for the night that it stands for, of which neither speed nor spending is measured.
        """
        run, problem = self.run, self.run.problem
        if step is None:
            progress = read_progress(run.directory)
            step = 0 if progress is None else progress.step
        usd_left = math.inf
        if not run.is_dry_run and run.caps.max_usd_per_run is not None:
            spent = spending_of(run.workspace, run.provider_name, run.run_id, now=utc_now())
            usd_left = run.caps.max_usd_per_run - spent.run_usd
        share_left = max(run.num_steps - step, 1) / run.num_steps
        rest = replace(problem, num_samples=problem.num_samples * share_left)
        return Rest(
            problem=with_scaled_times(rest, dict.fromkeys(problem.device_types, self._slowness())),
            seconds_left=math.inf if run.deadline is None else run.deadline.seconds_left(utc_now()),
            usd_left=usd_left,
        )

    def _slowness(self) -> float:
        """Return the seconds of a step as measured over those that were planned."""
        if self.run.is_dry_run:
            return 1.0
        planned = evaluate(self.run.problem, self.present.bought.launch_stages).throughput_samples_per_s
        return slowness_of(
            self.run.workspace, self.run.run_id, self.run.directory, planned_samples_per_s=planned
        )
