"""How a training ended, as one type on which the flow decides what comes next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from heterps_core.errors import TrainingError
from heterps_core.training.training_run import TrainingRun


@dataclass(frozen=True, slots=True)
class Complete:
    """All epochs were trained and the model was judged."""

    training: TrainingRun


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop was asked for: a checkpoint of the last step is written, and nothing was evaluated."""

    training: TrainingRun


@dataclass(frozen=True, kw_only=True, slots=True)
class MachinesLost:
    """Machines, or workers on them, ended or will end before the training has: others may go on from a checkpoint."""

    message: str
    """The event, in a sentence."""

    node_ids: tuple[str, ...] = ()
    """Machines that are lost; empty where all are there and only workers failed."""

    is_noticed: bool = False
    """The cloud gave notice, and a checkpoint of the last step is written."""

    signature: str | None = None
    """Text that is equal for equal errors; None for events of chance."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker failed in a way that would come again on other machines."""

    error: TrainingError


TrainingOutcome: TypeAlias = Complete | Stopped | MachinesLost | Failed
