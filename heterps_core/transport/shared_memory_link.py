"""Memory that all replicas of a stage on one machine see, in place of messages.

Tensors lie in memory files without a name, which the system frees with the last process that holds them. Short
messages over sockets say when tensors may be read; a socket also shows at once that its other end is gone.
Two loopback copies of a batch's rows and gradients cost a sixth of a step of CTR-DNN; here they are read in place.

All functions but those that append are collective: every replica calls them in the same order.

Shapes: R rows, C columns of any tensor.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heterps_core.transport.rank_layout import RankLayout, StagePeers
from heterps_core.transport.shared_memory import (
    SMALLEST_BUFFER_BYTES,
    SharedBuffer,
    aligned,
    connect_locally,
    map_aligned,
    new_file,
    receive_files,
    tensor_view,
)

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
"""Types of tensors in an outbox; a message says which by position."""

NUM_BUFFERS = 2
"""Buffers of an outbox: the answers of all to the first one show that nobody reads the second one any more."""

_LARGEST_MESSAGE_BYTES = 4096

_Contents = struct.Struct("<qq")
"""Message of an outbox: how many tensors it has, and the position of their list."""


class SharedMemoryLink(StagePeers):
    """The connection of one replica with the others of its stage; made by `connect`.

    Its `silence_limit_s` may be changed between messages.
    """

    @classmethod
    def connect(
        cls, group: ProcessGroup, *, layout: RankLayout, silence_limit_s: float
    ) -> SharedMemoryLink | None:
        """Connect the replicas of a stage, which must run on one machine.

        Returns:
            None, on all of them, where one cannot: the system is not Linux, or forbids it. The log says why.
        """
        ranks = dist.get_process_group_ranks(group)
        connections = connect_locally(
            dist.get_rank(),
            wanted=lambda machines: (
                machines.keys() - {dist.get_rank()} if len(machines) == len(ranks) else ()
            ),
            group=group,
        )
        if connections is None:
            return None
        peers = {ranks.index(rank): connection for rank, connection in connections.items()}
        return cls(peers, ranks=ranks, layout=layout, silence_limit_s=silence_limit_s)

    def new_tensor(self, num_rows: int, num_columns: int) -> Tensor:
        """Return a float32 tensor of zeros that is the same memory in all replicas."""
        num_bytes = max(4 * num_rows * num_columns, 1)
        if self.member == 0:
            file = new_file(num_bytes)
            for peer in self._peers.values():
                socket.send_fds(peer, [b"memory"], [file])
        else:
            (file,) = self._receive_files(0, 1)
        mapped = map_aligned(file, num_bytes)
        os.close(file)
        return tensor_view(mapped, 0, num_rows, num_columns, torch.float32)

    def new_outbox(self) -> Outbox:
        """Return a place for tensors that the others are to read."""
        own = [new_file(SMALLEST_BUFFER_BYTES) for _ in range(NUM_BUFFERS)]
        for peer in self._peers.values():
            socket.send_fds(peer, [b"outbox"], own)
        files = {number: self._receive_files(number, NUM_BUFFERS) for number in self._peers}
        files[self.member] = own
        return Outbox(self, [files[number] for number in range(self.num_members)])

    def exchange(self, message: bytes) -> list[bytes]:
        """Give a message to all and return those of all, by replica.

        Raises:
            LostWorkerError: A replica has ended, or gave none in time.
        """
        for number, peer in self._peers.items():
            try:
                peer.send(message)
            except OSError as error:
                raise self._lost(number, has_ended=True) from error
        found = {number: self._receive(number) for number in self._peers}
        found[self.member] = message
        return [found[number] for number in range(self.num_members)]

    def wait_for_all(self) -> None:
        """Return when all replicas have come here; raises as `exchange` does."""
        self.exchange(b"here")

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers.values():
            peer.close()

    def _receive(self, number: int) -> bytes:
        self._wait_until_readable(number)
        with suppress(OSError):
            message = self._peers[number].recv(_LARGEST_MESSAGE_BYTES)
            if message:
                return message
        raise self._lost(number, has_ended=True)

    def _receive_files(self, number: int, count: int) -> list[int]:
        self._wait_until_readable(number)
        try:
            return receive_files(self._peers[number], count)
        except OSError as error:
            raise self._lost(number, has_ended=True) from error

    def _wait_until_readable(self, number: int) -> None:
        waiting = select.poll()
        waiting.register(self._peers[number], select.POLLIN)
        if not waiting.poll(1000 * self.silence_limit_s):
            raise self._lost(number, has_ended=False)


class Outbox:
    """Tensors of one replica that the others read where they lie; made by `SharedMemoryLink.new_outbox`."""

    def __init__(self, link: SharedMemoryLink, files: list[list[int]]) -> None:
        self._link = link
        self._buffers = [
            [SharedBuffer(own[turn]) for own in files]  # by replica
            for turn in range(NUM_BUFFERS)
        ]
        self._turn = 0
        self._contents: list[list[int]] = []
        self._num_bytes = 0

    def append(self, tensor_RC: Tensor) -> None:
        """Copy a tensor of one of `DTYPES` into the outbox."""
        num_rows, num_columns = tensor_RC.shape
        self._new(num_rows, num_columns, tensor_RC.dtype).copy_(tensor_RC)

    @torch.no_grad()
    def append_flat(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors of float32 into the outbox, one after the other as a single row."""
        num_columns = sum(tensor.numel() for tensor in tensors)
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=self._new(1, num_columns, torch.float32)[0])

    def _new(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
        first = aligned(self._num_bytes)
        self._num_bytes = first + num_rows * num_columns * dtype.itemsize
        buffer = self._buffers[self._turn][self._link.member]
        buffer.grow(self._num_bytes)
        self._contents.append([first, num_rows, num_columns, DTYPES.index(dtype)])
        return buffer.view(first, num_rows, num_columns, dtype)

    def exchange(self) -> list[list[Tensor]]:
        """Return by replica what each has put in since the last call, and begin again.

        The tensors are those in shared memory: they must not be written, and are valid until the next call.

        Raises:
            LostWorkerError: A replica has ended, or did not come here in time.
        """
        num_tensors = len(self._contents)
        self.append(torch.tensor(self._contents, dtype=torch.int64).view(num_tensors, 4))
        message = _Contents.pack(num_tensors, self._contents[-1][0])
        buffers = self._buffers[self._turn]
        self._turn, self._contents, self._num_bytes = (self._turn + 1) % NUM_BUFFERS, [], 0
        found = []
        for buffer, answer in zip(buffers, self._link.exchange(message), strict=True):
            number, first = _Contents.unpack(answer)
            contents = buffer.view(first, number, 4, torch.int64).tolist()
            found.append(
                [buffer.view(place, rows, columns, DTYPES[dtype]) for place, rows, columns, dtype in contents]
            )
        return found
