"""Messages among the replicas of a stage: all send one another bytes at a time, over sockets of their own.

gloo's all-to-all sends three packets for each message and wakes threads of its own for each. Among 16 processes that
send one another 1 KiB it took 0.83 ms of each one's processor time, this 0.15 by TCP over loopback, and 0.10 by the
Unix sockets that connect the replicas of one machine (2 x86 cores, AMD EPYC, load 12). One thread uses the sockets at
a time. Every replica calls the same functions in the same order.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heterps_core.transport.rank_layout import LostWorkerError, RankLayout, StagePeers
from heterps_core.transport.token_connections import connect_by_token, ranks_here

_SIZE_BYTES = 8


class PeerSockets(StagePeers):
    """The connections of one replica with the others of its stage; made by `connect`."""

    waited_s = 0.0
    """Seconds in which rows were sent and waited for."""

    @classmethod
    def connect(
        cls,
        group: ProcessGroup,
        *,
        silence_limit_s: float,
        layout: RankLayout | None = None,
        uses_unix: bool = True,
    ) -> PeerSockets:
        """Connect the members of a group; all of them call it.

        Args:
            layout: Ranks of all workers, for messages about lost ones; by default the members are one stage.
            silence_limit_s: Longest wait for another replica.
            uses_unix: Connect members on one machine by Unix sockets, else as if each had a machine of its own.

        Raises:
            OSError: A member could not be reached.
        """
        ranks = dist.get_process_group_ranks(group)
        others = set(ranks) - {dist.get_rank()}
        here = others & ranks_here(group) if uses_unix else set()
        connections = connect_by_token(here, group, local_kind=socket.SOCK_STREAM)
        connections |= connect_by_token(others - here, group)
        peers = {ranks.index(rank): connection for rank, connection in connections.items()}
        layout = layout or RankLayout((tuple(ranks),))
        limit_us = round(1e6 * silence_limit_s)
        for peer in peers.values():
            # The system keeps the limit: Python would make another call before each one.
            peer.setblocking(True)
            peer.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(limit_us, 10**6))
            )
        return cls(peers, ranks=ranks, layout=layout, silence_limit_s=silence_limit_s)

    def exchange_rows(
        self,
        rows: Sequence[Tensor],
        sent_counts: Sequence[Sequence[int]],
        received_counts: Sequence[Sequence[int]],
    ) -> list[Tensor]:
        """Send consecutive rows of some tensors to the members in order, and return the rows that they send.

        Args:
            rows: On the host.
            sent_counts: How many rows of each tensor go to each member.
            received_counts: How many rows each member sends for each tensor.

        Raises:
            LostWorkerError: A replica has ended, or was silent for too long.
        """
        received = [
            tensor.new_empty(sum(counts), *tensor.shape[1:])
            for tensor, counts in zip(rows, received_counts, strict=True)
        ]
        sent, places = _by_member(rows, sent_counts), _by_member(received, received_counts)
        for place, own in zip(places[self.member], sent[self.member], strict=True):
            place[:] = own
        started_s = time.perf_counter()
        self._run(sent, {number: iter([places[number]]) for number in self._peers})
        self.waited_s += time.perf_counter() - started_s
        return received

    def exchange_sized(self, sent: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        """Send bytes to each member and return theirs, of any size; raises as `exchange_rows`."""
        found: list[bytes | memoryview] = list(sent)

        def parts(number: int) -> Iterator[list[memoryview]]:
            size = memoryview(bytearray(_SIZE_BYTES))
            yield [size]
            found[number] = content = memoryview(bytearray(int.from_bytes(size, "little")))
            yield [content]

        framed = [(memoryview(len(each).to_bytes(_SIZE_BYTES, "little")), memoryview(each)) for each in sent]
        self._run(framed, {number: parts(number) for number in self._peers})
        return found

    def _run(
        self, sent: Sequence[Sequence[memoryview]], wanted: Mapping[int, Iterator[Sequence[memoryview]]]
    ) -> None:
        """Send bytes to each peer, and fill each peer's buffers, in order."""
        unsent: dict[int, list[memoryview]] = {}
        lost: LostWorkerError | None = None
        for number in self._peers:
            # All other peers get their bytes first: they must find the lost one, not this replica, which ends now.
            try:
                unsent[number] = self._send(number, sent[number])
            except LostWorkerError as error:
                lost = lost or error
        if lost is not None:
            raise lost
        unsent = {number: parts for number, parts in unsent.items() if parts}
        unfilled = {number: parts for number in self._peers if (parts := _next_of(wanted[number]))}
        if unsent:
            self._fill_until_sent(unsent, unfilled, wanted)
        # Nothing is left to send, so this replica may wait for each peer in turn, by fewer calls than `poll` takes.
        for number in list(unfilled):
            self._fill(number, unfilled, wanted[number], socket.MSG_WAITALL)

    def _fill_until_sent(
        self,
        unsent: dict[int, list[memoryview]],
        unfilled: dict[int, list[memoryview]],
        wanted: Mapping[int, Iterator[Sequence[memoryview]]],
    ) -> None:
        """Send the rest as connections take it, and receive meanwhile: peers with a rest wait for that."""
        waiting = select.poll()
        numbers = {peer.fileno(): number for number, peer in self._peers.items()}
        for file, number in numbers.items():
            waiting.register(file, _events(number, unsent, unfilled))
        while unsent:
            ready = waiting.poll(1000 * self.silence_limit_s)
            if not ready:
                raise self._lost(min(unsent), has_ended=False)
            for file, event in ready:
                number = numbers[file]
                if event & select.POLLOUT:
                    unsent[number] = self._send(number, unsent[number])
                    if not unsent[number]:
                        del unsent[number]
                if event & ~select.POLLOUT:
                    self._fill(number, unfilled, wanted[number], socket.MSG_DONTWAIT)
                events = _events(number, unsent, unfilled)
                if events:
                    waiting.modify(file, events)
                else:
                    waiting.unregister(file)

    def _send(self, number: int, parts: Sequence[memoryview]) -> list[memoryview]:
        """Send a peer as many bytes as its connection takes, and return the rest."""
        parts = [part for part in parts if part]
        if not parts:
            return parts
        try:
            count = self._peers[number].sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return parts
        except OSError as error:
            raise self._lost(number, has_ended=True) from error
        return _after(parts, count)

    def _fill(
        self,
        number: int,
        unfilled: dict[int, list[memoryview]],
        wanted: Iterator[Sequence[memoryview]],
        flags: int,
    ) -> None:
        """Receive the bytes of a peer: all of them, or with MSG_DONTWAIT those that have arrived."""
        while number in unfilled:
            try:
                count, *_ = self._peers[number].recvmsg_into(unfilled[number], 0, flags)
            except BlockingIOError:
                if flags & socket.MSG_DONTWAIT:
                    return
                raise self._lost(number, has_ended=False) from None
            except OSError as error:
                raise self._lost(number, has_ended=True) from error
            if not count:
                raise self._lost(number, has_ended=True)
            unfilled[number] = _after(unfilled[number], count) or _next_of(wanted)
            if not unfilled[number]:
                del unfilled[number]


