"""A model as a chain of named layers: how it is built, checked and run.

A user writes it as an `nn.Sequential` of these layers, or as any module whose forward takes the batch, which
`module_line` turns into one.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.models import CTR_MODELS, sizes_of
from heterps_core.models.module_line import chain_of
from heterps_core.models.row_dropout import with_row_dropout
from heterps_core.models.slot_embedding import SlotEmbedding

_ModelBuilder: TypeAlias = Callable[[FeatureSpec], nn.Module]
"""Builds the model for given features. It, or the last layer of a Sequential, returns logits [B, labels]."""

_RESHAPES = (
    "ViewBackward",
    "UnsafeViewBackward",
    "ReshapeAliasBackward",
    "UnsqueezeBackward",
    "SqueezeBackward",
)
"""Names of autograd's operations that leave values as they are."""


def run_layers(layers: Iterable[nn.Module], batch: ClickBatch, activation: Tensor | None) -> Tensor:
    """Run consecutive layers of a chain.

    What enters is the output of the layer before [B, W], None at the start; only embeddings see the batch.
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
        ConfigurationError: The import path cannot be imported, or what it builds cannot be trained; see
            `_checked_chain` and `chain_of`.
    """
    builder = load_builder(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module: object = builder(features)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"the model {model!r} must be built by calling its function with the features, but that raised "
                f"{type(error).__name__}: {error}"
            ) from error
        chain = with_row_dropout(module) if isinstance(module, nn.Module) else module
        if isinstance(chain, nn.Module) and not isinstance(chain, nn.Sequential):
            chain = chain_of(model, chain)
    return _checked_chain(model, chain, features)


def load_builder(model: str) -> _ModelBuilder:
    """Return the function that builds a model.

    Raises:
        UnknownNameError, ConfigurationError: See `build_chain`.
    """
    name, sizes = sizes_of(model)
    path = CTR_MODELS.get(name, name)
    module_name, colon, function_name = path.partition(":")
    if not colon:
        raise UnknownNameError("model", model, [*CTR_MODELS, "package.module:function"])
    try:
        builder = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:
        # A module of a user's own may raise anything.
        raise ConfigurationError(
            f"the model {model!r} must name a function as package.module:function, but it cannot be imported: "
            f"{error}; is its folder on PYTHONPATH?"
        ) from error
    if not callable(builder):
        raise ConfigurationError(f"the model {model!r} must name a function, got {type(builder).__name__}")
    known = list(inspect.signature(builder).parameters)[1:]
    for size in sizes:
        if size not in known:
            raise ConfigurationError(
                f"{size} must be a parameter of the function that builds {name!r}, but is none; leave {size} out, or "
                f"take one of: {', '.join(known) or 'none'}"
            )
    return partial(builder, **sizes)


def _checked_chain(model: str, chain: object, features: FeatureSpec) -> nn.Sequential:
    """Return a chain that can be trained, as one forward pass over two synthetic rows shows.

    Layers run in evaluation mode, so that they learn nothing from these rows; the chain is left in training mode.

    Raises:
        ConfigurationError: It is no `nn.Sequential`, does not start with an embedding, a layer fails or returns
            anything but a tensor of as many rows, the last one does not give one logit per row, or vectors of a slot
            have another width than it asks for.
    """
    if not isinstance(chain, nn.Sequential) or len(chain) == 0:
        raise ConfigurationError(
            f"the model {model!r} must be a torch.nn.Module whose forward takes the batch, or a torch.nn.Sequential "
            f"of named layers, got {type(chain).__name__}"
        )
    if not isinstance(chain[0], SlotEmbedding):
        raise ConfigurationError(
            f"the first layer of the model {model!r} must be a SlotEmbedding, got {type(chain[0]).__name__}"
        )
    _check_dimensions(model, chain, features)
    _check_tables(model, chain, features)
    chain.eval()
    activation = torch.empty(2, 0)
    for name, layer in chain.named_children():
        activation = _run_checked(f"layer {name!r} of the model {model!r}", layer, activation)
    chain.train()
    width, num_labels = tuple(activation.shape[1:]), features.num_labels
    if width != (num_labels,):
        logits = "one logit per row" if num_labels == 1 else f"a logit for each of {num_labels} labels"
        raise ConfigurationError(
            f"the last layer of the model {model!r} must give {logits}, shape (rows, {num_labels}), "
            f"got (rows, {', '.join(map(str, width))})"
        )
    if _is_sigmoid(activation):
        raise ConfigurationError(
            f"the last layer of the model {model!r} must give logits, got probabilities: it ends with a sigmoid, "
            f"which the loss and the predictions apply by themselves; remove that sigmoid"
        )
    return chain


