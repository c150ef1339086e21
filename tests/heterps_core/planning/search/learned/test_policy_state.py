import re

import numpy as np
import pytest
import torch
from torch import nn

from heterps_core.errors import ConfigurationError
from heterps_core.planning.search.learned.policy_state import PolicyState


def test_a_state_survives_its_file(tmp_path):
    state = PolicyState.of(nn.Linear(3, 2))

    state.save(tmp_path / "policy.safetensors")
    read = PolicyState.load(tmp_path / "policy.safetensors")

    assert set(read.arrays) == {"weight", "bias"}
    for name, array in state.arrays.items():
        np.testing.assert_array_equal(read.arrays[name], array)


def test_a_state_does_not_change_with_the_policy_it_came_from_or_went_to():
    policy = nn.Linear(3, 2)
    state = PolicyState.of(policy)
    kept = state.arrays["bias"].copy()
    state.load_into(policy)

    nn.init.constant_(policy.bias, 7.0)

    np.testing.assert_array_equal(state.arrays["bias"], kept)


def test_a_loaded_policy_answers_as_the_old_one():
    old, new = nn.Linear(3, 2), nn.Linear(3, 2)

    PolicyState.of(old).load_into(new)

    torch.testing.assert_close(new(torch.ones(3)), old(torch.ones(3)))


def test_a_state_of_another_shape_is_refused_with_both_shapes():
    with pytest.raises(
        ConfigurationError, match=r"weight 2x3, this search needs .*weight 2x4; start without"
    ):
        PolicyState.of(nn.Linear(3, 2)).load_into(nn.Linear(4, 2))


def test_a_file_that_is_no_state_is_refused(tmp_path):
    path = tmp_path / "policy.safetensors"
    path.write_bytes(b"no tensors here")

    with pytest.raises(ConfigurationError, match=re.escape(f"{path} must be a safetensors file")):
        PolicyState.load(path)
    with pytest.raises(ConfigurationError, match="cannot read the policy file"):
        PolicyState.load(tmp_path / "missing")
