"""Parameters and products of the image classifiers against what their authors and torchvision publish.

Convolutions do not depend on the size of the image. Classifiers do, and are worked by hand here.
"""

import pytest
import torch
from torch import nn

from heterps_core.embeddings.row_optimizers import RowWiseAdagrad
from heterps_core.models.image_chain import IMAGE_SHAPE, build_image_chain
from heterps_core.models.tracing import trace_chain

CLASSES_OF_IMAGENET, CLASSES_OF_CIFAR = 1000, 10


def num_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_alexnet_has_the_published_convolutions():
    chain = build_image_chain("alexnet", seed=0)
    # torchvision.models.alexnet: 61,100,840 parameters, of which its three fully connected layers hold
    # 9216 * 4096 + 4096, 4096 * 4096 + 4096 and 4096 * 1000 + 1000.
    published = 61_100_840 - (9216 * 4096 + 4096) - (4096 * 4096 + 4096) - (4096 * CLASSES_OF_IMAGENET + 1000)

    convolutions = [layer for layer in chain if isinstance(layer, nn.Conv2d)]

    assert sum(map(num_parameters, convolutions)) == published == 2_469_696
    assert num_parameters(chain.fc6) == 256 * 4096 + 4096
    assert num_parameters(chain) == published + 257 * 4096 + 4097 * 4096 + 4097 * CLASSES_OF_CIFAR


def test_vgg_16_has_the_published_convolutions():
    chain = build_image_chain("vgg-16", seed=0)
    # Simonyan and Zisserman (2015), table 2: 138 million parameters; torchvision.models.vgg16: 138,357,544.
    published = 138_357_544 - (25_088 * 4096 + 4096) - (4097 * 4096) - 4097 * CLASSES_OF_IMAGENET

    convolutions = [layer for layer in chain if isinstance(layer, nn.Conv2d)]

    assert len(convolutions) == 13
    assert sum(map(num_parameters, convolutions)) == published == 14_714_688
    assert num_parameters(chain) == published + 513 * 4096 + 4097 * 4096 + 4097 * CLASSES_OF_CIFAR


def test_vgg_16_does_the_published_products_on_a_cifar_image():
    chain = build_image_chain("vgg-16", seed=0)

    graph = trace_chain(
        "vgg-16",
        chain,
        dense_optimizer_values_per_parameter=0,
        row_optimizer=RowWiseAdagrad,
        input_shape=IMAGE_SHAPE,
    )
    flops = {layer.name: layer.forward_flops_per_sample for layer in graph.layers}

    # Li et al., Pruning Filters for Efficient ConvNets (2017), table 1: VGG-16 on CIFAR-10 takes 3.13e8
    # multiplications with additions; there the classifier is a hundredth of it.
    convolutions = sum(value for name, value in flops.items() if name.startswith("conv"))
    assert convolutions / 2 == pytest.approx(3.13e8, rel=0.002)
    # 3 x 3 x 3 products for each of 64 channels of 32 x 32 pixels.
    assert flops["conv1_1"] == 2 * 27 * 64 * 1024


def test_inception_v3_has_the_published_parameters():
    chain = build_image_chain("inception-v3", seed=0)
    # torchvision.models.inception_v3: 27,161,264 with the auxiliary classifier of 3,326,696 (its second
    # convolution alone 2,457,600), so 23,834,568 without, of which 2048 * 1000 + 1000 are the classifier's.
    published = 27_161_264 - 3_326_696 - (2048 * CLASSES_OF_IMAGENET + 1000)

    assert num_parameters(chain) - num_parameters(chain.output) == published == 21_785_568


def test_inception_v3_is_cut_between_its_blocks_and_not_inside_them():
    chain = build_image_chain("inception-v3", seed=0).eval()
    channels = {}
    activation = torch.zeros(2, *IMAGE_SHAPE)
    for name, layer in chain.named_children():
        activation = layer(activation)
        channels[name] = activation.shape[1]

    blocks = {name: width for name, width in channels.items() if name.startswith("block")}
    # Szegedy et al. (2016), table 1: three blocks on 35 x 35 pixels, a reduction, and so on; 288, 768, 1280, 2048.
    assert [name.removeprefix("block_")[0] for name in blocks] == [*"aaabccccdee"]
    assert [blocks[f"block_{letter}"] for letter in ("a3", "c4", "d", "e2")] == [288, 768, 1280, 2048]
