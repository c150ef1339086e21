"""A model to begin with: the weights of one that was exported before, whatever plan trained it, and its optimizers.

Each worker reads its own layers and its own rows of the tables, so any cut into stages and any number of replicas
begins with the same model, and goes on as if there had been no break.

The files are in the safetensors format (github.com/huggingface/safetensors): 8 bytes with the length of a header, the
header as JSON (type, shape and place of each tensor), then the tensors. The flow's host, which has them on its disk,
lists their tensors and hashes in a manifest; workers read ranges by it, and need neither that package nor the header.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from heterps_core.errors import CheckpointError, ConfigurationError
from heterps_core.training.checkpoint import TrainingCursor, load_latest_checkpoint
from heterps_core.training.job import StartModel, TrainingConfig, TrainingJob
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.storage.exported_files import OPTIMIZER_STATE, WEIGHTS
from heterps_core.training.storage.named_tensors import (
    dense_optimizer_state,
    fill_swept_rows,
    fill_tensors,
    row_optimizer_state,
    weights_of,
)
from heterps_core.training.storage.run_directory import START_MODEL, RunDirectory
from heterps_core.training.storage.stored_tensors import StoredLayer, StoredRows, TensorManifest
from heterps_core.training.storage.verified_files import (
    BlockHasher,
    DamagedFileError,
    read_signed_json,
    write_hashes,
    write_signed_json,
)

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
_LENGTH_OF_HEADER = struct.Struct("<Q")
_READ_BYTES = 16 * 1024**2

logger = logging.getLogger(__name__)


def begin(run: RunDirectory, job: TrainingJob, model: StageModel) -> TrainingCursor:
    """Load what training goes on from: the run's own newest checkpoint, else the job's start model, else nothing.

    Returns:
        The batch that comes next.

    Raises:
        CheckpointError: What is there cannot be loaded into this replica's layers.
    """
    cursor = load_latest_checkpoint(run, model)
    if cursor is not None:
        return cursor
    if job.start_model is not None:
        _load_start_model(run, job.start_model, model, config=job.config)
    return TrainingCursor()


def publish_start_model(run: RunDirectory, start: StartModel, folder: Path) -> None:
    """Copy an exported model into a run directory, with the manifest that workers read it by.

    Args:
        run: Where to; what stands there of another start model is removed.
        start: The model, of which the hashes of the files are checked.
        folder: That has the files.

    Raises:
        CheckpointError: A file is not the one of `start`.
        OSError: A file cannot be read or written.
    """
    # What a launch that was cut short left there may be a part, or of another model.
    run.delete_folder(START_MODEL)
    run.upload_folder(folder, START_MODEL)
    tensors = TensorManifest()
    for name, sha256 in _sha256_by_file(start).items():
        tensors += _published(run, folder / name, sha256)
    document = {
        "schema_version": SCHEMA_VERSION,
        "sha256": _sha256_by_file(start),
        "tensors": tensors.to_json(),
    }
    write_signed_json(run, f"{START_MODEL}/{MANIFEST}", document)


def _load_start_model(
    run: RunDirectory, start: StartModel, model: StageModel, *, config: TrainingConfig
) -> None:
    """Load the start model into this replica's layers and table shards, in place: weights, then optimizer state.

    State of an optimizer of another kind is left aside; so is that of all where the start model has none.

    Raises:
        CheckpointError: A file is not the one of the job, or has other layers or sizes than this model.
    """
    tensors = load_start_weights(run, start, model)
    logger.info("begins with the weights of version %s, trained by run %s", start.version, start.run_id)
    state = start.optimizer_state
    if state is None:
        logger.info("the optimizers start again: version %s holds no state of theirs", start.version)
        return
    goes_on: dict[str, Tensor] = {}
    if state.dense_optimizer == config.dense_optimizer:
        goes_on |= dense_optimizer_state(model)
    if state.embedding_optimizer == config.embedding_optimizer:
        goes_on |= row_optimizer_state(model)
    _fill(
        run,
        tensors,
        model,
        goes_on,
        of_swept=lambda key: key != "weight" and state.embedding_optimizer == config.embedding_optimizer,
        scales={"accumulator": start.accumulators_kept},
    )
    for name, tensor in goes_on.items():
        if name.endswith(".accumulator"):
            tensor.mul_(start.accumulators_kept)
    for change in state.left_aside(
        dense_optimizer=config.dense_optimizer, embedding_optimizer=config.embedding_optimizer
    ):
        logger.info("%s", change)


def load_start_weights(run: RunDirectory, start: StartModel, model: StageModel) -> TensorManifest:
    """Load the weights alone, and return the manifest of the start model."""
    tensors = _read_manifest(run, start)
    _fill(run, tensors, model, weights_of(model), of_swept=lambda key: key == "weight")
    return tensors


def _fill(
    run: RunDirectory,
    manifest: TensorManifest,
    model: StageModel,
    tensors: dict[str, Tensor],
    *,
    of_swept: Callable[[str], bool],
    scales: Mapping[str, float] | None = None,
) -> None:
    try:
        layers = [StoredLayer(folder=START_MODEL, tensors=manifest)]
        fill_tensors(run, layers, model, tensors)
        fill_swept_rows(run, layers, model, wanted=of_swept, scales=scales)
    except DamagedFileError as error:
        raise CheckpointError(f"{error}; start a new run") from error
    except CheckpointError as error:
        raise CheckpointError(
            f"the start model must have the layers and sizes of this run: {error}; train from scratch, or with the "
            f"model and table sizes that it was made with"
        ) from error


def _read_manifest(run: RunDirectory, start: StartModel) -> TensorManifest:
    key = f"{START_MODEL}/{MANIFEST}"
    try:
        document = read_signed_json(run, key)
        if document["sha256"] != _sha256_by_file(start):
            raise ValueError(f"it is not that of version {start.version}")
        return TensorManifest.from_json(document["tensors"])
    except DamagedFileError as error:
        raise CheckpointError(f"{error}; start a new run") from error
    except (KeyError, TypeError, ValueError, ConfigurationError) as error:
        raise CheckpointError(
            f"{key} in {run.location} must be that of the job's start model, but is not: {error}; start a new run"
        ) from error


def _sha256_by_file(start: StartModel) -> dict[str, str]:
    state = start.optimizer_state
    return {WEIGHTS: start.weights_sha256, **({} if state is None else {OPTIMIZER_STATE: state.sha256})}


def _published(run: RunDirectory, path: Path, sha256: str) -> TensorManifest:
    """Write the hashes of a file of the start model, and return what stands in it, after checking its own."""
    whole, hasher = hashlib.sha256(), BlockHasher()
    with path.open("rb") as file:
        while content := memoryview(file.read(_READ_BYTES)):
            whole.update(content)
            hasher.update(content)
        if whole.hexdigest() != sha256:
            raise CheckpointError(
                f"{path} must have the SHA-256 {sha256}, got {whole.hexdigest()}; it was changed or damaged: train "
                f"from scratch, or go back with heterps rollback"
            )
        file.seek(0)
        (header_bytes,) = _LENGTH_OF_HEADER.unpack(file.read(_LENGTH_OF_HEADER.size))
        header: dict[str, Any] = json.loads(file.read(header_bytes))
    first = _LENGTH_OF_HEADER.size + header_bytes
    rows = tuple(
        StoredRows(
            tensor=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            first_row=0,
            num_rows=entry["shape"][0] if entry["shape"] else 1,
            file=path.name,
            offset=first + entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    )
    return TensorManifest(files=(write_hashes(run, START_MODEL, path.name, hasher),), rows=rows)
