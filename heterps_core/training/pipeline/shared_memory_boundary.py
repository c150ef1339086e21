"""The messages between one replica and a neighbouring stage on the same machine, in memory that both see.

A sender copies its rows into a memory file once; a receiver computes with them where they lie. Short messages over
sockets say what is where, and tell at once when the other end is gone. Nothing runs on other threads and nothing
spins, so all of a core is left to the layers.

Rows stay until their receiver is done with the whole step, and with the next one where they were sent ahead for it:
weight gradients are worked out late. A sender has three files, one for each step in turn, and writes into the one of
three steps ago once all receivers have ended the step after that; in training they have long done so by then.

Shapes: B rows of this replica in a micro-batch, W width of a boundary activation.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heterps_core.training.pipeline.stage_boundary import BoundaryMessages
from heterps_core.transport.rank_layout import LostWorkerError
from heterps_core.transport.shared_memory import SharedBuffer, aligned

NUM_BUFFERS = 3
"""Buffers of a sender, for the steps in turn."""

_DONE = b"done"
"""Message: the step is at its end, and nothing is read any more of what was sent before it or in it for it."""

_Place = struct.Struct("<qqq")
"""Message: number of the buffer, first byte, and number of rows."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One replica of the neighbouring stage."""

    connection: socket.socket
    buffers: list[SharedBuffer]
    arrived: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Places of rows that are not taken yet."""


@dataclass(frozen=True, slots=True)
class SharedNeighbour:
    """A neighbouring stage with which a replica shares memory; made by `stage_place.connect_neighbours`."""

    peers: list[Peer]
    """By replica."""

    own_buffers: list[SharedBuffer]


@dataclass(kw_only=True, eq=False)
class SharedMemoryBoundary(BoundaryMessages):
    """Does what `StageBoundary` does where a stage and its neighbour are on one machine."""

    shared: SharedNeighbour
    """The connection with it."""

    def __post_init__(self) -> None:
        self._step = 0
        self._num_bytes = 0
        self._steps_done = [0] * len(self.shared.peers)

    def receive(self, num_rows: int) -> ArrivingRows:
        """Expect this replica's slice of a micro-batch of `num_rows` rows."""
        return ArrivingRows(self, num_rows)

    def send(self, rows_BW: Tensor, num_rows: int, counts_BS: Tensor | None = None) -> None:
        """Send this replica's slice of a micro-batch of `num_rows` rows; it is copied at once.

        Args:
            counts_BS: Lengths of packed sequences.

        Raises:
            LostWorkerError: A neighbour died, or has not finished the step before the last one in time.
        """
        for peer in range(len(self._steps_done)):
            while self._steps_done[peer] <= self._step - NUM_BUFFERS + 1:
                self._read(peer, self.silence_limit_s)
        turn = self._step % NUM_BUFFERS
        if self.packed is not None:
            assert counts_BS is not None
            for route in self.side.routes(num_rows):
                message = self.packed.message(rows_BW, counts_BS, route.first, route.stop)
                first_byte = self._write(message.unsqueeze(0), torch.uint8)
                self._tell(route.peer_replica, _Place.pack(turn, first_byte, route.stop - route.first))
            return
        first_byte = self._write(rows_BW, self.dtype)
        row_bytes = self.width * self.dtype.itemsize
        for route in self.side.routes(num_rows):
            place = _Place.pack(turn, first_byte + route.first * row_bytes, route.stop - route.first)
            self._tell(route.peer_replica, place)

    def _write(self, rows_BW: Tensor, dtype: torch.dtype) -> int:
        """Write rows into the buffer of the step; returns their first byte."""
        buffer, first_byte = self.shared.own_buffers[self._step % NUM_BUFFERS], aligned(self._num_bytes)
        num_bytes = rows_BW.numel() * dtype.itemsize
        self._num_bytes = first_byte + num_bytes
        self.sent_bytes += num_bytes
        buffer.grow(self._num_bytes)
        buffer.view(first_byte, len(rows_BW), rows_BW.shape[1], dtype).copy_(rows_BW)
        return first_byte

    def end_step(self, *, is_drained: bool) -> None:
        """Tell neighbours that a step is at its end; all rows are in memory already, drained or not."""
        for peer in range(len(self.shared.peers)):
            # One that has left needs to know nothing, and is missed where something is expected of it.
            with suppress(LostWorkerError):
                self._tell(peer, _DONE)
        self._step += 1
        self._num_bytes = 0

    def has_arrived(self, num_rows: int) -> bool:
        """Tell whether `take` would return at once."""
        return all(self._has_rows_of(route.peer_replica, 0.0) for route in self.side.routes(num_rows))

    def take(self, num_rows: int) -> Tensor:
        """Return the slice [B, W], float32, of the next micro-batch of `num_rows` rows, once all of it is there."""
        parts, sizes = [], []
        for route in self.side.routes(num_rows):
            self._has_rows_of(route.peer_replica, self.silence_limit_s)
            sender = self.shared.peers[route.peer_replica]
            turn, first_byte, num_part_rows = sender.arrived.popleft()
            assert num_part_rows == route.stop - route.first
            buffer = sender.buffers[turn]
            sizes.append(num_part_rows)
            if self.packed is not None:
                head = buffer.view(first_byte, 1, self.packed.head_bytes(num_part_rows), torch.uint8)[0]
                size = self.packed.message_bytes(head, num_part_rows)
                parts.append(buffer.view(first_byte, 1, size, torch.uint8)[0])
            else:
                parts.append(buffer.view(first_byte, num_part_rows, self.width, self.dtype))
        if self.packed is not None:
            return self.packed.rows(parts, sizes)
        if not parts:
            return torch.empty(0, self.width)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).float()

    def _has_rows_of(self, peer: int, limit_s: float) -> bool:
        """Tell whether rows of a peer are there; read its messages until they are, or there is none."""
        arrived = self.shared.peers[peer].arrived
        while not arrived and self._read(peer, limit_s):
            pass
        return bool(arrived)

    def _read(self, peer: int, limit_s: float) -> bool:
        """Read the next message of a peer; returns False where none came at once and `limit_s` is 0."""
        sender = self.shared.peers[peer]
        sender.connection.settimeout(limit_s)
        try:
            message = sender.connection.recv(_Place.size)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # Said once of a neighbour that left without reading all; what it sent before is still there.
            return self._read(peer, limit_s)
        except OSError as error:
            raise self.lost(peer, has_ended=not isinstance(error, TimeoutError)) from error
        if not message:
            raise self.lost(peer, has_ended=True)
        if message == _DONE:
            self._steps_done[peer] += 1
        else:
            sender.arrived.append(_Place.unpack(message))
        return True

    def _tell(self, peer: int, message: bytes) -> None:
        connection = self.shared.peers[peer].connection
        connection.settimeout(self.silence_limit_s)
        try:
            connection.send(message)
        except OSError as error:
            raise self.lost(peer, has_ended=not isinstance(error, TimeoutError)) from error


@dataclass(frozen=True, slots=True)
class ArrivingRows:
    """A slice of a micro-batch on its way to this replica."""

    boundary: SharedMemoryBoundary
    num_rows: int
    """Rows of the whole micro-batch."""

    def is_there(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self.boundary.has_arrived(self.num_rows)

    def wait(self) -> Tensor:
        """Return the slice [B, W], which must not be written and is valid until the end of the step.

        Raises:
            LostWorkerError: A neighbour did not send its part in time.
        """
        return self.boundary.take(self.num_rows)
