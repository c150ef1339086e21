"""What a layer looks rows up in, wherever they are: one autograd function around bringing rows and taking gradients.

Shapes: B samples of a look-up, S rows that each looks up, U distinct ones, D width of a row, X = S * D.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.embeddings.row_kernels import kernels_for

Fetched = TypeVar("Fetched")
"""What a table remembers of a look-up until its gradients come."""


class LookupTable(ABC, Generic[Fetched]):
    """A table as its reader sees it.

    A look-up calls `_gather` once, and `_scatter` with what that returned once its gradients are known.

    Args:
        name: Name of the table.
        num_rows: Rows of the whole table.
        dimension: Width of a row (D).
        device: Where row indices come from and rows go to.
    """

    def __init__(self, *, name: str, num_rows: int, dimension: int, device: torch.device = CPU) -> None:
        self.name = name
        self.device = device
        self.num_rows = num_rows
        self.dimension = dimension
        self._expected: Fetched | None = None
        # Autograd calls a function's backward only where an input needs a gradient.
        self._anchor = torch.zeros(1, requires_grad=True, device=device)

    def expect(self, fetched: Fetched) -> None:
        """Let the next look-up, which must be the one that it was made for, use what was asked for ahead."""
        self._expected = fetched

    def lookup(
        self,
        rows_BS: Tensor,
        before_BW: Tensor | None = None,
        after_BV: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Look rows up and put them side by side for each sample, between columns that come from elsewhere.

        Args:
            rows_BS: Row indices [B, S] of the whole table, int64.
            before_BW: Columns to put before the rows.
            after_BV: Columns to put behind them; they get no gradient.
            dtype: Of what is returned, float32 or bfloat16; the table stays float32.

        Returns:
            Tensor [B, W + S * D + V].

        Raises:
            IndexError: A row is not in the table.
        """
        return _Lookup.apply(rows_BS, self._anchor, before_BW, after_BV, dtype, self)  # type: ignore[no-any-return, no-untyped-call]

    @abstractmethod
    def apply_gradients(self, *, learning_rate: float) -> None:
        """Hand on all gradients that came since the last call; once a step, after all backward passes."""

    def _distinct(self, rows_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct rows [U] of a look-up, ascending, and the position of each row in them.

        Raises:
            IndexError: A row is not in the table.
        """
        rows_U, inverse_BS = torch.unique(rows_BS, return_inverse=True)
        if len(rows_U) and not (rows_U[0] >= 0 and rows_U[-1] < self.num_rows):
            raise IndexError(
                f"rows must lie in 0..{self.num_rows - 1} of table {self.name!r}, got {rows_U[[0, -1]]}"
            )
        return rows_U, inverse_BS

    @abstractmethod
    def _gather(self, rows_BS: Tensor, out_BX: Tensor) -> Fetched:
        """Write the rows into columns, which may belong to a wider tensor."""

    @abstractmethod
    def _scatter(self, rows_BS: Tensor, fetched: Fetched, gradients_BX: Tensor) -> None:
        """Take the gradients of a look-up's columns."""


def copy_rows(weight_RD: Tensor, rows_BS: Tensor, out_BX: Tensor) -> None:
    """Copy rows [B, S] of a table into columns [B, S * D], which may belong to a wider tensor."""
    kernels = kernels_for(weight_RD)
    if kernels is None:
        out_BX.copy_(weight_RD.index_select(0, rows_BS.reshape(-1)).view(out_BX.shape))
    else:
        kernels.gather(weight_RD, rows_BS, out_BX)


class _Lookup(torch.autograd.Function):
    """Bring rows together forward and hand their gradients to the table backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_BS: Tensor,
        anchor: Tensor,
        before_BW: Tensor | None,
        after_BV: Tensor | None,
        dtype: torch.dtype,
        table: LookupTable[Any],
    ) -> Tensor:
        num_samples, num_slots = rows_BS.shape
        first = 0 if before_BW is None else before_BW.shape[1]
        stop = first + num_slots * table.dimension
        width = stop + (0 if after_BV is None else after_BV.shape[1])
        leaving = torch.empty(num_samples, width, dtype=dtype, device=rows_BS.device)
        if before_BW is not None:
            leaving[:, :first] = before_BW
        if after_BV is not None:
            leaving[:, stop:] = after_BV
        ctx.fetched = table._gather(rows_BS, leaving[:, first:stop])
        ctx.table, ctx.rows_BS, ctx.columns = table, rows_BS, (first, stop)
        ctx.before_dtype = None if before_BW is None else before_BW.dtype
        return leaving

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor | None, None, None, None]:
        (gradient,) = gradients
        first, stop = ctx.columns
        ctx.table._scatter(ctx.rows_BS, ctx.fetched, gradient[:, first:stop])
        before = None if ctx.before_dtype is None else gradient[:, :first].to(ctx.before_dtype)
        return None, None, before, None, None, None
