"""A synthetic click stream in the published Criteo format, whose click probabilities are known.

So a model's AUC can be put beside the best that is reachable, which no real log tells.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from heterps_core.data.reading.readers import read_rows
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_truth import ClickTruth, FloatArray
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.judging.quality import ClickQuality, measure_quality

_ROWS_PER_CHUNK = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class ClickStream:
    """A written click stream."""

    path: Path
    """The file, to be read with `CRITEO_SCHEMA`."""

    probabilities_path: Path
    """.npy file with the true click probability of each row, float64 [num_rows]. Its name begins with
    "_", so a reader of the folder leaves it out."""

    num_rows: int

    def click_probabilities(self) -> FloatArray:
        """Return the true click probability [num_rows] of each row, in file order."""
        probabilities: FloatArray = np.load(self.probabilities_path)
        return probabilities

    def best_reachable(self) -> ClickQuality:
        """Return what the truth itself reaches on the rows as written; reads them."""
        labels = [batch.labels for batch in read_rows([self.path], CRITEO_SCHEMA)]
        return best_reachable_quality(self.click_probabilities(), np.concatenate(labels))


def write_click_stream(path: Path | str, *, num_rows: int, seed: int) -> ClickStream:
    """Write a click stream as tab-separated text, gzip-compressed where the name ends in ".gz".

    The same seed gives the same rows, and a longer stream begins with the shorter one. The file appears
    under its name when it is complete.

    Raises:
        DataError: The file cannot be written, for instance because the disk is full; nothing is left of it.
    """
    if num_rows < 1:
        raise ConfigurationError(f"num_rows must be at least 1, got {num_rows}")
    return write_rows(Path(path), ClickTruth.of_seed(seed), num_rows=num_rows, entropy=(seed,))


def write_rows(path: Path, truth: ClickTruth, *, num_rows: int, entropy: Sequence[int]) -> ClickStream:
    """Write rows of a truth, with their probabilities beside them; `entropy` decides which rows.

    Raises:
        DataError: As `write_click_stream`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"_{path.name}.draft")
    probabilities_path = probabilities_beside(path)
    try:
        _write_draft(draft, probabilities_path, truth, num_rows=num_rows, entropy=entropy)
        draft.replace(path)
    except OSError as error:
        free_bytes = shutil.disk_usage(path.parent).free
        draft.unlink(missing_ok=True)
        probabilities_path.unlink(missing_ok=True)
        raise DataError(
            path,
            f"cannot be written, with {free_bytes:,} bytes free there: {error.strerror or error}; free space "
            f"or choose another folder",
        ) from error
    return ClickStream(path=path, probabilities_path=probabilities_path, num_rows=num_rows)


def probabilities_beside(path: Path) -> Path:
    """Return where the true click probabilities of a synthetic file stand."""
    return path.with_name(f"_{path.name}.probabilities.npy")


def _write_draft(
    draft: Path, probabilities_path: Path, truth: ClickTruth, *, num_rows: int, entropy: Sequence[int]
) -> None:
    fields = [("label", pa.int8())]
    fields += [(column, pa.int64()) for column in CRITEO_SCHEMA.numeric_columns]
    fields += [(column, pa.string()) for column in CRITEO_SCHEMA.categorical_columns]
    options = pa_csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    probabilities = np.empty(num_rows)
    compression = "gzip" if ".gz" in draft.suffixes else None
    with (
        pa.output_stream(str(draft), compression=compression) as stream,
        pa_csv.CSVWriter(stream, pa.schema(fields), write_options=options) as writer,
    ):
        for chunk, start in enumerate(range(0, num_rows, _ROWS_PER_CHUNK)):
            stop = min(start + _ROWS_PER_CHUNK, num_rows)
            generator = np.random.default_rng([*entropy, chunk])
            of_chunk, columns = truth.draw(generator, _ROWS_PER_CHUNK)
            labels = generator.random(_ROWS_PER_CHUNK) < of_chunk
            probabilities[start:stop] = of_chunk[: stop - start]
            batch = pa.record_batch([pa.array(labels.astype(np.int8)), *columns], schema=pa.schema(fields))
            writer.write_batch(batch.slice(0, stop - start))
    np.save(probabilities_path, probabilities)


def best_reachable_quality(
    click_probabilities: FloatArray, labels: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
) -> ClickQuality:
    """Return the quality of the true probabilities [N] on labels [N]: no model does better but by luck."""
    return measure_quality(labels, np.log(click_probabilities / (1.0 - click_probabilities)))
