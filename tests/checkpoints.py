"""A checkpoint of a moment, written and waited for."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.checkpoint_writer import CheckpointWriter
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.storage.run_directory import RunDirectory


def save_checkpoint(
    run: RunDirectory, model: StageModel, cursor: TrainingCursor, *, group: ProcessGroup | None
) -> None:
    """Write a checkpoint of a model and return when it is complete; every process of the world takes part."""
    writer = CheckpointWriter(run, model, group=group, world=None)
    writer.begin(cursor.step)
    writer.save(cursor, is_last=True)
    writer.finish()
