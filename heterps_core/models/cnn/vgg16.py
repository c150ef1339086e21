"""VGG-16 for CIFAR-10: configuration D of Simonyan and Zisserman (2015).

All convolutions and pools are the published ones. Five pools leave one pixel of an image of 32 x 32, so the first
layer of the classifier reads 512 values instead of 25,088.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from heterps_core.models.image_chain import IMAGE_SHAPE, NUM_CLASSES

CHANNELS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Of the convolutions, which are 3 x 3; a pool follows each group."""

CLASSIFIER_WIDTH = 4096
DROPOUT = 0.5


def build() -> nn.Sequential:
    """Build the chain: [B, 3, 32, 32] -> [B, 10]."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = IMAGE_SHAPE[0]
    for group, group_channels in enumerate(CHANNELS, start=1):
        for number, out_channels in enumerate(group_channels, start=1):
            layers[f"conv{group}_{number}"] = nn.Conv2d(channels, out_channels, kernel_size=3, padding=1)
            layers[f"relu{group}_{number}"] = nn.ReLU()
            channels = out_channels
        layers[f"pool{group}"] = nn.MaxPool2d(2)
    layers["pool5"] = nn.Sequential(layers["pool5"], nn.Flatten())
    for number, width in enumerate((channels, CLASSIFIER_WIDTH), start=6):
        layers[f"fc{number}"] = nn.Linear(width, CLASSIFIER_WIDTH)
        layers[f"relu{number}"] = nn.ReLU()
        layers[f"dropout{number}"] = nn.Dropout(DROPOUT)
    layers["output"] = nn.Linear(CLASSIFIER_WIDTH, NUM_CLASSES)
    return nn.Sequential(layers)
