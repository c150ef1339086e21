"""What crosses between the stages of a plan, by the names of the model's own operations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from heterps_core.data.features import FeatureSpec
from heterps_core.models.chain import build_chain
from heterps_core.models.graph_block import GraphBlock
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.text_table import Table


def cuts_table(model: str, features: FeatureSpec, stages: Sequence[Stage]) -> Table | None:
    """Return the tensors at each cut with their shape for one sample; None where a plan has one stage.

    A layer of a Sequential gives one tensor, which has the layer's name.
    """
    layers = list(build_chain(model, features, seed=0).named_children())
    rows = []
    for before, after in pairwise(stages):
        name, layer = layers[before.last_layer]
        outputs = layer.outputs if isinstance(layer, GraphBlock | SlotEmbedding) else ()
        tensors = [f"{each.name} {'x'.join(map(str, each.shape))}" for each in outputs]
        rows.append((f"{name} | {layers[after.first_layer][0]}", ", ".join(tensors) or name))
    return (
        Table(caption="What crosses each cut", columns={"cut": "", "tensors": ""}, rows=rows)
        if rows
        else None
    )
