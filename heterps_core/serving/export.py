"""Writes what a run has trained as an exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from heterps_core.data.manifest import DatasetManifest
from heterps_core.errors import CheckpointError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import complete_checkpoints, load_latest_checkpoint
from heterps_core.training.job import OptimizerState, TrainingJob
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.storage.exported_files import (
    DESCRIPTION,
    OPTIMIZER_STATE,
    SCHEMA_VERSION,
    WEIGHTS,
    file_sha256,
)
from heterps_core.training.storage.named_tensors import dense_optimizer_state, row_optimizer_state, weights_of
from heterps_core.training.storage.run_directory import JOB, RunDirectory


def export_model(run: RunDirectory, manifest: DatasetManifest, folder: Path, *, model: str) -> None:
    """Write the newest checkpoint of a run as an exported model.

    `model` is the flow's own word: it is imported and called here, and rented machines could have changed the job's.

    Raises:
        CheckpointError: The run has no complete checkpoint, or the newest is damaged.
    """
    job = replace(TrainingJob.from_json(run.require_json(JOB)), model=model)
    num_layers = job.stages[-1].last_layer + 1
    whole = (Stage(0, num_layers - 1, job.stages[0].device_type, 1),)
    trained = build_stage_model(job.model, manifest.features, job.config, whole, 0, None)
    cursor = load_latest_checkpoint(run, trained)
    if cursor is None:
        raise CheckpointError(
            f"a run must have a complete checkpoint to be exported, {run.location} has none"
        )
    newest = int(complete_checkpoints(run)[-1])
    if cursor.step != newest:
        raise CheckpointError(
            f"the newest checkpoint of a run must be whole to be exported, but that of step {newest} in "
            f"{run.location} is damaged; resume the run, which trains again from step {cursor.step}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _save(weights_of(trained), folder / WEIGHTS)
    _save(row_optimizer_state(trained) | dense_optimizer_state(trained), folder / OPTIMIZER_STATE)
    state = OptimizerState(
        sha256=file_sha256(folder / OPTIMIZER_STATE),
        dense_optimizer=job.config.dense_optimizer,
        embedding_optimizer=job.config.embedding_optimizer,
    )
    description = {
        "schema_version": SCHEMA_VERSION,
        "model": job.model,
        "features": manifest.features.to_json(),
        "schema": manifest.schema.to_json(),
        "numeric_transform": manifest.numeric_transform.to_json(),
        "weights_sha256": file_sha256(folder / WEIGHTS),
        "optimizer_state": asdict(state),
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1))


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
