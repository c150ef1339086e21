"""A model's predictions for the held-out rows of a prepared data set, also where its schema is another one.

Each model reads its own columns. A data set of text holds the columns of its own schema alone, so a model of another
schema reads the rows again from their sources, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.manifest import describe_source
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.bucket_path import source_path
from heterps_core.data.reading.row_batch import first_label
from heterps_core.data.row_arrays import RowArrays
from heterps_core.data.schema import LAYOUT_FIELDS
from heterps_core.errors import ConfigurationError, DataError, OtherColumnsError
from heterps_core.judging.held_out import HeldOutScores
from heterps_core.serving.exported_model import ClickPredictor

_OF_ROWS = ("label_column", "label_columns", "label_positive", "label_negative", "weight_column")
"""Fields of a schema that say what a row is judged by."""


def held_out_rows(dataset: PreparedDataset) -> tuple[int, int]:
    """Return the first of the rows that a data set holds out, and where they stop; all where it holds out none."""
    return (dataset.num_train_rows if dataset.num_eval_rows else 0), dataset.manifest.num_rows


def predicted_parts(
    predictor: ClickPredictor, dataset: PreparedDataset, first: int, stop: int
) -> Iterator[tuple[RowArrays, npt.NDArray[np.float64]]]:
    """Yield rows first..stop - 1, those of one row group at a time, and a model's logits, [n] or [n, labels].

    Raises:
        ConfigurationError: The data set has other columns than the model.
        DataError: A source is gone or has changed.
    """
    _check_columns(predictor, dataset)
    for part in dataset.parts(
        first, stop, features=predictor.features, numeric_transform=predictor.numeric_transform
    ):
        yield part, predictor.logits(part.dense, part.ids)


def held_out_scores(predictor: ClickPredictor, dataset: PreparedDataset) -> HeldOutScores:
    """Return a model's scores of held-out rows by their first label.

    A model of another schema reads them by its own columns.

    Raises:
        OtherColumnsError: The rows lack one of its columns, or hold something else in it.
        DataError: A source is gone or has changed.
    """
    first, stop = held_out_rows(dataset)
    scores = HeldOutScores(stop - first)
    with _read_by(predictor, dataset) as own:
        for rows, logits in predicted_parts(predictor, own, *held_out_rows(own)):
            scores.add(first_label(rows.labels), first_label(logits), rows.weights)
    return scores


@contextmanager
def _read_by(predictor: ClickPredictor, dataset: PreparedDataset) -> Iterator[PreparedDataset]:
    """Give the data set, or one with the same held-out rows as a model of another schema reads them."""
    own, given = predictor.schema, dataset.manifest.schema
    if own.meaning == given.meaning:
        yield dataset
        return
    first, stop = held_out_rows(dataset)
    sources = dataset.sources_from(first)
    for source in sources:
        if source.view:
            raise OtherColumnsError(
                source.path, "is a file of a table, of which the columns of the new schema alone are known"
            )
        if not describe_source(source_path(source.path)).is_same(source):
            raise DataError(
                source.path, "must stay as it was when the rows were prepared, but has changed; run it again"
            )
    try:
        kept = {name: getattr(given, name) for name in (*LAYOUT_FIELDS, *_OF_ROWS)}
        schema = replace(
            own, **kept, negative_share=1.0, time_column=None, request_column=None, request_columns=()
        )
        with TemporaryDirectory(prefix="heterps-rows-") as folder:
            rows = prepare_dataset(
                [source_path(source.path) for source in sources],
                schema=schema,
                buckets_per_slot=predictor.features.slot_rows,
                eval_fraction=0.0,
                numeric_transform=predictor.numeric_transform,
                out_dir=Path(folder) / "rows",
            )
            yield rows.until(rows.num_train_rows - (stop - first))
    except (DataError, ConfigurationError) as error:
        if isinstance(error.__cause__, OSError):
            raise
        place, problem = (
            (error.path, error.problem) if isinstance(error, DataError) else (sources[0].path, error)
        )
        raise OtherColumnsError(place, str(problem)) from error


def _check_columns(predictor: ClickPredictor, dataset: PreparedDataset) -> None:
    own, other = predictor.schema, dataset.manifest.schema
    lists = ("multi_hot_columns", "sequence_columns", "history_columns")
    for kind in ("numeric_columns", "categorical_columns", *lists):
        needed, found = getattr(own, kind), getattr(other, kind)
        if needed != found:
            raise ConfigurationError(
                f"rows must have the {kind} of the model, {', '.join(map(str, needed))}, to be predicted by it, "
                f"got {', '.join(map(str, found)) or 'none'}"
            )
