"""Masks of dropout follow from seed, epoch, row and layer: worked out again with Python's own integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from heterps_core.models.row_dropout import RowDropout, keys_of_rows, with_row_dropout

ROWS = np.arange(5, 4005)


def masks(dropout: RowDropout, keys: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    dropout.row_keys = keys
    return dropout(torch.ones(len(keys), *shape)) != 0


def test_a_mask_is_the_hash_of_a_rows_key_and_a_column():
    keys = keys_of_rows(ROWS[:7], seed=3, epoch=1)
    columns = torch.randint(2**32, (5,), generator=torch.Generator().manual_seed(2)).tolist()

    found = masks(RowDropout(0.3, number=2), keys, (5,))

    for row, key in enumerate(keys.tolist()):
        for column, other in enumerate(columns):
            value = ((key % 2**32) ^ other) * 0x7FEB352D % 2**32
            value = (value ^ (value >> 15)) * 0x846CA68B % 2**32
            # As a signed number of 32 bits, counted from the smallest.
            assert found[row, column] == ((value + 2**31) % 2**32 >= 0.3 * (2**32 - 1) - 1)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_so_many_values_are_dropped_and_the_mean_stays(share):
    dropout = RowDropout(share, number=0)
    dropout.row_keys = keys_of_rows(ROWS, seed=0, epoch=0)

    values = dropout(torch.ones(len(ROWS), 50))

    # Five standard errors of 200,000 draws.
    error = 5 * (share * (1 - share) / values.numel()) ** 0.5
    assert (values == 0).float().mean().item() == pytest.approx(share, abs=error + 1e-9)
    assert set(values.unique().tolist()) <= {0.0, 1.0 if share == 1 else torch.tensor(1 / (1 - share)).item()}


def test_rows_columns_epochs_seeds_and_layers_drop_apart_from_one_another():
    dropout, keys = RowDropout(0.5, number=0), keys_of_rows(ROWS, seed=0, epoch=0)
    first = masks(dropout, keys, (40,)).float()
    others = [
        masks(RowDropout(0.5, number=1), keys, (40,)),
        masks(dropout, keys_of_rows(ROWS, seed=1, epoch=0), (40,)),
        masks(dropout, keys_of_rows(ROWS, seed=0, epoch=1), (40,)),
        masks(dropout, keys_of_rows(ROWS + 1, seed=0, epoch=0), (40,)),
    ]

    for other in others:
        # Of independent bits half agree; six standard errors of 160,000.
        assert (first == other).float().mean().item() == pytest.approx(0.5, abs=0.008)
    between_columns = torch.corrcoef(first.T) - torch.eye(40)
    between_rows = torch.corrcoef(first[:200].repeat(1, 1)) - torch.eye(200)
    assert between_columns.abs().max() < 6 / len(ROWS) ** 0.5
    assert between_rows.mean().abs() < 0.01


def test_a_part_of_a_batch_drops_what_the_whole_does_and_gradients_only_pass_what_is_kept():
    dropout, keys = RowDropout(0.5, number=0), keys_of_rows(ROWS[:8], seed=0, epoch=0)
    whole = masks(dropout, keys, (2, 3))
    parts = [masks(dropout, part, (2, 3)) for part in keys.split([5, 3])]
    values = torch.ones(8, 2, 3, requires_grad=True)
    dropout.row_keys = keys
    dropout(values).sum().backward()

    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(values.grad, whole * 2.0)
    assert torch.equal(dropout.eval()(values), values)


def test_each_dropout_of_a_model_gets_a_number_and_one_that_is_used_twice_stays_one():
    shared = nn.Dropout(0.2)
    module = nn.ModuleDict({"a": nn.Sequential(nn.Dropout(0.1), shared), "b": shared, "c": nn.AlphaDropout()})

    found = with_row_dropout(module)

    assert [type(each) for each in found["a"]] == [RowDropout, RowDropout]
    assert found["a"][1] is found["b"]
    assert (found["a"][0].p, found["b"].p) == (0.1, 0.2)
    assert isinstance(found["c"], nn.AlphaDropout)
    torch.manual_seed(0)
    alone = found["b"](torch.ones(1000))
    # Without keys, as where a layer is timed alone, torch draws.
    assert 100 < (alone == 0).sum() < 300
