"""A discrete-event simulation of the training pipeline, with unequal replica counts and unlike replicas.

Every worker has one processor and the two lanes of its link, and all three serve their jobs in an order that the
1F1B schedule fixes. So the time of every event is a maximum of earlier ones plus a duration, and instead of a
queue of single events, a pass of a whole stage is worked out at once, as arrays over its replicas.

Weight gradients are put off as the trainer does: a worker without rows to work on does them, and what is left when
its last backward pass of a step is done, then. They are taken to be divisible at will; a product of one layer and
micro-batch that is not done when a message comes keeps the trainer a little longer.

Ignored: that a switch between the machines may be narrower than their links, latency of messages, reading the
batch, checkpoints. Buffers at a receiver are as large as the schedule needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.simulate.pipeline_load import PipelineLoad
from heterps_core.planning.simulate.simulated_run import SimulatedRun, StageUse
from heterps_core.planning.simulate.simulation_options import SimulationOptions, per_replica
from heterps_core.planning.simulate.stage_durations import stage_durations
from heterps_core.training.pipeline.pipeline_schedule import Action, one_forward_one_backward
from heterps_core.training.pipeline.stage_exchange import replica_slice


def simulate(load: PipelineLoad, options: SimulationOptions) -> SimulatedRun:
    """Run a pipeline for some steps.

    The same load, options and seed give the same run. Work grows with steps, micro-batches and stages as calls
    of NumPy, each over the replicas of a stage.

    Raises:
        ConfigurationError: A slow factor or start-up time names a worker that the pipeline has not.
    """
    return _Simulation(load, options).run()


def pass_order(
    *, num_microbatches: int, num_stages: int, warmup_per_stage: int
) -> Iterator[tuple[int, Action]]:
    """Yield the passes of all stages so that each comes behind those whose results it needs.

    Each stage keeps its own 1F1B order.
    """
    orders = [
        one_forward_one_backward(
            num_microbatches=num_microbatches,
            num_stages=num_stages,
            stage=stage,
            warmup_per_stage=warmup_per_stage,
        )
        for stage in range(num_stages)
    ]
    nexts = [next(order, None) for order in orders]
    done = {"forward": [0] * num_stages, "backward": [0] * num_stages}
    while any(action is not None for action in nexts):
        for stage, order in enumerate(orders):
            while (action := nexts[stage]) is not None:
                source = stage - 1 if action.direction == "forward" else stage + 1
                if 0 <= source < num_stages and done[action.direction][source] <= action.microbatch:
                    break
                yield stage, action
                done[action.direction][stage] += 1
                nexts[stage] = next(order, None)


@dataclass(slots=True)
class _Sending:
    """A micro-batch on its way from a stage to its neighbour."""

    starts: Floats
    """When each sender's lane begins with it."""

    pass_ends: Floats


class _StageState:
    """The clocks of a stage's replicas and how they spent their time; arrays of shape (k,)."""

    def __init__(self, ready_seconds: Floats) -> None:
        self.worker_free = ready_seconds.copy()
        self.lane_in_free = ready_seconds.copy()
        self.lane_out_free = ready_seconds.copy()
        self.put_off_seconds = np.zeros_like(ready_seconds)
        """Of weight gradients, still to be worked out."""

        self.updated_seconds = 0.0
        """When all replicas ended the step before; no row is read before."""

        self.computing = np.zeros_like(ready_seconds)
        self.waiting_for_data = np.zeros_like(ready_seconds)
        self.waiting_for_link = np.zeros_like(ready_seconds)
        self.waiting_at_barrier = np.zeros_like(ready_seconds)

    def fill(self, seconds: Floats) -> None:
        """Work weight gradients out for so long, or until none is left."""
        done = np.minimum(self.put_off_seconds, seconds)
        self.worker_free = self.worker_free + done
        self.computing += done
        self.put_off_seconds = self.put_off_seconds - done

    def use(self) -> StageUse:
        parts = {
            name: float(getattr(self, name).mean())
            for name in ("computing", "waiting_for_data", "waiting_for_link", "waiting_at_barrier")
        }
        total_seconds = sum(parts.values())
        return StageUse(
            **{name: part / total_seconds if total_seconds else 0.0 for name, part in parts.items()}
        )


