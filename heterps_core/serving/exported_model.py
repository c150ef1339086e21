"""A trained model as a folder of two files that anyone may load: weights without code, and how to read raw columns.

model.safetensors    every weight by "layer.parameter"; no pickle, so loading runs nothing
model.json           name of the model, its features, schema and numeric transform, hash of the weights
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.data.hashing import rows_of_texts
from heterps_core.data.manifest import DatasetManifest
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.schema import DataSchema
from heterps_core.embeddings.row_optimizers import RowWiseSGD
from heterps_core.errors import CheckpointError, ConfigurationError, DataError
from heterps_core.models.chain import build_chain, run_layers
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import load_latest_checkpoint
from heterps_core.training.job import TrainingJob
from heterps_core.training.run_directory import JOB, RunDirectory
from heterps_core.training.stage_model import build_stage_model

SCHEMA_VERSION = 1
WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
ROWS_PER_BATCH = 8192


def export_model(run: RunDirectory, manifest: DatasetManifest, folder: Path) -> None:
    """Write the newest checkpoint of a run as an exported model.

    Args:
        run: Where the job and the checkpoint are.
        manifest: Of the data set that it was trained on.
        folder: Where to; made if missing.

    Raises:
        CheckpointError: The run has no complete checkpoint.
    """
    job = TrainingJob.from_json(run.require_json(JOB))
    num_layers = job.stages[-1].last_layer + 1
    whole = (Stage(0, num_layers - 1, job.stages[0].device_type, 1),)
    model = build_stage_model(job.model, manifest.features, job.config, whole, 0, None)
    if load_latest_checkpoint(run, model, group=None) is None:
        raise CheckpointError(
            f"a run must have a complete checkpoint to be exported, {run.location} has none"
        )
    weights = {f"{name}.weight": table.weight_RD for name, table in model.tables.items()}
    for name, layer in model.layers.items():
        weights |= {f"{name}.{key}": tensor.contiguous() for key, tensor in layer.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS)
    description = {
        "schema_version": SCHEMA_VERSION,
        "model": job.model,
        "features": manifest.features.to_json(),
        "schema": manifest.schema.to_json(),
        "numeric_transform": manifest.numeric_transform.to_json(),
        "weights_sha256": _sha256(folder / WEIGHTS),
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1))


class ClickPredictor:
    """Click probabilities from raw columns, as in training.

    An id that was never seen gets the row that its hash gives; a missing value gets the row, or the mean, that
    missing values had in training. Columns that the model does not know are ignored.

    Args:
        folder: What `export_model` wrote.

    Raises:
        CheckpointError: The weights are not those that the description was written for.
        ConfigurationError: The model's code cannot be imported.
    """

    def __init__(self, folder: Path) -> None:
        description = json.loads((folder / DESCRIPTION).read_text())
        if description.get("schema_version") != SCHEMA_VERSION:
            raise ConfigurationError(
                f"{folder / DESCRIPTION} must have schema_version {SCHEMA_VERSION}, "
                f"got {description.get('schema_version')!r}"
            )
        found = _sha256(folder / WEIGHTS)
        if found != description["weights_sha256"]:
            raise CheckpointError(
                f"{folder / WEIGHTS} must have the SHA-256 {description['weights_sha256']} of its description, "
                f"got {found}; it was changed or damaged: export the model anew"
            )
        self.features = FeatureSpec.from_json(description["features"])
        self.schema = DataSchema.from_json(description["schema"])
        self._transform = NumericTransform.from_json(description["numeric_transform"])
        self._layers = _load_layers(description["model"], self.features, load_file(folder / WEIGHTS))

    def predict(self, columns: Mapping[str, Sequence[Any]]) -> npt.NDArray[np.float64]:
        """Return click probabilities [N] for columns of N raw values each.

        Raises:
            DataError: A column that the model needs is missing, or a number cannot be read.
        """
        needed = (*self.schema.numeric_columns, *self.schema.categorical_columns)
        missing = [name for name in needed if name not in columns]
        if missing:
            raise DataError("the rows to predict", f"must have the columns {', '.join(missing)}")
        dense_ND = self._dense(columns)
        ids_NS = self._ids(columns)
        logits = []
        for first in range(0, len(ids_NS), ROWS_PER_BATCH):
            part = slice(first, first + ROWS_PER_BATCH)
            labels = np.zeros(len(ids_NS[part]), dtype=np.float32)
            batch = ClickBatch.from_numpy(dense_ND[part], ids_NS[part], labels)
            with torch.no_grad():
                logits.append(run_layers(self._layers, batch, None).squeeze(1).double())
        if not logits:
            return np.empty(0)
        return torch.cat(logits).sigmoid().numpy()

    def _dense(self, columns: Mapping[str, Sequence[Any]]) -> npt.NDArray[np.float32]:
        names = self.schema.numeric_columns
        num_rows = len(columns[self.schema.categorical_columns[0]])
        raw_ND = np.empty((num_rows, len(names)))
        for position, name in enumerate(names):
            try:
                raw_ND[:, position] = (
                    _present(columns[name], self.schema).cast(pa.float64()).fill_null(np.nan)
                )
            except pa.ArrowInvalid as error:
                raise DataError("the rows to predict", f"column {name} must hold numbers: {error}") from error
        return self._transform.apply(raw_ND)

    def _ids(self, columns: Mapping[str, Sequence[Any]]) -> npt.NDArray[np.int32]:
        names = self.schema.categorical_columns
        ids_NS = np.empty((len(columns[names[0]]), len(names)), dtype=np.int32)
        for slot, name in enumerate(names):
            texts = _present(columns[name], self.schema).cast(pa.string())
            ids_NS[:, slot] = rows_of_texts(texts, slot=slot, num_rows=self.features.slot_rows[slot])
        return ids_NS


def _present(values: Sequence[Any], schema: DataSchema) -> pa.Array:
    """Return raw values as Arrow, with null for what counts as missing."""
    array = pa.array(values, from_pandas=True)
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        markers = pa.array(["", *schema.missing_markers], array.type)
        array = pc.if_else(pc.is_in(array, markers), pa.scalar(None, array.type), array)
    return array


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
    return list(chain.children())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
