"""Predicts the rows of files into one file, a batch of rows in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.file_kinds import is_parquet
from heterps_core.data.reading.parquet_reader import columns_in_common
from heterps_core.data.reading.readers import read_columns
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.serving.exported_model import ClickPredictor
from heterps_core.serving.raw_columns import SOURCE

PROBABILITY = "probability"
_PARQUET, _CSV = ".parquet", ".csv"


def predict_files(
    predictor: ClickPredictor, files: Sequence[SourcePath], output: Path, *, kept: Sequence[str] = ()
) -> int:
    """Write a probability for each row of the files, in their order, and return how many.

    The file appears under its name once it is whole.

    Args:
        predictor: The model.
        files: Parquet, or text as training takes it; labels may be missing.
        output: A name that ends in .parquet or .csv. Its columns are the kept ones, then `probability`, or
            `probability_<label>` for each of several labels.
        kept: Columns of the files to copy, such as an id.

    Raises:
        ConfigurationError: The output has another ending, is one of the files or cannot be written; a kept column has
            the name of a new one, or a type that the output cannot hold.
        DataError: A file cannot be read, lacks a column, or has a row that cannot be predicted.
    """
    labels = predictor.schema.labels
    added = [PROBABILITY] if len(labels) == 1 else [f"{PROBABILITY}_{label}" for label in labels]
    if output.suffix not in (_PARQUET, _CSV):
        raise ConfigurationError(f"the output's name must end in {_PARQUET} or {_CSV}, got {output}")
    if taken := sorted(set(kept) & set(added)):
        raise ConfigurationError(
            f"columns to keep must differ from those that are added, got {', '.join(taken)}"
        )
    if output.absolute() in [file.absolute() for file in files]:
        raise ConfigurationError(f"the output must be another file than the rows, got {output} for both")
    part, kept = output.with_name(f"{output.name}.part"), tuple(dict.fromkeys(kept))
    num_rows = 0
    try:
        with ExitStack() as stack:
            writer: pq.ParquetWriter | pa_csv.CSVWriter | None = None
            for batch in _predicted(predictor, files, kept, added):
                if writer is None:
                    kind = pq.ParquetWriter if output.suffix == _PARQUET else pa_csv.CSVWriter
                    writer = stack.enter_context(kind(part, batch.schema))
                writer.write_batch(batch)
                num_rows += batch.num_rows
        if num_rows == 0:
            raise DataError(", ".join(map(str, files)), "must hold at least one row to predict, got none")
        part.replace(output)
        # Files that cannot be read are errors of their own.
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise ConfigurationError(
            f"the output {output} must be a file that can be written, but: {reason}"
        ) from error
    except pa.ArrowException as error:
        raise ConfigurationError(
            f"columns to keep must have types that a {output.suffix} file can hold, but: {error}; keep others, or "
            f"write {_PARQUET}"
        ) from error
    finally:
        if part.parent.is_dir():
            part.unlink(missing_ok=True)
    return num_rows


def _predicted(
    predictor: ClickPredictor, files: Sequence[SourcePath], kept: Sequence[str], added: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    schema = predictor.schema
    features = tuple(dict.fromkeys((*schema.numeric_columns, *schema.text_columns, *schema.pointer_columns)))
    needed = tuple(dict.fromkeys((*features, *kept)))
    types = dict.fromkeys(kept, pa.string())
    if kept and all(map(is_parquet, files)):
        common = columns_in_common(files)
        types = {name: common.field(name).type for name in kept if name in common.names}
    for file in files:
        num_before = 0
        for batch in read_columns(file, schema, needed):
            try:
                probabilities = predictor.predict({name: batch.column(name) for name in features})
            except DataError as error:
                if error.path != SOURCE:
                    # The events of a history cannot be read, whatever the row.
                    raise
                row = num_before + _first_bad_row(predictor, batch.select(features)) + 1
                raise DataError(file, f"row {row:,}: {error.problem}") from error
            num_before += batch.num_rows
            found = [probabilities] if len(added) == 1 else list(probabilities.T)
            yield pa.record_batch(
                [*(batch.column(name).cast(types[name]) for name in kept), *map(pa.array, found)],
                names=[*kept, *added],
            )


def _first_bad_row(predictor: ClickPredictor, batch: pa.RecordBatch) -> int:
    """Return the place of the first row that cannot be predicted, by halves; 0 where none can."""
    first, num_rows = 0, batch.num_rows
    while num_rows > 1:
        half = batch.slice(first, num_rows // 2)
        try:
            predictor.predict({name: half.column(name) for name in half.schema.names})
        except DataError:
            num_rows //= 2
        else:
            first, num_rows = first + num_rows // 2, num_rows - num_rows // 2
    return first
