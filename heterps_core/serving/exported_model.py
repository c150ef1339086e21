"""An exported model that predicts: from raw columns as they come, or from rows that were prepared as its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.data.manifest import DatasetManifest
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.schema import DataSchema
from heterps_core.embeddings.row_optimizers import RowWiseSGD
from heterps_core.errors import ConfigurationError
from heterps_core.models.chain import build_chain, run_layers
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.serving.raw_columns import Columns, dense_input, id_input
from heterps_core.training.storage.exported_files import WEIGHTS, read_description

ROWS_PER_BATCH = 8192


class ClickPredictor:
    """Click probabilities from raw columns, as in training.

    An id that was never seen gets the row that its hash gives; a missing value gets the row, or the mean, that
    missing values had in training. Columns that the model does not know are ignored.

    Args:
        folder: What `export_model` wrote.

    Raises:
        CheckpointError: A file is missing, or the weights are not those that the description was written for.
        ConfigurationError: The model's code cannot be imported.
    """

    def __init__(self, folder: Path) -> None:
        description = read_description(folder)
        self.features = FeatureSpec.from_json(description["features"])
        self.schema = DataSchema.from_json(description["schema"])
        self.numeric_transform = NumericTransform.from_json(description["numeric_transform"])
        self._layers = _load_layers(description["model"], self.features, load_file(folder / WEIGHTS))

    def predict(self, columns: Columns) -> npt.NDArray[np.float64]:
        """Return click probabilities [N] for columns of N raw values each.

        Raises:
            DataError: A column that the model needs is missing, or a number cannot be read.
        """
        logits = self.logits(
            dense_input(columns, self.schema, self.numeric_transform),
            id_input(columns, self.schema, self.features),
        )
        return torch.from_numpy(logits).sigmoid().numpy()

    def logits(
        self, dense_ND: npt.NDArray[np.float32], ids_NS: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float64]:
        """Return logits [N] of model input as `dense_input` and `id_input` make it, or as prepared."""
        logits = []
        for first in range(0, len(ids_NS), ROWS_PER_BATCH):
            part = slice(first, first + ROWS_PER_BATCH)
            labels = np.zeros(len(ids_NS[part]), dtype=np.float32)
            # Copies, as torch warns of arrays that it may not write, such as mapped ones.
            batch = ClickBatch.from_numpy(dense_ND[part].copy(), ids_NS[part].copy(), labels)
            with torch.no_grad():
                logits.append(run_layers(self._layers, batch, None).squeeze(1).double())
        if not logits:
            return np.empty(0)
        return torch.cat(logits).numpy()

    def prepared_logits(self, dataset: PreparedDataset, *, first: int, stop: int) -> npt.NDArray[np.float64]:
        """Return logits [stop - first] of rows first..stop (half open, from the first training row).

        Raises:
            ConfigurationError: The rows were not prepared as those that the model was trained on.
        """
        if not self.reads_alike(dataset.manifest):
            raise ConfigurationError(
                f"rows must be prepared with the features and the numeric transform that the model was trained with, "
                f"but {dataset.directory} {self._difference(dataset.manifest)}; prepare them again with those of the "
                f"model"
            )
        return self.logits(dataset.dense[first:stop], dataset.ids[first:stop])

    def reads_alike(self, manifest: DatasetManifest) -> bool:
        """Tell whether prepared rows mean to this model what its training rows meant."""
        return (manifest.features, manifest.numeric_transform) == (self.features, self.numeric_transform)

    def _difference(self, manifest: DatasetManifest) -> str:
        """Return the first thing in which a data set was prepared otherwise."""
        own, other = self.features, manifest.features
        if own.dense_names != other.dense_names:
            return f"has the dense columns {', '.join(other.dense_names)}, not {', '.join(own.dense_names)}"
        if own.slot_names != other.slot_names:
            return f"has the slots {', '.join(other.slot_names)}, not {', '.join(own.slot_names)}"
        if own.slot_rows != other.slot_rows:
            return f"has tables of {other.total_rows} rows in all, not {own.total_rows}"
        return "has another numeric transform"


def _load_layers(model: str, features: FeatureSpec, weights: Mapping[str, Tensor]) -> list[nn.Module]:
    chain = build_chain(model, features, seed=0)
    for name, layer in chain.named_children():
        own = {
            key.removeprefix(f"{name}."): value
            for key, value in weights.items()
            if key.startswith(f"{name}.")
        }
        if isinstance(layer, SlotEmbedding):
            table = layer.new_table(name, RowWiseSGD(), seed=0)
            table.weight_RD.copy_(own["weight"])
            layer.attach_table(table)
        else:
            layer.load_state_dict(own)
    return list(chain.eval().children())
