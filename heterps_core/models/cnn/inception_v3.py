"""Inception-V3 for CIFAR-10: the network of Szegedy et al. (2016) without its auxiliary classifier.

Each inception block is one layer of the chain, because its branches run side by side and join in one tensor. All
convolutions have the published channels and kernels. The stem is padded and its second pool is left out, since an
image of 32 x 32 cannot be halved five times: blocks A see 8 x 8 pixels, C 3 x 3, E one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from heterps_core.models.image_chain import IMAGE_SHAPE, NUM_CLASSES

BATCH_NORM_EPSILON = 1e-3
DROPOUT = 0.5
STEM = (
    # channels, kernel, stride, padding
    (32, 3, 2, 1),
    (32, 3, 1, 1),
    (64, 3, 1, 1),
    (80, 1, 1, 0),
    (192, 3, 1, 1),
)
POOLED_AFTER = 3
"""Number of the stem's convolution that its pool follows."""


class Branches(nn.Module):
    """Runs branches side by side on the same input and joins their channels."""

    def __init__(self, branches: Iterable[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Return [B, sum of the branches' channels, H', W']."""
        return torch.cat([branch(image_BCHW) for branch in self.branches], 1)


def build() -> nn.Sequential:
    """Build the chain: [B, 3, 32, 32] -> [B, 10]."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = IMAGE_SHAPE[0]
    for number, (out_channels, kernel, stride, padding) in enumerate(STEM, start=1):
        layers[f"conv{number}"] = nn.Conv2d(channels, out_channels, kernel, stride, padding, bias=False)
        layers[f"norm{number}"] = nn.BatchNorm2d(out_channels, eps=BATCH_NORM_EPSILON)
        layers[f"relu{number}"] = nn.ReLU()
        channels = out_channels
        if number == POOLED_AFTER:
            layers["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    layers["block_a1"] = _block_a(channels, pool_channels=32)
    layers["block_a2"] = _block_a(256, pool_channels=64)
    layers["block_a3"] = _block_a(288, pool_channels=64)
    layers["block_b"] = _block_b(288)
    for number, middle in enumerate((128, 160, 160, 192), start=1):
        layers[f"block_c{number}"] = _block_c(768, middle=middle)
    layers["block_d"] = _block_d(768)
    layers["block_e1"] = _block_e(1280)
    layers["block_e2"] = _block_e(2048)
    layers["mean"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    layers["dropout"] = nn.Dropout(DROPOUT)
    layers["output"] = nn.Linear(2048, NUM_CLASSES)
    return nn.Sequential(layers)


def _convolution(
    channels: int,
    out_channels: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
) -> nn.Sequential:
    """Return a convolution with its batch normalisation and ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels, eps=BATCH_NORM_EPSILON),
        nn.ReLU(),
    )


def _pooled(channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _convolution(channels, out_channels, 1))


def _block_a(channels: int, *, pool_channels: int) -> Branches:
    return Branches(
        [
            _convolution(channels, 64, 1),
            nn.Sequential(_convolution(channels, 48, 1), _convolution(48, 64, 5, padding=2)),
            nn.Sequential(
                _convolution(channels, 64, 1),
                _convolution(64, 96, 3, padding=1),
                _convolution(96, 96, 3, padding=1),
            ),
            _pooled(channels, pool_channels),
        ]
    )


def _block_b(channels: int) -> Branches:
    return Branches(
        [
            _convolution(channels, 384, 3, stride=2),
            nn.Sequential(
                _convolution(channels, 64, 1),
                _convolution(64, 96, 3, padding=1),
                _convolution(96, 96, 3, stride=2),
            ),
            nn.MaxPool2d(3, stride=2),
        ]
    )


def _block_c(channels: int, *, middle: int) -> Branches:
    wide = partial(_convolution, kernel=(1, 7), padding=(0, 3))
    high = partial(_convolution, kernel=(7, 1), padding=(3, 0))
    return Branches(
        [
            _convolution(channels, 192, 1),
            nn.Sequential(_convolution(channels, middle, 1), wide(middle, middle), high(middle, 192)),
            nn.Sequential(
                _convolution(channels, middle, 1),
                high(middle, middle),
                wide(middle, middle),
                high(middle, middle),
                wide(middle, 192),
            ),
            _pooled(channels, 192),
        ]
    )


def _block_d(channels: int) -> Branches:
    return Branches(
        [
            nn.Sequential(_convolution(channels, 192, 1), _convolution(192, 320, 3, stride=2)),
            nn.Sequential(
                _convolution(channels, 192, 1),
                _convolution(192, 192, (1, 7), padding=(0, 3)),
                _convolution(192, 192, (7, 1), padding=(3, 0)),
                _convolution(192, 192, 3, stride=2),
            ),
            nn.MaxPool2d(3, stride=2),
        ]
    )


def _block_e(channels: int) -> Branches:
    return Branches(
        [
            _convolution(channels, 320, 1),
            nn.Sequential(_convolution(channels, 384, 1), _split(384)),
            nn.Sequential(_convolution(channels, 448, 1), _convolution(448, 384, 3, padding=1), _split(384)),
            _pooled(channels, 192),
        ]
    )


def _split(channels: int) -> Branches:
    """Return a row of three pixels and a column of three side by side."""
    return Branches(
        [
            _convolution(channels, channels, (1, 3), padding=(0, 1)),
            _convolution(channels, channels, (3, 1), padding=(1, 0)),
        ]
    )
