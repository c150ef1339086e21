"""Weights to begin with: those of a model that was exported before, whatever plan trained it.

Each worker reads its own layers and its own rows of the tables, so any cut into stages and any number of replicas
begins with the same model. What the optimizers had accumulated is not part of an exported model: they start anew.

The file is in the safetensors format (github.com/huggingface/safetensors): 8 bytes with the length of a header, the
header as JSON (type, shape and place of each tensor), then the tensors. It is read here without that package, which
rented nodes do not have.
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

from heterps_core.errors import CheckpointError
from heterps_core.serving.exported_files import WEIGHTS, file_sha256
from heterps_core.training.checkpoint import load_latest_checkpoint
from heterps_core.training.cursor import TrainingCursor
from heterps_core.training.job import StartModel, TrainingJob
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
        load_start_model(run, job.start_model, model)
    return TrainingCursor()


def load_start_model(run: RunDirectory, start: StartModel, model: StageModel) -> None:
    """Load the weights of the start model into this replica's layers and table shards, in place.

    Raises:
        CheckpointError: The file is not the one of the job, or has other layers or sizes than this model.
    """
    with _local_file(run) as path:
        _check_hash(path, start)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            weights = _Weights(mapped)
            for name, table in model.tables.items():
                rows = weights.read(f"{name}.weight", (table.num_rows, table.dimension))
                table.weight_RD.copy_(rows[table.rows.first : table.rows.stop])
                del rows
            for name, layer in model.layers.items():
                own = layer.state_dict()
                for key, tensor in own.items():
                    tensor.copy_(weights.read(f"{name}.{key}", tuple(tensor.shape)))
            del weights
    logger.info("begins with the weights of version %s, trained by run %s", start.version, start.run_id)


class _Weights:
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
def _local_file(run: RunDirectory) -> Iterator[Path]:
    """Yield the weights as a file of this machine, fetched where the run is not on this disk."""
    key = f"{START_MODEL}/{WEIGHTS}"
    if run.is_local:
        yield run.path(key)
        return
    with tempfile.TemporaryDirectory(prefix="heterps-start-") as folder:
        path = Path(folder) / WEIGHTS
        size = run.file_sizes(START_MODEL).get(WEIGHTS, 0)
        if size:
            run.download_ranges(key, path, [(0, size)])
        yield path


def _check_hash(path: Path, start: StartModel) -> None:
    found = file_sha256(path)
    if found != start.weights_sha256:
        raise CheckpointError(
            f"{START_MODEL}/{WEIGHTS} of the run directory must have the SHA-256 {start.weights_sha256} of version "
            f"{start.version}, got {found}; it was changed or damaged: start the run anew"
        )
