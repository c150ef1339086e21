"""A model to begin with: the weights of one that was exported before, whatever plan trained it, and its optimizers.

Each worker reads its own layers and its own rows of the tables, so any cut into stages and any number of replicas
begins with the same model, and goes on as if there had been no break.

The files are in the safetensors format (github.com/huggingface/safetensors): 8 bytes with the length of a header, the
header as JSON (type, shape and place of each tensor), then the tensors. They are read here without that package,
which rented nodes do not have.
"""

from __future__ import annotations

import json
import logging
import mmap
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.errors import CheckpointError
from heterps_core.serving.exported_files import OPTIMIZER_STATE, WEIGHTS, file_sha256
from heterps_core.training.checkpoint import load_latest_checkpoint
from heterps_core.training.cursor import TrainingCursor
from heterps_core.training.job import StartModel, TrainingConfig, TrainingJob
from heterps_core.training.named_tensors import (
    dense_optimizer_state,
    row_optimizer_state,
    tables_by_tensor,
    weights_of,
)
from heterps_core.training.run_directory import START_MODEL, RunDirectory
from heterps_core.training.stage_model import StageModel

_LENGTH_BYTES = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

logger = logging.getLogger(__name__)


def begin(
    run: RunDirectory, job: TrainingJob, model: StageModel, *, group: ProcessGroup | None
) -> TrainingCursor:
    """Load what training goes on from: the run's own newest checkpoint, else the job's start model, else nothing.

    Returns:
        The batch that comes next.

    Raises:
        CheckpointError: What is there cannot be loaded into this replica's layers.
    """
    cursor = load_latest_checkpoint(run, model, group=group)
    if cursor is not None:
        return cursor
    if job.start_model is not None:
        load_start_model(run, job.start_model, model, config=job.config)
    return TrainingCursor()


def load_start_model(
    run: RunDirectory, start: StartModel, model: StageModel, *, config: TrainingConfig
) -> None:
    """Load the start model into this replica's layers and table shards, in place: weights, then optimizer state.

    State of an optimizer of another kind is left aside; so is that of all where the start model has none.

    Raises:
        CheckpointError: A file is not the one of the job, or has other layers or sizes than this model.
    """
    tables = tables_by_tensor(model)
    with _verified_file(run, start, WEIGHTS, start.weights_sha256) as file:
        _fill(weights_of(model), tables, file)
    logger.info("begins with the weights of version %s, trained by run %s", start.version, start.run_id)
    state = start.optimizer_state
    if state is None:
        logger.info("the optimizers start anew: version %s holds no state of theirs", start.version)
        return
    goes_on: dict[str, Tensor] = {}
    if state.dense_optimizer == config.dense_optimizer:
        goes_on |= dense_optimizer_state(model)
    if state.embedding_optimizer == config.embedding_optimizer:
        goes_on |= row_optimizer_state(model)
    with _verified_file(run, start, OPTIMIZER_STATE, state.sha256) as file:
        _fill(goes_on, tables, file)
    for name, tensor in goes_on.items():
        if name.endswith(".accumulator"):
            tensor.mul_(start.accumulators_kept)
    for change in state.left_aside(
        dense_optimizer=config.dense_optimizer, embedding_optimizer=config.embedding_optimizer
    ):
        logger.info("%s", change)


def _fill(tensors: Mapping[str, Tensor], tables: Mapping[str, ShardedTable], file: _TensorFile) -> None:
    """Fill tensors of a replica with those of the same name, those of tables with their own rows."""
    for name, tensor in tensors.items():
        # No view may have a name here: an error would keep it, and the file then could not be closed.
        if name in tables:
            table = tables[name]
            tensor.copy_(
                file.read(name, (table.num_rows, *tensor.shape[1:]))[table.rows.first : table.rows.stop]
            )
        else:
            tensor.copy_(file.read(name, tuple(tensor.shape)))


class _TensorFile:
    """The tensors of a mapped file; they are views and must not outlive it."""

    def __init__(self, mapped: mmap.mmap) -> None:
        length = int.from_bytes(mapped[:_LENGTH_BYTES], "little")
        self._first = _LENGTH_BYTES + length
        self._header: Mapping[str, Any] = json.loads(mapped[_LENGTH_BYTES : self._first])
        self._mapped = mapped

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor, which must have the shape.

        Raises:
            CheckpointError: There is none, or it has another.
        """
        entry = self._header.get(name, {})
        sizes = entry.get("shape", "none")
        if sizes != list(shape):
            raise CheckpointError(
                f"the start model must hold {name} with the sizes {list(shape)} of the model that is trained, got "
                f"{sizes}; train from scratch, or with the model and table sizes that it was made with"
            )
        first, stop = entry["data_offsets"]
        if first == stop:
            return torch.empty(shape)
        dtype = _DTYPES[entry["dtype"]]
        count = (stop - first) // dtype.itemsize
        flat = torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=self._first + first)
        return flat.view(shape)


@contextmanager
def _verified_file(run: RunDirectory, start: StartModel, name: str, sha256: str) -> Iterator[_TensorFile]:
    """Yield a file of the start model after checking it, fetched where the run is not on this disk."""
    with _local_file(run, name) as path:
        found = file_sha256(path)
        if found != sha256:
            raise CheckpointError(
                f"{START_MODEL}/{name} of the run directory must have the SHA-256 {sha256} of version "
                f"{start.version}, got {found}; it was changed or damaged: start the run anew"
            )
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            yield _TensorFile(mapped)


@contextmanager
def _local_file(run: RunDirectory, name: str) -> Iterator[Path]:
    """Yield a file of the start model as one of this machine."""
    key = f"{START_MODEL}/{name}"
    if run.is_local:
        yield run.path(key)
        return
    with tempfile.TemporaryDirectory(prefix="heterps-start-") as folder:
        path = Path(folder) / name
        size = run.file_sizes(START_MODEL).get(name, 0)
        if size:
            run.download_ranges(key, path, [(0, size)])
        yield path
