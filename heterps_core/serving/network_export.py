"""The network of an exported model as a program of torch.export, for servers that have torch and not this package.

network.pt2     (dense [N, D] float32, ids [N, K] int64) -> probabilities [N] float64, or [N, labels]
model.json      columns, numeric transform, and the table rows of each column
examples.json   raw columns of two rows with their dense input, ids and probabilities: a check of other readers

The ids of raw values are those of `data/hashing.py`, the dense input is that of `data/numeric_transform.py`;
docs/OPERATING.md has both in short.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import NO_ID
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.errors import ConfigurationError
from heterps_core.models.chain import run_layers
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.serving.exported_model import ClickPredictor
from heterps_core.serving.raw_columns import model_input
from heterps_core.training.storage.exported_files import DESCRIPTION

NETWORK, EXAMPLES = "network.pt2", "examples.json"


class _WholeTable(ShardedTable):
    """A table that is looked up by operators of torch alone."""

    def __init__(self, weight_RD: Tensor, layer: SlotEmbedding) -> None:
        self.weight_RD, self.bags, self.dimension = weight_RD, layer.bags, layer.dimension
        self._expected = None

    def lookup(
        self,
        rows_BS: Tensor | None,
        before_BW: Tensor | None = None,
        after_BV: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        packs: bool = False,
    ) -> Tensor:
        """Return what `ShardedTable.lookup` returns, with padded sequences."""
        assert rows_BS is not None
        vectors_BSD = F.embedding(rows_BS.clamp(min=0), self.weight_RD)
        if self.bags is not None:
            num_pooled = self.bags.num_columns
            is_there_BS1 = (rows_BS[:, num_pooled:] != NO_ID).unsqueeze(2)
            pooled_BGD = self.bags.pool_in_place(vectors_BSD[:, :num_pooled], rows_BS[:, :num_pooled])
            vectors_BSD = torch.cat([pooled_BGD, vectors_BSD[:, num_pooled:] * is_there_BS1], 1)
        columns = (before_BW, vectors_BSD.flatten(1), after_BV)
        return torch.cat([each.to(dtype) for each in columns if each is not None], 1)


class _Network(nn.Module):
    def __init__(self, layers: Iterable[nn.Module], *, logit_shift: float) -> None:
        super().__init__()
        self.layers, self.logit_shift = nn.ModuleList(layers), logit_shift
        for number, layer in enumerate(self.layers):
            if isinstance(layer, SlotEmbedding):
                assert layer.table is not None
                self.register_buffer(f"table_{number}", layer.table.weight_RD)
                layer.attach_table(_WholeTable(layer.table.weight_RD, layer))

    def forward(self, dense_ND: Tensor, ids_NK: Tensor) -> Tensor:
        batch = ClickBatch(dense=dense_ND, ids=ids_NK, labels=dense_ND.new_zeros(dense_ND.shape[0]))
        logits = run_layers(self.layers, batch, None).squeeze(1).double()
        return (logits + self.logit_shift).sigmoid()


def export_network(exported: Path, folder: Path) -> None:
    """Write the network of an exported model with its tables; all rows are in memory meanwhile.

    Raises:
        CheckpointError: See `ClickPredictor`.
        ConfigurationError: Ids are dynamic, or the model's code cannot be imported or exported.
    """
    predictor = ClickPredictor(exported)
    features, schema = predictor.features, predictor.schema
    if features.dynamic_ids is not None:
        raise ConfigurationError(
            "an exported network must find the row of a value by its hash, but this model has dynamic ids; serve it "
            "with heterps predict or MLflow"
        )
    columns: dict[str, list[Any]] = {name: [1.0, None] for name in schema.numeric_columns}
    columns |= {name: [["a1b2c3d4"], None] for name in schema.list_columns}
    columns = {name: ["a1b2c3d4", None] for name in schema.text_columns} | columns
    dense_ND, ids_NK = model_input(columns, schema, predictor.numeric_transform, features)
    inputs = (torch.from_numpy(dense_ND), torch.from_numpy(ids_NK).long())
    network = _Network(predictor.layers, logit_shift=schema.logit_shift).eval().requires_grad_(False)
    rows = torch.export.Dim("rows")
    try:
        program = torch.export.export(network, inputs, dynamic_shapes=({0: rows}, {0: rows}), strict=False)
    except Exception as error:
        raise ConfigurationError(
            f"torch.export must follow the model's code for any number of rows (x.shape[0], not len(x)), but says: "
            f"{str(error).splitlines()[0]}"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, folder / NETWORK)
    (folder / DESCRIPTION).write_bytes((exported / DESCRIPTION).read_bytes())
    answers = predictor.predict(columns)
    examples = {
        "columns": columns,
        "dense": dense_ND.tolist(),
        "ids": ids_NK.tolist(),
        "probabilities": answers.tolist(),
    }
    (folder / EXAMPLES).write_text(json.dumps(examples, indent=1))
