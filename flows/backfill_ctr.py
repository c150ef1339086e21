"""Trains a range of past days, one after the other, as the nights would have done.

Runs on request (`prefect deployment run backfill-ctr`). Each day is a run of train-ctr of its own, which goes on from
the champion of the day before; days that are done are skipped.
"""

from __future__ import annotations

import inspect
import sys
from datetime import date, timedelta
from typing import Any

from prefect import flow

from flows.parameter_checks import check_parameters, check_types
from flows.service.schedule import BACKFILL_CTR
from flows.train_ctr import train_ctr
from heterps_core.data.reading.days import parse_day
from heterps_core.errors import (
    ConfigurationError,
    HeterpsError,
    LiveFleetError,
    TrainingError,
    UnknownNameError,
)
from tasks.running.story import tell

OWN_PARAMETERS = ("data", "day", "resume_run_id", "plan_only", "ready_by")
"""Of train-ctr, which a back-fill sets itself or has no use for."""

NO_SETTINGS: dict[str, Any] = {}


def check(
    *, first_day: str, last_day: str, data: str, settings: dict[str, Any], go_on: bool = False
) -> list[date]:
    """Check the parameters in milliseconds, and return the days in order.

    Raises:
        ConfigurationError: A day is no date, the range is empty, or a setting is none of train-ctr's.
        UnknownNameError, DataError, ProvisioningError: See `flows.parameter_checks.check_parameters`.
    """
    first, last = parse_day(first_day), parse_day(last_day)
    if last < first:
        raise ConfigurationError(f"the last day must not come before the first, got {first} and {last}")
    parameters = inspect.signature(train_ctr.fn).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    for name in settings:
        if name in OWN_PARAMETERS or name not in defaults:
            raise UnknownNameError(
                "setting of a back-fill", name, [known for known in defaults if known not in OWN_PARAMETERS]
            )
    typed = check_types(train_ctr.fn, settings, place="settings")
    given = {name: value for name, value in (defaults | typed).items() if name not in OWN_PARAMETERS}
    # A day that is missing or damaged fails in its turn, so that those before it are trained.
    check_parameters(**given, data=data)
    return [first + timedelta(days=number) for number in range((last - first).days + 1)]


@flow(name=BACKFILL_CTR, flow_run_name="{first_day}-to-{last_day}")
def backfill_ctr(
    first_day: str,
    last_day: str,
    data: str,
    settings: dict[str, Any] = NO_SETTINGS,
    go_on: bool = False,
) -> list[str]:
    """Train each day of a range in order, as train-ctr does; days that are done are skipped.

    Args:
        first_day: First day to train on, YYYY-MM-DD.
        last_day: Last day to train on; the day after it must be there too.
        data: Folder of folders day=YYYY-MM-DD, or a pattern of them.
        settings: Other parameters of train-ctr by name, such as {"epochs": 2, "again": true}.
        go_on: Go on with the next day where one fails; otherwise the first failure ends the back-fill. That another
            run has machines alive ends it in any case.

    Returns:
        The id of each day's run, in the order of days.
    """
    days = check(first_day=first_day, last_day=last_day, data=data, settings=settings)
    run_ids: list[str] = []
    failures: dict[date, HeterpsError] = {}
    for number, day in enumerate(days, start=1):
        tell("back-fill", f"{day}, day {number} of {len(days)}")
        try:
            run_ids.append(train_ctr(**settings, data=data, day=str(day)))
        except HeterpsError as error:
            # While another fleet is alive, every other day would be refused too.
            if not go_on or isinstance(error, LiveFleetError):
                left = len(days) - number
                tell(
                    "back-fill",
                    f"ends at {day}, {left} days before its end; run it again to go on from there",
                )
                raise
            failures[day] = error
            tell("back-fill", f"{day} failed: {error}")
    if failures:
        reasons = "; ".join(f"{day}: {error}" for day, error in failures.items())
        raise TrainingError(
            f"all {len(days)} days must be trained, but {len(failures)} failed; run the back-fill again for them: "
            f"{reasons}"
        )
    return run_ids


if __name__ == "__main__":
    from flows.command_line import main

    sys.exit(main(backfill_ctr, program="python -m flows.backfill_ctr", check=check))
