import pytest
import torch
from torch import nn

from heterps_core.models import CNN_MODELS
from heterps_core.models.image_blocks import AnimalLogit, block_sizes, build_image_blocks
from heterps_core.models.image_chain import IMAGE_SHAPE, build_image_chain


@pytest.mark.parametrize(
    ("model", "num_blocks"),
    # AlexNet has 5 convolutions and 3 fully connected layers, VGG-16 has 13 and 3; Inception-V3 has 5
    # convolutions in its stem, 11 blocks and a classifier.
    [("alexnet", 8), ("vgg-16", 16), ("inception-v3", 17)],
)
def test_a_model_has_one_block_for_each_layer_with_weights(model, num_blocks):
    chain = build_image_chain(model, seed=0)

    sizes = block_sizes(chain)

    assert len(sizes) == num_blocks
    assert sum(sizes) == len(chain)


@pytest.mark.parametrize("model", CNN_MODELS)
def test_blocks_compute_what_the_layers_do(model):
    images = torch.rand(4, *IMAGE_SHAPE, generator=torch.Generator().manual_seed(0))
    chain, blocks = build_image_chain(model, seed=1).eval(), build_image_blocks(model, seed=1).eval()

    with torch.no_grad():
        probabilities = chain(images).double().softmax(dim=1)
        logits = blocks(images)

    # CIFAR-10: airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck.
    animals = probabilities[:, 2:8].sum(dim=1)
    assert torch.allclose(logits[:, 0].double().sigmoid(), animals, atol=1e-5)


def test_every_class_learns():
    logits = torch.randn(3, 10, requires_grad=True)

    nn.functional.binary_cross_entropy_with_logits(AnimalLogit()(logits)[:, 0], torch.ones(3)).backward()

    assert logits.grad is not None
    assert (logits.grad != 0).all()
