"""The contract of every market policy: where a job with a deadline runs in the next minute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from heterps_core.spot.job import NightlyJob
from heterps_core.spot.night_state import NightState
from heterps_core.spot.trace import Ints


class Decider(ABC):
    """A policy made ready for one job; it keeps nothing from tick to tick, all it may know is in the state."""

    def __init__(self, job: NightlyJob) -> None:
        self.job = job

    @abstractmethod
    def decide(self, state: NightState) -> Ints:
        """Return the place of each night for the tick that begins: (N,), `IDLE`, `ON_DEMAND` or a pool that is up.

        The place where the job is already means to stay. Called at every tick while there is work left.
        """


class MarketPolicy(ABC):
    """A rule that buys time on spot and on-demand instances.

    Life cycle: a policy holds settings only. `prepare` is called once for the nights of a job, and its
    decider at every tick of them.
    """

    name: ClassVar[str]
    """As listed in `MARKET_POLICIES`."""

    keeps_deadlines: ClassVar[bool] = True
    """Every decision passes the safety net (`safety_net.granted`)."""

    @abstractmethod
    def prepare(self, job: NightlyJob) -> Decider:
        """Return the decider for nights of this job."""
