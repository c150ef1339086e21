import copy

import pytest
import torch
from torch import nn

from heterps_core.training.gradients.optimizers import get_dense_optimizer


@pytest.mark.parametrize("l2", [0.0, 0.01])
def test_adam_updates_parameters_and_state_as_torchs_does_to_the_last_digit(l2):
    torch.manual_seed(1)
    own = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2))]
    others = copy.deepcopy(own)
    optimizer = get_dense_optimizer("adam").new(own, 0.1, l2=l2)
    rival = torch.optim.Adam(
        [{"params": others[:1], "weight_decay": l2}, {"params": others[1:]}], lr=0.1, fused=True
    )

    for step in range(5):
        for parameter, other in zip(own, others, strict=True):
            # The last one has no gradient in every other step.
            gradient = None if step % 2 and parameter is own[-1] else torch.randn_like(parameter)
            parameter.grad, other.grad = gradient, gradient
        for each in (optimizer, rival):
            for group in each.param_groups:
                group["lr"] = 0.1 / (step + 1)
            each.step()

    for parameter, other in zip(own, others, strict=True):
        assert torch.equal(parameter, other)
        for name, tensor in rival.state[other].items():
            assert torch.equal(optimizer.state[parameter][name], tensor)
    assert optimizer.state[own[0]].keys() == rival.state[others[0]].keys()
