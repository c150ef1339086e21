"""What a prepared dataset holds and what it was made from: the JSON file that is written last and makes it complete.

Its fingerprint of source files and parameters has no work done twice, and a changed source noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from heterps_core.data.distinct_values import ColumnValues
from heterps_core.data.features import SEQUENCE, FeatureSpec
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.reading.bucket_path import BucketPath, SourcePath
from heterps_core.data.reading.parquet_rows import FileView
from heterps_core.data.reading.source_files import view_of
from heterps_core.data.schema import DataSchema
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.json_codec import JsonDocument, JsonForm

FORMAT_VERSION = 4
"""Raised whenever the same source would give other files, so that older caches are not reused."""

MANIFEST_NAME = "manifest.json"

_SAMPLED_BYTES = 65_536

Folder = Callable[[str], pa.NativeFile]
"""Opens a file of a dataset by its name, on this machine or in a bucket; a missing one is an OSError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file that a dataset was prepared from, as it was then."""

    path: str
    """Absolute, or the URI of an object."""

    size_bytes: int
    modified_ns: int
    """Time of the last change, nanoseconds since 1970; 0 of an object, whose tag tells it."""

    tag: str
    """SHA-256 of the first and the last 64 KiB: a rewritten file is noticed even where size and time agree. The
    ETag of an object."""

    view: str = ""
    """Hash of the columns, values and deleted rows by which a table shows it."""

    def is_same(self, other: SourceFile) -> bool:
        """Tell whether it has the content of another, whenever each was written."""
        return (self.size_bytes, self.tag) == (other.size_bytes, other.tag)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparationRequest:
    """All that decides what a prepared dataset holds."""

    schema: DataSchema
    buckets_per_slot: int | Sequence[int] | None
    eval_fraction: float
    numeric_transform: NumericTransform | None
    """None where it is fitted on the rows."""

    text_rule: int
    sources: tuple[SourceFile, ...] = ()
    num_eval_sources: int = 0
    """The last sources, which are held out."""

    events: tuple[SourceFile, ...] = ()
    """Files of the schema's history."""

    snapshot: str | None = None
    """Of the table that the sources are listed by; not part of what the rows are."""

    @property
    def fingerprint(self) -> str:
        """Hash of the request."""
        document = {
            "format_version": FORMAT_VERSION,
            "sources": [asdict(source) for source in self.sources],
            "schema": self.schema.to_json(),
            "buckets_per_slot": self.buckets_per_slot,
            "eval_fraction": self.eval_fraction,
            "text_rule": self.text_rule,
        }
        if self.num_eval_sources:
            document["num_eval_sources"] = self.num_eval_sources
        if self.events:
            document["events"] = [asdict(source) for source in self.events]
        if self.numeric_transform is not None:
            document["numeric_transform"] = self.numeric_transform.to_json()
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetManifest(JsonDocument):
    """The content of `manifest.json`."""

    json_form = JsonForm(
        what="prepared dataset",
        way_out="prepare it again",
        version=FORMAT_VERSION,
        version_name="format_version",
        sums=("train_click_rate",),
    )

    fingerprint: str
    schema: DataSchema
    features: FeatureSpec
    numeric_transform: NumericTransform
    """Fitted on the training rows, or of the model that goes on with them; apply it to raw numbers when serving."""

    eval_fraction: float
    num_train_rows: int
    num_eval_rows: int
    num_left_out_rows: int = 0
    """Rows of the source that `negative_share` leaves out; they are in no other count and have no index."""

    num_sampled_rows: int = 0
    """Training rows that the share of clicks, the values of the columns, and the transform where none was given, were
    measured on."""

    num_sampled_clicks: int = 0
    columns: tuple[ColumnValues, ...] = ()
    snapshot: str | None = None
    """Of the table that the sources were listed by."""

    mean_lengths: tuple[float, ...] = ()
    """Values of a row in each slot, in the mean of the sampled rows; empty for as many as there may be."""

    rows_per_list: tuple[float, ...] = ()
    """Rows that share the list of a slot in the mean: of a request's sequences those of the request, else 1; empty
    for 1 each."""

    file_groups: tuple[int, ...]
    sources: tuple[SourceFile, ...]
    bucket_files: tuple[int, ...] = ()
    """Numbers of the files that are read from their bucket as they lie; all others are in the dataset's folder."""

    views: Mapping[str, FileView] = field(default_factory=dict)
    """How a table shows a file, by the file's number; others are as they are."""

    @property
    def num_rows(self) -> int:
        """Rows for training and evaluation together."""
        return self.num_train_rows + self.num_eval_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in memory in the mean: features, of sequences those there are, labels, float32 weights."""
        padding = sum(
            length - mean
            for length, mean, pooling in zip(
                self.features.slot_lengths, self.mean_lengths, self.features.slot_poolings, strict=False
            )
            if pooling == SEQUENCE
        )
        num_bytes = self.features.row_bytes + 4 * self.schema.has_weights
        return num_bytes - int(padding) * self.features.id_bytes

    @property
    def source_row_bytes(self) -> float:
        """Bytes of a row in the files that the dataset was prepared from; in memory where it is from no file."""
        source_bytes = sum(source.size_bytes for source in self.sources)
        return source_bytes / self.num_rows if source_bytes else self.row_bytes

    @property
    def train_click_rate(self) -> float:
        """Share of clicks among the sampled training rows, in [0, 1]."""
        return self.num_sampled_clicks / self.num_sampled_rows


def folder_of(directory: Path) -> Folder:
    """Return how the files of a folder of this machine are opened."""
    return lambda name: pa.OSFile(str(directory / name))


def read_manifest(folder: Folder) -> DatasetManifest | None:
    """Return the manifest, or None where there is none of this format that can be read."""
    try:
        with folder(MANIFEST_NAME) as file:
            document = json.loads(file.read())
        return DatasetManifest.from_json(document)
    except (OSError, ValueError, ConfigurationError):
        return None


def describe_source(file: SourcePath) -> SourceFile:
    """Return what a source file is now.

    Raises:
        DataError: It cannot be read.
    """
    try:
        if isinstance(file, BucketPath):
            tag, num_bytes = file.tag_and_size()
            return SourceFile(path=str(file), size_bytes=num_bytes, modified_ns=0, tag=tag)
        status = file.stat()
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLED_BYTES))
            stream.seek(max(0, status.st_size - _SAMPLED_BYTES))
            digest.update(stream.read(_SAMPLED_BYTES))
    except OSError as error:
        raise DataError(file, f"cannot be read: {error.strerror or error}") from error
    return SourceFile(
        path=str(file.absolute()),
        size_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        tag=digest.hexdigest(),
    )


def describe_sources(
    files: Iterable[SourcePath], columns: Collection[str] | None = None
) -> tuple[SourceFile, ...]:
    """Return what source files are now, and how a table shows some of their columns; raises as `describe_source`."""

    def described(file: SourcePath) -> SourceFile:
        return replace(describe_source(file), view=view_of(file).digest(columns))

    with ThreadPoolExecutor() as pool:
        return tuple(pool.map(described, files))
