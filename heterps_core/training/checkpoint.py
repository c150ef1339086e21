"""Checkpoints that do not depend on the plan: tensors by layer name, tables in the global order of rows.

Each worker writes one file: its rows of the tables, and if it is the first replica of its stage the other tensors too
(`stored_tensors.py`). So another number of replicas, or another cut into stages, reads the rows that it needs. The
manifest lists all of it, bears a tag made with the run's key, and is written last; what fails half-way is removed.
The newest two are kept, and where one is damaged all workers go back to the one before it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heterps_core.errors import CheckpointError, ConfigurationError
from heterps_core.json_codec import JsonDocument
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.storage.named_tensors import (
    dense_optimizer_state,
    fill_swept_rows,
    fill_tensors,
    row_optimizer_state,
    rows_on_host,
    swept_rows,
    tables_by_tensor,
    weights_of,
)
from heterps_core.training.storage.run_directory import CHECKPOINTS, RunDirectory
from heterps_core.training.storage.stored_tensors import TensorManifest, TensorRows, write_tensors
from heterps_core.training.storage.verified_files import DamagedFileError, read_signed_json, write_signed_json

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2
"""1 was that of torch.distributed.checkpoint, which unpickles."""

MANIFEST = "manifest.json"
KEPT_CHECKPOINTS = 2


@dataclass(frozen=True, slots=True)
class TrainingCursor(JsonDocument):
    """The batch that comes next. With the seed it names the rows of every later batch."""

    epoch: int = 0
    batch_index: int = 0
    """Within the epoch."""

    step: int = 0
    """Batches trained before, over all epochs."""

    def after_batch(self, batches_per_epoch: int) -> TrainingCursor:
        """Return the cursor behind one more batch."""
        if self.batch_index + 1 < batches_per_epoch:
            return TrainingCursor(self.epoch, self.batch_index + 1, self.step + 1)
        return TrainingCursor(self.epoch + 1, 0, self.step + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What the manifest of a checkpoint says."""

    cursor: TrainingCursor
    """The batch that comes next."""

    tensors: TensorManifest


def save_checkpoint(
    run: RunDirectory, model: StageModel, cursor: TrainingCursor, *, group: ProcessGroup | None
) -> None:
    """Write a checkpoint; every process of the world takes part.

    Args:
        group: The replicas of this stage; None where this process is alone.

    Raises:
        CheckpointError: It could not be written, for instance because the disk is full.
    """
    key = f"{CHECKPOINTS}/{cursor.step:08d}"
    own: TensorManifest | str
    try:
        owned = chain(_owned(model, group).items(), swept_rows(model))
        own = write_tensors(run, key, f"rank-{dist.get_rank():05d}.bin", owned)
    except OSError as error:
        own = str(error)
    # The manifest says that all parts are there, so it waits for the last of them, and all wait for the manifest: a
    # crash right now could lose a checkpoint that others count on.
    is_coordinator = dist.get_rank() == 0
    parts: list[TensorManifest | str | None] = [None] * dist.get_world_size()
    dist.gather_object(own, parts if is_coordinator else None)
    outcome: list[str | None] = [_complete(run, key, cursor, parts) if is_coordinator else None]
    dist.broadcast_object_list(outcome)
    if outcome[0] is not None:
        raise CheckpointError(outcome[0])


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
        found: Checkpoint | CheckpointError
        try:
            found = read_checkpoint(run, name)
            fill_tensors(run, f"{CHECKPOINTS}/{name}", found.tensors, model, _tensors(model))
            fill_swept_rows(run, f"{CHECKPOINTS}/{name}", found.tensors, model)
        except CheckpointError as error:
            found = error
        problem = _problem_of_any(found)
        if not problem and isinstance(found, Checkpoint):
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


def complete_checkpoints(run: RunDirectory) -> list[str]:
    """Return the names of checkpoints that have a manifest, oldest first."""
    names = [name for name in run.names(CHECKPOINTS) if name.isdecimal()]
    return [name for name in names if run.exists(f"{CHECKPOINTS}/{name}/{MANIFEST}")]


