"""Optimizers that update only the rows of a table which a batch touched, once each: repeated rows are summed first.

Each is written twice: here in torch, and in `row_kernels.cpp` as one pass over memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.embeddings.bags import Bags
from heterps_core.embeddings.row_kernels import kernels_for
from heterps_core.embeddings.row_range import RowRange
from heterps_core.errors import UnknownNameError
from heterps_core.units import BYTES_PER_FLOAT32

State: TypeAlias = dict[str, Tensor]


def _sum_repeated_rows(rows_N: Tensor, gradients_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the gradients of rows that occur more than once.

    A sort and an embedding bag used as segment sum take half the time of `unique` and `index_add_`.

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
    """Updates rows in place; its state has one entry per row, so it is sharded like the table.

    Args:
        l2: Strength of a penalty on the rows that a step updates: `l2` times a row is added to its summed gradient,
            once a step, so that no number of replicas or micro-batches changes it.
    """

    def __init__(self, *, l2: float = 0.0) -> None:
        self.l2 = l2

    KERNEL_RULE: ClassVar[str | None] = None
    """The rule of `RowKernels.update` that does the same; None for an optimizer that is written in torch alone."""

    KERNEL_CONSTANTS: ClassVar[tuple[float, ...]] = ()
    """Further arguments of that rule after the learning rate; it takes the state's tensors in their order."""

    ELEMENT_STATE: ClassVar[tuple[str, ...]] = ()
    """Float32 tensors [rows, D] of the state, which come first."""

    ROW_STATE: ClassVar[tuple[str, ...]] = ()
    """Float32 tensors [rows]."""

    @classmethod
    def state_bytes_per_row(cls, dimension: int) -> int:
        """Return the bytes of optimizer state that one row of that width needs."""
        return BYTES_PER_FLOAT32 * (dimension * len(cls.ELEMENT_STATE) + len(cls.ROW_STATE))

    def new_state(self, num_rows: int, dimension: int, *, device: torch.device = CPU) -> State:
        """Return fresh state for a shard of `num_rows` rows; every tensor has `num_rows` as first size."""
        wide = {name: torch.zeros(num_rows, dimension, device=device) for name in self.ELEMENT_STATE}
        return wide | {name: torch.zeros(num_rows, device=device) for name in self.ROW_STATE}

    @abstractmethod
    def update(
        self, weight_RD: Tensor, state: State, rows_U: Tensor, gradients_UD: Tensor, *, learning_rate: float
    ) -> None:
        """Apply the summed gradients of distinct rows, in place."""

    def update_repeated(
        self,
        weight_RD: Tensor,
        state: State,
        parts: Sequence[tuple[Tensor, Tensor]],
        *,
        learning_rate: float,
        shard: RowRange | None = None,
        bags: Bags | None = None,
        changed_R: Tensor | None = None,
    ) -> None:
        """Apply the gradients of rows that may repeat, in place.

        Args:
            weight_RD: The table.
            state: What `new_state` made.
            parts: Rows [B, S], int64, and their gradients [B, S * D], side by side for each of B samples;
                all float32 or all bfloat16.
            learning_rate: Of this step.
            shard: Of which rows of a larger table `weight_RD` is; `parts` have row indices of the larger one, and
                those outside the shard are passed over.
            bags: Of all parts but those of single rows: their gradients are those of the sums of bags, [B, G * D].
            changed_R: Bool; True is written for each row that is updated.

        Raises:
            IndexError: A row is not in the table, and there is no larger one.
        """
        kernels = kernels_for(weight_RD)
        if kernels is not None and self.KERNEL_RULE is not None:
            kernels.update(
                self.KERNEL_RULE,
                weight_RD,
                list(state.values()),
                parts,
                learning_rate=learning_rate,
                l2=self.l2,
                constants=self.KERNEL_CONSTANTS,
                shard=shard,
                bags=bags,
                changed_R=changed_R,
            )
            return
        if bags is not None:
            parts = [part if bags.of(part[0]) is None else bags.spread(*part) for part in parts]
        rows_N = torch.cat([rows_BS.reshape(-1) for rows_BS, _ in parts])
        gradients_ND = torch.cat([gradients_BX.reshape(-1, weight_RD.shape[1]) for _, gradients_BX in parts])
        if shard is not None:
            is_inside_N = (rows_N >= shard.first) & (rows_N < shard.stop)
            rows_N, gradients_ND = rows_N[is_inside_N] - shard.first, gradients_ND[is_inside_N]
        rows_U, gradients_UD = _sum_repeated_rows(rows_N, gradients_ND.float())
        if rows_U.numel():
            if self.l2:
                gradients_UD = gradients_UD + self.l2 * weight_RD.index_select(0, rows_U)
            self.update(weight_RD, state, rows_U, gradients_UD, learning_rate=learning_rate)
            if changed_R is not None:
                changed_R[rows_U] = True


class RowWiseSGD(RowOptimizer):
    """w <- w - learning_rate * g. Linear, so it is what exactness tests use."""

    KERNEL_RULE = "sgd"

    def update(
        self, weight_RD: Tensor, state: State, rows_U: Tensor, gradients_UD: Tensor, *, learning_rate: float
    ) -> None:
        """Apply one step of SGD."""
        weight_RD.index_add_(0, rows_U, gradients_UD, alpha=-learning_rate)


class RowSums(RowWiseSGD):
    """w <- w + g: rows that add up what a step gives them, whatever the learning rate."""

    def update_repeated(
        self,
        weight_RD: Tensor,
        state: State,
        parts: Sequence[tuple[Tensor, Tensor]],
        *,
        learning_rate: float = 0.0,
        **others: Any,
    ) -> None:
        """Add the gradients of rows that may repeat, in place, as `RowOptimizer.update_repeated` takes them."""
        # A step of -1 is the sum.
        super().update_repeated(weight_RD, state, parts, learning_rate=-1.0, **others)


