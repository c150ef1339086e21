"""What the workers of a dry run cost this machine: what its speed is predicted from. No torch here.

A layer profile times layers for the planner. A worker does more: it reads batches, sends rows to other stages, sums
gradients with other replicas, and shares cores, memory and caches with other workers. All seconds are those of a
core, so programs that take a core away for a while change none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from heterps_core.json_codec import JsonDocument, JsonForm


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts:
    """Core seconds of one replica of a stage, while all others work too."""

    forward_seconds: float
    """For a micro-batch, like the next three."""

    backward_seconds: float
    """Gradients of what entered, on the last stage the loss too, and sending and receiving rows."""

    weight_gradient_seconds: float
    """What is put off until the stage has to wait, or to the end of the step."""

    num_weight_gradients: int
    """In so many equal parts, 0 or more."""

    gradient_sum_seconds: float
    """For a step, like the next two: gradients added up with the other replicas."""

    update_seconds: float
    reading_seconds: float
    """On a thread of its own."""

    updates_together: bool
    """Replicas wait for one another before and after the update, because they share a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCosts(JsonDocument):
    """What all workers of a plan cost."""

    json_form = JsonForm(what="worker costs", version=4, way_out="measure them again")

    stages: tuple[StageCosts, ...]
    step_seconds: float
    """Of a whole step by the clock, with waits and whatever else ran on this machine: the reward of a search by
    measurements, and no cost."""

    measured_at: str