def _check_dimensions(model: str, chain: nn.Sequential, features: FeatureSpec) -> None:
    """Check that the first layer that looks a slot up has vectors of the width that the slot asks for."""
    found: dict[int, int] = {}
    for layer in chain:
        if isinstance(layer, SlotEmbedding):
            found = dict.fromkeys(layer.slots, layer.dimension) | found
    for slot, (name, asked) in enumerate(zip(features.slot_names, features.slot_dimensions, strict=True)):
        if asked is not None and found.get(slot, asked) != asked:
            raise ConfigurationError(
                f"the model {model!r} must look column {name} up in vectors of {asked} values, as dimensions of the "
                f"schema say, but has {found[slot]}; leave it out there, or look rows up by Embeddings of "
                f"heterps_core.models.embedding_layers, as 2emb, matchnet and wide-deep do"
            )


def _check_tables(model: str, chain: nn.Sequential, features: FeatureSpec) -> None:
    """Check that the slots of a shared table are looked up by one layer, as each layer has rows of its own."""
    of_layers = [set(layer.slots) for layer in chain if isinstance(layer, SlotEmbedding)]
    for table in set(features.slot_tables):
        of_table = {slot for slot, own in enumerate(features.slot_tables) if own == table}
        if not any(of_table & set().union(*of_layers) <= slots for slots in of_layers):
            names = ", ".join(features.slot_names[slot] for slot in sorted(of_table))
            raise ConfigurationError(
                f"the model {model!r} must look the columns {names}, which share a table, up in one SlotEmbedding, "
                f"but does so in several; leave tables out of the schema, or take another model, such as din"
            )


def _run_checked(what: str, layer: nn.Module, activation: Tensor) -> Tensor:
    """Return the output of a layer for the output of the one before; a message about it begins with `what`."""
    if isinstance(layer, SlotEmbedding):
        got = math.prod(activation.shape[1:])
        if got != layer.input_width:
            raise ConfigurationError(
                f"{what} must have input_width {got}, the width of the layer before it, got {layer.input_width}"
            )
        # Not a leaf of autograd, which a later layer could not change in place.
        return layer.example(len(activation)).requires_grad_().clone()
    width = ", ".join(map(str, activation.shape[1:]))
    try:
        output: object = layer(activation)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"{what} cannot take an input of shape (rows, {width}): {type(error).__name__}: {reason}"
        ) from error
    if not isinstance(output, Tensor):
        raise ConfigurationError(
            f"{what} must return one tensor, but {type(layer).__name__} returns a {type(output).__name__}; "
            f"wrap it in a torch.nn.Module whose forward returns the tensor that the next layer takes"
        )
    if output.shape[:1] != activation.shape[:1]:
        raise ConfigurationError(
            f"{what} must return a tensor with one row for each row that enters, shape "
            f"({len(activation)}, ...) here, got {tuple(output.shape)}"
        )
    return output


def _is_sigmoid(output: Tensor) -> bool:
    """Tell whether a tensor was made by a sigmoid, whatever module or function applied it, and then only reshaped."""
    operation = output.grad_fn
    while operation is not None and operation.name().startswith(_RESHAPES):
        operation = operation.next_functions[0][0]
    return operation is not None and operation.name().startswith("SigmoidBackward")
