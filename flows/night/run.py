"""Opens a night: its record, the model that it begins with, and its rows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefect.runtime import flow_run as current_flow_run

from flows.parameter_checks import resumed_parameters
from flows.parameters import TrainedParameters, TrainParameters
from flows.service.prefect_connection import name_flow_run
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.reading.days import Night
from heterps_core.training.job import (
    CHAMPION,
    TrainingConfig,
    default_batch_size,
    default_dense_learning_rate,
)
from heterps_core.training.storage.run_directory import RunDirectory
from infra.bootstrap.node_start import Bootstrap
from infra.ledger.ledger import Ledger
from infra.providers import get_provider, provider_of
from infra.workspace import Workspace
from tasks.clusters import data_folders, directory_of_run, next_launch_id
from tasks.data import PreparedClicks, prepare_data
from tasks.planning.regions import Regions
from tasks.records.champion import champion_before
from tasks.records.mlflow_names import Tag, TrackedRun
from tasks.records.mlflow_store import answering_client, record_events, record_table
from tasks.records.past_runs import check_not_finished
from tasks.records.run_files import save_parameters
from tasks.running.progress import log_step
from tasks.running.run_lifecycle import open_run
from tasks.running.start import Start, choose_start, fits_night, load_start
from tasks.training import label_weights_of


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run of train-ctr, from when its record is open."""

    workspace: Workspace
    run_id: str
    is_resumed: bool
    asked: TrainParameters
    """A run that is resumed keeps the parameters that decide its model."""

    tracked: TrackedRun
    start: Start
    clicks: PreparedClicks
    dataset: PreparedDataset
    planned_batch_size: int | None = None
    """Batch of the planned job where a curve of quality chose it."""

    @property
    def is_dry_run(self) -> bool:
        """This machine stands for those of the plan."""
        return get_provider(self.asked.provider).is_dry_run

    @property
    def batch_size(self) -> int:
        """Samples of a training step."""
        return self.asked.batch_size or default_batch_size(self.dataset.num_train_rows)

    @property
    def num_steps(self) -> int:
        """Steps of the whole training."""
        steps, most = self.dataset.num_batches(self.batch_size) * self.asked.epochs, self.asked.max_samples
        return steps if most is None else min(steps, -(-most // self.batch_size))

    @property
    def training_numbers(self) -> dict[str, Any]:
        """The numbers of `TrainingConfig` that were asked for; None where the plan decides."""
        asked = self.asked
        return asked.values_for(TrainingConfig) | {
            "batch_size": self.batch_size,
            "embedding_folders": tuple(asked.embedding_folders),
            "label_weights": label_weights_of(self.dataset.manifest.schema, asked.label_weights),
            "dense_learning_rate": asked.dense_learning_rate or default_dense_learning_rate(asked.model),
        }

    @property
    def directory(self) -> RunDirectory:
        """Where the flow's host and the nodes meet."""
        return directory_of_run(self.workspace, self.asked.provider, self.run_id)


def begin_run(
    workspace: Workspace, asked: TrainParameters, night: Night | None, *, run_id: str, is_resumed: bool
) -> OpenedRun:
    """Open the record of a run, choose what it begins with, and prepare its rows.

    Args:
        asked: Its parameters; a run that is resumed keeps those that decide its model.
        night: Of `asked`; None where the data has no days, or the run is resumed.
    """
    if is_resumed:
        check_not_finished(workspace, run_id)
        asked = asked.model_copy(update=resumed_parameters(workspace, run_id))
        night = asked.source.night(asked.day) if asked.day else night
    else:
        save_parameters(workspace, run_id, asked.values_for(TrainedParameters))
    log_step("run", run_id)
    name_flow_run(asked.name_of(run_id))
    tracked = open_run(
        workspace,
        run_id=run_id,
        run_name=asked.name_of(run_id),
        tags={
            "heterps.provider": asked.provider,
            "prefect.flow_run_id": current_flow_run.id or "",
            Tag.MODEL: asked.sized_model,
            Tag.DATA: asked.source.name,
            **({Tag.DAY: asked.day} if asked.day else {}),
        },
    )
    if not is_resumed and (table := asked.source.table) is not None:
        record_table(workspace, tracked, table)
    start = _start_of(workspace, asked, night, run_id=run_id, is_resumed=is_resumed)
    if start.reason:
        log_step("start", start.reason)
    if start.model is not None:
        with answering_client(workspace) as client:
            client.set_tag(tracked.mlflow_run_id, Tag.START, start.model.version)
    clicks = prepare_data(
        workspace,
        asked.source,
        night=night,
        start=start,
        late_rows=asked.late_rows,
        # What was let pass once is not asked again.
        data_checks=None if is_resumed else asked.data_checks,
    )
    log_step("data", clicks.summary)
    dataset = clicks.open()
    if dataset.events is not None and not is_resumed:
        record_events(workspace, tracked, dataset.events)
    return OpenedRun(workspace, run_id, is_resumed, asked, tracked, start, clicks, dataset)


def prepared(run: OpenedRun) -> AbstractContextManager[object]:
    """Make the parts of a run's launch that a cloud knows late, while the block plans it.

    Not where one of several regions is to be chosen: there the launch makes them.
    """
    asked = run.asked
    region, *others = Regions.of(run.workspace, asked.provider, asked.regions, data=asked.data).rented
    provider = provider_of(run.workspace, asked.provider, region=region)
    if others or provider.runs_here:
        return nullcontext()
    location, folders = run.directory.location, data_folders(run.dataset.manifest)
    bootstrap = Bootstrap(run_location=location, data_folders=folders, python=provider.node_python)
    return provider.prepared(next_launch_id(Ledger(run.workspace.ledger_path), run.run_id), bootstrap)


def _start_of(
    workspace: Workspace, asked: TrainParameters, night: Night | None, *, run_id: str, is_resumed: bool
) -> Start:
    """Return the model that a run begins with; a run that is resumed keeps its own."""
    start = load_start(directory_of_run(workspace, asked.provider, run_id)) if is_resumed else None
    if start is not None:
        return start
    champion, schema = None, asked.source.schema
    if night is not None and asked.start_from == CHAMPION:
        fits = partial(fits_night, model=asked.sized_model, schema=schema)
        champion = champion_before(workspace, night.day, fits=fits)
    return choose_start(
        champion,
        start_from=asked.start_from,
        day=None if night is None else night.day,
        model=asked.sized_model,
        schema=schema,
        optimizers=asked.model_dump(include={"dense_optimizer", "embedding_optimizer"}),
    )
