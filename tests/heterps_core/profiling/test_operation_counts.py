"""The operations that an estimate charges launches for, against those that PyTorch really dispatches."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings import row_kernels
from heterps_core.embeddings.row_optimizers import RowWiseAdagrad
from heterps_core.models.model_graph import LayerKind
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.profiling.analytic_profile import _NUM_OPERATIONS
from heterps_core.profiling.measurement.profiling_input import click_batches
from heterps_core.profiling.measuring_process import ProfileRequest
from heterps_core.training.gradients.optimizers import get_dense_optimizer

VIEWS = {"view", "_unsafe_view", "slice", "unsqueeze", "t", "detach", "expand"}
MARKERS = {"_record_function_enter_new", "_record_function_exit"}
NO_PART_OF_THE_LAYER = {"ones_like"}
"""The gradient that the test itself makes."""


class CountOperations(TorchDispatchMode):
    """Counts operations that do work."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in VIEWS | MARKERS | NO_PART_OF_THE_LAYER:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def count(action):
    with CountOperations() as counted:
        result = action()
    return len(counted.names), result


def count_phases(forward, update):
    """Count the second round: in the first one, gradients and state are made."""
    for _ in range(2):
        num_forward, leaving = count(forward)
        num_backward, _ = count(lambda leaving=leaving: leaving.backward(torch.ones_like(leaving)))
        num_update, _ = count(update)
    return {"forward": num_forward, "backward": num_backward, "update": num_update}


def test_an_embedding_starts_as_many_operations_as_an_estimate_charges(monkeypatch):
    # As on an accelerator, for which there are no compiled row kernels.
    monkeypatch.setattr(row_kernels, "row_kernels", lambda: None)
    features = FeatureSpec(num_dense=2, slot_rows=(10, 10))
    batch = click_batches(ProfileRequest(model="ctrdnn", features=features, batch_size=4), features)[0]
    layer = SlotEmbedding(features, dimension=4)
    table = layer.new_table("embedding", RowWiseAdagrad(), seed=0)
    layer.attach_table(table)

    found = count_phases(lambda: layer(batch), lambda: table.apply_gradients(learning_rate=0.1))

    assert found == _NUM_OPERATIONS[LayerKind.EMBEDDING]


DENSE_LAYERS = {
    LayerKind.FULLY_CONNECTED: nn.Linear(3, 2),
    LayerKind.ELEMENTWISE: nn.ReLU(),
}


@pytest.mark.parametrize("kind", DENSE_LAYERS)
def test_a_dense_layer_starts_as_many_operations_as_an_estimate_charges(kind):
    layer = DENSE_LAYERS[kind]
    entering = torch.ones(4, 3, requires_grad=True)
    parameters = list(layer.parameters())
    optimizer = get_dense_optimizer("adam")(parameters)

    def forward():
        entering.grad = None
        return layer(entering)

    def update():
        optimizer.step(0.1)

    assert count_phases(forward, update) == _NUM_OPERATIONS[kind]
