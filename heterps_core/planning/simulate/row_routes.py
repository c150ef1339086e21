"""How long the passes and messages of one micro-batch take on every replica, by the rows that each has.

All messages between two neighbouring stages at once, as arrays: the same slices and the same order of messages as in
`training/pipeline/stage_exchange.py`, for thousands of replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.simulate.pipeline_load import PipelineLoad
from heterps_core.training.pipeline.stage_exchange import replica_slice

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowRoutes:
    """Messages in the order of their rows; every field has shape (R,) for R messages."""

    replicas: Ints
    """Sender in the one stage; never falling."""

    peer_replicas: Ints
    """Receiver in the other stage; never falling."""

    num_rows: Ints
    """At least 1."""

    def reversed(self) -> _RowRoutes:
        """Return the same messages in the other direction."""
        return _RowRoutes(replicas=self.peer_replicas, peer_replicas=self.replicas, num_rows=self.num_rows)


def _slice_bounds(num_rows: int, num_replicas: int) -> Ints:
    """Return the first row of each replica's slice and the number of rows after the last; shape (k + 1,)."""
    firsts = [replica_slice(num_rows, num_replicas, replica).first for replica in range(num_replicas)]
    return np.array([*firsts, num_rows], dtype=np.int64)


def _routes_between(num_rows: int, *, num_replicas: int, num_peer_replicas: int) -> _RowRoutes:
    """Return the messages in which the slices of a micro-batch travel from one stage to the other.

    Example:
        >>> routes = _routes_between(12, num_replicas=3, num_peer_replicas=2)
        >>> list(zip(routes.replicas.tolist(), routes.peer_replicas.tolist(), routes.num_rows.tolist()))
        [(0, 0, 4), (1, 0, 2), (1, 1, 2), (2, 1, 4)]
    """
    bounds, peer_bounds = _slice_bounds(num_rows, num_replicas), _slice_bounds(num_rows, num_peer_replicas)
    # Between two neighbouring bounds of either stage lies one message. Empty slices begin where the next one
    # does, so the last slice that begins at a row is the one that holds it.
    cuts = np.union1d(bounds, peer_bounds)
    return _RowRoutes(
        replicas=np.searchsorted(bounds, cuts[:-1], side="right") - 1,
        peer_replicas=np.searchsorted(peer_bounds, cuts[:-1], side="right") - 1,
        num_rows=np.diff(cuts),
    )


class Transfer:
    """The way of one micro-batch from the lanes out of one stage to the lanes in of its neighbour.

    A replica sends its messages one after the other, in the order of peers; a replica receives in the order of
    senders. A message streams through: it takes the slower of the two lanes' times, begins when both lanes are
    there for it, and occupies each for that lane's own time, the receiver's at least until the last byte is sent.
    """

    def __init__(
        self,
        routes: _RowRoutes,
        *,
        num_senders: int,
        num_receivers: int,
        send_seconds_per_row: float,
        receive_seconds_per_row: float,
    ) -> None:
        send_seconds = routes.num_rows * send_seconds_per_row
        receive_seconds = routes.num_rows * receive_seconds_per_row
        self.sending_seconds = np.bincount(routes.replicas, send_seconds, minlength=num_senders)
        """How long each sender's lane is busy, shape (senders,)."""
        self._receiving_seconds = np.bincount(routes.peer_replicas, receive_seconds, minlength=num_receivers)
        self._senders = routes.replicas
        self._receivers, self._firsts = np.unique(routes.peer_replicas, return_index=True)
        self._all_receive = self._receivers.size == num_receivers
        _, sender_firsts = np.unique(routes.replicas, return_index=True)
        sent_before = np.cumsum(send_seconds) - send_seconds
        lengths = np.diff([*sender_firsts, send_seconds.size])
        sent_before -= np.repeat(sent_before[sender_firsts], lengths)
        received_until = np.cumsum(receive_seconds)
        lasts = np.append(self._firsts[1:], receive_seconds.size) - 1
        received_after = np.repeat(received_until[lasts], np.diff(np.append(self._firsts, lasts[-1] + 1)))
        received_after -= received_until
        # From the moment when a sender begins with its first message to the moment when the receiver of this
        # message has it and all those after it, were they to follow without a gap.
        self._route_seconds = sent_before + np.maximum(send_seconds, receive_seconds) + received_after

    def received(self, sending_starts: Floats, lane_free: Floats) -> Floats:
        """Return when each receiver has all its rows.

        Args:
            sending_starts: When each sender begins with its first message, shape (senders,).
            lane_free: When each receiver's lane is free, shape (receivers,).
        """
        by_lane = lane_free + self._receiving_seconds
        by_route = np.maximum.reduceat(sending_starts[self._senders] + self._route_seconds, self._firsts)
        if self._all_receive:
            np.maximum(by_lane, by_route, out=by_lane)
        else:
            by_lane[self._receivers] = np.maximum(by_lane[self._receivers], by_route)
        return by_lane

    def produced(self, pass_ends: Floats) -> Floats:
        """Return when the last of each receiver's rows existed, shape (senders,) -> (receivers,).

        It is minus infinity for receivers without rows.
        """
        latest = np.full(self._receiving_seconds.size, -np.inf)
        latest[self._receivers] = np.maximum.reduceat(pass_ends[self._senders], self._firsts)
        return latest


