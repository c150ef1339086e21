"""Rows that are sent as whole numbers come back within half a step of their own."""

from __future__ import annotations

import pytest
import torch

from heterps_core.compute_device import CPU
from heterps_core.embeddings.row_wire import from_wire, new_message, to_wire, wire_bytes


def test_rows_in_int8_are_off_by_half_a_step_of_their_row_at_most():
    rows = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    # Of unlike sizes, down to gradients that are hardly above the smallest float32.
    rows *= 10.0 ** torch.arange(-30, 10).repeat(5)[:, None]

    found = from_wire(to_wire(rows, torch.int8))

    step = rows.abs().amax(1, keepdim=True) / 127
    assert ((found - rows).abs() <= 0.5001 * step).all()
    assert found.abs().amax(1) == pytest.approx(rows.abs().amax(1), rel=1e-6)
    assert not torch.equal(found, rows)


def test_a_row_worked_by_hand():
    # Steps of 2: -254 is -127 of them, 3 is nearest to 4, of which 2, and 0.9 to 0.
    assert from_wire(to_wire(torch.tensor([[-254.0, 3.1, 0.9]]), torch.int8)).tolist() == [[-254.0, 4.0, 0.0]]


def test_zeros_and_no_rows_stay_what_they_are():
    assert from_wire(to_wire(torch.zeros(2, 3), torch.int8)).tolist() == [[0.0] * 3] * 2
    assert from_wire(to_wire(torch.zeros(0, 3), torch.int8)).shape == (0, 3)


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [(torch.float32, 64), (torch.bfloat16, 32), (torch.int8, 20)]
)
def test_a_message_has_the_bytes_that_are_counted(dtype, row_bytes):
    message = to_wire(torch.ones(7, 16), dtype)

    assert wire_bytes(16, dtype) == row_bytes
    assert message.nbytes == 7 * row_bytes
    assert new_message(7, 16, dtype, device=CPU).shape == message.shape
