"""Past runs as the next one needs them, from the record of runs in MLflow."""

from __future__ import annotations

import logging

from prefect import task
from prefect.cache_policies import NO_CACHE

from heterps_core.errors import ConfigurationError
from heterps_core.planning.calibration import Calibration
from infra.workspace import Workspace
from tasks.records.past_runs import PastRun, past_trainings

_MOST_RUNS = 90
"""About a season of nights, of whatever model and machines."""

logger = logging.getLogger(__name__)


@task(name="learn from past runs", cache_policy=NO_CACHE)
def learn_from_runs(workspace: Workspace, *, run_id: str) -> Calibration:
    """Read the speeds of past runs from the record; `run_id` itself, which may be resumed, is left out."""
    past = readable_past(workspace, most=_MOST_RUNS)
    speeds = [run.speed for run in past if run.run_id != run_id]
    return Calibration(tuple(speed for speed in speeds if speed is not None))


def readable_past(workspace: Workspace, *, most: int) -> list[PastRun]:
    """Return the newest training runs, the newest last; none where the record does not answer: no run waits."""
    try:
        return past_trainings(workspace, most=most)
    except ConfigurationError as error:
        logger.warning("past runs cannot be read now: %s", error)
        return []
