"""Where training stands in the data: enough to go on without losing or repeating a sample."""

from __future__ import annotations

from dataclasses import dataclass

from heterps_core.json_codec import JsonDocument


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