class _Simulation:
    def __init__(self, load: PipelineLoad, options: SimulationOptions) -> None:
        self.load = load
        self.options = options
        self.random = np.random.default_rng(options.seed)
        self.row_counts = [
            replica_slice(load.batch_size, load.num_microbatches, index).num_rows
            for index in range(load.num_microbatches)
        ]
        shape = [stage.num_replicas for stage in load.stages]
        slow = per_replica(options.slow_factors, shape, otherwise=1.0)
        self.durations = {
            num_rows: stage_durations(load, num_rows=num_rows, slow_factors=slow)
            for num_rows in set(self.row_counts)
        }
        self.states = [
            _StageState(ready) for ready in per_replica(options.startup_seconds, shape, otherwise=0.0)
        ]
        self.sendings: dict[tuple[int, Action], _Sending] = {}
        self.step_ends = np.zeros(options.num_steps)
        # Without a flush the all-reduce has no moment of its own.
        share = 0 if options.flushes_each_step else 1 / load.num_microbatches
        self.exchange_seconds = [
            stage.exchange_seconds + share * stage.all_reduce_seconds for stage in load.stages
        ]

    def run(self) -> SimulatedRun:
        num_steps, num_microbatches = self.options.num_steps, self.load.num_microbatches
        shape = {"num_stages": len(self.load.stages), "warmup_per_stage": self.options.warmup_per_stage}
        if self.options.flushes_each_step:
            order = list(pass_order(num_microbatches=num_microbatches, **shape))
            for step in range(num_steps):
                for stage, action in order:
                    self._pass(stage, action, step)
                self.step_ends[step] = max(self._end_step(stage) for stage in range(len(self.states)))
        else:
            for stage, action in pass_order(num_microbatches=num_steps * num_microbatches, **shape):
                self._pass(stage, action, action.microbatch // num_microbatches)
        return SimulatedRun(
            batch_size=self.load.batch_size,
            step_end_seconds=self.step_ends,
            stages=tuple(state.use() for state in self.states),
        )

    def _pass(self, stage: int, action: Action, step: int) -> None:
        state = self.states[stage]
        microbatch = action.microbatch % self.load.num_microbatches
        durations = self.durations[self.row_counts[microbatch]]
        is_forward = action.direction == "forward"
        exchange_seconds = self.exchange_seconds[stage]
        if is_forward and exchange_seconds:
            begin = max(state.lane_in_free.max(), state.updated_seconds)
            state.lane_in_free = np.full_like(state.lane_in_free, begin + exchange_seconds)
        incoming = durations[stage].incoming[action.direction]
        data_ready: Floats | float = -np.inf
        if incoming is not None:
            source = stage - 1 if is_forward else stage + 1
            sending = self.sendings.pop((source, action))
            state.lane_in_free = incoming.received(sending.starts, state.lane_in_free)
            data_ready = incoming.produced(sending.pass_ends)
        state.fill(np.maximum(state.lane_in_free - state.worker_free, 0.0))
        start = np.maximum(state.worker_free, state.lane_in_free)
        waiting = start - state.worker_free
        waiting_for_data = np.minimum(np.maximum(data_ready - state.worker_free, 0.0), waiting)
        state.waiting_for_data += waiting_for_data
        state.waiting_for_link += waiting - waiting_for_data
        seconds = self._drawn(durations[stage].pass_seconds[action.direction])
        state.computing += seconds
        state.worker_free = end = start + seconds
        target = stage + 1 if is_forward else stage - 1
        if 0 <= target < len(self.states):
            outgoing = durations[target].incoming[action.direction]
            assert outgoing is not None
            starts = np.maximum(state.lane_out_free, end)
            self.sendings[stage, action] = _Sending(starts, end)
            state.lane_out_free = starts + outgoing.sending_seconds
        if not is_forward and exchange_seconds:
            begin = max(state.lane_out_free.max(), end.max())
            state.lane_out_free = np.full_like(end, begin + exchange_seconds)
        if not is_forward:
            state.put_off_seconds += self._drawn(durations[stage].weight_gradient_seconds)
            if microbatch == self.load.num_microbatches - 1:
                state.fill(state.put_off_seconds)
            if not self.options.flushes_each_step:
                self.step_ends[step] = max(self.step_ends[step], state.worker_free.max())

    def _end_step(self, stage: int) -> float:
        """Wait until all is sent and sum the gradients; return when the stage's last replica is through."""
        state = self.states[stage]
        sent = np.maximum(state.worker_free, state.lane_out_free)
        state.waiting_for_link += sent - state.worker_free
        all_reduce_seconds = self.load.stages[stage].all_reduce_seconds
        end = sent
        if all_reduce_seconds:
            state.waiting_at_barrier += sent.max() - sent
            state.waiting_for_link += all_reduce_seconds
            end = np.full_like(sent, sent.max() + all_reduce_seconds)
            state.lane_in_free = end.copy()
        state.worker_free, state.lane_out_free = end, end.copy()
        state.updated_seconds = float(end.max())
        return state.updated_seconds

    def _drawn(self, seconds: Floats) -> Floats:
        if not self.options.jitter:
            return seconds
        variance = np.log1p(self.options.jitter**2)
        drawn: Floats = seconds * self.random.lognormal(-variance / 2, np.sqrt(variance), seconds.size)
        return drawn
