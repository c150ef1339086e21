"""Files and folders in a bucket, with what the readers ask of a local path.

Arrow's S3 client finds keys in the environment, in a profile or in the role of the machine (`bucket_files` has those
that boto3 alone finds), and repeats requests that fail for some seconds.
"""

from __future__ import annotations

import glob
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self, cast
from urllib.parse import unquote

from pyarrow import NativeFile, fs

from heterps_core.bucket_files import files_of
from heterps_core.data.reading.parquet_rows import TableView
from heterps_core.errors import ConfigurationError, DataError

_SCHEME = "s3://"
_S3_SCHEMES = ("s3", "s3a", "s3n")
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(.*)", re.DOTALL)
"""With one slash where a path was made of it."""

_COPIED = "with a program that knows {}"
_COPIED_BY = {
    "gs gcs": "gcloud storage cp -r {} .",
    "abfs abfss wasb wasbs adl az": "azcopy copy 'https://ACCOUNT.blob.core.windows.net/CONTAINER/...' . --recursive",
    "hdfs webhdfs viewfs": "hdfs dfs -get {} .",
}
_BLOCK_BYTES = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPath:
    """A file or folder in S3; what cannot be opened is an OSError, what cannot be looked for a DataError."""

    key: str
    """Bucket and key, such as clicks/day=2026-11-21/part-0.parquet."""

    options: str = ""
    """Options of the URI, such as region=eu-central-1&endpoint_override=localhost:9000."""

    kind: fs.FileType | None = field(default=None, compare=False)
    """As it was listed; None where it was not."""

    view: TableView | None = field(default=None, compare=False, repr=False)
    """Of the table that has listed it."""

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Read a URI such as s3://bucket/clicks?region=eu-central-1."""
        place, _, options = uri.removeprefix(_SCHEME).partition("?")
        return cls(key=place.rstrip("/"), options=options)

    def __str__(self) -> str:
        """Return the URI."""
        return f"{_SCHEME}{self.key}{'?' * bool(self.options)}{self.options}"

    @property
    def name(self) -> str:
        """Last part of the key."""
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        """Ending of the name, such as .gz."""
        return PurePosixPath(self.key).suffix

    @property
    def parts(self) -> tuple[str, ...]:
        """Bucket, folders and name."""
        return PurePosixPath(self.key).parts

    @property
    def parent(self) -> BucketPath:
        """The folder that it lies in."""
        return BucketPath(key=str(PurePosixPath(self.key).parent), options=self.options)

    @property
    def parents(self) -> tuple[BucketPath, ...]:
        """The folders that it lies in, the nearest first."""
        return tuple(
            BucketPath(key=str(folder), options=self.options) for folder in PurePosixPath(self.key).parents
        )

    @property
    def file_system(self) -> fs.FileSystem:
        """Arrow's file system, in which `key` is the path."""
        return _file_system(self.key.partition("/")[0], self.options)

    def __truediv__(self, name: str) -> BucketPath:
        """Return what lies below, by its name."""
        return BucketPath(key=f"{self.key}/{name}", options=self.options)

    def absolute(self) -> BucketPath:
        """Return itself."""
        return self

    def exists(self) -> bool:
        """Tell whether there is such a file or folder."""
        return bool(self._found_kind() != fs.FileType.NotFound)

    def is_file(self) -> bool:
        """Tell whether it is an object."""
        return bool(self._found_kind() == fs.FileType.File)

    def is_dir(self) -> bool:
        """Tell whether keys lie below it."""
        return bool(self._found_kind() == fs.FileType.Directory)

    def iterdir(self) -> Iterator[BucketPath]:
        """Yield the files and folders directly below, by one request for a thousand of them."""
        for info in self._infos(fs.FileSelector(self.key)):
            yield BucketPath(key=info.path, options=self.options, kind=info.type)

    def rglob(self, pattern: str) -> Iterator[BucketPath]:
        """Yield what lies below at any depth and has a name of a pattern."""
        for info in self._infos(fs.FileSelector(self.key, recursive=True)):
            if fnmatchcase(info.base_name, pattern):
                yield BucketPath(key=info.path, options=self.options, kind=info.type)

    def matches(self) -> list[BucketPath]:
        """Return the files and folders that fit this path as a pattern; no more folders are listed than it asks."""
        found = [BucketPath(key=self.parts[0], options=self.options)]
        for part in self.parts[1:]:
            if glob.has_magic(part):
                found = [
                    each
                    for folder in found
                    if folder.is_dir()
                    for each in folder.iterdir()
                    if fnmatchcase(each.name, part)
                ]
            else:
                found = [folder / part for folder in found]
        return [each for each in found if each.exists()]

    def open_ranges(self) -> NativeFile:
        """Open the object to read parts of it; several threads may."""
        return self.file_system.open_input_file(self.key)

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the object to read its bytes in order."""
        return cast(BinaryIO, io.BufferedReader(self.open_ranges(), _BLOCK_BYTES))

    def tag_and_size(self) -> tuple[str, int]:
        """Return the object's ETag, which changes with its content, and its bytes, as they are now."""
        with self.open_ranges() as file:
            return tag_of(file), file.size()

    def _found_kind(self) -> fs.FileType:
        return self.kind or self._infos([self.key])[0].type

    def _infos(self, of: fs.FileSelector | list[str]) -> list[fs.FileInfo]:
        try:
            return list(self.file_system.get_file_info(of))
        except OSError as error:
            raise DataError(
                self,
                f"cannot be looked for: {error}; check its name, the region and your credentials (aws s3 ls)",
            ) from error


SourcePath = Path | BucketPath


def tag_of(opened: NativeFile) -> str:
    """Return the ETag of an object when it was opened."""
    tag: bytes = opened.metadata().get("ETag", b"")
    return tag.decode().strip('"')


def source_path(source: str | SourcePath) -> SourcePath:
    """Return a path of this machine, or of a bucket for a text such as s3://bucket/clicks.

    Raises:
        DataError: It is in a store that cannot be read; names a command that copies from there.
    """
    if isinstance(source, BucketPath):
        return source
    found = _URI.fullmatch(str(source))
    if found is None:
        return Path(source)
    scheme, place = found[1].lower(), found[2]
    if scheme in _S3_SCHEMES:
        return BucketPath.parse(f"{_SCHEME}{place}")
    if scheme == "file":
        return Path("/", unquote(place.removeprefix("localhost").lstrip("/")))
    # Before '@' and after '?' secrets may stand.
    shown = f"{found[0][: found.start(2)]}{place.partition('?')[0].rpartition('@')[2]}"
    command = next((way for schemes, way in _COPIED_BY.items() if scheme in schemes.split()), _COPIED)
    raise DataError(
        shown,
        f"must be a path of this machine or in S3 (s3://bucket/clicks), but {scheme}: is another store; copy the "
        f"rows from there: {command.format(shown)}",
    )


def matching(path: SourcePath) -> list[SourcePath]:
    """Return the files and folders that fit a path as a pattern."""
    if isinstance(path, BucketPath):
        return list(path.matches())
    # Path.glob takes no absolute patterns.
    return [Path(name) for name in glob.glob(str(path))]  # noqa: PTH207


@lru_cache
def _file_system(bucket: str, options: str) -> fs.FileSystem:
    try:
        if not bucket:
            raise ValueError("no bucket is named")
        files, _ = files_of(f"{_SCHEME}{bucket}?{options}")
    except ValueError as error:
        raise ConfigurationError(
            f"a bucket must be given as s3://BUCKET/PREFIX, then options such as ?region=eu-central-1, got "
            f"{_SCHEME}{bucket}?{options}: {error}"
        ) from error
    return files
