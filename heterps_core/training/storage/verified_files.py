"""Files of a run that are believed only where they are as they were written: signed manifests, and what these name.

A manifest is JSON that bears a tag made with the run's key (HMAC-SHA256, RFC 2104). The key is drawn by the flow's
host, kept in its own files, and handed to the nodes of the run when they start; it is never in the run directory. So
one who may write there but is no node of this run cannot make such a file, nor move one to another place, since the
tag is of the place too.

Beside a file that a manifest names, `<file>.sha256` holds the hashes of its blocks of 64 KiB, and the hash of these
is in the manifest. So who trusts the manifest can check what it reads of the file, having read little more.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from heterps_core.errors import CheckpointError, ConfigurationError
from heterps_core.training.storage.run_directory import RunDirectory

BLOCK_BYTES = 65_536
"""A read extends a range by less than one block at either end; hashes of blocks are 0.05 % of the bytes."""

HASHES_SUFFIX = ".sha256"

_HASH_BYTES = hashlib.sha256().digest_size
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PIECE_BYTES = 16 * BLOCK_BYTES
"""Hashed by one thread at a time where a file is read."""

_HASH_THREADS = 4
"""SHA-256 takes longer than a disk; where each core has a worker of its own, they do no harm."""

_TAG, _DOCUMENT = "hmac_sha256", "document"


class DamagedFileError(CheckpointError):
    """A file of a checkpoint or of a start model is missing, damaged or not authentic; the message names it."""


def write_signed_json(run: RunDirectory, key: str, document: Any) -> None:
    """Write a document with its tag; durable on return.

    Raises:
        OSError: It cannot be written.
        ConfigurationError: A run in a bucket has no key.
    """
    signed = {_TAG: _tag(run, key, document), _DOCUMENT: document}
    run.write_bytes(key, json.dumps(signed, indent=1).encode(), is_durable=True)


def read_signed_json(run: RunDirectory, key: str) -> Any:
    """Return a document after checking its tag; raises as `find_signed_json`, also where it is missing."""
    document = find_signed_json(run, key)
    if document is None:
        raise DamagedFileError(f"{key} in {run.location} is missing")
    return document


def read_unverified_json(run: RunDirectory, key: str) -> Any:
    """Return a document without a check of its tag, for what is only shown; None where there is none.

    Earlier versions wrote documents without a tag.
    """
    found = run.read_json(key)
    return None if found is None else found.get(_DOCUMENT, found)


def find_signed_json(run: RunDirectory, key: str) -> Any | None:
    """Return a document after checking its tag; None where there is none.

    Raises:
        DamagedFileError: It is no JSON, or has no tag or another.
        ConfigurationError: A run in a bucket has no key.
    """
    try:
        signed = run.read_json(key)
    except ValueError as error:
        raise DamagedFileError(f"{key} in {run.location} must be JSON, but is damaged: {error}") from error
    if signed is None:
        return None
    if not isinstance(signed, dict) or not isinstance(signed.get(_TAG), str):
        raise DamagedFileError(
            f"{key} in {run.location} must bear a tag of the run's key, but has none: it was written by an earlier "
            f"version of heterps, or by another program"
        )
    if not hmac.compare_digest(signed[_TAG].encode(), _tag(run, key, signed.get(_DOCUMENT)).encode()):
        raise DamagedFileError(
            f"{key} in {run.location} must bear the tag that the run's key gives, but has another: it was changed, "
            f"damaged, or written with another key"
        )
    return signed[_DOCUMENT]


@dataclass(frozen=True, kw_only=True, slots=True)
class HashedFile:
    """Length and checksum of a file."""

    name: str
    num_bytes: int
    hashes_sha256: str
    """SHA-256 of the file with the hashes of its blocks."""

    def __post_init__(self) -> None:
        if not _FILE_NAME.fullmatch(self.name):
            raise ValueError(f"a file of tensors must have a plain name, got {self.name!r}")


class BlockHasher:
    """Takes the SHA-256 of each block of a file while it is written or read from its beginning to its end."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._digests = bytearray()
        self._open = hashlib.sha256()

    def update(self, content: memoryview) -> None:
        """Take in the next bytes."""
        while content:
            room = BLOCK_BYTES - self.num_bytes % BLOCK_BYTES
            block, content = content[:room], content[room:]
            self._open.update(block)
            self.num_bytes += len(block)
            if self.num_bytes % BLOCK_BYTES == 0:
                self._digests += self._open.digest()
                self._open = hashlib.sha256()

    def digests(self) -> bytes:
        """Return the hashes of all blocks [blocks x 32], at the end."""
        return bytes(self._digests) + (self._open.digest() if self.num_bytes % BLOCK_BYTES else b"")


