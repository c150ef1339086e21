"""Checks of parameters that need files, prices or more than one of them, before anything is recorded or launched."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from typing import Any

from flows import parameters
from flows.parameter_model import REMOVED
from flows.service.schedule import nightly_timezone
from heterps_core.data.reading.days import parse_day
from heterps_core.device_types import get_device_type, in_markets
from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.hardware import DeviceKind, Market
from heterps_core.models import CTR_MODELS, DEFAULT_MODEL
from infra.prices.price_catalogue import PriceCatalogue
from infra.providers import get_provider, provider_of
from infra.providers.base import REGION
from infra.workspace import Workspace
from tasks.planning.deadline import parse_time_of_day
from tasks.planning.regions import Regions
from tasks.prices import RENTED_AS, catalogue_of, device_types_of
from tasks.profiling import check_model, check_model_name
from tasks.provisioning import check_offers, check_rentable
from tasks.records.run_files import saved_parameters
from tasks.training import label_weights_of

OWN_PARAMETERS = ("data", "day", "resume_run_id", "plan_only", "ready_by")
"""Parameters of train-ctr that a back-fill sets itself or has no use for."""


def check_run(asked: parameters.TrainParameters) -> None:
    """Check all that can be known before a run, and that its data and model fit one another.

    What a run that is resumed began with has been checked then.
    """
    check_parameters(asked)
    if asked.resume_run_id is not None:
        return
    if not asked.plan_only:
        workspace = Workspace.locate()
        for region in _regions_of(workspace, asked):
            check_rentable(asked.device_types, provider=provider_of(workspace, asked.provider, region=region))
    label_weights_of(asked.source.schema, asked.label_weights)
    asked.source.check_columns(asked.day)
    # The built-in models are known to fit the default columns; building one loads torch, which takes seconds.
    if asked.sized_model not in CTR_MODELS or asked.schema_file is not None:
        check_model(asked.sized_model, asked.source.schema)


def check_parameters(asked: parameters.TrainParameters) -> None:
    """Check the parameters before any work or record begins: in milliseconds, and a model of one's own in seconds.

    Raises:
        UnknownNameError: A model, device type or region is not known; the message lists the known ones.
        DataError, ConfigurationError: A file, day or run is not there, the provider lacks what it needs, or a device
            type is not sold in a market of the region.
    """
    workspace = Workspace.locate()
    rented_from = get_provider(asked.provider)
    _check_home(asked, workspace)
    regions = _regions_of(workspace, asked)
    location = rented_from.run_location(workspace, "check")
    provider_of(workspace, asked.provider, region=regions[0]).check_run_directory(location)
    check_model_name(asked.model)
    if asked.size != "m" and asked.model != DEFAULT_MODEL:
        raise ConfigurationError(
            f"size is measured for {DEFAULT_MODEL} alone, so it must be m for {asked.model}, got {asked.size!r}; set "
            f"hidden_widths and embedding_dim"
        )
    if asked.plan_only and asked.resume_run_id is not None:
        raise ConfigurationError(
            f"plan_only says what a new run would buy, so resume_run_id must be left out, "
            f"got {asked.resume_run_id!r}"
        )
    if asked.resume_run_id is not None:
        resumed_parameters(workspace, asked.resume_run_id)
    for folder in asked.embedding_folders:
        if not Path(folder).is_absolute():
            raise ConfigurationError(
                f"embedding_folders must be whole paths, as workers have folders of their own, got {folder!r}"
            )
    if asked.epochs > 1 and (asked.target_auc or asked.max_samples):
        raise ConfigurationError(
            f"target_auc and max_samples end the first epoch early, so epochs must be 1, got {asked.epochs}"
        )
    if asked.ready_by is not None:
        parse_time_of_day(asked.ready_by)
        nightly_timezone()
    catalogue = catalogue_of(workspace, asked.provider)
    device_types = asked.device_types or device_types_of(workspace, asked.provider)
    cpu_types = [name for name in device_types if get_device_type(name).kind is DeviceKind.CPU]
    if asked.num_threads > 1 and not rented_from.is_dry_run and cpu_types:
        raise ConfigurationError(
            f"num_threads must be 1 where workers may be on {cpu_types[0]}, since a plan counts one "
            f"core for each of them, got {asked.num_threads}; leave it out, or take GPU device types only"
        )
    # Where prices are asked for before machines are rented, those of spot markets are among them.
    markets = [Market.ON_DEMAND] if rented_from.live_prices else [Market(each) for each in asked.markets]
    # Not every region sells all types; a plan that may stand in one of several takes those that are sold there.
    is_each_sold = bool(asked.device_types) and len(regions) == 1
    for region in regions:
        if rented_from.live_prices is None or region in catalogue.regions():
            wanted = in_markets(device_types, markets)
            check_offers(wanted, catalogue=catalogue, region=region, is_each_sold=is_each_sold)
    asked.source.check(asked.day)


def _regions_of(workspace: Workspace, asked: parameters.TrainParameters) -> tuple[str, ...]:
    return Regions.of(workspace, asked.provider, asked.regions, data=asked.data).rented


def _check_home(asked: parameters.TrainParameters, workspace: Workspace) -> None:
    """Check that nothing is asked of machines of one's own that only rented ones or a dry run have.

    Raises:
        UnknownNameError: There is no such region with prices, or no such machine.
        ConfigurationError: Another night than that of the data is to be planned.
    """
    provider = get_provider(asked.provider)
    for name in ("planned_samples", "planned_rows_per_slot"):
        if getattr(asked, name) is not None and not provider.is_dry_run:
            raise ConfigurationError(
                f"{name} is of a larger night that a dry run is planned for, but provider {asked.provider} trains "
                f"the rows at hand; add provider local, or leave {name} out"
            )
    if not provider.has_inventory:
        return
    if asked.regions:
        # In the first of which the price on rented machines is looked up.
        Regions.of(workspace, RENTED_AS, asked.regions, data=asked.data)
    known = device_types_of(workspace, asked.provider)
    rented = [name for name in asked.device_types if get_device_type(name).name not in known]
    if rented:
        way_out = "With provider local rented machines are planned, in a dry run."
        raise UnknownNameError(f"device type of the home {asked.provider}", rented[0], known, way_out=way_out)


def resumed_parameters(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """Return the parameters that a run began with and keeps when it is resumed.

    Raises:
        UnknownNameError, ConfigurationError: There is no such run, or its saved parameters cannot be used.
    """
    saved = saved_parameters(workspace, run_id)
    saved = {name: value for name, value in saved.items() if name not in REMOVED}
    return dict(parameters.TrainedParameters.of(saved, place=f" in the saved parameters of run {run_id}"))


def days_of(asked: parameters.BackfillParameters) -> list[date]:
    """Return the days of a back-fill in order.

    Raises:
        ConfigurationError: A day is no date, or the range is empty.
    """
    first, last = parse_day(asked.first_day), parse_day(asked.last_day)
    if last < first:
        raise ConfigurationError(f"the last day must not come before the first, got {first} and {last}")
    return [first + timedelta(days=number) for number in range((last - first).days + 1)]


def check_backfill(asked: parameters.BackfillParameters) -> None:
    """Check the days and settings of a back-fill; a day that is missing or damaged fails in its turn.

    Raises:
        ConfigurationError: See `days_of`; or a setting is out of its range.
        UnknownNameError, DataError: A setting is none of train-ctr's; see `check_parameters`.
    """
    days_of(asked)
    for name in asked.settings:
        if name in OWN_PARAMETERS:
            known = [each for each in parameters.TrainParameters.model_fields if each not in OWN_PARAMETERS]
            raise UnknownNameError("setting of a back-fill", name, known)
    settings = parameters.TrainParameters.of(asked.settings, place=" of train-ctr in settings")
    check_parameters(settings.model_copy(update={"data": asked.data}))


def check_comparison(asked: parameters.CompareParameters) -> None:
    """Check what is to be compared.

    Raises:
        UnknownNameError: A model or device type is not known.
        ConfigurationError: A file cannot be read, or a device type is not sold at the prices at hand.
    """
    from heterps_core.planning.search.measured_search import MEASURED_METHODS
    from tasks.comparison import load_problems

    for model in asked.models or []:
        check_model_name(model)
    if asked.reward == "measured":
        for method in asked.methods or []:
            if method not in MEASURED_METHODS:
                raise UnknownNameError("method that learns from measured rewards", method, MEASURED_METHODS)
        if asked.problem:
            raise ConfigurationError(
                "measured rewards are those of a model that is trained here, so problem must be left out; "
                "name models instead"
            )
    check_offers(asked.device_types, catalogue=PriceCatalogue(), region=REGION)
    load_problems(asked.problem or [])
