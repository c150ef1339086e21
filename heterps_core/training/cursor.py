"""Where training stands in the data: enough to go on without losing or repeating a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainingCursor:
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

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TrainingCursor:
        """Read what `to_json` wrote."""
        return cls(**{name: document[name] for name in cls.__dataclass_fields__})
