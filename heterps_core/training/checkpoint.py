"""Checkpoints that do not depend on the plan: tensors by layer name, tables in the global order of rows.

Tensors go through torch.distributed.checkpoint, each shard written by its owner; tables are DTensors cut by
rows, so another number of replicas, or another cut into stages, reads the rows that it needs. A checkpoint
counts only when its manifest is there, which is written last; what fails half-way is removed, and the
complete ones before it stay.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.errors import CheckpointError
from heterps_core.training.cursor import TrainingCursor
from heterps_core.training.named_tensors import (
    dense_optimizer_state,
    row_optimizer_state,
    tables_by_tensor,
    weights_of,
)
from heterps_core.training.run_directory import CHECKPOINTS, RunDirectory
from heterps_core.training.stage_model import StageModel

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
KEPT_CHECKPOINTS = 2


def save_checkpoint(
    run: RunDirectory, model: StageModel, cursor: TrainingCursor, *, group: ProcessGroup | None
) -> None:
    """Write a checkpoint; every process of the world takes part.

    Args:
        run: Where it goes.
        model: This replica's layers.
        cursor: The batch that comes next.
        group: The replicas of this stage; None where this process is alone.

    Raises:
        CheckpointError: It could not be written, for instance because the disk is full.
    """
    key = f"{CHECKPOINTS}/{cursor.step:08d}"
    is_coordinator = dist.get_rank() == 0
    try:
        with _local_folder(run, key) as folder:
            on_host = {name: tensor.cpu() for name, tensor in _tensors(model).items()}
            save(_state(on_host, model, group), checkpoint_id=folder)
            if not run.is_local:
                run.upload_folder(folder, key)
    except (CheckpointException, OSError, RuntimeError) as error:
        reason = _why_not_written(error, run, cursor)
        if is_coordinator:
            run.delete_folder(key)
        raise CheckpointError(reason) from error
    # The manifest says that all parts are there, so it waits for the last of them.
    dist.barrier()
    if is_coordinator:
        run.write_json(f"{key}/{MANIFEST}", _manifest(cursor, run.file_sizes(key)))
        _delete_old(run)
        logger.info("checkpoint at step %d written to %s/%s", cursor.step, run.location, key)
    # Nobody goes on before the manifest is there, or a crash right now could lose a checkpoint that others count on.
    dist.barrier()


def load_latest_checkpoint(
    run: RunDirectory, model: StageModel, *, group: ProcessGroup | None
) -> TrainingCursor | None:
    """Load the newest complete checkpoint into this replica's layers, in place.

    Returns:
        The batch that comes next, or None where there is no complete checkpoint.

    Raises:
        CheckpointError: It belongs to a model with other layers or sizes, or files of it are damaged.
    """
    complete = complete_checkpoints(run)
    if not complete:
        return None
    key = f"{CHECKPOINTS}/{complete[-1]}"
    manifest = run.require_json(f"{key}/{MANIFEST}")
    _check_files(run, key, manifest)
    try:
        with _local_folder(run, key) as folder, warnings.catch_warnings():
            if not run.is_local:
                run.download_folder(key, folder)
            # Outside of torchrun one process reads the whole checkpoint, and means to.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            tensors = _tensors(model)
            on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
            load(_state(on_host, model, group), checkpoint_id=folder)
            for name, tensor in tensors.items():
                if tensor.device.type != "cpu":
                    tensor.copy_(on_host[name])
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint {key} in {run.location} must hold this model's layers with the same sizes: {error}; "
            f"train from the start in a new run, or use the model that wrote it"
        ) from error
    return TrainingCursor.from_json(manifest["cursor"])


def complete_checkpoints(run: RunDirectory) -> list[str]:
    """Return the names of complete checkpoints, oldest first."""
    return [name for name in run.names(CHECKPOINTS) if run.exists(f"{CHECKPOINTS}/{name}/{MANIFEST}")]


def _tensors(model: StageModel) -> dict[str, Tensor]:
    """Return all tensors of a replica, on its device, by names that do not depend on the plan."""
    return weights_of(model) | row_optimizer_state(model) | dense_optimizer_state(model)


def _state(
    on_host: Mapping[str, Tensor], model: StageModel, group: ProcessGroup | None
) -> dict[str, DTensor | Tensor]:
    """Return what a checkpoint holds of a replica, shards as parts of whole tables; loading fills it in place."""
    table_of = tables_by_tensor(model)
    return {
        name: _as_whole(tensor, table_of[name], group) if name in table_of else tensor
        for name, tensor in on_host.items()
    }


def _as_whole(tensor: Tensor, table: ShardedTable, group: ProcessGroup | None) -> DTensor | Tensor:
    """Return a shard as the whole tensor that it is part of."""
    if group is None or table.num_shards == 1:
        return tensor
    mesh = DeviceMesh.from_group(group, "cpu")
    shape = (table.num_rows, *tensor.shape[1:])
    stride = (table.dimension, 1) if len(shape) == 2 else (1,)
    return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)  # type: ignore[arg-type]


@contextmanager
def _local_folder(run: RunDirectory, key: str) -> Iterator[Path]:
    """Yield the folder of a checkpoint, or a temporary one of this process where the run is not on this disk."""
    if run.is_local:
        yield run.path(key)
        return
    with tempfile.TemporaryDirectory(prefix="heterps-checkpoint-") as folder:
        yield Path(folder)


def _manifest(cursor: TrainingCursor, bytes_per_file: dict[str, int]) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "cursor": cursor.to_json(), "bytes_per_file": bytes_per_file}


def _check_files(run: RunDirectory, key: str, manifest: Mapping[str, Any]) -> None:
    found = run.file_sizes(key)
    for name, size in manifest["bytes_per_file"].items():
        if found.get(name) != size:
            raise CheckpointError(
                f"{name} of the checkpoint {key} in {run.location} must have {size} bytes, but "
                f"{f'has {found[name]}' if name in found else 'is missing'}; delete that folder to go on from the "
                f"checkpoint before it"
            )


def _delete_old(run: RunDirectory) -> None:
    complete = complete_checkpoints(run)
    for name in run.names(CHECKPOINTS):
        # What is older than the kept ones, and what an earlier attempt left unfinished.
        if name not in complete[-KEPT_CHECKPOINTS:]:
            run.delete_folder(f"{CHECKPOINTS}/{name}")


def _why_not_written(error: BaseException, run: RunDirectory, cursor: TrainingCursor) -> str:
    causes = list(error.failures.values()) if isinstance(error, CheckpointException) else [error]
    cause = causes[0][0] if causes and isinstance(causes[0], tuple) else causes[0] if causes else error
    complete = complete_checkpoints(run)
    # What torch's writer raises on a full disk does not say so.
    free = f", with {shutil.disk_usage(run.path('')).free:,} bytes free there" if run.is_local else ""
    kept = f"the checkpoint of step {int(complete[-1])} stays" if complete else "there is none before it"
    return (
        f"the checkpoint of step {cursor.step} could not be written to {run.location}{free}: {cause}; {kept}; "
        f"free space there and resume the run"
    )
