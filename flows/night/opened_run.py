"""A run whose record is open: what it was asked for, what it begins with, and the rows that it trains on."""

from __future__ import annotations

from dataclasses import dataclass

from prefect.runtime import flow_run as current_flow_run

from flows.parameter_checks import resumed_parameters
from flows.parameters import TrainedParameters, TrainParameters
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.reading.days import Night
from heterps_core.training.job import default_batch_size
from heterps_core.training.storage.run_directory import RunDirectory
from infra.providers import get_provider
from infra.workspace import Workspace
from tasks.clusters import directory_of_run
from tasks.data import PreparedClicks, find_night_of, prepare_data, schema_of, source_name
from tasks.records.mlflow_names import START_TAG
from tasks.records.mlflow_store import client_of
from tasks.records.runs import check_not_finished, open_record, save_parameters
from tasks.records.tracking import TrackedRun
from tasks.running.progress import log_step
from tasks.running.start import Start, start_of_run


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedRun:
    """A run of train-ctr, from when its record is open."""

    workspace: Workspace
    run_id: str
    is_resumed: bool
    asked: TrainParameters
    """Of a run that is resumed, what decides its model is what it began with."""

    tracked: TrackedRun
    start: Start
    clicks: PreparedClicks
    dataset: PreparedDataset

    @property
    def is_dry_run(self) -> bool:
        """Nothing is charged for it."""
        return not get_provider(self.asked.provider).charges_money

    @property
    def batch_size(self) -> int:
        """Samples of a training step."""
        return self.asked.batch_size or default_batch_size(self.dataset.num_train_rows)

    @property
    def directory(self) -> RunDirectory:
        """Where the flow's host and the nodes meet."""
        return directory_of_run(self.workspace, self.asked.provider, self.run_id)


def begin_run(
    workspace: Workspace,
    asked: TrainParameters,
    night: Night | None,
    *,
    run_id: str,
    is_resumed: bool,
) -> OpenedRun:
    """Open the record of a run, choose what it begins with, and prepare its rows.

    Args:
        asked: Its parameters; a run that is resumed keeps those that decide its model.
        night: Of `asked`; None where the data has no days, or the run is resumed.

    Raises:
        ConfigurationError: There is no such run to resume, or the record of runs does not answer.
        DataError: The rows cannot be read.
        CheckpointError: The champion's files are not those that were registered.
    """
    if is_resumed:
        check_not_finished(workspace, run_id)
        asked = asked.model_copy(update=resumed_parameters(workspace, run_id))
        night = find_night_of(asked.data, asked.day) if asked.day else night
    else:
        save_parameters(workspace, run_id, asked.values_for(TrainedParameters))
    log_step("run", run_id)
    tracked = open_record(
        workspace,
        run_id=run_id,
        model=asked.sized_model,
        scheduler=asked.scheduler,
        provider=asked.provider,
        flow_run_id=current_flow_run.id,
        data=source_name(asked.data, asked.schema_file),
        day=asked.day,
    )
    start = start_of_run(
        workspace,
        directory_of_run(workspace, asked.provider, run_id) if is_resumed else None,
        start_from=asked.start_from,
        day=None if night is None else night.day,
        model=asked.sized_model,
        schema=schema_of(asked.schema_file),
        optimizers=asked.model_dump(include={"dense_optimizer", "embedding_optimizer"}),
    )
    if start.reason:
        log_step("start", start.reason)
    if start.model is not None:
        client_of(workspace).set_tag(tracked.mlflow_run_id, START_TAG, start.model.version)
    clicks = prepare_data(
        workspace,
        data=asked.data,
        schema_file=asked.schema_file,
        night=night,
        buckets_per_slot=start.buckets_per_slot,
        numeric_transform=start.numeric_transform,
    )
    log_step("data", clicks.summary)
    return OpenedRun(
        workspace=workspace,
        run_id=run_id,
        is_resumed=is_resumed,
        asked=asked,
        tracked=tracked,
        start=start,
        clicks=clicks,
        dataset=clicks.open(),
    )