def read_checkpoint(run: RunDirectory, name: str) -> Checkpoint:
    """Return what the manifest of a checkpoint says.

    Raises:
        DamagedFileError: It is damaged, not authentic, or of an earlier version.
    """
    key = f"{CHECKPOINTS}/{name}/{MANIFEST}"
    document = read_signed_json(run, key)
    try:
        if document["schema_version"] != SCHEMA_VERSION:
            raise ValueError(
                f"the schema_version must be {SCHEMA_VERSION}, got {document['schema_version']!r}"
            )
        return Checkpoint(
            cursor=TrainingCursor.from_json(document["cursor"]),
            tensors=TensorManifest.from_json(document["tensors"]),
        )
    except (KeyError, TypeError, ValueError, ConfigurationError) as error:
        raise DamagedFileError(f"{key} in {run.location} cannot be understood: {error!r}") from error


def _none_is_usable(complete: Sequence[str], problem: str) -> CheckpointError:
    return CheckpointError(
        f"one of the checkpoints {', '.join(complete)} must be whole and of this model, but none is: {problem}; "
        f"start a new run"
    )


def _owned(model: StageModel, group: ProcessGroup | None) -> dict[str, TensorRows]:
    """Return what this replica writes: its rows of shared tables, and what all replicas have alike if it is first."""
    is_first = group is None or dist.get_rank(group) == 0
    tables = tables_by_tensor(model)
    own = {
        name: tensor
        for name, tensor in _tensors(model).items()
        if is_first or (name in tables and tables[name].num_shards > 1)
    }
    return rows_on_host(model, own)


def _tensors(model: StageModel) -> dict[str, Tensor]:
    """Return all tensors of a replica, on its device, by names that do not depend on the plan."""
    return weights_of(model) | row_optimizer_state(model) | dense_optimizer_state(model)


def _complete(
    run: RunDirectory, key: str, cursor: TrainingCursor, parts: Sequence[TensorManifest | str | None]
) -> str | None:
    """Write the manifest of what all workers have written, or return why there is no checkpoint."""
    tensors, problem = TensorManifest(), None
    for part in parts:
        if isinstance(part, TensorManifest):
            tensors += part
        else:
            problem = problem or part
    if problem is None:
        try:
            write_signed_json(
                run,
                f"{key}/{MANIFEST}",
                {
                    "schema_version": SCHEMA_VERSION,
                    "cursor": cursor.to_json(),
                    "tensors": tensors.to_json(),
                },
            )
        except OSError as error:
            problem = str(error)
    if problem is not None:
        run.delete_folder(key)
        return _why_not_written(problem, run, cursor)
    _delete_old(run)
    logger.info("checkpoint at step %d written to %s/%s", cursor.step, run.location, key)
    return None


def _problem_of_any(found: Checkpoint | CheckpointError) -> str:
    """Return why some process of the world cannot load a checkpoint; empty where all can."""
    own = str(found) if isinstance(found, CheckpointError) else ""
    if not dist.is_initialized():
        return own
    problems = [own] * dist.get_world_size()
    dist.all_gather_object(problems, own)
    return next((problem for problem in problems if problem), "")


def _delete_old(run: RunDirectory) -> None:
    complete = complete_checkpoints(run)
    for name in run.names(CHECKPOINTS):
        # What is older than the kept ones, and what an earlier attempt left unfinished.
        if name not in complete[-KEPT_CHECKPOINTS:]:
            run.delete_folder(f"{CHECKPOINTS}/{name}")


def _why_not_written(cause: str, run: RunDirectory, cursor: TrainingCursor) -> str:
    complete = complete_checkpoints(run)
    free = f", with {shutil.disk_usage(run.path('')).free:,} bytes free there" if run.is_local else ""
    kept = f"the checkpoint of step {int(complete[-1])} stays" if complete else "there is none before it"
    return (
        f"the checkpoint of step {cursor.step} could not be written to {run.location}{free}: {cause}; {kept}; "
        f"free space there and resume the run"
    )
