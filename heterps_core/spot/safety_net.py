"""The rule that keeps the deadline, whatever a policy wishes and whatever the market does.

On-demand instances are taken to be always to be had. A wish is granted if, should spot vanish at the very
next tick, on-demand would still finish in time; otherwise on-demand takes over. It is the Safety-net rule
of Can't Be Late (NSDI 2024), with unsaved progress counted as lost, and to the tick.
"""

from __future__ import annotations

import numpy as np

from heterps_core.spot.job import NightlyJob
from heterps_core.spot.night_state import IDLE, ON_DEMAND, NightState
from heterps_core.spot.trace import Ints


def granted(job: NightlyJob, state: NightState, wish: Ints) -> Ints:
    """Return the wished places where they are safe, and the safe ones elsewhere.

    Waiting is safe while a spot instance could still be started safely at the next tick; with less slack
    waiting gains nothing. A spot instance may be started with `NightlyJob.entry_slack_ticks`, and kept while
    the start of an on-demand instance still fits behind the loss of the unsaved work. An instance whose
    successor may not be started is kept.

    Args:
        job: What is to be done.
        state: N nights.
        wish: (N,), places; spot pools that are up.
    """
    slack = state.slack_ticks
    can_enter = slack >= job.entry_slack_ticks
    can_keep = (state.place >= 0) & (slack > state.unsaved_ticks + job.startup_ticks)
    fallback = np.where(can_keep, state.place, ON_DEMAND)
    keeps = wish == state.place
    is_safe = np.where(
        wish == IDLE,
        slack > job.entry_slack_ticks,
        (wish == ON_DEMAND) | np.where(keeps, can_keep, can_enter),
    )
    return np.where(is_safe, wish, fallback)
