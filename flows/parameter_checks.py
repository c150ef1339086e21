"""Checks the parameters of a run before Prefect, a record or a machine is started for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from flows.service.schedule import nightly_timezone
from heterps_core.device_types import DEVICE_TYPES, in_markets
from heterps_core.errors import ConfigurationError
from heterps_core.hardware import Market
from heterps_core.models import CTR_MODELS
from heterps_core.planning.problem.extra_costs import NO_EXTRA_COSTS
from heterps_core.planning.search.schedulers import get_scheduler
from infra.prices.price_catalogue import PriceCatalogue
from infra.workspace import Workspace
from tasks.clusters import check_provider
from tasks.data import check_source, check_source_columns, schema_of
from tasks.judging.promotion_gates import PromotionGates
from tasks.planning.deadline import parse_time_of_day
from tasks.planning.markets import check_markets
from tasks.planning.parameter_ranges import check_numbers
from tasks.prices import price_files
from tasks.profiling import check_model, check_model_name
from tasks.provisioning import LOCAL_PROVIDER, check_offers
from tasks.records.runs import kept_parameters
from tasks.running.start import CHAMPION, check_start_name


def check_run(**parameters: Any) -> None:
    """Check all that can be known before a run: its parameters, and that its data and model fit them.

    What a run that is resumed began with has been checked then.

    Raises:
        UnknownNameError, DataError, ConfigurationError, ProvisioningError: See `check_parameters`; or the data lacks
            a column of the schema, or the model cannot be built for its columns.
    """
    check_parameters(**parameters)
    if parameters.get("resume_run_id") is not None:
        return
    data, schema_file, model = (parameters[name] for name in ("data", "schema_file", "model"))
    check_source_columns(data, schema_file=schema_file, day=parameters.get("day"))
    # The built-in models are known to fit the default columns; building one loads torch, which takes seconds.
    if model not in CTR_MODELS or schema_file is not None:
        check_model(model, schema_of(schema_file))


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
        DataError, ConfigurationError: A file, day or run is not there, the provider lacks what it needs, or a number
            is out of its range.
        ProvisioningError: A device type is not sold in a market of the region.
    """
    workspace = Workspace.locate()
    check_numbers(numbers)
    if "promotion_confidence" in numbers:
        gates_of(numbers)
    check_provider(workspace, provider)
    get_scheduler(scheduler)
    check_model_name(model)
    check_start_name(start_from)
    if plan_only and resume_run_id is not None:
        raise ConfigurationError(
            f"plan_only says what a new run would buy, so resume_run_id must be left out, got {resume_run_id!r}"
        )
    if resume_run_id is not None:
        kept_parameters(workspace, resume_run_id)
    if ready_by is not None:
        parse_time_of_day(ready_by)
        nightly_timezone()
    check_device_types(device_types)
    check_markets(markets=markets, provider=provider, catalogue=catalogue, region=region)
    # Before machines are rented prices are refreshed, those of spot markets among them.
    known_markets = [Market(each) for each in markets] if provider == LOCAL_PROVIDER else [Market.ON_DEMAND]
    check_offers(
        in_markets(device_types, known_markets),
        catalogue=PriceCatalogue(price_files(workspace, catalogue)),
        region=region,
    )
    NO_EXTRA_COSTS.without(leave_out_costs)
    check_source(data, schema_file=schema_file, day=day)


def check_device_types(names: Sequence[str]) -> None:
    """Check that at least one device type is named; `check_offers` looks them up.

    Raises:
        ConfigurationError: None is named.
    """
    if not names:
        raise ConfigurationError(f"device_types must name at least one of: {', '.join(DEVICE_TYPES)}")


def check_types(function: Callable[..., Any], values: Mapping[str, Any], *, place: str) -> dict[str, Any]:
    """Return values as Prefect gives them to a flow's function, so that "2" is a number here where it is one there.

    Args:
        function: Whose parameters have the names of the values.
        values: As they were read from JSON.
        place: Where they stand, for the message.

    Raises:
        ConfigurationError: A value has not the type of its parameter.
    """
    types = get_type_hints(function, include_extras=True)
    typed = {}
    for name, value in values.items():
        try:
            typed[name] = TypeAdapter(types[name]).validate_python(value)
        except ValidationError as error:
            said = error.errors()[0]["msg"].lower()
            raise ConfigurationError(
                f"{name} in {place} must have the type of that parameter, got {value!r}: {said}"
            ) from error
    return typed


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
