"""The serving process: runs `train-ctr` and `sweep-orphans` on schedule, all of them on request.

`python -m flows.service.serve` starts it, and a team's server runs it beside its own Prefect. It must be its own
main module, as flow runs that are served from an imported one stay pending for ever. Where workers run the
deployments of prefect.yaml, `python -m flows.service.deployments --set-up-only` installs what they need beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.flows import Flow
from prefect.runner import Runner
from prefect.schedules import Cron, Interval
from prefect.settings import PREFECT_API_URL
from prefect.types.entrypoint import EntrypointType

from flows.backfill_ctr import backfill_ctr
from flows.compare_schedulers import compare_schedulers
from flows.parameter_checks import check_parameters
from flows.parameters import TrainParameters
from flows.profile_devices import profile_devices
from flows.refresh_prices import refresh_prices
from flows.service.kept_settings import register
from flows.service.prefect_connection import wait_for_server
from flows.service.recovery import install_crash_automations, recover
from flows.service.schedule import (
    NIGHTLY_CRON,
    NIGHTLY_VARIABLE,
    SWEEP_INTERVAL_S,
    nightly_parameters,
    nightly_timezone,
)
from flows.sweep_orphans import sweep_orphans
from flows.train_ctr import train_ctr
from heterps_core.errors import HeterpsError
from infra.workspace import Workspace

# A sweep that hangs must not pile up; runs that train keep one another out (tasks/running/live_fleet.py).
ONE_AT_A_TIME = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)


def main(arguments: Sequence[str] | None = None) -> int:
    """Register the deployments and run what they are asked for, until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m flows.service.deployments", description=main.__doc__)
    parser.add_argument(
        "--set-up-only",
        action="store_true",
        help="install the automations that call dead runs crashed, drop runs that were missed, and end",
    )
    options = parser.parse_args(arguments)
    try:
        _checked_nightly_parameters()
        if api_url := PREFECT_API_URL.value():
            wait_for_server(api_url)
        install_crash_automations()
        recover(is_alone=not options.set_up_only)
        if not options.set_up_only:
            _serve(Workspace.locate().deployments_path)
    except HeterpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _serve(record: Path) -> None:
    """Register the deployments and run what they are asked for; `record` as in `register`."""
    logging.getLogger("prefect.flow_runs").addFilter(_in_one_line)
    runner = Runner(pause_on_shutdown=False)
    served = deployments()
    register(served, record=record)
    for each in served:
        runner.add_deployment(each)
    with suppress(KeyboardInterrupt, TerminationSignal):
        asyncio.run(runner.start())


def _in_one_line(record: logging.LogRecord) -> bool:
    """Say in place of Prefect's traceback why it cannot clean up after a run; let all lines pass."""
    if record.exc_info and isinstance(record.exc_info[1], ObjectNotFound):
        record.msg = (
            "flow run %s: its deployment was deleted in Prefect, so sweep-orphans ends its machines, at the latest "
            "after their lease"
        )
        record.exc_info = None
    return True


def deployments() -> tuple[RunnerDeployment, ...]:
    """Return the nightly training, the sweeper, and what runs on request only, each named as its flow."""
    nightly = Cron(NIGHTLY_CRON, timezone=nightly_timezone())
    return (
        deployment(train_ctr, schedule=nightly, parameters=_checked_nightly_parameters()),
        deployment(sweep_orphans, schedule=Interval(SWEEP_INTERVAL_S), concurrency_limit=ONE_AT_A_TIME),
        *(deployment(each) for each in (compare_schedulers, refresh_prices, profile_devices, backfill_ctr)),
    )


def deployment(flow: Flow[..., Any], **settings: Any) -> RunnerDeployment:
    """Return the deployment of a flow, which has its name."""
    made = flow.to_deployment(name=flow.name, entrypoint_type=EntrypointType.MODULE_PATH, **settings)
    assert isinstance(made, RunnerDeployment)
    return made


def _checked_nightly_parameters() -> dict[str, Any]:
    """Return the parameters of the nightly training that the environment sets.

    The data is looked for by each night and not here, as a folder may come later than the service. A model of one's
    own is built by each night too, for the columns of its data.

    Raises:
        UnknownNameError: train-ctr has no such parameter.
        ConfigurationError: A value does not fit, or see `flows.parameter_checks.check_parameters`.
    """
    parameters = nightly_parameters()
    asked = TrainParameters.of(parameters, place=f" of train-ctr in {NIGHTLY_VARIABLE}")
    check_parameters(
        asked.model_copy(update={"data": None, "schema_file": None, "prepare_sql": None, "day": None})
    )
    return parameters


if __name__ == "__main__":
    sys.exit(main())
