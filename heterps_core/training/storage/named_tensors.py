"""The tensors of a replica by names that do not depend on the plan: "layer.tensor", or those of a traced module.

Checkpoints and exported models are written and read by them, so another cut into stages, or another number of
replicas, finds its own. A tensor of a table is this replica's rows of it; all others are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from heterps_core.compute_device import CPU
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.models.graph_block import tensor_name
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.storage.stored_tensors import StoredLayer, TensorRows, read_tensors


def weights_of(model: StageModel) -> dict[str, Tensor]:
    """Return what predictions depend on: rows of tables, which ids have them, parameters and buffers."""
    weights = {
        f"{name}.{key}": tensor
        for name, table in _tables_in_memory(model).items()
        for key, tensor in table.weights().items()
    }
    for name, layer in model.layers.items():
        weights |= {tensor_name(name, layer, key): tensor for key, tensor in layer.state_dict().items()}
    return weights


def row_optimizer_state(model: StageModel) -> dict[str, Tensor]:
    """Return what the optimizers of tables have accumulated for this replica's rows."""
    return {
        f"{layer_name}.{key}": tensor
        for layer_name, table in _tables_in_memory(model).items()
        for key, tensor in table.state.items()
    }


def _parameters_of(model: StageModel) -> dict[str, nn.Parameter]:
    """Return the parameters of dense layers."""
    return {
        tensor_name(layer_name, layer, name): parameter
        for layer_name, layer in model.layers.items()
        for name, parameter in layer.named_parameters()
    }


def dense_optimizer_state(model: StageModel) -> dict[str, Tensor]:
    """Return what the optimizer of the dense parameters has accumulated, by "layer.parameter.tensor"."""
    return {
        f"{name}.{key}": tensor
        for name, parameter in _parameters_of(model).items()
        for key, tensor in model.dense_optimizer.state[parameter].items()
    }


def tables_by_tensor(model: StageModel) -> dict[str, ShardedTable]:
    """Return the table of each tensor of which a replica has some rows only; all tensors beside these are whole."""
    return {
        f"{layer_name}.{key}": table
        for layer_name, table in _tables_in_memory(model).items()
        for key in table.tensors()
    }


def fill_swept_rows(
    run: RunDirectory,
    layers: Sequence[StoredLayer],
    model: StageModel,
    *,
    wanted: Callable[[str], bool] = lambda key: True,
    scales: Mapping[str, float] | None = None,
) -> None:
    """Fill the tables that are larger than memory with what stands in layers; none of their rows may be in memory.

    Args:
        wanted: Tells by its name in a table whether a tensor is filled, or stays as it is.
        scales: By what a tensor is multiplied, by its name in a table.

    Raises:
        CheckpointError: See `read_tensors`.
    """
    for layer_name, table in model.swept_tables.items():
        for rows, tensors in table.row_blocks(writes=True):
            parts = {
                f"{layer_name}.{key}": TensorRows(tensor=tensor, rows=rows, num_rows=table.num_rows)
                for key, tensor in tensors.items()
                if wanted(key)
            }
            read_tensors(run, layers, parts)
            for key, tensor in tensors.items():
                if wanted(key):
                    tensor.mul_((scales or {}).get(key, 1.0))


def rows_on_host(model: StageModel, tensors: Mapping[str, Tensor]) -> dict[str, TensorRows]:
    """Return which rows some tensors of a replica are, themselves where they are on the host, else copies."""
    tables = tables_by_tensor(model)
    found = {}
    for name, tensor in tensors.items():
        on_host = tensor.to(CPU).contiguous()
        if name in tables:
            table = tables[name]
            found[name] = TensorRows(tensor=on_host, rows=table.rows, num_rows=table.num_rows)
        else:
            found[name] = TensorRows.whole(on_host)
    return found


def fill_tensors(
    run: RunDirectory, layers: Sequence[StoredLayer], model: StageModel, tensors: Mapping[str, Tensor]
) -> None:
    """Fill tensors of a replica in place with what stands under their names in layers, tables with their own rows.

    Raises:
        CheckpointError: See `read_tensors`.
    """
    on_host = rows_on_host(model, tensors)
    read_tensors(run, layers, on_host)
    for name, tensor in tensors.items():
        if on_host[name].tensor is not tensor:
            tensor.copy_(on_host[name].tensor)


def _tables_in_memory(model: StageModel) -> dict[str, ShardedTable]:
    return {name: table for name, table in model.tables.items() if name not in model.swept_tables}
