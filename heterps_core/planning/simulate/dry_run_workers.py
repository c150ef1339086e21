"""The workers of a dry run on one machine, simulated pass by pass on the cores that they share.

Each worker is the trainer's: it takes the next batch from its feed, runs the passes in the trainer's own order, works
out weight gradients while it waits, sums gradients with the other replicas of its stage, and updates. What a worker's
parts cost was measured (`WorkerCosts`); what workers do to one another comes out of the simulation.

Ignored: that a scheduler hands cores out in slices of milliseconds, and checkpoints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Hashable, Iterator
from functools import partial

from heterps_core.errors import ConfigurationError
from heterps_core.planning.simulate.shared_cores import SharedCores, Thread, Wait, Work
from heterps_core.profiling.measuring_process import WorkerCosts
from heterps_core.training.batch_feed import BATCHES_AHEAD
from heterps_core.training.job import DELAYED, TrainingJob
from heterps_core.training.pipeline.pipeline_schedule import one_forward_one_backward
from heterps_core.training.pipeline.stage_exchange import routes_to_neighbour

Message = tuple[str, int]

NUM_WARMUP_STEPS, NUM_STEPS = 3, 6
"""Steps until the feeds and stages have fallen into their rhythm, and those whose mean is taken."""


WAKE_SECONDS = 50e-6
"""From a message to the work of who waited for it: half a round trip of small messages between two workers that do
nothing else took so long (2 cores, 2026-11-21)."""

BALANCE_SECONDS = 2e-3
"""Until a core that rests takes a thread of another: half a tick of Linux at 250 Hz, as it balances at ticks."""


def simulate_workers(
    costs: WorkerCosts,
    job: TrainingJob,
    *,
    num_cores: int,
    wake_seconds: float = WAKE_SECONDS,
    balance_seconds: float = BALANCE_SECONDS,
) -> float:
    """Return the seconds of a training step.

    Raises:
        ConfigurationError: The costs are those of another number of stages, or there is no core.
    """
    if len(costs.stages) != len(job.stages):
        raise ConfigurationError(
            f"worker costs must be those of the job, got {len(costs.stages)} stages for {len(job.stages)}; "
            f"measure them again"
        )
    cores = SharedCores(num_cores, wake_seconds=wake_seconds, balance_seconds=balance_seconds)
    return _DryRun(costs, job, cores).step_seconds()


class _DryRun:
    def __init__(self, costs: WorkerCosts, job: TrainingJob, cores: SharedCores) -> None:
        self.costs = costs
        self.job = job
        self.cores = cores
        self.num_steps = NUM_WARMUP_STEPS + NUM_STEPS
        self.step_ends: list[float] = []
        self.arrived: dict[Hashable, int] = {}
        self.trainers: dict[tuple[int, int], Thread] = {}

    def step_seconds(self) -> float:
        for stage, num_replicas in enumerate(self.job.replicas_per_stage):
            for replica in range(num_replicas):
                worker = _Worker(self, stage, replica)
                self.trainers[stage, replica] = worker.train()
                self.cores.start(worker.feed())
        for trainer in self.trainers.values():
            self.cores.start(trainer)
        self.cores.run()
        return (self.step_ends[-1] - self.step_ends[NUM_WARMUP_STEPS - 1]) / NUM_STEPS


class _Worker:
    """One replica of a stage."""

    def __init__(self, dry_run: _DryRun, stage: int, replica: int) -> None:
        self.dry_run = dry_run
        self.cores = dry_run.cores
        self.costs = dry_run.costs.stages[stage]
        self.replicas = dry_run.job.replicas_per_stage
        self.stage, self.replica = stage, replica
        self.num_stages = len(self.replicas)
        self.pending: deque[Work] = deque()

    def feed(self) -> Thread:
        """Read batches on a thread of its own, a few ahead."""
        # The last steps have reading beside them like all others.
        for step in range(self.dry_run.num_steps + BATCHES_AHEAD):
            if step >= BATCHES_AHEAD:
                yield Wait(("taken", self.stage, self.replica, step - BATCHES_AHEAD))
            yield Work(self.costs.reading_seconds)
            self.cores.happen(("read", self.stage, self.replica, step))

    def train(self) -> Thread:
        config, costs = self.dry_run.job.config, self.costs
        for direction, index in self._order():
            step, microbatch = divmod(index, config.num_microbatches)
            if direction == "forward" and microbatch == 0:
                yield Wait(("read", self.stage, self.replica, step))
                self.cores.happen(("taken", self.stage, self.replica, step))
            before, behind = self.stage - 1, self.stage + 1
            source, target = (before, behind) if direction == "forward" else (behind, before)
            yield from self._receive(source, (direction, index))
            if direction == "forward":
                yield Work(costs.forward_seconds)
            else:
                yield Work(costs.backward_seconds)
                num_parts = max(costs.num_weight_gradients, 1)
                self.pending.extend([Work(costs.weight_gradient_seconds / num_parts)] * num_parts)
            self._send(target, (direction, index))
            if direction == "backward" and microbatch == config.num_microbatches - 1:
                yield from self._end_step(step)

    def _order(self) -> Iterator[tuple[str, int]]:
        """Yield the passes of all steps, micro-batches counted through."""
        config, num_steps = self.dry_run.job.config, self.dry_run.num_steps
        order = partial(one_forward_one_backward, num_stages=self.num_stages, stage=self.stage)
        if config.update_mode == DELAYED:
            yield from order(
                num_microbatches=num_steps * config.num_microbatches, most_ahead=config.num_microbatches
            )
            return
        for step in range(num_steps):
            for direction, index in order(num_microbatches=config.num_microbatches):
                yield direction, step * config.num_microbatches + index

    def _end_step(self, step: int) -> Thread:
        while self.pending:
            yield self.pending.popleft()
        yield from self._meet(("gradients", step))
        yield Work(self.costs.gradient_sum_seconds)
        if self.costs.updates_together:
            yield from self._meet(("rows", step))
        yield Work(self.costs.update_seconds)
        if self.costs.updates_together:
            yield from self._meet(("updated", step))
        if self.stage == self.num_stages - 1 and self.replica == 0:
            self.dry_run.step_ends.append(self.cores.now_seconds)

    def _receive(self, source: int, message: Message) -> Thread:
        """Wait for all parts of a slice, and work out weight gradients meanwhile."""
        for peer in self._peers(source):
            event = ("arrived", source, peer, self.stage, self.replica, message)
            while self.pending and not self.cores.has_happened(event):
                yield self.pending.popleft()
            yield Wait(event)

    def _send(self, target: int, message: Message) -> None:
        for peer in self._peers(target):
            self.cores.happen(("arrived", self.stage, self.replica, target, peer, message))

    def _peers(self, neighbour: int) -> list[int]:
        """Return the replicas of a neighbouring stage that a slice goes to or comes from, if there is one."""
        if not 0 <= neighbour < self.num_stages:
            return []
        routes = routes_to_neighbour(
            self.dry_run.job.config.microbatch_size,
            num_replicas=self.replicas[self.stage],
            replica=self.replica,
            num_peer_replicas=self.replicas[neighbour],
        )
        return [route.peer_replica for route in routes]

    def _meet(self, place: Hashable) -> Generator[Wait, None, None]:
        """Wait for the other replicas of the stage."""
        key = (self.stage, place)
        self.dry_run.arrived[key] = self.dry_run.arrived.get(key, 0) + 1
        if self.dry_run.arrived[key] == self.replicas[self.stage]:
            self.cores.happen(key)
        yield Wait(key)
