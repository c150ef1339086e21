"""Trains a range of past days, one after the other, as the nights would have done.

Runs on request (`prefect deployment run backfill-ctr`). Each day is a run of train-ctr of its own, which goes on from
the champion of the day before; days that are done are skipped.
"""

from __future__ import annotations

import sys

from flows.parameters import BackfillParameters

if __name__ == "__main__":
    # Before Prefect is loaded, so that --help and a wrong value are answered at once.
    from flows.command_line import main

    sys.exit(main("flows.backfill_ctr", BackfillParameters))

from prefect import State, flow

from flows.parameter_checks import days_of
from flows.parameter_model import takes
from flows.service.schedule import BACKFILL_CTR
from flows.train_ctr import stopped_state, train_ctr
from heterps_core.errors import HeterpsError, RunStoppedError
from tasks.running.progress import log_step


@flow(name=BACKFILL_CTR, flow_run_name="{first_day}-to-{last_day}", validate_parameters=False)
@takes(BackfillParameters)
def backfill_ctr(asked: BackfillParameters) -> list[str] | State[str]:
    """Train each day of a range in order, as train-ctr does; days that are done are skipped.

    Returns:
        The id of each day's run, in the order of days; it ends as Stopped where a day's run does.
    """
    days = days_of(asked)
    run_ids: list[str] = []
    for number, day in enumerate(days, start=1):
        log_step("back-fill", f"{day}, day {number} of {len(days)}")
        try:
            run_ids.append(train_ctr(**asked.settings, data=asked.data, day=str(day)))
        except HeterpsError as error:
            left = len(days) - number
            log_step(
                "back-fill", f"ends at {day}, {left} days before its end; run it again to go on from there"
            )
            if isinstance(error, RunStoppedError):
                return stopped_state(error)
            raise
    return run_ids
