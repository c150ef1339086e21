"""The files of an exported model, and the check that they are whole; without torch, for checks alone.

model.safetensors        every weight by "layer.parameter"; no pickle, so loading runs nothing
model.json               name of the model, its features, schema and numeric transform, hashes of the other files
optimizer.safetensors    what the optimizers had accumulated, for training that goes on; predictions do not need it
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heterps_core.errors import CheckpointError, ConfigurationError

SCHEMA_VERSION = 1
WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
OPTIMIZER_STATE = "optimizer.safetensors"

REMEMBERED_BYTES = 16 * 1024**2
"""From which size on the hash of a file is remembered: the steps after a training asked eight times for that of the
weights, 0.6 s of a core for a gigabyte each time."""

SETTLED_NS = 2_000_000_000
"""More than the steps in which file systems count times: a file that was changed so lately is read again."""

_hashes: dict[tuple[int, ...], str] = {}


def read_description(folder: Path) -> Mapping[str, Any]:
    """Return what stands in model.json, after checking the weights against it.

    Raises:
        CheckpointError: A file is missing or damaged, or the weights are not those that it was written for.
        ConfigurationError: The schema version is another one.
    """
    path = folder / DESCRIPTION
    try:
        description: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} must be JSON, but is damaged ({error}): export the model again"
        ) from error
    if description.get("schema_version") != SCHEMA_VERSION:
        raise ConfigurationError(
            f"{path} must have schema_version {SCHEMA_VERSION}, got {description.get('schema_version')!r}"
        )
    check_sha256(folder / WEIGHTS, description["weights_sha256"], way_out="export the model again")
    return description


def check_sha256(path: Path, sha256: str, *, way_out: str) -> None:
    """Check that a file of an exported model is the one that the hash was taken of.

    Raises:
        CheckpointError: It is another, or cannot be read.
    """
    found = file_sha256(path)
    if found != sha256:
        raise CheckpointError(
            f"{path} must have the SHA-256 {sha256}, got {found}; it was changed or damaged: {way_out}"
        )


def exported_sha256(folder: Path) -> str:
    """Return one hash of what an exported model predicts with: that of what `sha256sum` prints for the two files.

    The description holds the hashes of the others, and its own hash is kept elsewhere.

    Raises:
        CheckpointError: A file is missing.
    """
    digest = hashlib.sha256()
    for name in (DESCRIPTION, WEIGHTS):
        digest.update(f"{file_sha256(folder / name)}  {name}\n".encode())
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file; a large one is read once, as long as its inode stays as it was.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            stat, now_ns = os.fstat(file.fileno()), time.time_ns()
            # No program can set the time of an inode's last change; one so late might come again with other bytes.
            is_settled = stat.st_size >= REMEMBERED_BYTES and stat.st_ctime_ns < now_ns - SETTLED_NS
            key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            if is_settled and key in _hashes:
                return _hashes[key]
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if is_settled:
                _hashes[key] = found
            return found
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"an exported model must have the file {path}, but it cannot be read: {error.strerror or error}"
    )
