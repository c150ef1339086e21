"""A trained model as files, and what predicts from them: raw columns as they come, or rows prepared as its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.data.manifest import DatasetManifest
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.schema import DataSchema
from heterps_core.embeddings.row_optimizers import RowWiseSGD
from heterps_core.errors import CheckpointError, ConfigurationError
from heterps_core.models.chain import build_chain, run_layers
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.raw_columns import Columns, model_input
from heterps_core.training.checkpoint import complete_checkpoints, load_latest_checkpoint
from heterps_core.training.job import OptimizerState, TrainingJob
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.storage.exported_files import (
    DESCRIPTION,
    OPTIMIZER_STATE,
    SCHEMA_VERSION,
    WEIGHTS,
    file_sha256,
    read_description,
)
from heterps_core.training.storage.named_tensors import dense_optimizer_state, row_optimizer_state, weights_of
from heterps_core.training.storage.run_directory import JOB, RunDirectory

ROWS_PER_BATCH = 8192


class ClickPredictor:
    """Click probabilities from raw columns, as in training.

    An id that was never seen gets the row that its hash gives; a missing value gets the row, or the mean, that
    missing values had in training. Columns that the model does not know are ignored.

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
        logits = self.logits(*model_input(columns, self.schema, self.numeric_transform, self.features))
        return torch.from_numpy(logits).sigmoid().numpy()

    def logits(
        self, dense_ND: npt.NDArray[np.float32], ids_NS: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float64]:
        """Return logits [N] of model input as `model_input` makes it, or as prepared."""
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


def held_out_labels(dataset: PreparedDataset) -> npt.NDArray[np.uint8]:
    """Return the labels [N] of the rows that a data set holds out; of all its rows where it holds out none."""
    return dataset.labels(_first_row(dataset), dataset.manifest.num_rows)


def held_out_logits(predictor: ClickPredictor, dataset: PreparedDataset) -> npt.NDArray[np.float64]:
    """Return a model's logits [N] of the rows that a data set holds out; of all its rows where it holds out none.

    Raises:
        ConfigurationError: The data set has other columns than the model.
        DataError: A source is gone or has changed.
    """
    _check_columns(predictor, dataset)
    rows = dataset.parts(
        _first_row(dataset),
        dataset.manifest.num_rows,
        features=predictor.features,
        numeric_transform=predictor.numeric_transform,
    )
    return np.concatenate([predictor.logits(part.dense, part.ids) for part in rows])


def _check_columns(predictor: ClickPredictor, dataset: PreparedDataset) -> None:
    own, other = predictor.schema, dataset.manifest.schema
    for kind in ("numeric_columns", "categorical_columns"):
        needed, found = getattr(own, kind), getattr(other, kind)
        if needed != found:
            raise ConfigurationError(
                f"rows must have the {kind} of the model, {', '.join(needed)}, to be predicted by it, "
                f"got {', '.join(found) or 'none'}"
            )


def _first_row(dataset: PreparedDataset) -> int:
    return dataset.num_train_rows if dataset.num_eval_rows else 0


def export_model(run: RunDirectory, manifest: DatasetManifest, folder: Path, *, model: str) -> None:
    """Write the newest checkpoint of a run as an exported model.

    `model` is the flow's own word: it is imported and called here, and rented machines could have changed the job's.

    Raises:
        CheckpointError: The run has no complete checkpoint, or the newest is damaged.
    """
    job = replace(TrainingJob.from_json(run.require_json(JOB)), model=model)
    num_layers = job.stages[-1].last_layer + 1
    whole = (Stage(0, num_layers - 1, job.stages[0].device_type, 1),)
    trained = build_stage_model(job.model, manifest.features, job.config, whole, 0, None)
    cursor = load_latest_checkpoint(run, trained)
    if cursor is None:
        raise CheckpointError(
            f"a run must have a complete checkpoint to be exported, {run.location} has none"
        )
    newest = int(complete_checkpoints(run)[-1])
    if cursor.step != newest:
        raise CheckpointError(
            f"the newest checkpoint of a run must be whole to be exported, but that of step {newest} in "
            f"{run.location} is damaged; resume the run, which trains again from step {cursor.step}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _save(weights_of(trained), folder / WEIGHTS)
    _save(row_optimizer_state(trained) | dense_optimizer_state(trained), folder / OPTIMIZER_STATE)
    state = OptimizerState(
        sha256=file_sha256(folder / OPTIMIZER_STATE),
        dense_optimizer=job.config.dense_optimizer,
        embedding_optimizer=job.config.embedding_optimizer,
    )
    description = {
        "schema_version": SCHEMA_VERSION,
        "model": job.model,
        "features": manifest.features.to_json(),
        "schema": manifest.schema.to_json(),
        "numeric_transform": manifest.numeric_transform.to_json(),
        "weights_sha256": file_sha256(folder / WEIGHTS),
        "optimizer_state": asdict(state),
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1))


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
