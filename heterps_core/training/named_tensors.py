"""The tensors of a replica by names that do not depend on the plan: "layer.tensor".

Checkpoints and exported models are written and read by them, so another cut into stages, or another number of
replicas, finds its own. A tensor of a table is this replica's rows of it; all others are whole.
"""

from __future__ import annotations

from torch import Tensor

from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.training.stage_model import StageModel


def weights_of(model: StageModel) -> dict[str, Tensor]:
    """Return what predictions depend on: rows of tables, parameters and buffers."""
    weights = {f"{name}.weight": table.weight_RD for name, table in model.tables.items()}
    for name, layer in model.layers.items():
        weights |= {f"{name}.{key}": tensor for key, tensor in layer.state_dict().items()}
    return weights


def row_optimizer_state(model: StageModel) -> dict[str, Tensor]:
    """Return what the optimizers of tables have accumulated for this replica's rows."""
    return {
        f"{layer_name}.{key}": tensor
        for layer_name, table in model.tables.items()
        for key, tensor in table.state.items()
    }


def dense_optimizer_state(model: StageModel) -> dict[str, Tensor]:
    """Return what the optimizer of the dense parameters has accumulated, by "layer.parameter.tensor"."""
    if model.dense_optimizer is None:
        return {}
    return {
        f"{layer_name}.{name}.{key}": tensor
        for layer_name, layer in model.layers.items()
        for name, parameter in layer.named_parameters()
        for key, tensor in model.dense_optimizer.state[parameter].items()
    }


def tables_by_tensor(model: StageModel) -> dict[str, ShardedTable]:
    """Return the table of each tensor of which a replica has some rows only; all tensors beside these are whole."""
    return {
        f"{layer_name}.{key}": table for layer_name, table in model.tables.items() for key in table.tensors()
    }
