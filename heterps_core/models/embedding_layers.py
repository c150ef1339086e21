"""The layers that look slots up: one for each width of their vectors, as a table has vectors of one width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.attention import AttentionPooling
from heterps_core.models.slot_embedding import SlotEmbedding


class Embeddings(nn.Module):
    """Embeddings of slots, those of one width together: [B, W] with the dense features after all vectors.

    Args:
        features: Slots, dense features, and the widths that slots ask for.
        dimension: Width of the vectors of all other slots; their layer is called "embedding", one of another width
            "embedding_8".
        slots: Indices of the slots to look up; all by default.
        include_dense: Put the dense features after the vectors.

    Example:
        >>> features = FeatureSpec(num_dense=1, slot_rows=(9, 9, 9), slot_dimensions=(None, 4, None))
        >>> embeddings = Embeddings(features, dimension=8)
        >>> embeddings.width, [name for name, _ in embeddings.named_children()]
        (21, ['embedding', 'embedding_4'])
    """

    def __init__(
        self,
        features: FeatureSpec,
        *,
        dimension: int,
        slots: Sequence[int] | None = None,
        include_dense: bool = True,
    ) -> None:
        super().__init__()
        self.width = 0
        for ending, layer_of in _by_dimension(features, dimension, slots, include_dense=include_dense):
            embedding = layer_of()
            self.add_module(f"embedding{ending}", embedding)
            self.width += embedding.output_width

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return [B, width]."""
        columns = [embedding(batch) for embedding in self.children()]
        return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


def add_embeddings(layers: MutableMapping[str, nn.Module], features: FeatureSpec, *, dimension: int) -> int:
    """Add embeddings of all slots to a chain, with attention over the values of sequences.

    They are those of `Embeddings`, one after the other. Returns the width that leaves the last.

    Example:
        >>> features = FeatureSpec(num_dense=1, slot_rows=(9, 9, 9), slot_dimensions=(None, 4, None))
        >>> layers: dict[str, nn.Module] = {}
        >>> add_embeddings(layers, features, dimension=8), list(layers)
        (21, ['embedding', 'embedding_4'])
    """
    width = 0
    for ending, layer_of in _by_dimension(features, dimension, None, include_dense=True):
        embedding = layers[f"embedding{ending}"] = layer_of(
            input_width=width, keeps_sequences=True, packs_sequences=True
        )
        width = embedding.output_width
        if embedding.sequences:
            attention = AttentionPooling(embedding)
            layers[f"attention{ending}"] = attention
            width = attention.output_width
    return width


def _by_dimension(
    features: FeatureSpec, dimension: int, slots: Sequence[int] | None, *, include_dense: bool
) -> Iterator[tuple[str, Callable[..., SlotEmbedding]]]:
    """Yield for each width of vectors the ending of its layer's name, and a function that makes the layer."""
    by_dimension: dict[int, list[int]] = {}
    for slot in range(features.num_slots) if slots is None else slots:
        by_dimension.setdefault(features.slot_dimensions[slot] or dimension, []).append(slot)
    for own, of_slots in by_dimension.items():
        has_dense = include_dense and own == [*by_dimension][-1]
        ending = "" if own == dimension else f"_{own}"
        yield ending, partial(SlotEmbedding, features, dimension=own, slots=of_slots, include_dense=has_dense)
