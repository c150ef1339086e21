"""What a simulation found: speed, and how each stage spent its time."""

from __future__ import annotations

from dataclasses import dataclass

from heterps_core.planning.cost_model.arrays import Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class StageUse:
    """How the replicas of a stage spent the time from their start to the end of their last step.

    The shares are means over replicas and add up to 1.
    """

    computing: float
    waiting_for_data: float
    """Rows or gradients that a neighbouring stage had not worked out yet."""

    waiting_for_link: float
    """Messages, exchanges or the all-reduce were on their way, or stood in line, or an exchange waited for one of the
    replicas."""

    waiting_at_barrier: float
    """For slower replicas of the same stage before the all-reduce."""

    @property
    def idle(self) -> float:
        """All but computing."""
        return self.waiting_for_data + self.waiting_for_link + self.waiting_at_barrier


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRun:
    """A simulated run of several steps."""

    batch_size: int
    step_end_seconds: Floats
    """When the last replica of all stages ended each step, since the beginning of the run; shape (N,)."""

    stages: tuple[StageUse, ...]

    @property
    def total_seconds(self) -> float:
        """From the beginning, start-up included, to the end of the last step."""
        return float(self.step_end_seconds[-1])

    @property
    def step_seconds(self) -> float:
        """Mean time per step in the middle half of the run, without what is special at its start and end.

        Of a run of fewer than four steps, the mean of all.
        """
        num_steps = self.step_end_seconds.size
        if num_steps < 4:
            return self.total_seconds / num_steps
        first, last = num_steps // 4 - 1, 3 * num_steps // 4 - 1
        return float(self.step_end_seconds[last] - self.step_end_seconds[first]) / (last - first)

    @property
    def throughput_samples_per_s(self) -> float:
        """In the middle half of the run."""
        return self.batch_size / self.step_seconds