class RowWiseAdagrad(RowOptimizer):
    r"""Adagrad with one accumulator per row (Gupta et al. 2014, as in the sparse optimizers of FBGEMM).

    :math:`a_r \leftarrow a_r + \mathrm{mean}(g_r^2)`,
    :math:`w_r \leftarrow w_r - \eta\, g_r / (\sqrt{a_r} + \epsilon)`.
    """

    EPSILON = 1e-8
    # A gradient element is about 1e-5 for a mean loss over thousands of rows. From exactly zero the first
    # update of a row would have the size of the learning rate whatever its gradient.
    INITIAL_ACCUMULATOR = 1e-10

    KERNEL_RULE = "adagrad"
    KERNEL_CONSTANTS = (EPSILON,)
    ROW_STATE = ("accumulator",)

    def new_state(self, num_rows: int, dimension: int, *, device: torch.device = CPU) -> State:
        """Return accumulators [rows]."""
        return {"accumulator": torch.full((num_rows,), self.INITIAL_ACCUMULATOR, device=device)}

    def update(
        self, weight_RD: Tensor, state: State, rows_U: Tensor, gradients_UD: Tensor, *, learning_rate: float
    ) -> None:
        """Apply one step of row-wise Adagrad."""
        accumulator = state["accumulator"]
        accumulated_U = accumulator.index_select(0, rows_U).add_(gradients_UD.square().mean(1))
        accumulator.index_copy_(0, rows_U, accumulated_U)
        step_U = accumulated_U.sqrt_().add_(self.EPSILON).reciprocal_().mul_(-learning_rate)
        weight_RD.index_add_(0, rows_U, gradients_UD * step_U[:, None])


class RowWiseAdam(RowOptimizer):
    r"""Adam (Kingma and Ba 2015) with one second moment per row, and moments that only updates of the row move.

    For the :math:`t`-th update of row :math:`r`:
    :math:`m_r \leftarrow \beta_1 m_r + (1 - \beta_1) g_r`,
    :math:`v_r \leftarrow \beta_2 v_r + (1 - \beta_2)\,\mathrm{mean}(g_r^2)`,
    :math:`w_r \leftarrow w_r - \eta\,\frac{m_r}{1 - \beta_1^t} / (\sqrt{v_r / (1 - \beta_2^t)} + \epsilon)`.
    A row's state is m (D values), v and t. Counting t for each row corrects the bias of rows that are seldom seen as
    well as of frequent ones; in rows of one element this is Adam run on the batches that touch the row.
    """

    MEAN_DECAY, SQUARE_DECAY, EPSILON = 0.9, 0.999, 1e-8

    KERNEL_RULE = "adam"
    KERNEL_CONSTANTS = (MEAN_DECAY, SQUARE_DECAY, EPSILON)
    ELEMENT_STATE = ("mean",)
    ROW_STATE = ("square", "num_updates")

    def update(
        self, weight_RD: Tensor, state: State, rows_U: Tensor, gradients_UD: Tensor, *, learning_rate: float
    ) -> None:
        """Apply one step of row-wise Adam."""
        counts_U = state["num_updates"].index_select(0, rows_U).add_(1)
        state["num_updates"].index_copy_(0, rows_U, counts_U)
        mean_UD = state["mean"].index_select(0, rows_U).lerp_(gradients_UD, 1 - self.MEAN_DECAY)
        state["mean"].index_copy_(0, rows_U, mean_UD)
        square_U = state["square"].index_select(0, rows_U)
        square_U.lerp_(gradients_UD.square().mean(1), 1 - self.SQUARE_DECAY)
        state["square"].index_copy_(0, rows_U, square_U)
        # In float64: 1 - 0.999 keeps three digits fewer.
        mean_correction_U = (1 - self.MEAN_DECAY ** counts_U.double()).float()
        square_correction_U = (1 - self.SQUARE_DECAY ** counts_U.double()).float()
        root_U = square_U.div_(square_correction_U).sqrt_().add_(self.EPSILON)
        step_U = -learning_rate / (mean_correction_U * root_U)
        weight_RD.index_add_(0, rows_U, mean_UD * step_U[:, None])


ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "rowwise-adagrad": RowWiseAdagrad,
    "rowwise-adam": RowWiseAdam,
    "sgd": RowWiseSGD,
}


def sum_by_row(
    parts: Sequence[tuple[Tensor, Tensor]], num_rows: int, dimension: int, bags: Bags | None = None
) -> Tensor:
    """Return the gradients [num_rows, dimension] of rows, summed over parts that `update_repeated` takes."""
    sums_RD = torch.zeros(num_rows, dimension, device=parts[0][1].device)
    if dimension == 1 and sums_RD.device == CPU and bags is None:
        # Without a sort: 76 for 144 microseconds with 6,656 rows, 230 for 667 with 53,248; longer rows gain nothing.
        for rows_BS, gradients_BX in parts:
            sums_RD.index_add_(0, rows_BS.reshape(-1), gradients_BX.reshape(-1, 1).float())
        return sums_RD
    RowSums().update_repeated(sums_RD, {}, parts, bags=bags)
    return sums_RD


def get_row_optimizer(name: str) -> type[RowOptimizer]:
    """Return the row optimizer of that name.

    Raises:
        UnknownNameError: It is not in `ROW_OPTIMIZERS`.
    """
    if name not in ROW_OPTIMIZERS:
        raise UnknownNameError("embedding optimizer", name, ROW_OPTIMIZERS)
    return ROW_OPTIMIZERS[name]
