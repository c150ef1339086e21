"""Image classifiers as chains of named layers: what goes in, what comes out, how one is built.

They are here to be profiled and planned beside the click models, as the TAPP paper does it with the CIFAR images;
the training engine feeds clicks only. All images are of one size, that of CIFAR-10.
"""

from __future__ import annotations

import importlib

import torch
from torch import nn

from heterps_core.errors import UnknownNameError

IMAGE_SHAPE = (3, 32, 32)
"""Channels, height and width of a CIFAR-10 image."""

NUM_CLASSES = 10


def build_image_chain(model: str, *, seed: int) -> nn.Sequential:
    """Build an image classifier: [B, *IMAGE_SHAPE] -> logits [B, NUM_CLASSES].

    Raises:
        UnknownNameError: The name is not in `CNN_MODELS`.
    """
    from heterps_core.models import CNN_MODELS

    if model not in CNN_MODELS:
        raise UnknownNameError("image model", model, CNN_MODELS)
    module_name, _, function_name = CNN_MODELS[model].partition(":")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        chain: nn.Sequential = getattr(importlib.import_module(module_name), function_name)()
    return chain
