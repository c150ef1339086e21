"""The pipeline simulated a second time, one event after the other from a heap: slow, plain and independent.

Every worker is three processes that wait for named events: its processor, its lane in and its lane out.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Hashable
from typing import Any

from heterps_core.planning.simulate.pipeline_load import PipelineLoad
from heterps_core.training.pipeline.pipeline_schedule import one_forward_one_backward
from heterps_core.training.pipeline.stage_exchange import _routes_to_neighbour, replica_slice

Process = Generator[float | Hashable, Any, None]


class EventQueue:
    """Runs processes that yield a time to sleep until, or an event to wait for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Process, Any]] = []
        self._waiting: dict[Hashable, list[Process]] = {}
        self._happened: dict[Hashable, Any] = {}
        self._count = 0

    def start(self, process: Process, at: float = 0.0, value: Any = None) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, process, value))

    def happen(self, event: Hashable, value: Any = None) -> None:
        self._happened[event] = value
        for process in self._waiting.pop(event, []):
            self.start(process, self.now, value)

    def run(self) -> None:
        while self._heap:
            self.now, _, process, value = heapq.heappop(self._heap)
            try:
                request = process.send(value)
            except StopIteration:
                continue
            if isinstance(request, float):
                self.start(process, max(request, self.now))
            elif request in self._happened:
                self.start(process, self.now, self._happened[request])
            else:
                self._waiting.setdefault(request, []).append(process)
        assert not self._waiting, "processes wait for ever"


