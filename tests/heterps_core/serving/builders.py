"""Exported models that are made in milliseconds: a logistic regression as a chain, written by a second writer."""

from __future__ import annotations

import csv
import hashlib
import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from torch import nn

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.models.slot_embedding import SlotEmbedding
from tasks.judging.baseline import _design_matrix
from tests.heterps_core.data.synthetic_rows import all_rows

LOGISTIC_MODEL = f"{__name__}:build_logistic"


def build_logistic(features: FeatureSpec) -> nn.Sequential:
    """One weight per embedding row and one per dense column."""
    embedding = SlotEmbedding(features, dimension=1)
    return nn.Sequential(OrderedDict(embedding=embedding, output=nn.Linear(embedding.output_width, 1)))


def fit_logistic(dataset: PreparedDataset) -> np.ndarray:
    """Fit on the training rows; the weights are those of the dense columns, of all rows, and the intercept."""
    rows = _design_matrix(all_rows(dataset), dataset.features)[: dataset.num_train_rows]
    fitted = LogisticRegression(C=0.1, max_iter=300, tol=1e-3)
    fitted.fit(rows, all_rows(dataset).labels[: dataset.num_train_rows])
    return np.concatenate([fitted.coef_[0], fitted.intercept_])


def write_logistic(folder: Path, dataset: PreparedDataset, weights: np.ndarray) -> Path:
    """Write the two files of an exported model, with the weights of `fit_logistic`."""
    features = dataset.features
    num_dense = features.num_dense
    values = torch.from_numpy(weights.astype(np.float32))
    folder.mkdir(parents=True)
    save_file(
        {
            "embedding.weight": values[num_dense:-1].reshape(-1, 1).clone(),
            "output.weight": torch.cat([torch.ones(features.num_slots), values[:num_dense]])
            .reshape(1, -1)
            .clone(),
            "output.bias": values[-1:].clone(),
        },
        folder / "model.safetensors",
    )
    description = {
        "schema_version": 1,
        "model": LOGISTIC_MODEL,
        "features": features.to_json(),
        "schema": dataset.manifest.schema.to_json(),
        "numeric_transform": dataset.manifest.numeric_transform.to_json(),
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
    }
    (folder / "model.json").write_text(json.dumps(description))
    return folder


def raw_columns(path: Path, rows: slice) -> dict[str, list[str]]:
    """Read rows of a file in the Criteo format by the standard library alone."""
    with path.open() as file:
        lines = list(csv.reader(file, delimiter="\t"))[rows]
    return {name: [line[index] for line in lines] for index, name in enumerate(CRITEO_SCHEMA.column_names)}
