"""An embedding table in memory that replicas on a machine share: rows are read in place, gradients by their owner.

Shapes as in `sharded_table.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heterps_core.embeddings.row_exchange import LookupRows
from heterps_core.embeddings.row_lookup import copy_rows
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.transport.shared_memory_link import SharedMemoryLink


class SharedMemoryTable(ShardedTable):
    """The shard of one replica, and its view of the others; made by all replicas in the same order.

    Beside the link between the replicas it takes what `ShardedTable` takes, but no other connection with them.
    """

    looks_ahead = False

    def __init__(self, *, link: SharedMemoryLink, num_rows: int, dimension: int, **others: Any) -> None:
        self._link = link
        self._outbox = link.new_outbox()
        self._whole_RD = link.new_tensor(num_rows, dimension)
        super().__init__(num_rows=num_rows, dimension=dimension, **others)
        link.wait_for_all()

    def apply_gradients(self, *, learning_rate: float) -> None:
        """Apply all gradients of rows of this shard; once a step, after all backward passes.

        Raises:
            LostWorkerError: Another replica has ended, or did not come here in time.
        """
        parts = [
            part
            for tensors in self._outbox.exchange()
            for part in zip(tensors[::2], tensors[1::2], strict=True)
        ]
        self._apply(parts, learning_rate, bags=self.bags, shard=self.rows)
        self._link.wait_for_all()

    def _shards(self) -> tuple[int, int]:
        return self._link.num_members, self._link.member

    def _new_weight(self) -> Tensor:
        shard_RD = self._whole_RD[self.rows.first : self.rows.stop]
        # A storage that ends with the shard: a checkpoint copies tensors that are part of a larger one.
        return torch.from_numpy(shard_RD.numpy())

    def gather(self, looked_up: LookupRows, out_BX: Tensor) -> None:
        """Write rows into columns."""
        copy_rows(self._whole_RD, looked_up.rows_BS, out_BX, self.bags)

    def scatter(self, looked_up: LookupRows, gradients_BX: Tensor) -> None:
        """Take the gradients of a look-up's columns; their owners read them at the update."""
        self._outbox.append(looked_up.rows_BS)
        self._outbox.append(gradients_BX)
