"""Checkpoints that do not depend on the plan: tensors by layer name, tables in the global order of rows.

Each worker writes one file: rows of its tables, and if it is the first replica of its stage the other tensors too
(`stored_tensors.py`). So another number of replicas, or another cut into stages, reads the rows that it needs.

A checkpoint is a list of folders, oldest first: one with whole rows, and those with what changed since. The manifest
lists all of it, bears a tag made with the run's key, and is written last. Where a file is damaged all workers go back
to the checkpoint before it. `checkpoint_writer.py` writes them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from heterps_core.errors import CheckpointError, ConfigurationError
from heterps_core.json_codec import JsonDocument, to_json
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.storage.named_tensors import (
    dense_optimizer_state,
    fill_swept_rows,
    fill_tensors,
    row_optimizer_state,
    weights_of,
)
from heterps_core.training.storage.run_directory import CHECKPOINTS, RunDirectory
from heterps_core.training.storage.stored_tensors import StoredLayer, TensorManifest
from heterps_core.training.storage.verified_files import DamagedFileError, read_signed_json, write_signed_json
from heterps_core.transport.json_messages import gather_json

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 3
"""1 was that of torch.distributed.checkpoint, which unpickles."""

_WITHOUT_LAYERS = 2
"""Each checkpoint of this version is whole, in its own folder."""

MANIFEST = "manifest.json"
WHOLE_SUFFIX = "-whole"
"""Ends the names of folders with nothing but rows, all of them, as they were some steps after the step of the
name."""

_FOLDER = re.compile(rf"\d{{8}}(?:{WHOLE_SUFFIX})?")


@dataclass(frozen=True, slots=True)
class TrainingCursor(JsonDocument):
    """The batch that comes next. With the seed it names the rows of every later batch."""

    epoch: int = 0
    batch_index: int = 0
    """Within the epoch."""

    step: int = 0
    """Batches trained before, over all epochs."""

    def after_batch(self, batches_per_epoch: int) -> TrainingCursor:
        """Return the cursor after one more batch."""
        if self.batch_index + 1 < batches_per_epoch:
            return TrainingCursor(self.epoch, self.batch_index + 1, self.step + 1)
        return TrainingCursor(self.epoch + 1, 0, self.step + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checkpoint:
    """Content of a checkpoint's manifest."""

    cursor: TrainingCursor
    """The batch that comes next."""

    layers: tuple[StoredLayer, ...]
    """Oldest first."""


def load_latest_checkpoint(run: RunDirectory, model: StageModel) -> TrainingCursor | None:
    """Load the newest checkpoint that is whole into this replica's layers, in place.

    Every process of the world takes part, where there is one: they all load the same, so that what is damaged for one
    counts for none.

    Returns:
        The batch that comes next, or None where there is no checkpoint.

    Raises:
        CheckpointError: All are damaged or of an earlier version, or hold other layers or sizes.
    """
    complete = complete_checkpoints(run)
    problem = ""
    for name in reversed(complete):
        found: _Checkpoint | CheckpointError
        try:
            found = read_checkpoint(run, name)
            fill_tensors(run, found.layers, model, all_tensors(model))
            fill_swept_rows(run, found.layers, model)
        except CheckpointError as error:
            found = error
        problem = _problem_of_any(found)
        if not problem and isinstance(found, _Checkpoint):
            return found.cursor
        logger.warning("the checkpoint of step %d is not used: %s", int(name), problem)
    if complete:
        raise _none_is_usable(complete, problem)
    return None


def step_to_resume_from(run: RunDirectory) -> int:
    """Return the step of the newest checkpoint whose manifest is whole, or 0 where there is no checkpoint.

    Needs no model, so that a run that cannot be resumed is refused before machines are rented for it.

    Raises:
        CheckpointError: There are checkpoints, but none whose manifest is whole and of this version.
    """
    complete = complete_checkpoints(run)
    problem = ""
    for name in reversed(complete):
        try:
            return read_checkpoint(run, name).cursor.step
        except DamagedFileError as error:
            problem = str(error)
            logger.warning("the checkpoint of step %d is not used: %s", int(name), problem)
    if complete:
        raise _none_is_usable(complete, problem)
    return 0


def newest_checkpoint_bytes(run: RunDirectory) -> int:
    """Return the bytes of all files of the newest checkpoint whose manifest is whole; 0 where there is none."""
    for name in reversed(complete_checkpoints(run)):
        with suppress(DamagedFileError):
            return sum(layer.tensors.num_bytes for layer in read_checkpoint(run, name).layers)
    return 0


def complete_checkpoints(run: RunDirectory) -> list[str]:
    """Return the names of checkpoints that have a manifest, oldest first."""
    names = [name for name in run.names(CHECKPOINTS) if name.isdecimal()]
    return [name for name in names if run.exists(f"{CHECKPOINTS}/{name}/{MANIFEST}")]


def read_checkpoint(run: RunDirectory, name: str) -> _Checkpoint:
    """Return what the manifest of a checkpoint says.

    Raises:
        DamagedFileError: It is damaged, not authentic, or of an earlier version.
    """
    key = f"{CHECKPOINTS}/{name}/{MANIFEST}"
    document = read_signed_json(run, key)
    try:
        if document["schema_version"] not in (SCHEMA_VERSION, _WITHOUT_LAYERS):
            raise ValueError(
                f"the schema_version must be {SCHEMA_VERSION}, got {document['schema_version']!r}"
            )
        is_whole = document["schema_version"] == _WITHOUT_LAYERS
        layers = [{"folder": name, "tensors": document["tensors"]}] if is_whole else document["layers"]
        return _Checkpoint(
            cursor=TrainingCursor.from_json(document["cursor"]),
            layers=tuple(_layer(layer["folder"], layer["tensors"]) for layer in layers),
        )
    except (KeyError, TypeError, ValueError, ConfigurationError) as error:
        raise DamagedFileError(f"{key} in {run.location} cannot be understood: {error!r}") from error


def write_manifest(run: RunDirectory, cursor: TrainingCursor, layers: Mapping[str, TensorManifest]) -> None:
    """Make a checkpoint complete of which all tensors are written.

    Args:
        cursor: The batch that comes next.
        layers: By the name of their folder.

    Raises:
        OSError: It cannot be written.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "cursor": cursor.to_json(),
        "layers": [{"folder": name, "tensors": to_json(layers[name])} for name in sorted(layers)],
    }
    write_signed_json(run, f"{CHECKPOINTS}/{cursor.step:08d}/{MANIFEST}", document)


def _layer(folder: str, tensors: object) -> StoredLayer:
    if not _FOLDER.fullmatch(folder):
        raise ValueError(f"a folder of a checkpoint must have the number of a step, got {folder!r}")
    return StoredLayer(folder=f"{CHECKPOINTS}/{folder}", tensors=TensorManifest.from_json(tensors))


def _none_is_usable(complete: Sequence[str], problem: str) -> CheckpointError:
    return CheckpointError(
        f"one of the checkpoints {', '.join(complete)} must be whole and of this model, but none is: {problem}; "
        f"start a new run"
    )


def all_tensors(model: StageModel) -> dict[str, Tensor]:
    """Return all tensors of a replica, on its device, by names that do not depend on the plan."""
    return weights_of(model) | row_optimizer_state(model) | dense_optimizer_state(model)


def _problem_of_any(found: _Checkpoint | CheckpointError) -> str:
    """Return why some process of the world cannot load a checkpoint; empty where all can."""
    own = str(found) if isinstance(found, CheckpointError) else ""
    if not dist.is_initialized():
        return own
    return next((problem for problem in gather_json(own) if problem), "")
