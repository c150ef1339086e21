"""The messages between one replica and the stage on one side of it, over sockets of their own.

The thread that computes sends and receives: rows cross at once where the connection takes them, and what it does not
take at once a thread sends while layers compute. For each pair of replicas the order of messages is the protocol, and
both know the size of each, so nothing but rows travels. A stage on a CUDA device writes and reads them in pinned
memory. No wait is without a limit: a neighbour that died or froze is named, and the run ends.

gloo's messages, which threads of its own send and watch, took 0.48 ms of a worker's processor time for a micro-batch
(2 x86 cores, AMD EPYC, quiet).

Shapes: B rows of this replica in a micro-batch, W width of a boundary activation.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from heterps_core.compute_device import CPU, HostCopy, host_buffer, to_device
from heterps_core.embeddings.sequence_columns import SequenceColumns
from heterps_core.training.pipeline.packed_rows import PackedRows
from heterps_core.training.pipeline.stage_exchange import StageSide
from heterps_core.transport.peer_sockets import bytes_of
from heterps_core.transport.rank_layout import LostWorkerError


@dataclass(kw_only=True, eq=False)
class BoundaryMessages:
    """The messages between one replica and a neighbouring stage, by sockets or in memory.

    What `receive` returns must be waited for in order.
    """

    side: StageSide
    """This replica's."""

    width: int
    """Of the activation that crosses (W)."""

    columns: SequenceColumns | None = None
    """Of packed sequences in it, which give it any width."""

    silence_limit_s: float
    """Longest wait for one message."""

    dtype: torch.dtype = torch.float32
    """Of what is sent, float32 or bfloat16."""

    sent_bytes: int = field(default=0, init=False)

    @cached_property
    def packed(self) -> PackedRows | None:
        """The form of messages with packed sequences."""
        return None if self.columns is None else PackedRows(self.columns, self.dtype)

    def lost(self, peer: int, *, has_ended: bool) -> LostWorkerError:
        """Return what to say of a replica of the neighbour."""
        rank = self.side.rank_of(peer)
        return LostWorkerError(self.side.layout, rank, limit_s=self.silence_limit_s, has_ended=has_ended)


@dataclass(kw_only=True, eq=False)
class StageBoundary(BoundaryMessages):
    """Sends to and receives from a neighbouring stage over sockets."""

    connections: Sequence[socket.socket]
    """With the replicas of the neighbour, in order; made by `stage_place.connect_neighbours`."""

    device: torch.device = CPU
    """That this stage computes on."""

    def __post_init__(self) -> None:
        self._peers = [_Peer(self, number, each) for number, each in enumerate(self.connections)]

    def receive(self, num_rows: int) -> Receiving | ReceivingPacked:
        """Expect this replica's slice of a micro-batch of `num_rows` rows."""
        if self.packed is not None:
            routes = self.side.routes(num_rows)
            messages = [
                _Message(self.packed, self._peers[route.peer_replica], route.stop - route.first)
                for route in routes
            ]
            return ReceivingPacked(self, self.packed, messages)
        num_own = self.side.slice_of(num_rows).num_rows
        rows_BW = host_buffer(num_own, self.width, near=self.device, dtype=self.dtype)
        missing = [
            (self._peers[route.peer_replica], bytes_of(rows_BW[route.first : route.stop]))
            for route in self.side.routes(num_rows)
        ]
        return Receiving(self, rows_BW, missing)

    def send(self, rows_BW: Tensor, num_rows: int, counts_BS: Tensor | None = None) -> None:
        """Send this replica's slice of a micro-batch of `num_rows` rows, which must not be changed in this step.

        Args:
            counts_BS: Lengths of packed sequences.

        Raises:
            LostWorkerError: A neighbour died, or did not take an earlier message in time.
        """
        if self.packed is not None:
            assert counts_BS is not None
            for route in self.side.routes(num_rows):
                message = self.packed.message(rows_BW, counts_BS, route.first, route.stop)
                self.sent_bytes += message.nbytes
                self._peers[route.peer_replica].send(HostCopy(message, None), 0, len(message))
            return
        rows_BW = rows_BW.to(self.dtype).contiguous()
        self.sent_bytes += rows_BW.nbytes
        leaving = HostCopy.begin(rows_BW)
        for route in self.side.routes(num_rows):
            self._peers[route.peer_replica].send(leaving, route.first, route.stop)

    def end_step(self, *, is_drained: bool) -> None:
        """End a step; where the pipeline is drained, wait until connections have taken all messages.

        Elsewhere a neighbour that itself waits to be read may not read them before this stage goes on.

        Raises:
            LostWorkerError: A neighbour died, or did not take a message in time.
        """
        for peer in self._peers:
            peer.check_sent(waits=is_drained)