@dataclass(frozen=True, kw_only=True, slots=True)
class StageDurations:
    """One stage and a micro-batch of one size."""

    pass_seconds: Mapping[Direction, Floats]
    """Shape (k,), slow factors included."""

    weight_gradient_seconds: Floats
    """The same, of what is put off."""

    incoming: Mapping[Direction, Transfer | None]
    """Activations from the stage before, gradients from the next stage; None at the ends of the chain."""


def stage_durations(load: PipelineLoad, *, num_rows: int) -> list[StageDurations]:
    """Return the durations of all stages.

    A pass takes the stage's mean time, times what its slice is longer or shorter than the mean as far as rows
    matter. Messages take their rows' share of the slice's time.
    """
    # Rows of a slice, in a micro-batch of mean size.
    mean_rows = [load.batch_size / load.num_microbatches / stage.num_replicas for stage in load.stages]

    def transfer(sender: int, receiver: int, routes: _RowRoutes) -> Transfer:
        seconds = {
            max(sender, receiver): load.stages[max(sender, receiver)].input_seconds,
            min(sender, receiver): load.stages[min(sender, receiver)].output_seconds,
        }
        return Transfer(
            routes,
            num_senders=load.stages[sender].num_replicas,
            num_receivers=load.stages[receiver].num_replicas,
            send_seconds_per_row=seconds[sender] / mean_rows[sender],
            receive_seconds_per_row=seconds[receiver] / mean_rows[receiver],
        )

    boundaries = [
        _routes_between(num_rows, num_replicas=stage.num_replicas, num_peer_replicas=following.num_replicas)
        for stage, following in pairwise(load.stages)
    ]
    arriving = [transfer(index, index + 1, routes) for index, routes in enumerate(boundaries)]
    returning = [transfer(index + 1, index, routes.reversed()) for index, routes in enumerate(boundaries)]
    durations = []
    for index, stage in enumerate(load.stages):
        num_slice_rows = np.diff(_slice_bounds(num_rows, stage.num_replicas))
        factors = 1 + stage.compute_row_share * (num_slice_rows / mean_rows[index] - 1)
        durations.append(
            StageDurations(
                pass_seconds={
                    "forward": factors * stage.forward_seconds,
                    "backward": factors * stage.backward_seconds,
                },
                weight_gradient_seconds=factors * stage.weight_gradient_seconds,
                incoming={
                    "forward": arriving[index - 1] if index > 0 else None,
                    "backward": returning[index] if index < len(boundaries) else None,
                },
            )
        )
    return durations
