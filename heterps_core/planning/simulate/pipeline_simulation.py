"""A discrete-event simulation of the training pipeline, with unequal replica counts and unlike replicas.

Every worker has one processor and the two lanes of its link, and all three serve their jobs in an order that the
1F1B schedule fixes. So the time of every event is a maximum of earlier ones plus a duration, and instead of a
queue of single events, a pass of a whole stage is worked out at once, as arrays over its replicas.

Weight gradients are put off as the trainer does: a worker without rows to work on does them, and what is left when
its last backward pass of a step is done, then. They are taken to be divisible at will; a product of one layer and
micro-batch that is not done when a message comes keeps the trainer a little longer.

A pipeline either drains at the end of each step, or it has the trainer's delayed updates: micro-batches of all
steps follow one another. The sum of a batch's gradients then begins after its last backward pass, takes as long as
the links need for all that they carry in a step, and is waited for at the end of the next. A worker of the trainer
exchanges rows before a forward and after a backward pass, on both lanes of its link, which carry so much less of
what else there is; one of a plain contract, of which no more than DT is known, on its links beside the passes.

Ignored: that a switch between the machines may be narrower than their links, latency of messages,
checkpoints. Buffers at a receiver are as large as the schedule needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.simulate.pipeline_load import PipelineLoad
from heterps_core.planning.simulate.row_routes import stage_durations
from heterps_core.training.pipeline.pipeline_schedule import Action, one_forward_one_backward
from heterps_core.training.pipeline.stage_exchange import replica_slice

NUM_STEPS = 20
"""Every step takes the same time from the third on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageUse:
    """How the replicas of a stage spent the time from their start to the end of their last step.

    The shares are means over replicas and add up to 1.
    """

    computing: float
    waiting_for_data: float
    """Rows or gradients that a neighbouring stage had not worked out yet."""

    waiting_for_link: float
    """Messages, exchanges or the all-reduce were on their way, or stood in line, or an exchange waited for one of the
    replicas."""

    waiting_at_barrier: float
    """For slower replicas of the same stage before the all-reduce."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRun:
    """A simulated run of several steps."""

    batch_size: int
    step_end_seconds: Floats
    """When the last replica of all stages ended each step, since the beginning of the run; shape (N,)."""

    stages: tuple[StageUse, ...]

    @property
    def total_seconds(self) -> float:
        """From the beginning, start-up included, to the end of the last step."""
        return float(self.step_end_seconds[-1])

    @property
    def step_seconds(self) -> float:
        """Mean time per step in the middle half of the run, without what is special at its start and end.

        Of a run of fewer than four steps, the mean of all.
        """
        num_steps = self.step_end_seconds.size
        if num_steps < 4:
            return self.total_seconds / num_steps
        first, last = num_steps // 4 - 1, 3 * num_steps // 4 - 1
        return float(self.step_end_seconds[last] - self.step_end_seconds[first]) / (last - first)

    @property
    def throughput_samples_per_s(self) -> float:
        """In the middle half of the run."""
        return self.batch_size / self.step_seconds


def simulate(load: PipelineLoad, *, num_steps: int = NUM_STEPS) -> SimulatedRun:
    """Run a pipeline for some steps.

    Work grows with steps, micro-batches and stages as calls of NumPy, each over the replicas of a stage.
    """
    return _Simulation(load, num_steps).run()


def pass_order(
    *, num_microbatches: int, num_stages: int, most_ahead: int | None = None
) -> Iterator[tuple[int, Action]]:
    """Yield the passes of all stages so that each comes after those whose results it needs.

    Each stage keeps its own 1F1B order.
    """
    orders = [
        one_forward_one_backward(
            num_microbatches=num_microbatches, num_stages=num_stages, stage=stage, most_ahead=most_ahead
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
    pass_ends: Floats


class _StageState:
    """The clocks of a stage's replicas and how they spent their time; arrays of shape (k,)."""

    def __init__(self, num_replicas: int) -> None:
        self.worker_free = np.zeros(num_replicas)
        self.lane_in_free = np.zeros(num_replicas)
        self.lane_out_free = np.zeros(num_replicas)
        self.put_off_seconds = np.zeros(num_replicas)

        self.updated_seconds = 0.0
        """When all replicas ended the step before; no row is read before."""

        self.summed_seconds = 0.0
        """When the sum of gradients that was begun last is through."""

        self.computing = np.zeros(num_replicas)
        self.waiting_for_data = np.zeros(num_replicas)
        self.waiting_for_link = np.zeros(num_replicas)
        self.waiting_at_barrier = np.zeros(num_replicas)

    def fill(self, seconds: Floats) -> None:
        """Work weight gradients out for so long, or until none is left."""
        done = np.minimum(self.put_off_seconds, seconds)
        self.worker_free = self.worker_free + done
        self.computing += done
        self.put_off_seconds = self.put_off_seconds - done

    def exchange(self, seconds: float) -> None:
        """Let all replicas exchange rows for so long, from when the last one is there."""
        if seconds:
            last = self.worker_free.max()
            self.waiting_at_barrier += last - self.worker_free
            self.waiting_for_link += seconds
            self.worker_free = np.full_like(self.worker_free, last + seconds)

    def finish_sum(self) -> None:
        """Wait for the sum that was begun last."""
        waiting = np.maximum(self.summed_seconds - self.worker_free, 0.0)
        self.waiting_for_link += waiting
        self.worker_free = self.worker_free + waiting

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
    def __init__(self, load: PipelineLoad, num_steps: int) -> None:
        self.load = load
        self.num_steps = num_steps
        self.row_counts = [
            replica_slice(load.batch_size, load.num_microbatches, index).num_rows
            for index in range(load.num_microbatches)
        ]
        self.durations = {
            num_rows: stage_durations(load, num_rows=num_rows) for num_rows in set(self.row_counts)
        }
        self.states = [_StageState(stage.num_replicas) for stage in load.stages]
        self.sendings: dict[tuple[int, Action], _Sending] = {}
        self.step_ends = np.zeros(num_steps)

    def run(self) -> SimulatedRun:
        num_microbatches, num_stages = self.load.num_microbatches, len(self.load.stages)
        if self.load.drains:
            order = list(pass_order(num_microbatches=num_microbatches, num_stages=num_stages))
            for step in range(self.num_steps):
                for stage, action in order:
                    self._pass(stage, action)
                self.step_ends[step] = max(self._end_step(stage) for stage in range(num_stages))
        else:
            for stage, action in pass_order(
                num_microbatches=self.num_steps * num_microbatches,
                num_stages=num_stages,
                most_ahead=num_microbatches,
            ):
                self._pass(stage, action)
            for state in self.states:
                state.finish_sum()
                self.step_ends[-1] = max(self.step_ends[-1], state.worker_free.max())
        # Each step begins after its rows are read, and after its share of a pass over a file of table rows.
        beside = self.load.beside_seconds * np.arange(self.num_steps)
        return SimulatedRun(
            batch_size=self.load.batch_size,
            step_end_seconds=np.maximum.accumulate(self.step_ends - beside) + beside,
            stages=tuple(state.use() for state in self.states),
        )

    def _pass(self, stage: int, action: Action) -> None:
        state = self.states[stage]
        step, microbatch = divmod(action.microbatch, self.load.num_microbatches)
        durations = self.durations[self.row_counts[microbatch]]
        is_forward = action.direction == "forward"
        exchange_seconds = self.load.stages[stage].exchange_seconds
        if is_forward and exchange_seconds and not self.load.stops_to_exchange:
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
        state.worker_free = start
        if is_forward and self.load.stops_to_exchange:
            state.exchange(exchange_seconds)
        seconds = durations[stage].pass_seconds[action.direction]
        state.computing += seconds
        state.worker_free = end = state.worker_free + seconds
        if not is_forward and self.load.stops_to_exchange:
            state.exchange(exchange_seconds)
            end = state.worker_free
        if self.load.stops_to_exchange:
            # Each replica gives and takes: both lanes carry the exchange beside their messages.
            state.lane_in_free = state.lane_in_free + exchange_seconds
            state.lane_out_free = state.lane_out_free + exchange_seconds
        target = stage + 1 if is_forward else stage - 1
        if 0 <= target < len(self.states):
            outgoing = durations[target].incoming[action.direction]
            assert outgoing is not None
            starts = np.maximum(state.lane_out_free, end)
            self.sendings[stage, action] = _Sending(starts, end)
            state.lane_out_free = starts + outgoing.sending_seconds
        if not is_forward and exchange_seconds and not self.load.stops_to_exchange:
            begin = max(state.lane_out_free.max(), end.max())
            state.lane_out_free = np.full_like(end, begin + exchange_seconds)
        if not is_forward:
            state.put_off_seconds += durations[stage].weight_gradient_seconds
            if microbatch == self.load.num_microbatches - 1:
                state.fill(state.put_off_seconds)
                if not self.load.drains:
                    state.finish_sum()
                    self.step_ends[step] = max(self.step_ends[step], state.worker_free.max())
                    state.summed_seconds = state.worker_free.max() + self._sum_seconds(stage)

    def _sum_seconds(self, stage: int) -> float:
        """Return how long the sum of a step takes beside what else is on the links."""
        load = self.load.stages[stage]
        if not load.all_reduce_seconds:
            return 0.0
        messages = load.input_seconds + load.output_seconds + 2 * load.exchange_seconds
        return load.all_reduce_seconds + self.load.num_microbatches * messages

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
            state.lane_in_free = np.maximum(state.lane_in_free, end)
        state.worker_free, state.lane_out_free = end, end.copy()
        state.updated_seconds = float(end.max())
        return state.updated_seconds