def simulate_by_events(load: PipelineLoad, *, num_steps: int) -> list[float]:
    """Return when the last replica of all stages ended each step."""
    queue = EventQueue()
    num_stages, num_microbatches = len(load.stages), load.num_microbatches
    replicas = [range(stage.num_replicas) for stage in load.stages]
    sizes = [replica_slice(load.batch_size, num_microbatches, i).num_rows for i in range(num_microbatches)]
    step_ends = [0.0] * num_steps

    def schedule(stage: int) -> list[list[tuple[str, int, int]]]:
        """Passes as (direction, step, micro-batch), in groups that end with a flush."""
        if not load.drains:
            endless = one_forward_one_backward(
                num_microbatches=num_steps * num_microbatches,
                num_stages=num_stages,
                stage=stage,
                most_ahead=num_microbatches,
            )
            return [[(d, *divmod(i, num_microbatches)) for d, i in endless]]
        order = list(
            one_forward_one_backward(num_microbatches=num_microbatches, num_stages=num_stages, stage=stage)
        )
        return [[(d, group, i) for d, i in order] for group in range(num_steps)]

    def mean_rows(stage: int) -> float:
        return load.batch_size / num_microbatches / load.stages[stage].num_replicas

    def messages(stage: int, replica: int, peer_stage: int, microbatch: int) -> list[tuple[int, float, int]]:
        """Messages with a neighbour as (peer, seconds on this replica's lane, rows), in the order of peers."""
        seconds = (
            load.stages[stage].input_seconds if peer_stage < stage else load.stages[stage].output_seconds
        )
        routes = _routes_to_neighbour(
            sizes[microbatch],
            shares=(1,) * load.stages[stage].num_replicas,
            replica=replica,
            peer_shares=(1,) * load.stages[peer_stage].num_replicas,
        )
        return [
            (r.peer_replica, (r.stop - r.first) / mean_rows(stage) * seconds, r.stop - r.first)
            for r in routes
        ]

    def together(kind: str, stage: int, replica: int, *which: Hashable) -> Process:
        queue.happen((kind, stage, replica, *which))
        for other in replicas[stage]:
            yield (kind, stage, other, *which)

    def processor(stage: int, replica: int) -> Process:
        own = load.stages[stage]
        put_off = 0.0
        for group, passes in enumerate(schedule(stage)):
            for direction, step, microbatch in passes:
                free = queue.now
                yield ("arrived", stage, replica, direction, step, microbatch)
                put_off = max(0.0, put_off - (queue.now - free))
                if direction == "forward" and own.exchange_seconds and load.stops_to_exchange:
                    yield from together("pull", stage, replica, step, microbatch)
                    yield queue.now + own.exchange_seconds
                rows = replica_slice(sizes[microbatch], own.num_replicas, replica).num_rows
                seconds = own.forward_seconds if direction == "forward" else own.backward_seconds
                factor = 1 + own.compute_row_share * (rows / mean_rows(stage) - 1)
                yield queue.now + seconds * factor
                if direction == "backward" and own.exchange_seconds and load.stops_to_exchange:
                    yield from together("push", stage, replica, step, microbatch)
                    yield queue.now + own.exchange_seconds
                queue.happen(("ran", stage, replica, direction, step, microbatch))
                if direction == "backward":
                    put_off += own.weight_gradient_seconds * factor
                    if microbatch == num_microbatches - 1:
                        yield queue.now + put_off
                        put_off = 0.0
                        if not load.drains:
                            if own.all_reduce_seconds and step:
                                yield ("summed", stage, step - 1)
                            step_ends[step] = max(step_ends[step], queue.now)
                            queue.happen(("updated", stage, replica, step))
            if load.drains:
                yield from end_group(stage, replica, group)

    def sums(stage: int) -> Process:
        own = load.stages[stage]
        on_links = own.all_reduce_seconds
        on_links += num_microbatches * (own.input_seconds + own.output_seconds + 2 * own.exchange_seconds)
        for step in range(num_steps):
            for replica in replicas[stage]:
                yield ("updated", stage, replica, step)
            yield queue.now + on_links
            queue.happen(("summed", stage, step))
        step_ends[-1] = max(step_ends[-1], queue.now)

    def lane_out(stage: int, replica: int) -> Process:
        own = load.stages[stage]
        for group, passes in enumerate(schedule(stage)):
            for direction, step, microbatch in passes:
                if own.exchange_seconds and load.stops_to_exchange:
                    yield queue.now + own.exchange_seconds
                yield ("ran", stage, replica, direction, step, microbatch)
                peer_stage = stage + 1 if direction == "forward" else stage - 1
                if 0 <= peer_stage < num_stages:
                    for peer, seconds, _ in messages(stage, replica, peer_stage, microbatch):
                        sent = queue.now + seconds
                        queue.happen(
                            ("sending", stage, replica, peer_stage, peer, direction, step, microbatch), sent
                        )
                        yield sent
                if direction == "backward" and own.exchange_seconds and not load.stops_to_exchange:
                    yield from together("push", stage, replica, step, microbatch)
                    yield queue.now + own.exchange_seconds
            queue.happen(("all sent", stage, replica, group))
            if own.all_reduce_seconds and load.drains:
                yield ("ended", stage, replica, group)

    def lane_in(stage: int, replica: int) -> Process:
        own = load.stages[stage]
        for group, passes in enumerate(schedule(stage)):
            for direction, step, microbatch in passes:
                if direction == "forward" and own.exchange_seconds and not load.stops_to_exchange:
                    if group:
                        # Rows are not read before all replicas have updated them.
                        for other in replicas[stage]:
                            yield ("ended", stage, other, group - 1)
                    yield from together("pull", stage, replica, step, microbatch)
                    yield queue.now + own.exchange_seconds
                peer_stage = stage - 1 if direction == "forward" else stage + 1
                if 0 <= peer_stage < num_stages:
                    for peer, seconds, _ in messages(stage, replica, peer_stage, microbatch):
                        sent = yield (
                            "sending",
                            peer_stage,
                            peer,
                            stage,
                            replica,
                            direction,
                            step,
                            microbatch,
                        )
                        yield max(queue.now + seconds, sent)
                queue.happen(("arrived", stage, replica, direction, step, microbatch))
                if own.exchange_seconds and load.stops_to_exchange:
                    yield queue.now + own.exchange_seconds
            if own.all_reduce_seconds and load.drains:
                yield ("ended", stage, replica, group)

    def end_group(stage: int, replica: int, group: int) -> Process:
        queue.happen(("computed", stage, replica, group))
        seconds = load.stages[stage].all_reduce_seconds
        for other in replicas[stage] if seconds else [replica]:
            yield ("computed", stage, other, group)
            yield ("all sent", stage, other, group)
        yield queue.now + seconds
        queue.happen(("ended", stage, replica, group))
        step_ends[group] = max(step_ends[group], queue.now)

    for stage in range(num_stages):
        for replica in replicas[stage]:
            for process in (processor, lane_in, lane_out):
                queue.start(process(stage, replica))
        if load.stages[stage].all_reduce_seconds and not load.drains:
            queue.start(sums(stage))
    queue.run()
    return step_ends