def write_hashes(run: RunDirectory, folder: str, name: str, hasher: BlockHasher) -> HashedFile:
    """Write the hashes of a file's blocks beside it, and return its length and checksum."""
    hashes = hasher.digests()
    run.write_bytes(f"{folder}/{name}{HASHES_SUFFIX}", hashes, is_durable=True)
    return HashedFile(name=name, num_bytes=hasher.num_bytes, hashes_sha256=hashlib.sha256(hashes).hexdigest())


class VerifiedFile:
    """A file that a manifest names, read in parts that are checked.

    Raises:
        DamagedFileError: The hashes of its blocks are missing or not those of the manifest.
    """

    def __init__(self, run: RunDirectory, folder: str, file: HashedFile) -> None:
        self._run = run
        self._key = f"{folder}/{file.name}"
        self._num_bytes = file.num_bytes
        hashes_key = f"{self._key}{HASHES_SUFFIX}"
        self._hashes = _read_or_damaged(run, hashes_key)
        if hashlib.sha256(self._hashes).hexdigest() != file.hashes_sha256:
            raise _damaged(run, hashes_key, "is not the file that the manifest names")

    def read(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        """Yield whole blocks that hold the given bytes, after checking them, each part with its offset.

        Raises:
            DamagedFileError: The file is missing, cannot be read, or is not the one of the manifest.
        """
        run, key = self._run, self._key
        blocks = _whole_blocks(ranges, self._num_bytes)
        num_missing = sum(stop - first for first, stop in blocks)
        try:
            with ThreadPoolExecutor(_HASH_THREADS) as beside:
                for start, content in run.read_ranges(key, blocks):
                    num_missing -= len(content)
                    view = memoryview(content)
                    firsts = range(0, len(content), _PIECE_BYTES)
                    pieces = [view[first : first + _PIECE_BYTES] for first in firsts]
                    for first, found in zip(firsts, beside.map(_digests, pieces), strict=True):
                        number = (start + first) // BLOCK_BYTES
                        if found != self._hashes[number * _HASH_BYTES : number * _HASH_BYTES + len(found)]:
                            raise _damaged(
                                run, key, f"has other bytes after offset {start + first:,} than were written"
                            )
                    yield start, content
        except FileNotFoundError as error:
            raise _damaged(run, key, "is missing") from error
        except OSError as error:
            raise _damaged(run, key, f"cannot be read: {error}") from error
        if num_missing:
            raise _damaged(run, key, f"must have {self._num_bytes:,} bytes, but ends before")


def _tag(run: RunDirectory, key: str, document: Any) -> str:
    if not run.secret and not run.is_local:
        raise ConfigurationError(
            f"{key} in {run.location} must be authenticated by the run's key, as others may write there, but this "
            f"process was given none"
        )
    content = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hmac.new(run.secret, f"{key}\n{content}".encode(), hashlib.sha256).hexdigest()


def _digests(content: memoryview) -> bytes:
    hasher = BlockHasher()
    hasher.update(content)
    return hasher.digests()


def _read_or_damaged(run: RunDirectory, key: str) -> bytes:
    try:
        content = run.read_bytes(key)
    except OSError as error:
        raise _damaged(run, key, f"cannot be read: {error}") from error
    if content is None:
        raise _damaged(run, key, "is missing")
    return content


def _damaged(run: RunDirectory, key: str, how: str) -> DamagedFileError:
    return DamagedFileError(f"{key} in {run.location} {how}")


def _whole_blocks(ranges: Iterable[tuple[int, int]], num_bytes: int) -> list[tuple[int, int]]:
    """Return the blocks that hold some ranges, touching ones together."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(each for each in ranges if each[0] < each[1]):
        block_first = first // BLOCK_BYTES * BLOCK_BYTES
        block_stop = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, num_bytes)
        if found and block_first <= found[-1][1]:
            block_first, before = found.pop()
            block_stop = max(before, block_stop)
        found.append((block_first, block_stop))
    return found
