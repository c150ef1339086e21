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

from prefect import flow

from flows.parameter_checks import days_of
from flows.parameter_model import takes
from flows.service.schedule import BACKFILL_CTR
from flows.train_ctr import train_ctr
from heterps_core.errors import HeterpsError
from tasks.running.progress import log_step


@flow(name=BACKFILL_CTR, flow_run_name="{first_day}-to-{last_day}", validate_parameters=False)
@takes(BackfillParameters)
def backfill_ctr(asked: BackfillParameters) -> list[str]:
    """Train each day of a range in order, as train-ctr does; days that are done are skipped.

    Returns:
        The id of each day's run, in the order of days.
    """
    days = days_of(asked)
    run_ids: list[str] = []
    for number, day in enumerate(days, start=1):
        log_step("back-fill", f"{day}, day {number} of {len(days)}")
        try:
            run_ids.append(train_ctr(**asked.settings, data=asked.data, day=str(day)))
        except HeterpsError:
            left = len(days) - number
            log_step(
                "back-fill", f"ends at {day}, {left} days before its end; run it again to go on from there"
            )
            raise
    return run_ids
