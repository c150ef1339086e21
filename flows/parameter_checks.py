"""Checks the parameters of a run before Prefect, a record or a machine is started for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heterps_core.device_types import get_device_type
from heterps_core.errors import ConfigurationError
from heterps_core.problem.extra_costs import NO_EXTRA_COSTS
from heterps_core.scheduling.schedulers import get_scheduler
from heterps_core.training.job import check_update_mode_name
from infra.workspace import Workspace
from tasks.clusters import check_provider
from tasks.data import check_source, schema_of
from tasks.deadline import parse_time_of_day
from tasks.markets import check_markets
from tasks.parameter_ranges import check_numbers
from tasks.prices import price_files
from tasks.profiling import check_model_name, check_own_model
from tasks.promotion_gates import PromotionGates
from tasks.start import CHAMPION, check_start_name


def check_parameters(
    *,
    data: str | None,
    schema_file: str | None,
    model: str,
    scheduler: str,
    provider: str,
    device_types: list[str],
    markets: list[str],
    catalogue: str | None,
    region: str,
    leave_out_costs: list[str],
    update_mode: str = "sync",
    day: str | None = None,
    start_from: str = CHAMPION,
    ready_by: str | None = None,
    plan_only: bool = False,
    resume_run_id: str | None = None,
    **numbers: Any,
) -> None:
    """Check the parameters before any work or record begins: in milliseconds, and a model of one's own in seconds.

    Raises:
        UnknownNameError: A name is in no registry; the message lists the known ones.
        DataError, ConfigurationError: A file or day is not there, the provider lacks what it needs, a number is
            out of its range, or a model of one's own cannot be trained.
    """
    check_numbers(numbers)
    if "promotion_confidence" in numbers:
        gates_of(numbers)
    check_provider(Workspace.locate(), provider)
    get_scheduler(scheduler)
    check_model_name(model)
    check_update_mode_name(update_mode)
    check_start_name(start_from)
    if plan_only and resume_run_id is not None:
        raise ConfigurationError(
            f"plan_only says what a new run would buy, so resume_run_id must be left out, got {resume_run_id!r}"
        )
    if ready_by is not None:
        parse_time_of_day(ready_by)
    for name in device_types:
        get_device_type(name)
    check_markets(markets=markets, provider=provider, catalogue=catalogue, region=region)
    price_files(Workspace.locate(), catalogue)
    NO_EXTRA_COSTS.without(leave_out_costs)
    check_source(data, schema_file=schema_file, day=day)
    check_own_model(model, schema_of(schema_file))


def gates_of(parameters: Mapping[str, Any]) -> PromotionGates:
    """Return the gates that parameters of train-ctr ask for.

    Raises:
        ConfigurationError: A bound is out of its range.
    """
    return PromotionGates(
        least_auc_gain=parameters["least_auc_gain"],
        most_log_loss_rise=parameters["most_log_loss_rise"],
        most_calibration_rise=parameters["most_calibration_rise"],
        most_usd_per_million_samples_ratio=parameters["most_usd_per_million_samples_ratio"],
        least_clicks=parameters["least_clicks"],
        confidence=parameters["promotion_confidence"],
    )
