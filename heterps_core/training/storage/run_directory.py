"""The folder where the flow's host and the nodes of a run meet.

There is no connection between them: each writes small files, whole or not at all, and reads the other's. The
folder is a local path or, with the same code, a bucket ("s3://bucket/prefix", through Arrow's file systems).

    job.json                      what to train; written by the flow
    cluster.json                  who takes part; written by the flow after the launch
    stop                          asks for a checkpoint and an end
    progress.json                 where training is; replaced every second or so
    steps/<first step>.json       metrics of consecutive steps, written once
    checkpoints/<step>/           rank-<rank>.bin and their hashes: what changed since the one before, or all where
                                  that is little; complete where it has a manifest.json
    checkpoints/<step>-whole/     all rows of tables, which later checkpoints begin with
    nodes/<node id>/heartbeat.json, exit.json of the first generation, exit-<generation>.json, workers.log
    failures/rank-<rank>.json     what a worker died of
    leases/<launch>               renewed by the flow; a node ends itself where it no longer changes
    result.json                   quality and counts; written at the good end
    reserve                       room for the last words of nodes on a full disk
    usage/<process>.json          what a process asked of the bucket, written at its end
    data/                         the prepared data set, where nodes do not see the flow's disk
    start_model/                  the exported model that training goes on from, with hashes and a manifest.json

Nothing here is a pickle, and no name that stands in a file leads out of the run's folder: the flow's host reads what
machines have written that it does not trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from heterps_core.bucket_files import files_of
from heterps_core.errors import ConfigurationError
from heterps_core.training.storage.counted_file import CountedFile
from heterps_core.training.storage.store import StorageUsage, check_store_location

JOB = "job.json"
CLUSTER = "cluster.json"
STOP = "stop"
PROGRESS = "progress.json"
RESULT = "result.json"
SHARES = "shares.json"
STEPS = "steps"
USAGE = "usage"
CHECKPOINTS = "checkpoints"
FAILURES = "failures"
DATA = "data"
START_MODEL = "start_model"
LEASES = "leases"
RESERVE = "reserve"
RESERVED_BYTES = 262_144
"""A few kilobytes for each node and worker that has something to say when the disk is full."""

_PART_BYTES = 10 * 1024**2
"""Arrow writes larger files in parts of this size, each a request, with one before and one after."""

_BLOCK_BYTES = 16 * 1024**2
"""Read at once where files are copied, each a request."""

_MAX_READS = 50
"""Most reads of a file that is replaced again and again; two writes a second leave hundreds of milliseconds to
read."""

_MAX_FAILED_READS = 3


class RunDirectory:
    """Small files of one run, by keys such as "nodes/0/exit.json".

    Args:
        location: A local path, or a URI that Arrow's file systems know.
        secret: The run's key, which authenticates manifests (`verified_files.py`); never stored here. Without one a
            manifest is protected against damage, but not against forgery.

    Raises:
        ConfigurationError: The location is of a kind that Arrow does not know, or holds credentials.
    """

    def __init__(self, location: str, *, secret: bytes = b"") -> None:
        check_store_location(location)
        self.location = location
        self.secret = secret
        self._counting = threading.Lock()
        self.usage = StorageUsage()
        """Requests of this process to a bucket; a local folder costs nothing."""
        try:
            if "://" in location:
                self._files, self._root = files_of(_with_small_writes(location))
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

    def write_bytes(self, key: str, content: bytes, *, is_durable: bool = False) -> None:
        """Write a whole file; a reader sees the old one or the new one, never a part.

        Args:
            is_durable: Return only when it would survive a power failure; a bucket always does so.
        """
        target = f"{self._root}/{key}"
        if not self.is_local:
            with self._files.open_output_stream(target) as stream:
                stream.write(content)
            self._count_write(len(content))
            return
        folder = Path(target).parent
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{uuid.uuid4().hex}.part"
        try:
            with temporary.open("wb") as file:
                file.write(content)
                if is_durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(target)
            if is_durable:
                _sync_folder(folder)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def appending(self, key: str) -> Iterator[Callable[[memoryview], object]]:
        """Yield a function that appends to a new file, which is durable at the end of the block.

        A reader may see a part of it: what names the file must be written afterwards.

        Raises:
            OSError: It cannot be written.
        """
        target = f"{self._root}/{key}"
        num_bytes = 0

        def append(content: memoryview) -> None:
            nonlocal num_bytes
            file.write(content)
            num_bytes += content.nbytes

        if not self.is_local:
            with self._files.open_output_stream(target) as file:
                yield append
            self._count_write(num_bytes)
            return
        folder = Path(target).parent
        folder.mkdir(parents=True, exist_ok=True)
        with Path(target).open("wb") as file:
            yield append
            file.flush()
            os.fsync(file.fileno())
        for changed in (folder, folder.parent):
            _sync_folder(changed)

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
        between, the bytes are cut off or followed by others. So what was read must have the hash that its tag is. A
        tag that is none (uploads in parts) must be the same before and after; one that only looks like a hash
        (encryption with one's own keys) must come twice with the same bytes.

        Raises:
            OSError: The file was replaced during every one of many reads.
        """
        target = f"{self._root}/{key}"
        previous: tuple[str, bytes] | None = None
        num_failed = 0
        try:
            for _ in range(_MAX_READS):
                try:
                    with self._files.open_input_stream(target, compression=None) as stream:
                        before = stream.metadata()
                        content = bytes(stream.read())
                except FileNotFoundError:
                    raise
                except OSError:
                    # Shorter than its size said a moment ago: replaced in between, unless the store itself fails.
                    num_failed += 1
                    if self.is_local or num_failed > _MAX_FAILED_READS:
                        raise
                    continue
                if self.is_local:
                    return content
                self._count(get_requests=2, bytes_read=len(content))
                if _tag(before) == hashlib.md5(content, usedforsecurity=False).hexdigest():
                    return content
                self._count(get_requests=1)
                with self._files.open_input_stream(target, compression=None) as stream:
                    is_same = stream.metadata() == before
                if is_same and (not _is_hash(_tag(before)) or (_tag(before), content) == previous):
                    return content
                previous = (_tag(before), content)
        except FileNotFoundError:
            self._count(get_requests=1)
            return None
        raise OSError(f"{key} in {self.location} was replaced during each of {_MAX_READS} reads")

    def write_json(self, key: str, document: Any) -> None:
        """Write a JSON file."""
        self.write_bytes(key, json.dumps(document, indent=1).encode())

    def read_json(self, key: str) -> Any | None:
        """Return a JSON file's content, or None where there is no file.

        Parts of two versions that pass the checks of `read_bytes`, as the same two came twice, are no JSON: neither a
        part of an object nor one with something after it is.

        Raises:
            ValueError: It is damaged.
        """
        reads_left = 1 if self.is_local else _MAX_READS
        while True:
            reads_left -= 1
            content = self.read_bytes(key)
            try:
                return None if content is None else json.loads(content)
            except ValueError:
                if not reads_left:
                    raise

    def require_json(self, key: str) -> Any:
        """Return a JSON file's content.

        Raises:
            ConfigurationError: There is no such file.
        """
        document = self.read_json(key)
        if document is None:
            raise ConfigurationError(f"{key} must stand in the run directory {self.location}, but does not")
        return document

    def request_stop(self, reason: str = "") -> None:
        """Ask the workers to write a checkpoint and end.

        Args:
            reason: Of a flow that goes on afterwards; empty where the run is to end.
        """
        self.write_bytes(STOP, reason.encode())

    def stop_reason(self) -> str | None:
        """Return why a stop was asked for last, None where it was not."""
        reason = self.read_bytes(STOP)
        return None if reason is None else reason.decode()

    def is_trained(self) -> bool:
        """Tell whether the model is trained and judged, and its last checkpoint written."""
        result = self.read_json(RESULT)
        return result is not None and bool(result["is_complete"])

    def exists(self, key: str) -> bool:
        """Return whether there is such a file or folder."""
        is_there = bool(self._files.get_file_info(f"{self._root}/{key}").type != fs.FileType.NotFound)
        self._count(get_requests=1, put_requests=0 if is_there else 1)
        return is_there

    def names(self, key: str) -> list[str]:
        """Return the sorted names of files and folders directly under a folder; none where it is missing."""
        names = [info.base_name for info in self._list(key)]
        return sorted(name for name in names if not name.startswith("."))

    def file_sizes(self, key: str) -> dict[str, int]:
        """Return the bytes of each file directly under a folder."""
        return {info.base_name: info.size for info in self._list(key) if info.type == fs.FileType.File}

    def stamps(self, key: str) -> dict[str, int]:
        """Return when each file below a folder was last written, in the store's own clock (ns), by its key.

        One request tells of all files of all nodes.
        """
        infos = [info for info in self._list(key, recursive=True) if info.type == fs.FileType.File]
        return {info.path.removeprefix(f"{self._root}/"): info.mtime_ns for info in infos}

    def _list(self, key: str, *, recursive: bool = False) -> list[fs.FileInfo]:
        """Return what is below a folder; nothing where it is missing."""
        selector = fs.FileSelector(f"{self._root}/{key}", allow_not_found=True, recursive=recursive)
        reads_left = _MAX_READS
        while True:
            reads_left -= 1
            self._count(put_requests=1)
            try:
                return list(self._files.get_file_info(selector))
            except FileNotFoundError:
                # A folder that is made between listing it and looking whether it is there is an error to Arrow.
                if not reads_left:
                    raise

    def upload_folder(self, source: Path, key: str) -> None:
        """Copy the files directly in a folder of this machine to a folder of the run."""
        if self.is_local:
            # A bucket has no folders; marks for them would be written beside other runs, which a node may not.
            self._files.create_dir(f"{self._root}/{key}", recursive=True)
        for path in sorted(source.iterdir()):
            target = f"{self._root}/{key}/{path.name}"
            local = fs.LocalFileSystem()
            fs.copy_files(str(path), target, local, self._files, chunk_size=_BLOCK_BYTES)
            self._count_write(path.stat().st_size)

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        """Yield the given (first, stop) bytes of a file, in parts of at most 16 MiB, each with where it begins.

        A part is shorter where the file ends before it.

        Raises:
            OSError: There is no such file, or it cannot be read.
        """
        with self._files.open_input_file(f"{self._root}/{key}") as source:
            self._count(get_requests=1)
            yield from self._parts(source, ranges)

    def open_file(self, key: str) -> pa.NativeFile:
        """Open a file to read parts of it, each of which counts as a request.

        Raises:
            OSError: There is no such file, or it cannot be read.
        """
        source = self._files.open_input_file(f"{self._root}/{key}")
        self._count(get_requests=1)
        return source if self.is_local else pa.PythonFile(CountedFile(source, self._count), mode="r")

    def _parts(self, source: pa.NativeFile, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        for first, stop in ranges:
            for start in range(first, stop, _BLOCK_BYTES):
                content = source.read_at(min(_BLOCK_BYTES, stop - start), start)
                self._count(get_requests=1, bytes_read=len(content))
                yield start, content

    def delete_file(self, key: str) -> None:
        """Delete a file; a missing one is no error."""
        if self.exists(key):
            self._files.delete_file(f"{self._root}/{key}")
            self._count(get_requests=1, put_requests=1)

    def delete_folder(self, key: str) -> None:
        """Delete a folder with all below it; a missing one is no error."""
        if self.exists(key):
            self._files.delete_dir(f"{self._root}/{key}")
            self._count(get_requests=1, put_requests=4)

    def num_bytes(self, key: str = "") -> int:
        """Return how much stands below a folder, or in the whole run directory; none where it is missing."""
        infos = self._list(key, recursive=True)
        return sum(info.size for info in infos if info.type == fs.FileType.File)

    def clear(self, *, kept: Collection[str] = ()) -> None:
        """Delete all but some files directly in the run directory, and itself where none of those is there."""
        infos = self._list("")
        if not any(info.base_name in kept for info in infos):
            self.delete_folder("")
            return
        for info in infos:
            if info.base_name in kept:
                continue
            delete = self.delete_folder if info.type == fs.FileType.Directory else self.delete_file
            delete(info.base_name)

    def _count_write(self, num_bytes: int) -> None:
        """Count the requests of a written file: one, or one for each part and two around them."""
        num_parts = -(-num_bytes // _PART_BYTES)
        self._count(put_requests=1 if num_bytes < _PART_BYTES else num_parts + 2, bytes_written=num_bytes)

    def _count(self, **more: int) -> None:
        if not self.is_local:
            with self._counting:
                self.usage += StorageUsage(**more)


def _sync_folder(folder: Path) -> None:
    """Return once the names of a folder's files are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tag(metadata: Mapping[str, bytes]) -> str:
    return metadata.get("ETag", b"").decode().strip('"')


def _is_hash(tag: str) -> bool:
    """Tell whether a tag has the form of an MD5; one of an upload in parts has a dash."""
    return re.fullmatch(r"[0-9a-f]{32}", tag) is not None


def _with_small_writes(location: str) -> str:
    """Let Arrow write a small file with one request instead of the three of an upload in parts."""
    if not location.startswith("s3://") or "allow_delayed_open" in location:
        return location
    return f"{location}{'&' if '?' in location else '?'}allow_delayed_open=true"
