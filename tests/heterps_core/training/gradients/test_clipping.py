"""Gradients are scaled to a norm over all of them; what is not finite stays for the check that names its layer."""

import math

import pytest
import torch

from heterps_core.training.gradients.clipping import clip_gradients
from heterps_core.training.pipeline.stage_place import ALONE


@pytest.mark.parametrize(("longest", "expected"), [(2.5, [1.5, 2.0]), (5.0, [3.0, 4.0]), (9.0, [3.0, 4.0])])
def test_gradients_are_scaled_where_all_together_are_longer(longest, expected):
    gradients = [torch.tensor([3.0]), torch.tensor([[4.0]])]

    clip_gradients(gradients, ALONE, longest=longest)

    assert [gradient.item() for gradient in gradients] == pytest.approx(expected)


def test_a_gradient_that_is_not_finite_spoils_no_other():
    gradients = [torch.tensor([math.nan, 1.0]), torch.tensor([4.0])]

    clip_gradients(gradients, ALONE, longest=1.0)

    assert gradients[1].item() == 4.0
    assert gradients[0][1].item() == 1.0