def bytes_of(rows: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, where they lie."""
    return rows.view(torch.uint8).numpy().reshape(-1).data


def _by_member(rows: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> list[tuple[memoryview, ...]]:
    """Return by member the bytes of its rows in each tensor, where they lie."""
    return list(zip(*map(_pieces, rows, counts), strict=True))


def _pieces(rows: Tensor, counts: Sequence[int]) -> list[memoryview]:
    content = bytes_of(rows)
    row_bytes = rows.itemsize * math.prod(rows.shape[1:])
    ends = accumulate((row_bytes * count for count in counts), initial=0)
    return [content[first:stop] for first, stop in pairwise(ends)]


def _next_of(wanted: Iterator[Sequence[memoryview]]) -> list[memoryview]:
    """Return the next buffers that have room."""
    for buffers in wanted:
        if parts := [buffer for buffer in buffers if buffer]:
            return parts
    return []


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return what follows so many bytes."""
    while parts and count >= len(parts[0]):
        count -= len(parts.pop(0))
    if count:
        parts[0] = parts[0][count:]
    return parts


def _events(number: int, unsent: dict[int, list[memoryview]], unfilled: dict[int, list[memoryview]]) -> int:
    return (select.POLLOUT if number in unsent else 0) | (select.POLLIN if number in unfilled else 0)
