"""AlexNet for CIFAR-10: the five convolutions of Krizhevsky (2014), and its classifier of three layers.

Channels and kernels are the published ones. An image of 32 x 32 cannot be halved as often as one of 224 x 224, so
the first convolution is padded by 5 instead of 2 and the pools are 2 x 2; the classifier then reads 256 values
instead of 9,216.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from heterps_core.models.image_chain import IMAGE_SHAPE, NUM_CLASSES

POOLED_AFTER = (1, 2, 5)
"""Numbers of the convolutions that a pool follows."""

CLASSIFIER_WIDTH = 4096
DROPOUT = 0.5


def build() -> nn.Sequential:
    """Build the chain: [B, 3, 32, 32] -> [B, 10]."""
    convolutions = (
        nn.Conv2d(IMAGE_SHAPE[0], 64, kernel_size=11, stride=4, padding=5),
        nn.Conv2d(64, 192, kernel_size=5, padding=2),
        nn.Conv2d(192, 384, kernel_size=3, padding=1),
        nn.Conv2d(384, 256, kernel_size=3, padding=1),
        nn.Conv2d(256, 256, kernel_size=3, padding=1),
    )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, convolution in enumerate(convolutions, start=1):
        layers[f"conv{number}"] = convolution
        layers[f"relu{number}"] = nn.ReLU()
        if number in POOLED_AFTER:
            layers[f"pool{number}"] = nn.MaxPool2d(2)
    layers["pool5"] = nn.Sequential(layers["pool5"], nn.Flatten())
    for number, (width, hidden) in enumerate(((256, CLASSIFIER_WIDTH), (CLASSIFIER_WIDTH,) * 2), start=6):
        layers[f"dropout{number}"] = nn.Dropout(DROPOUT)
        layers[f"fc{number}"] = nn.Linear(width, hidden)
        layers[f"relu{number}"] = nn.ReLU()
    layers["output"] = nn.Linear(CLASSIFIER_WIDTH, NUM_CLASSES)
    return nn.Sequential(layers)
