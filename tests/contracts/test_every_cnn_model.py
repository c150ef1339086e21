"""What holds for every image classifier in the registry."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from heterps_core.embeddings.row_optimizers import RowWiseAdagrad
from heterps_core.errors import UnknownNameError
from heterps_core.models import CNN_MODELS
from heterps_core.models.image_chain import IMAGE_SHAPE, NUM_CLASSES, build_image_chain
from heterps_core.models.model_graph import LayerKind, ModelGraph
from heterps_core.models.tracing import trace_chain


@pytest.fixture(scope="module", params=CNN_MODELS)
def chain(request):
    return build_image_chain(request.param, seed=1)


@pytest.fixture(scope="module")
def images():
    return torch.rand(8, *IMAGE_SHAPE, generator=torch.Generator().manual_seed(0))


def trace(chain):
    return trace_chain(
        "cnn",
        chain,
        dense_optimizer_values_per_parameter=2,
        row_optimizer=RowWiseAdagrad,
        input_shape=IMAGE_SHAPE,
    )


def test_a_model_becomes_a_graph_with_its_own_sizes(chain):
    before = {name: value.clone() for name, value in chain.state_dict().items()}

    graph = trace(chain)

    parameter_bytes = 4 * sum(parameter.numel() for parameter in chain.parameters())
    assert [layer.name for layer in graph.layers] == [name for name, _ in chain.named_children()]
    assert graph.layers[0].kind is LayerKind.CONVOLUTION
    assert graph.layers[0].input_bytes_per_sample == 4 * 3 * 32 * 32
    assert graph.layers[-1].output_bytes_per_sample == 4 * NUM_CLASSES
    assert graph.state_bytes == 3 * parameter_bytes
    assert ModelGraph.from_json(graph.to_json()) == graph
    # Tracing must not teach a batch normalisation anything.
    assert all(torch.equal(before[name], value) for name, value in chain.state_dict().items())
    assert chain.training


def test_a_cut_gives_the_same_output(chain, images):
    chain.eval()
    with torch.no_grad():
        whole = chain(images)
        for cut in (1, len(chain) // 2, len(chain) - 1):
            crossing = chain[:cut](images)
            assert isinstance(crossing, torch.Tensor)
            assert torch.equal(chain[cut:](crossing), whole)
    chain.train()

    assert whole.shape == (8, NUM_CLASSES)


@pytest.mark.parametrize("model", CNN_MODELS)
def test_every_parameter_learns_and_the_loss_falls(model, images):
    chain = build_image_chain(model, seed=1)
    classes = torch.arange(8) % NUM_CLASSES
    optimizer = torch.optim.Adam(chain.parameters(), lr=1e-4)
    losses = []
    torch.manual_seed(0)
    for _ in range(4):
        loss = F.cross_entropy(chain(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert all(parameter.grad is not None for parameter in chain.parameters())
    assert losses[-1] < losses[0]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"alexnet, inception-v3, vgg-16. Did you mean 'vgg-16'"):
        build_image_chain("vgg16", seed=0)
