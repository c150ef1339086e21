"""Optimizers that update only the rows of a table which a batch touched.

All take rows that may repeat; gradients of a repeated row are summed before the update, so the result does
not depend on the order in which micro-batches or replicas delivered them (up to rounding).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from heterps_core.errors import UnknownNameError


def sum_repeated_rows(rows_N: Tensor, gradients_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the gradients of rows that occur more than once.

    A sort and an embedding bag used as segment sum take half the time of `unique` and `index_add_`.

    Args:
        rows_N: Row numbers [N], int64.
        gradients_ND: Their gradients [N, D].

    Returns:
        Distinct rows [U] in ascending order and their summed gradients [U, D].
    """
    if rows_N.numel() == 0:
        return rows_N, gradients_ND
    sorted_N, order_N = torch.sort(rows_N)
    rows_U, counts_U = torch.unique_consecutive(sorted_N, return_counts=True)
    offsets_U = torch.zeros_like(counts_U)
    torch.cumsum(counts_U[:-1], 0, out=offsets_U[1:])
    return rows_U, F.embedding_bag(order_N, gradients_ND, offsets_U, mode="sum")


class RowOptimizer(ABC):
    """Updates rows in place; its state has one entry per row, so it is sharded like the table."""

    @staticmethod
    @abstractmethod
    def state_bytes_per_row() -> int:
        """Return the bytes of optimizer state that one row needs."""

    @abstractmethod
    def new_state(self, num_rows: int) -> dict[str, Tensor]:
        """Return fresh state for a shard of `num_rows` rows; every tensor has `num_rows` as first size."""

    @abstractmethod
    def update(
        self,
        weight_RD: Tensor,
        state: dict[str, Tensor],
        rows_U: Tensor,
        gradients_UD: Tensor,
        *,
        learning_rate: float,
    ) -> None:
        """Apply the summed gradients of distinct rows, in place."""


class RowWiseSGD(RowOptimizer):
    """w <- w - learning_rate * g. Linear, so it is what exactness tests use."""

    @staticmethod
    def state_bytes_per_row() -> int:
        """Return 0: there is no state."""
        return 0

    def new_state(self, num_rows: int) -> dict[str, Tensor]:
        """Return no state."""
        return {}

    def update(
        self,
        weight_RD: Tensor,
        state: dict[str, Tensor],
        rows_U: Tensor,
        gradients_UD: Tensor,
        *,
        learning_rate: float,
    ) -> None:
        """Apply one step of SGD."""
        weight_RD.index_add_(0, rows_U, gradients_UD, alpha=-learning_rate)


class RowWiseAdagrad(RowOptimizer):
    r"""Adagrad with one accumulator per row (Gupta et al. 2014, as in the sparse optimizers of FBGEMM).

    :math:`a_r \leftarrow a_r + \mathrm{mean}(g_r^2)`,
    :math:`w_r \leftarrow w_r - \eta\, g_r / (\sqrt{a_r} + \epsilon)`.
    """

    EPSILON = 1e-8
    # A gradient element is about 1e-5 for a mean loss over thousands of rows. From exactly zero the first
    # update of a row would have the size of the learning rate whatever its gradient.
    INITIAL_ACCUMULATOR = 1e-10

    @staticmethod
    def state_bytes_per_row() -> int:
        """Return the bytes of one float32 accumulator."""
        return 4

    def new_state(self, num_rows: int) -> dict[str, Tensor]:
        """Return accumulators [rows]."""
        return {"accumulator": torch.full((num_rows,), self.INITIAL_ACCUMULATOR)}

    def update(
        self,
        weight_RD: Tensor,
        state: dict[str, Tensor],
        rows_U: Tensor,
        gradients_UD: Tensor,
        *,
        learning_rate: float,
    ) -> None:
        """Apply one step of row-wise Adagrad."""
        accumulator = state["accumulator"]
        accumulated_U = accumulator.index_select(0, rows_U).add_(gradients_UD.square().mean(1))
        accumulator.index_copy_(0, rows_U, accumulated_U)
        step_U = accumulated_U.sqrt_().add_(self.EPSILON).reciprocal_().mul_(-learning_rate)
        weight_RD.index_add_(0, rows_U, gradients_UD * step_U[:, None])


ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "rowwise-adagrad": RowWiseAdagrad,
    "sgd": RowWiseSGD,
}


def get_row_optimizer(name: str) -> type[RowOptimizer]:
    """Return the row optimizer of that name.

    Raises:
        UnknownNameError: It is not in `ROW_OPTIMIZERS`.
    """
    if name not in ROW_OPTIMIZERS:
        raise UnknownNameError("embedding optimizer", name, ROW_OPTIMIZERS)
    return ROW_OPTIMIZERS[name]
