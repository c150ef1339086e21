"""The layers that look slots up: one for each width of their vectors, as a table has vectors of one width."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from torch import nn

from heterps_core.data.features import FeatureSpec
from heterps_core.models.attention import AttentionPooling
from heterps_core.models.slot_embedding import SlotEmbedding


def add_embeddings(
    layers: MutableMapping[str, nn.Module],
    features: FeatureSpec,
    *,
    dimension: int,
    slots: Sequence[int] | None = None,
    input_width: int = 0,
    prefix: str = "",
    include_dense: bool = True,
    pools_by_attention: bool = False,
) -> int:
    """Add embeddings of slots to a chain, those of one width together; returns the width that leaves the last.

    Args:
        features: Slots, dense features, and the widths that slots ask for.
        dimension: Width of the vectors of all other slots; their layer is called "embedding", one of another width
            "embedding_8".
        slots: Indices of the slots to look up; all by default.
        input_width: Width of the activation that comes in; 0 at the start of a chain.
        prefix: Of the names of layers.
        include_dense: Put the dense features behind the vectors of the last layer.
        pools_by_attention: Add attention over the values of sequences; by default their vectors are averaged.

    Example:
        >>> features = FeatureSpec(num_dense=1, slot_rows=(9, 9, 9), slot_dimensions=(None, 4, None))
        >>> layers: dict[str, nn.Module] = {}
        >>> add_embeddings(layers, features, dimension=8), list(layers)
        (21, ['embedding', 'embedding_4'])
    """
    by_dimension: dict[int, list[int]] = {}
    for slot in range(features.num_slots) if slots is None else slots:
        by_dimension.setdefault(features.slot_dimensions[slot] or dimension, []).append(slot)
    width = input_width
    for number, (own, of_slots) in enumerate(by_dimension.items(), start=1):
        ending = "" if own == dimension else f"_{own}"
        embedding = SlotEmbedding(
            features,
            dimension=own,
            slots=of_slots,
            include_dense=include_dense and number == len(by_dimension),
            input_width=width,
            keeps_sequences=pools_by_attention,
        )
        layers[f"{prefix}embedding{ending}"] = embedding
        width = embedding.output_width
        if embedding.sequences:
            attention = AttentionPooling(embedding)
            layers[f"{prefix}attention{ending}"] = attention
            width = attention.output_width
    return width