class _Peer:
    """One replica of the neighbouring stage."""

    def __init__(self, boundary: StageBoundary, number: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._boundary, self._number, self._connection = boundary, number, connection
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        # Its thread begins with the first message that must wait.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"stage-peer-{number}-sending")
        self._unsent: deque[Future[None]] = deque()

    def send(self, leaving: HostCopy, first: int, stop: int) -> None:
        self.check_sent(waits=False)
        num_sent = 0
        if not self._unsent and leaving.is_there():
            content = bytes_of(leaving.tensor[first:stop])
            num_sent = self._send_some(content)
            if num_sent == len(content):
                return
        self._unsent.append(self._sender.submit(self._send_rest, leaving, first, stop, num_sent))

    def _send_rest(self, leaving: HostCopy, first: int, stop: int, num_sent: int) -> None:
        content = bytes_of(leaving.wait()[first:stop])[num_sent:]
        writable = select.poll()
        writable.register(self._connection, select.POLLOUT)
        while content:
            if not writable.poll(1000 * self._boundary.silence_limit_s):
                raise self._boundary.lost(self._number, has_ended=False)
            content = content[self._send_some(content) :]

    def _send_some(self, content: memoryview) -> int:
        """Return how many bytes the connection takes at once."""
        try:
            return self._connection.send(content)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._boundary.lost(self._number, has_ended=True) from error

    def check_sent(self, *, waits: bool) -> None:
        """Forget messages that are sent, all of them after waiting; raises what became of them."""
        while self._unsent and (waits or self._unsent[0].done()):
            self._unsent.popleft().result()

    def fill(self, content: memoryview, *, waits: bool) -> memoryview:
        """Receive bytes where they are wanted, and return the room that is still empty: none after waiting."""
        while content:
            try:
                count = self._connection.recv_into(content)
            except BlockingIOError:
                if not waits:
                    break
                if not self._readable.poll(1000 * self._boundary.silence_limit_s):
                    raise self._boundary.lost(self._number, has_ended=False) from None
                continue
            except OSError as error:
                raise self._boundary.lost(self._number, has_ended=True) from error
            if not count:
                raise self._boundary.lost(self._number, has_ended=True)
            content = content[count:]
        return content


@dataclass(slots=True)
class Receiving:
    """A slice of a micro-batch on its way to this replica."""

    boundary: StageBoundary
    rows_BW: Tensor
    """On the host."""

    missing: list[tuple[_Peer, memoryview]]
    """Parts of the rows that have not arrived yet."""

    def is_there(self) -> bool:
        """Tell whether `wait` would return at once."""
        self._receive(waits=False)
        return not self.missing

    def wait(self) -> Tensor:
        """Return the slice [B, W], float32, on the stage's device, once all of it is there.

        Raises:
            LostWorkerError: A neighbour did not send its part in time.
        """
        self._receive(waits=True)
        return to_device(self.rows_BW, self.boundary.device).float()

    def _receive(self, *, waits: bool) -> None:
        left = [(peer, peer.fill(content, waits=waits)) for peer, content in self.missing]
        self.missing = [(peer, content) for peer, content in left if content]


class _Message:
    """A part of a slice with packed sequences: its head tells its size."""

    def __init__(self, packed: PackedRows, peer: _Peer, num_rows: int) -> None:
        self._packed, self._peer, self.num_rows = packed, peer, num_rows
        self.content = torch.empty(packed.head_bytes(num_rows), dtype=torch.uint8, device=CPU)
        self._missing = bytes_of(self.content)
        self._has_size = False

    def arrives(self, *, waits: bool) -> bool:
        """Receive what is there, or all after waiting; tell whether nothing is missing."""
        self._missing = self._peer.fill(self._missing, waits=waits)
        if not self._missing and not self._has_size:
            head, self._has_size = self.content, True
            size = self._packed.message_bytes(head, self.num_rows)
            self.content = torch.empty(size, dtype=torch.uint8, device=CPU)
            self.content[: len(head)] = head
            self._missing = self._peer.fill(bytes_of(self.content)[len(head) :], waits=waits)
        return not self._missing


@dataclass(slots=True)
class ReceivingPacked:
    """As `Receiving`, of rows with packed sequences."""

    boundary: StageBoundary
    packed: PackedRows
    messages: list[_Message]

    def is_there(self) -> bool:
        """Tell whether `wait` would return at once."""
        return all(message.arrives(waits=False) for message in self.messages)

    def wait(self) -> Tensor:
        """Return the slice [B, W], as `Receiving.wait` does."""
        for message in self.messages:
            message.arrives(waits=True)
        sizes = [message.num_rows for message in self.messages]
        rows_BW = self.packed.rows([message.content for message in self.messages], sizes)
        return to_device(rows_BW, self.boundary.device)
