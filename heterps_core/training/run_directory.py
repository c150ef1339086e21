"""The folder where the flow's host and the nodes of a run meet.

There is no connection between them: each writes small files, whole or not at all, and reads the other's. The
folder is a local path or, with the same code, a bucket ("s3://bucket/prefix", through Arrow's file systems).

    job.json                      what to train; written by the flow
    cluster.json                  who takes part; written by the flow after the launch
    stop                          asks for a checkpoint and an end
    progress.json                 where training is; replaced every second or so
    steps/<first step>.json       metrics of consecutive steps, written once
    checkpoints/<step>/           complete where it has a manifest.json
    nodes/<node id>/heartbeat.json, exit.json, workers.log
    failures/rank-<rank>.json     what a worker died of
    result.json                   quality and counts; written at the good end
    reserve                       room for the last words of nodes on a full disk
    data/                         the prepared data set, where nodes do not see the flow's disk
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from pyarrow import fs

from heterps_core.errors import ConfigurationError

JOB = "job.json"
CLUSTER = "cluster.json"
STOP = "stop"
PROGRESS = "progress.json"
RESULT = "result.json"
STEPS = "steps"
CHECKPOINTS = "checkpoints"
FAILURES = "failures"
DATA = "data"
RESERVE = "reserve"
RESERVED_BYTES = 262_144
"""A few kilobytes for each node and worker that has something to say when the disk is full."""

_MAX_READS = 50
"""Of a file that is replaced again and again; two writes a second leave hundreds of milliseconds to read."""


class RunDirectory:
    """Small files of one run, by keys such as "nodes/0/exit.json".

    Args:
        location: A local path, or a URI that Arrow's file systems know.

    Raises:
        ConfigurationError: The location is of a kind that Arrow does not know.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        try:
            if "://" in location:
                self._files, self._root = fs.FileSystem.from_uri(location)
            else:
                self._files, self._root = fs.LocalFileSystem(), str(Path(location).absolute())
        except (ValueError, OSError) as error:
            raise ConfigurationError(
                f"a run directory must be a local path or a URI such as s3://bucket/prefix, got {location!r}: "
                f"{error}"
            ) from error
        self.is_local = isinstance(self._files, fs.LocalFileSystem)

    def path(self, key: str) -> Path:
        """Return the local path of a key; only where `is_local`."""
        if not self.is_local:
            raise ConfigurationError(f"{self.location} is not a folder of this machine")
        return Path(self._root) / key

    def write_bytes(self, key: str, content: bytes) -> None:
        """Write a whole file; a reader sees the old one or the new one, never a part."""
        target = f"{self._root}/{key}"
        if not self.is_local:
            with self._files.open_output_stream(target) as stream:
                stream.write(content)
            return
        folder = Path(target).parent
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{uuid.uuid4().hex}.part"
        try:
            temporary.write_bytes(content)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def reserve_space(self) -> None:
        """Put a file there that `write_last_words` may give up; a bucket does not need it."""
        if self.is_local:
            self.write_bytes(RESERVE, bytes(RESERVED_BYTES))

    def write_last_words(self, key: str, document: Any) -> None:
        """Write a JSON file that must not be lost, in the reserved space where there is no other."""
        try:
            self.write_json(key, document)
        except OSError:
            self.delete_file(RESERVE)
            self.write_json(key, document)

    def read_bytes(self, key: str) -> bytes | None:
        """Return a file's content, or None where there is none; never parts of two versions.

        Arrow asks a bucket for an object's size and then for so many bytes. Where the object was replaced in
        between, the bytes are cut off or followed by others, so it must have the same tag before and after.

        Raises:
            OSError: The file was replaced during every one of many reads.
        """
        target = f"{self._root}/{key}"
        try:
            for _ in range(_MAX_READS):
                with self._files.open_input_stream(target, compression=None) as stream:
                    before = stream.metadata()
                    content = bytes(stream.read())
                if self.is_local:
                    return content
                with self._files.open_input_stream(target, compression=None) as stream:
                    if stream.metadata() == before:
                        return content
        except FileNotFoundError:
            return None
        raise OSError(f"{key} in {self.location} was replaced during each of {_MAX_READS} reads")

    def write_json(self, key: str, document: Any) -> None:
        """Write a JSON file."""
        self.write_bytes(key, json.dumps(document, indent=1).encode())

    def read_json(self, key: str) -> Any | None:
        """Return a JSON file's content, or None where there is no file."""
        content = self.read_bytes(key)
        return None if content is None else json.loads(content)

    def require_json(self, key: str) -> Any:
        """Return a JSON file's content.

        Raises:
            ConfigurationError: There is no such file.
        """
        document = self.read_json(key)
        if document is None:
            raise ConfigurationError(f"{key} must stand in the run directory {self.location}, but does not")
        return document

    def exists(self, key: str) -> bool:
        """Return whether there is such a file or folder."""
        return bool(self._files.get_file_info(f"{self._root}/{key}").type != fs.FileType.NotFound)

    def names(self, key: str) -> list[str]:
        """Return the sorted names of files and folders directly under a folder; none where it is missing."""
        selector = fs.FileSelector(f"{self._root}/{key}", allow_not_found=True)
        names = [info.base_name for info in self._files.get_file_info(selector)]
        return sorted(name for name in names if not name.startswith("."))

    def file_sizes(self, key: str) -> dict[str, int]:
        """Return the bytes of each file directly under a folder."""
        selector = fs.FileSelector(f"{self._root}/{key}", allow_not_found=True)
        infos = self._files.get_file_info(selector)
        return {info.base_name: info.size for info in infos if info.type == fs.FileType.File}

    def upload_folder(self, source: Path, key: str) -> None:
        """Copy the files directly in a folder of this machine to a folder of the run."""
        self._files.create_dir(f"{self._root}/{key}", recursive=True)
        for path in sorted(source.iterdir()):
            fs.copy_files(str(path), f"{self._root}/{key}/{path.name}", fs.LocalFileSystem(), self._files)

    def download_folder(self, key: str, target: Path) -> None:
        """Copy the files directly in a folder of the run to a folder of this machine."""
        target.mkdir(parents=True, exist_ok=True)
        for name in self.file_sizes(key):
            fs.copy_files(f"{self._root}/{key}/{name}", str(target / name), self._files, fs.LocalFileSystem())

    def delete_file(self, key: str) -> None:
        """Delete a file; a missing one is no error."""
        if self.exists(key):
            self._files.delete_file(f"{self._root}/{key}")

    def delete_folder(self, key: str) -> None:
        """Delete a folder with all below it; a missing one is no error."""
        if self.exists(key):
            self._files.delete_dir(f"{self._root}/{key}")
