"""What a plan costs altogether, from its longest stage time, its price and its interruptions.

With x the longest stage time in seconds, R the price of all instances, and of disks that are bought for tables, in
USD per hour, the bill of a run is

    N / 3600 * (x h + x0 + y) * (R + r0)  +  fixed USD

N are the steps of the run, E M / B, and what pauses for checkpoints and evaluation take, counted as steps.
x0 are start-up and teardown, spread over the steps, and y how much more of them the slowest stage takes
(`start_terms.py`); r0 is storage per hour; h >= 1 is the stretch by interruptions.
With all terms off it is the planning contract's x * R. Young's checkpoint interval sqrt(2 delta / L) for L
interruptions per hour costs a share sqrt(2 delta L) of the time in pauses and lost work together, and each
interruption a restart rho, so h = 1 + sqrt(2 delta L) + rho L (J. W. Young, CACM 17(9), 1974; J. T. Daly, FGCS 22(3),
2006, whose higher terms matter only where a checkpoint takes a good part of the time between failures).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.units import SECONDS_PER_HOUR


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The terms of a problem's cost in the planner's unit, seconds of a step times USD per hour ("product").

    Methods take plain numbers and arrays alike.
    """

    extra_seconds: float
    """x0."""

    extra_usd_per_hour: float
    """r0, with the price of a machine that all stages share."""

    checkpoint_hours: float
    """delta."""

    restart_hours: float
    """rho."""

    interruptions_per_hour: Floats
    """Interruptions of one unit of each device type, all 0 where interruptions cost nothing; shape (T,)."""

    most_interruptions_per_hour: float
    usd_per_product: float
    fixed_usd: float

    @property
    def shift_seconds(self) -> float:
        """z such that a plan's product falls no faster than x + z where its stage time x falls.

        x0 without interruptions; with them (x h + x0) / (x + z) must not rise with x for any h, so
        z = x0 / the largest h.
        """
        return float(self.extra_seconds / self.stretch(self.most_interruptions_per_hour))

    @property
    def has_interruptions(self) -> bool:
        """Whether the stretch of any plan is above 1."""
        return bool(self.interruptions_per_hour.any())

    @property
    def is_plain(self) -> bool:
        """Whether the product is x * R, as in the planning contract."""
        return self.extra_seconds == 0 and self.extra_usd_per_hour == 0 and not self.has_interruptions

    def stretch(self, interruptions_per_hour: Any) -> Any:
        """Return h for the interruptions of a whole plan."""
        return (
            1
            + np.sqrt(2 * self.checkpoint_hours * interruptions_per_hour)
            + self.restart_hours * interruptions_per_hour
        )

    def later(self, start_seconds: float) -> Objective:
        """Return the objective of plans whose slowest stage takes at least so much more start-up."""
        return replace(self, extra_seconds=self.extra_seconds + start_seconds)

    def product(
        self, stage_seconds: Any, usd_per_hour: Any, interruptions_per_hour: Any, start_seconds: Any = 0.0
    ) -> Any:
        """Return (x h + x0 + y) * (R + r0)."""
        stretched = stage_seconds * self.stretch(interruptions_per_hour) + self.extra_seconds + start_seconds
        return stretched * (usd_per_hour + self.extra_usd_per_hour)

    def most_interruptions_of_better(
        self, least_seconds: float, least_hourly: float, product: float
    ) -> float:
        """Return interruptions per hour that no plan of less than a product exceeds; -1 where there is none."""

        def is_better(interruptions: float) -> bool:
            stretched = least_seconds * self.stretch(interruptions) + self.extra_seconds
            return bool(stretched * least_hourly <= product)

        least, most = 0.0, self.most_interruptions_per_hour
        if not is_better(least):
            return -1.0
        if is_better(most):
            return most
        for _ in range(40):
            middle = (least + most) / 2
            least, most = (middle, most) if is_better(middle) else (least, middle)
        return most

    def cost_usd(self, product: Any) -> Any:
        """Return the bill of a run."""
        return product * self.usd_per_product + self.fixed_usd

    def product_of(self, cost_usd: float) -> float:
        """Return the product of a plan from its bill."""
        return (cost_usd - self.fixed_usd) / self.usd_per_product


def objective_of(problem: SchedulingProblem) -> Objective:
    """Return the objective of a problem."""
    extra = problem.extra_costs
    units = tuple(problem.device_types.values())
    num_steps = problem.num_steps * (1 + problem.pause_share)
    usd_per_product = num_steps / SECONDS_PER_HOUR
    counts_interruptions = extra.checkpoint_seconds > 0 or extra.restart_seconds > 0
    interruptions = np.array([unit.interruptions_per_hour for unit in units]) * counts_interruptions
    return Objective(
        extra_seconds=(extra.startup_seconds + extra.teardown_seconds) / num_steps,
        extra_usd_per_hour=extra.storage_usd_per_hour + extra.machine_usd_per_hour,
        checkpoint_hours=extra.checkpoint_seconds / SECONDS_PER_HOUR,
        restart_hours=extra.restart_seconds / SECONDS_PER_HOUR,
        interruptions_per_hour=interruptions,
        most_interruptions_per_hour=float(interruptions @ [unit.max_units for unit in units]),
        usd_per_product=usd_per_product,
        fixed_usd=extra.fixed_usd,
    )
