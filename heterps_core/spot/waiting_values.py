"""What it is worth to wait, to run on demand or to run on spot: a small Markov decision process, solved exactly.

The market is a chain that goes up and down with a chance that depends on the age of the spell. The state is
where the job is, the bucket of age, the work left w and the time left R. Every action takes time, so one
sweep over R from 0 up gives the least expected cost of each state and the action that reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterps_core.spot.trace import Floats, Ints

AGE_BUCKETS_TICKS = (0, 10, 30, 90, 300)
"""Where each bucket of age begins; the last one has no end. Thirteen buckets were no better than these five."""

NUM_BUCKETS = len(AGE_BUCKETS_TICKS)

_LATE = 1e6
"""Cost of a deadline missed, in steps of on-demand; far above every cost that can be paid."""

Actions: TypeAlias = NDArray[np.uint8]

WAIT, RUN_ON_DEMAND, RUN_ON_SPOT = range(3)
"""Actions."""


def bucket_of(age_ticks: Ints) -> Ints:
    """Return the bucket that an age is in.

    Example:
        >>> bucket_of(np.array([0, 9, 10, 5000])).tolist()
        [0, 0, 1, 4]
    """
    return np.searchsorted(AGE_BUCKETS_TICKS, age_ticks, side="right") - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MarketModel:
    """B markets that differ in price and in the chance of a refuge; chances are per tick."""

    up_hazard: tuple[float, ...]
    """By bucket of age: that the pool which is used goes down."""

    down_hazard: tuple[float, ...]
    """By bucket of age: that a pool comes up while none is."""

    another_up: Floats
    """(B,): that another pool is up when the used one goes down."""

    spot_price: Floats
    """(B,): over the on-demand price."""


class BestActions(NamedTuple):
    """Best actions, each (R, B, J, W): time left 0 to R - 1 and work left 0 to W - 1, in steps."""

    idle_up: Actions
    idle_down: Actions
    on_demand_up: Actions
    on_demand_down: Actions


class _Values(NamedTuple):
    """Least expected costs with one time left, each (B, J, W); of starts by the steps that are left, 0 first."""

    idle_up: Floats
    idle_down: Floats
    on_demand_up: tuple[Floats, ...]
    on_demand_down: tuple[Floats, ...]
    spot: tuple[Floats, ...]


def best_actions(
    model: MarketModel,
    *,
    step_ticks: int,
    startup_steps: int,
    entry_slack_steps: int,
    lost_steps: float,
    num_times: int,
    num_works: int,
) -> BestActions:
    """Return the best action of every state of B markets.

    Args:
        model: The markets.
        step_ticks: Length of a step.
        startup_steps: That the start of an instance takes, at least 1.
        entry_slack_steps: Least slack with which a spot instance may be started.
        lost_steps: Expected loss of an interruption.
        num_times: R, one more than the longest time left.
        num_works: W, one more than the most work left.
    """
    chain = _AgeingChain(model, step_ticks)
    price = model.spot_price[:, None, None]
    late = np.full((len(model.spot_price), NUM_BUCKETS, num_works), _LATE)
    late[:, :, 0] = 0.0
    starts = (late,) * (startup_steps + 1)
    values = _Values(late, late, starts, starts, starts)
    actions = BestActions(*(np.zeros((num_times, *late.shape), dtype=np.uint8) for _ in range(4)))
    works = np.arange(num_works)
    for time in range(1, num_times):
        slack = time - works
        may_wait = np.where(slack > entry_slack_steps, 0.0, _LATE)
        may_enter = np.where(slack >= entry_slack_steps, 0.0, _LATE)
        wait_up = chain.from_up(values.idle_up, values.idle_down) + may_wait
        wait_down = chain.from_down(values.idle_up, values.idle_down) + may_wait
        pairs = list(zip(values.on_demand_up, values.on_demand_down, strict=True))
        start_up = [1 + chain.from_up(up, down) for up, down in pairs[:-1]]
        start_down = [1 + chain.from_down(up, down) for up, down in pairs[:-1]]
        run_up = _with_less_work(start_up[0])
        run_down = _with_less_work(start_down[0])
        start_spot = [
            price + chain.from_up(spot, values.idle_down, lost_to=values.idle_up) for spot in values.spot[:-1]
        ]
        keep_spot = price + chain.from_up(
            _with_less_work(values.spot[0]),
            _with_less_work(values.idle_down, lost_steps),
            lost_to=_with_less_work(values.idle_up, lost_steps),
        )
        enter = start_spot[-1] + may_enter
        choices = (
            np.stack([wait_up, start_up[-1], enter]),
            np.stack([wait_down, start_down[-1]]),
            np.stack([wait_up, run_up, enter]),
            np.stack([wait_down, run_down]),
        )
        for table, choice in zip(actions, choices, strict=True):
            table[time] = choice.argmin(axis=0)
        idle_up, idle_down, on_demand_up, on_demand_down = (choice.min(axis=0) for choice in choices)
        values = _Values(
            idle_up,
            idle_down,
            (on_demand_up, *start_up),
            (on_demand_down, *start_down),
            (np.minimum(keep_spot, start_up[-1]), *start_spot),
        )
        for value in (idle_up, idle_down, on_demand_up, on_demand_down, values.spot[0]):
            value[:, :, 0] = 0.0
    return actions


class _AgeingChain:
    """The step of the market: a spell ends, or grows older."""

    def __init__(self, model: MarketModel, step_ticks: int) -> None:
        self._down = (1 - (1 - np.array(model.up_hazard)) ** step_ticks)[None, :, None]
        self._return = (1 - (1 - np.array(model.down_hazard)) ** step_ticks)[None, :, None]
        self._another = model.another_up[:, None, None]
        lengths = np.diff(AGE_BUCKETS_TICKS)
        self._older = np.append(np.minimum(step_ticks / lengths, 1.0), 0.0)[None, :, None]

    def from_up(self, up: Floats, down: Floats, *, lost_to: Floats | None = None) -> Floats:
        """Return the mean over the next step; `lost_to` is where another pool is up instead, `up` by default."""
        elsewhere = up if lost_to is None else lost_to
        # The pool that takes over is rarely a young one: it was up before.
        after_end = (1 - self._another) * down[:, :1] + self._another * elsewhere[
            :, NUM_BUCKETS // 2 : NUM_BUCKETS // 2 + 1
        ]
        return self._down * after_end + (1 - self._down) * self._aged(up)

    def from_down(self, up: Floats, down: Floats) -> Floats:
        return self._return * up[:, :1] + (1 - self._return) * self._aged(down)

    def _aged(self, value: Floats) -> Floats:
        older = np.concatenate([value[:, 1:], value[:, -1:]], axis=1)
        return np.asarray((1 - self._older) * value + self._older * older)


def _with_less_work(value: Floats, lost_steps: float = 0.0) -> Floats:
    """Return the values with a step of work less, of which `lost_steps` are lost again."""
    whole = int(lost_steps)
    share = lost_steps - whole
    padded = np.concatenate([value[:, :, :1], value, np.repeat(value[:, :, -1:], whole + 1, axis=2)], axis=2)
    num_works = value.shape[2]
    less = padded[:, :, whole : whole + num_works]
    return (
        less if share == 0 else (1 - share) * less + share * padded[:, :, whole + 1 : whole + 1 + num_works]
    )
