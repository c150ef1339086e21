"""A model as a chain of named layers: how it is built, checked and run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.models.slot_embedding import SlotEmbedding

ModelBuilder: TypeAlias = Callable[[FeatureSpec], nn.Sequential]
"""Builds the chain for given features. The last layer returns logits [B, 1]."""


def run_layers(layers: Iterable[nn.Module], batch: ClickBatch, activation: Tensor | None) -> Tensor:
    """Run consecutive layers of a chain.

    Args:
        layers: In order.
        batch: What embeddings read; other layers never see it.
        activation: Output of the layer before [B, W]; None at the start of the chain.
    """
    for layer in layers:
        activation = layer(batch, activation) if isinstance(layer, SlotEmbedding) else layer(activation)
    assert activation is not None
    return activation


def build_chain(model: str, features: FeatureSpec, *, seed: int) -> nn.Sequential:
    """Build a model by its registry name or by the import path "package.module:function".

    Dense layers get the same initial values in every process that passes the same seed; embedding tables are
    made later, by the process that owns the shard.

    Raises:
        UnknownNameError: The name is in no registry and has no colon.
        ConfigurationError: The import path cannot be imported, or what it builds is not a chain that starts
            with an embedding and ends with one logit.
    """
    builder = load_builder(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            chain = builder(features)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"the model {model!r} must be built by calling its function with the features, but that raised "
                f"{type(error).__name__}: {error}"
            ) from error
    check_chain(model, chain, features)
    return chain


def load_builder(model: str) -> ModelBuilder:
    """Return the function that builds a model.

    Raises:
        UnknownNameError, ConfigurationError: See `build_chain`.
    """
    from heterps_core.models import CTR_MODELS

    path = CTR_MODELS.get(model, model)
    module_name, colon, function_name = path.partition(":")
    if not colon:
        raise UnknownNameError("model", model, [*CTR_MODELS, "package.module:function"])
    try:
        builder = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"the model {model!r} must name a function as package.module:function, but it cannot be imported: "
            f"{error}; is its folder on PYTHONPATH?"
        ) from error
    if not callable(builder):
        raise ConfigurationError(f"the model {model!r} must name a function, got {type(builder).__name__}")
    return builder  # type: ignore[no-any-return]


def check_chain(model: str, chain: object, features: FeatureSpec) -> None:
    """Check that a chain can be trained, by one forward pass over two made-up rows.

    Raises:
        ConfigurationError: It is no `nn.Sequential`, does not start with an embedding, or does not end with
            one logit per row.
    """
    if not isinstance(chain, nn.Sequential) or len(chain) == 0:
        raise ConfigurationError(
            f"the model {model!r} must be a torch.nn.Sequential of named layers, got {type(chain).__name__}"
        )
    if not isinstance(chain[0], SlotEmbedding):
        raise ConfigurationError(
            f"the first layer of the model {model!r} must be a SlotEmbedding, got {type(chain[0]).__name__}"
        )
    width: tuple[int, ...] = ()
    activation: Tensor | None = None
    with torch.no_grad():
        for name, layer in chain.named_children():
            try:
                if isinstance(layer, SlotEmbedding):
                    got = 0 if activation is None else activation.shape[1]
                    if got != layer.input_width:
                        raise ConfigurationError(
                            f"layer {name!r} of the model {model!r} must have input_width {got}, "
                            f"the width of the layer before it, got {layer.input_width}"
                        )
                    activation = torch.zeros(2, layer.output_width)
                else:
                    activation = layer(activation)
            except RuntimeError as error:
                raise ConfigurationError(
                    f"layer {name!r} of the model {model!r} cannot take an input of shape "
                    f"(rows, {', '.join(map(str, width))}): {error}"
                ) from error
            width = tuple(activation.shape[1:])
    if width != (1,):
        raise ConfigurationError(
            f"the last layer of the model {model!r} must give one logit per row, shape (rows, 1), "
            f"got (rows, {', '.join(map(str, width))})"
        )
