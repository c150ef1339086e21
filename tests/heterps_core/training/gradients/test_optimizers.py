"""Dense optimizers beside torch's own, which they must equal bit for bit."""

import copy
import sys

import pytest
import torch
from torch import nn

from heterps_core.training.gradients.optimizers import get_dense_optimizer

TORCHS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


@pytest.mark.parametrize("l2", [0.0, 0.01])
@pytest.mark.parametrize("name", TORCHS)
def test_parameters_and_state_are_updated_as_torchs_optimizer_does_to_the_last_digit(name, l2):
    torch.manual_seed(1)
    own = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2))]
    others = copy.deepcopy(own)
    optimizer = get_dense_optimizer(name)(own, l2=l2)
    rival = TORCHS[name](
        [{"params": others[:1], "weight_decay": l2}, {"params": others[1:]}], lr=0.1, fused=True
    )

    for step in range(5):
        for parameter, other in zip(own, others, strict=True):
            # The last one has no gradient in every other step.
            gradient = None if step % 2 and parameter is own[-1] else torch.randn_like(parameter)
            parameter.grad, other.grad = gradient, gradient
        optimizer.step(0.1 / (step + 1))
        for group in rival.param_groups:
            group["lr"] = 0.1 / (step + 1)
        rival.step()

    for parameter, other in zip(own, others, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, other)
        kept = {key: tensor for key, tensor in rival.state[other].items() if tensor is not None}
        assert optimizer.state[parameter].keys() == kept.keys()
        assert all(torch.equal(optimizer.state[parameter][key], tensor) for key, tensor in kept.items())


def test_parameters_of_two_data_types_are_updated_together():
    parameters = [nn.Parameter(torch.ones(2, dtype=each)) for each in (torch.float32, torch.float64)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)

    get_dense_optimizer("sgd")(parameters).step(0.25)

    assert [parameter.tolist() for parameter in parameters] == [[0.75, 0.75], [0.75, 0.75]]


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_compiler_is_not_loaded(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)

    get_dense_optimizer(name)([parameter]).step(0.5)

    assert parameter.tolist() == pytest.approx([0.5, 0.5])
