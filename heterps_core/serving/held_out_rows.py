"""An exported model's logits of the rows that a prepared data set holds out.

Two models are compared on the same rows, but may read them with other table sizes or another numeric transform, as
after a training from scratch. Rows that were prepared as the model's own are taken as they lie; otherwise the sources
of the data set are read again, as the model reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from heterps_core.data.array_files import hash_batch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.reading.readers import read_rows
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.serving.exported_model import ClickPredictor


def held_out_labels(dataset: PreparedDataset) -> npt.NDArray[np.uint8]:
    """Return the labels [N] of the rows that a data set holds out; of all its rows where it holds out none."""
    return dataset.labels[_first_row(dataset) :]


def held_out_logits(predictor: ClickPredictor, dataset: PreparedDataset) -> npt.NDArray[np.float64]:
    """Return a model's logits [N] of the rows that a data set holds out; of all its rows where it holds out none.

    Raises:
        ConfigurationError: The data set has other columns than the model.
        DataError: A source that must be read again is gone or has changed.
    """
    first = _first_row(dataset)
    if predictor.reads_alike(dataset.manifest):
        return predictor.prepared_logits(dataset, first=first, stop=dataset.manifest.num_rows)
    return _logits_of_sources(predictor, dataset, first)


def _logits_of_sources(
    predictor: ClickPredictor, dataset: PreparedDataset, first: int
) -> npt.NDArray[np.float64]:
    """Return logits of the rows from `first` on, read from the files that the data set was prepared from."""
    _check_columns(predictor, dataset)
    files = [Path(source.path) for source in dataset.manifest.sources]
    logits: list[npt.NDArray[Any]] = []
    position = 0
    for batch in read_rows(files, dataset.manifest.schema):
        rows = slice(max(0, first - position), None)
        known = dataset.labels[position : position + len(batch.labels)]
        if not np.array_equal(known, batch.labels):
            raise _changed(dataset)
        position += len(batch.labels)
        if position > first:
            dense_ND = predictor.numeric_transform.apply(batch.numbers)
            ids_NS = hash_batch(batch, predictor.features.slot_rows)
            logits.append(predictor.logits(dense_ND[rows], ids_NS[rows]))
    if position != dataset.manifest.num_rows:
        raise _changed(dataset)
    return np.concatenate(logits)


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


def _changed(dataset: PreparedDataset) -> DataError:
    return DataError(
        dataset.manifest.sources[-1].path,
        f"must hold the rows that {dataset.directory} was prepared from, but has changed since; prepare them again",
    )
