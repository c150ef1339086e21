"""The rows of a look-up side by side, bags pooled and sequences in order, and the way back of their gradients.

Shapes: as in `sharded_table`; V columns after the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heterps_core.data.features import NO_ID
from heterps_core.embeddings.bags import Bags
from heterps_core.embeddings.row_exchange import LookupRows
from heterps_core.embeddings.row_kernels import kernels_for
from heterps_core.embeddings.sequence_columns import packed_width, place_values, values_in

if TYPE_CHECKING:
    from heterps_core.embeddings.sharded_table import ShardedTable


def copy_rows(weight_RD: Tensor, rows_BS: Tensor, out_BX: Tensor, bags: Bags | None = None) -> None:
    """Copy rows [B, S] of a table, or the sums of bags, into columns [B, X], which may belong to a wider tensor."""
    kernels = kernels_for(weight_RD)
    if kernels is not None:
        kernels.gather(weight_RD, rows_BS, out_BX, bags)
    elif bags is not None and bags.of(rows_BS) is not None:
        out_BX.copy_(bags.pool(weight_RD, rows_BS).flatten(1))
    else:
        out_BX.copy_(weight_RD.index_select(0, rows_BS.reshape(-1)).view(out_BX.shape))


def placed_rows(
    table: ShardedTable,
    looked_up: LookupRows,
    anchor: Tensor,
    *,
    before_BW: Tensor | None,
    after_BV: Tensor | None,
    dtype: torch.dtype,
    packs: bool,
) -> Tensor:
    """Return [B, W + X + V] of type `dtype`, as `ShardedTable.lookup` does.

    Args:
        anchor: Needs a gradient, so that autograd calls the way back.
    """
    return _Lookup.apply(table, looked_up, anchor, before_BW, after_BV, dtype, packs)  # type: ignore[no-any-return, no-untyped-call]


class _Lookup(torch.autograd.Function):
    """Bring rows together forward and hand their gradients to the table backward."""

    @staticmethod
    def forward(
        ctx: Any,
        table: ShardedTable,
        looked_up: LookupRows,
        anchor: Tensor,
        before_BW: Tensor | None,
        after_BV: Tensor | None,
        dtype: torch.dtype,
        packs: bool,
    ) -> Tensor:
        num_samples, num_slots = looked_up.rows_BS.shape
        bags, dimension = table.bags, table.dimension
        num_pooled = num_slots if bags is None else bags.num_columns
        num_vectors = num_slots if bags is None else bags.num_bags
        first = 0 if before_BW is None else before_BW.shape[1]
        stop = end = first + num_vectors * dimension
        ctx.values, ctx.is_there = None, None
        if num_slots > num_pooled:
            in_sequences = looked_up.rows_BS[:, num_pooled:]
            ctx.is_there = in_sequences != NO_ID
            ctx.values = LookupRows(in_sequences[ctx.is_there].unsqueeze(1), looked_up.exchange)
            looked_up = LookupRows(looked_up.rows_BS[:, :num_pooled], looked_up.exchange)
            num_values, most = len(ctx.values.rows_BS), in_sequences.shape[1] * dimension
            vectors_ND = torch.empty(num_values, dimension, dtype=dtype, device=in_sequences.device)
            table.gather(ctx.values, vectors_ND)
            end += packed_width(num_values, num_samples, dimension=dimension, most=most) if packs else most
        rows_BS = looked_up.rows_BS
        width = end + (0 if after_BV is None else after_BV.shape[1])
        leaving = torch.empty(num_samples, width, dtype=dtype, device=rows_BS.device)
        if before_BW is not None:
            leaving[:, :first] = before_BW
        if after_BV is not None:
            leaving[:, end:] = after_BV
        if ctx.values is not None:
            place_values(vectors_ND, leaving[:, stop:end], ctx.is_there)
        if num_vectors:
            table.gather(looked_up, leaving[:, first:stop])
        ctx.divisors = None if bags is None else bags.divisors(rows_BS)
        if ctx.divisors is not None:
            leaving[:, first:stop].view(num_samples, num_vectors, table.dimension).div_(ctx.divisors)
        ctx.table, ctx.looked_up, ctx.columns = table, looked_up, (first, stop, end)
        ctx.before_dtype = None if before_BW is None else before_BW.dtype
        return leaving

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        first, stop, end = ctx.columns
        of_vectors = gradient[:, first:stop]
        if ctx.divisors is not None:
            shape = (*ctx.divisors.shape[:2], ctx.table.dimension)
            of_vectors = (of_vectors.reshape(shape) / ctx.divisors).flatten(1)
        if stop > first:
            ctx.table.scatter(ctx.looked_up, of_vectors)
        if ctx.values is not None:
            of_values = values_in(gradient[:, stop:end], ctx.is_there, ctx.table.dimension)
            ctx.table.scatter(ctx.values, of_values)
        before = None if ctx.before_dtype is None else gradient[:, :first].to(ctx.before_dtype)
        return None, None, None, before, None, None, None
