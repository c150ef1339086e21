"""From a source of clicks, or a made-up stream, to rows that workers can map into memory."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from heterps_core.data.dataset import PreparedDataset, prepare_dataset
from heterps_core.data.quality import ClickQuality
from heterps_core.data.readers import list_source_files
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema
from heterps_core.data.synthetic import best_reachable_quality, write_click_stream
from heterps_core.errors import ConfigurationError
from infra.workspace import Workspace

CLICK_STREAM_ROWS = 200_000
"""Of the made-up stream: some seconds of training on two cores, and most values are seen often enough."""

CLICK_STREAM_SEED = 0
"""The stream is the same for every run, so that runs can be compared; a run's seed is for its training."""

MIN_BUCKETS, MAX_BUCKETS = 1_024, 131_072
BYTES_PER_ROW = 240
"""Of the Criteo format, uncompressed; a guess at the number of rows of a source before it is read."""

ROWS_PER_BUCKET = 16
GZIP_RATIO = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedClicks:
    """A prepared data set with what is known about its source."""

    directory: str
    description: str
    """For people."""

    best_reachable: ClickQuality | None
    """Quality of the true probabilities on the held-out rows; None where nobody knows them."""

    @property
    def summary(self) -> str:
        """What was prepared, in one line."""
        manifest = self.open().manifest
        return (
            f"{self.description}: {manifest.num_train_rows:,} rows to train on, the latest "
            f"{manifest.num_eval_rows:,} held out, {manifest.train_click_rate:.1%} clicks"
        )

    def open(self) -> PreparedDataset:
        """Map the rows into memory."""
        return PreparedDataset.open(self.directory)


def check_source(data: str | None, *, schema_file: str | None) -> None:
    """Check that a source and a schema file can be found, without reading the rows.

    Raises:
        DataError: There is no such source.
        ConfigurationError: The schema file is missing, or no schema.
    """
    if schema_file is not None and data is None:
        raise ConfigurationError(
            f"a schema file describes the columns of data, but there is no data beside {schema_file}; give both"
        )
    if schema_file is not None:
        DataSchema.load(Path(schema_file))
    if data is not None:
        list_source_files(str(_source_path(data)))


@task(name="prepare data", cache_policy=NO_CACHE)
def prepare_data(workspace: Workspace, *, data: str | None, schema_file: str | None) -> PreparedClicks:
    """Read the source once, or reuse what an earlier run made of the same source.

    Args:
        workspace: Where prepared rows are kept.
        data: File, folder or pattern; None for the made-up click stream.
        schema_file: Schema file; None for the Criteo format.

    Raises:
        DataError: The source cannot be read; names file and line.
        ConfigurationError: The schema cannot be used.
    """
    if data is None:
        return _prepare_click_stream(workspace)
    data_schema = CRITEO_SCHEMA if schema_file is None else DataSchema.load(Path(schema_file))
    source = _source_path(data)
    dataset = prepare_dataset(
        str(source),
        schema=data_schema,
        buckets_per_slot=buckets_for_bytes(_bytes_of(source)),
        out_dir=workspace.data_directory
        / f"{_file_name(source.name)}-{_short_hash(f'{source} {schema_file}')}",
    )
    return PreparedClicks(
        directory=str(dataset.directory),
        description=f"{data} ({data_schema.name} format)",
        best_reachable=None,
    )


def buckets_for_bytes(num_bytes: int) -> int:
    """Return the rows of each slot's table for a source of a size: a power of two, in fixed limits.

    One bucket for 16 rows, since a bucket that is hardly ever seen learns nothing.

    Example:
        >>> buckets_for_bytes(48_000_000), buckets_for_bytes(0)
        (8192, 1024)
    """
    wanted = max(1, num_bytes // BYTES_PER_ROW // ROWS_PER_BUCKET)
    return min(max(1 << (wanted - 1).bit_length() >> 1, MIN_BUCKETS), MAX_BUCKETS)


def _prepare_click_stream(workspace: Workspace) -> PreparedClicks:
    name = f"click-stream-{CLICK_STREAM_ROWS}-{CLICK_STREAM_SEED}"
    path = workspace.data_directory / f"{name}.tsv"
    probabilities_path = path.with_name(f"_{path.name}.probabilities.npy")
    if not (path.exists() and probabilities_path.exists()):
        draft = path.with_name(f"draft-{path.name}")
        stream = write_click_stream(draft, num_rows=CLICK_STREAM_ROWS, seed=CLICK_STREAM_SEED)
        stream.probabilities_path.replace(probabilities_path)
        stream.path.replace(path)
    dataset = prepare_dataset(
        str(path),
        schema=CRITEO_SCHEMA,
        buckets_per_slot=buckets_for_bytes(path.stat().st_size),
        out_dir=workspace.data_directory / name,
    )
    return PreparedClicks(
        directory=str(dataset.directory),
        description=f"made-up click stream, {CLICK_STREAM_ROWS:,} rows, seed {CLICK_STREAM_SEED}",
        best_reachable=_best_reachable(dataset, probabilities_path),
    )


def _best_reachable(dataset: PreparedDataset, probabilities_path: Path) -> ClickQuality:
    import numpy as np

    probabilities = np.load(probabilities_path)
    return best_reachable_quality(probabilities[dataset.num_train_rows :], dataset.eval_labels)


def _source_path(data: str) -> Path:
    return Path(data).expanduser().absolute()


def _bytes_of(source: Path) -> int:
    """Return about how many bytes of text a source holds; 0 for what is no plain file or folder."""
    files = [source] if source.is_file() else list(source.glob("*")) if source.is_dir() else []
    return sum(
        file.stat().st_size * (GZIP_RATIO if file.suffix == ".gz" else 1) for file in files if file.is_file()
    )


def _file_name(text: str) -> str:
    return "".join(character if character.isalnum() or character in "._-" else "_" for character in text)[:60]


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
