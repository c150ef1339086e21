"""From a source of clicks, or a synthetic stream, to rows that workers can map into memory."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import partial
from pathlib import Path

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.distinct_values import outgrown_tables
from heterps_core.data.manifest import (
    MANIFEST_NAME,
    DatasetManifest,
    SourceFile,
    describe_source,
    folder_of,
    read_manifest,
)
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.proposal.day_check import check_day
from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.days import Night, parse_day, partitions_of, table_changes
from heterps_core.data.reading.readers import list_source_files
from heterps_core.data.reading.source_files import files_of_day
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.data.row_query import inputs_of
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema
from heterps_core.data.synthetic.click_stream import (
    best_reachable_quality,
    probabilities_beside,
    write_click_stream,
)
from heterps_core.errors import DataError
from heterps_core.judging.quality import ClickQuality
from heterps_core.training.job import STOP, TELL, TRAIN
from infra.workspace import Workspace
from tasks.running.progress import log_step
from tasks.running.start import NEW_MODEL, Start
from tasks.sources import ClickSource, naming_day
from tasks.steps import step

CLICK_STREAM_ROWS = 200_000
"""Rows of the synthetic stream: some seconds of training on two cores, and most values are seen often enough."""

CLICK_STREAM_SEED = 0
"""The stream is the same for every run, so that runs can be compared; a run's seed is for its training."""

_NIGHT_FOLDER = re.compile(r"-(\d{4}-\d{2}-\d{2})-[0-9a-f]{10}$")

_RESULTS = "queried"
"""Ends the name of the folder of what queries have made of a source."""

KEPT_NIGHTS = 7
"""Prepared nights of a source that stay on the disk; a live fleet needs its own, and there is one at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedClicks:
    """A prepared data set with what is known about its source."""

    directory: str
    description: str
    """For people."""

    best_reachable: ClickQuality | None
    """Quality of the true probabilities on the held-out rows; None where they are not known."""

    profiled_as: str = ""
    """What a profile of these rows is kept by: the same for the days of a source that fall into one week, whose ids
    repeat alike; empty for rows that are like no others."""

    @property
    def summary(self) -> str:
        """What was prepared, in one line."""
        manifest = self.open().manifest
        left_out = f", {manifest.num_left_out_rows:,} without a click left out" * bool(
            manifest.num_left_out_rows
        )
        return (
            f"{self.description}: {manifest.num_train_rows:,} rows to train on{left_out}, the latest "
            f"{manifest.num_eval_rows:,} held out, {manifest.train_click_rate:.1%} clicks"
        )

    def open(self) -> PreparedDataset:
        """Map the rows into memory."""
        return PreparedDataset.open(self.directory)


@step("prepare data")
def prepare_data(
    workspace: Workspace,
    source: ClickSource,
    *,
    night: Night | None = None,
    start: Start = NEW_MODEL,
    late_rows: str = TELL,
    data_checks: str | None = None,
) -> PreparedClicks:
    """Read the source once, or reuse the rows that an earlier run prepared of it.

    Args:
        night: Which days of the source to train on and to hold out; None for all rows, the latest held out.
        start: The model that goes on with these rows decides table sizes, numeric transform and texts.
        late_rows: Use of files that earlier days have got since they were trained: tell, or train them, too.
        data_checks: Consequence where the day to be judged on looks different from the day to train on: tell, or
            stop; None does not look.

    Raises:
        DataError: The source cannot be read; names day, file and line.
        ConfigurationError: The schema cannot be used.
    """
    if source.data is None:
        return _prepare_click_stream(workspace)
    schema, path, query = source.schema, source.path, source.prepare_sql
    asked = f"{path} {source.schema_file}" + f" {query}" * (query is not None)
    name = f"{_file_name(path.name)}-{_short_hash(asked)}"
    rows_of = partial(source.rows_of, folder=workspace.data_directory / f"{name}-{_RESULTS}")
    if night is None:
        rows = path if query is None else rows_of(list_source_files(path), day=None)
        with _made_by(query):
            dataset = prepare_dataset(rows, schema=schema, out_dir=workspace.data_directory / name)
        _forget_unused_results(workspace, name)
        return PreparedClicks(
            directory=str(dataset.directory),
            description=f"{source.data} ({schema.name} format)",
            best_reachable=None,
        )
    night = _with_late_files(workspace, path, night, name=name, late_rows=late_rows)
    with naming_day(night):
        night = replace(
            night,
            train_files=rows_of(night.train_files, day=night.day),
            eval_files=rows_of(night.eval_files, day=night.day + timedelta(days=1)),
        )
    # A folder of its own, so that no other night takes its place.
    way = _short_hash(f"{start.slot_rows} {start.numeric_transform} {start.text_rule}")
    with _made_by(query), naming_day(night):
        if data_checks is not None:
            _check_last_day(night, schema, data_checks)
        dataset = prepare_dataset(
            night.train_files,
            schema=schema,
            buckets_per_slot=start.slot_rows,
            eval_source=night.eval_files,
            numeric_transform=start.numeric_transform,
            text_rule=start.text_rule,
            snapshot=path.snapshot_id if isinstance(path, TablePath) else None,
            out_dir=workspace.data_directory / f"{name}-{night.day}-{way}",
        )
    _forget_old_nights(workspace, name, keep=Path(dataset.directory))
    _forget_unused_results(workspace, name)
    if start.slot_rows is not None and schema.dynamic_ids is None:
        outgrown = outgrown_tables(
            dataset.manifest.columns, dataset.features.slot_rows, num_rows=dataset.num_train_rows
        )
        if outgrown is not None:
            log_step("tables", outgrown)
    probabilities = [probabilities_beside(file) for file in night.eval_files if isinstance(file, Path)]
    return PreparedClicks(
        directory=str(dataset.directory),
        description=f"{source.data}, {night.day} judged on the day after ({schema.name} format)",
        best_reachable=_best_reachable(dataset, probabilities),
        profiled_as=f"{name} in {night.day:%G-W%V}",
    )


@contextmanager
def _made_by(prepare_sql: str | None) -> Iterator[None]:
    """Name the query where rows that it has made cannot be used."""
    try:
        yield
    except DataError as error:
        if prepare_sql is None:
            raise
        raise DataError(
            f"what {prepare_sql} returns ({error.path})", error.problem, line=error.line
        ) from error


def _check_last_day(night: Night, schema: DataSchema, data_checks: str) -> None:
    """Tell where the newer day of a night looks different from the day before.

    Raises:
        DataError: It does, and the night shall stop then; or a file cannot be read.
    """
    check = check_day(night.eval_files, schema, before=night.train_files)
    if not check.findings:
        log_step("checked", f"{check.num_rows:,} rows of the day to be judged on look like those to train on")
        return
    said = "; ".join(check.findings)
    if data_checks == STOP:
        raise DataError(
            night.eval_files[0],
            f"must look like the day before, as data_checks is {STOP}, but {said}; with data_checks={TELL} "
            f"the night goes on",
        )
    log_step("unusual", f"the day to be judged on, beside the one to train on: {said}")


def _with_late_files(
    workspace: Workspace, source: SourcePath | TablePath, night: Night, *, name: str, late_rows: str
) -> Night:
    """Tell of files that days trained on before have got since; returns a night that trains them, where it shall.

    Known is what the prepared nights before it have read: those of a day itself, and of the day after it.
    """
    trained: dict[date, DatasetManifest] = {}
    known: dict[str, SourceFile] = {}
    # In the order of days, which the names end with.
    for path in sorted(workspace.data_directory.glob(f"{name}-*")):
        found = _NIGHT_FOLDER.search(path.name)
        manifest = read_manifest(folder_of(path))
        if found is not None and manifest is not None and parse_day(found[1]) < night.day:
            trained[parse_day(found[1])] = manifest
            known |= {file.path: file for source in manifest.sources for file in inputs_of(source)}
    partitions = {} if isinstance(source, TablePath) else partitions_of(source)
    late: list[SourcePath] = []
    for day, manifest in trained.items():
        new: Sequence[SourcePath]
        changed: Sequence[SourcePath | TablePath]
        if isinstance(source, TablePath):
            new, changed = _changes_of_table(source, manifest, day)
        else:
            new = files_of_day(partitions[day]) if day in partitions else ()
            changed = [
                file
                for file in new
                if str(file) in known and not describe_source(file).is_same(known[str(file)])
            ]
        new = [file for file in new if str(file) not in known]
        with_night = "trained" if late_rows == TRAIN else "late_rows=train trains it"
        for some, what, way_out in (
            (new, "come", f"{with_night} with {night.day}"),
            (changed, "changed", f"day={day} again=True trains that day once more"),
        ):
            if some:
                others = f" and {len(some) - 1} more files" if len(some) > 1 else ""
                log_step("late rows", f"{some[0]}{others}: {what} since {day} was trained on; {way_out}")
        late += new
    return replace(night, train_files=(*late, *night.train_files)) if late_rows == TRAIN else night


def _changes_of_table(
    table: TablePath, manifest: DatasetManifest, day: date
) -> tuple[Sequence[SourcePath], Sequence[TablePath]]:
    """Return the files with new rows that a day has got since it was trained, and the table if rows were changed."""
    if manifest.snapshot is None:
        return (), ()
    try:
        added, changed = table_changes(table, manifest.snapshot)
    except DataError as error:
        log_step("late rows", f"which rows have come since {day} was trained on is not known: {error}")
        return (), ()
    return added.get(day, ()), [table] * (day in changed)


def _forget_old_nights(workspace: Workspace, name: str, *, keep: Path) -> None:
    """Delete prepared nights of a source but the newest; they can be prepared again from their partitions."""
    prepared = [
        path for path in workspace.data_directory.glob(f"{name}-*") if (path / MANIFEST_NAME).exists()
    ]
    newest_first = sorted(prepared, key=lambda path: (path / MANIFEST_NAME).stat().st_mtime, reverse=True)
    for path in newest_first[KEPT_NIGHTS:]:
        if path != keep:
            shutil.rmtree(path, ignore_errors=True)


def _forget_unused_results(workspace: Workspace, name: str) -> None:
    """Delete what queries have made of a source and no prepared data set reads."""
    manifests = [read_manifest(folder_of(path)) for path in workspace.data_directory.glob(f"{name}*")]
    used = {file.path for manifest in manifests if manifest is not None for file in manifest.sources}
    for path in (workspace.data_directory / f"{name}-{_RESULTS}").glob("*"):
        if not any(Path(file).parent == path for file in used):
            shutil.rmtree(path, ignore_errors=True)


def _prepare_click_stream(workspace: Workspace) -> PreparedClicks:
    name = f"click-stream-{CLICK_STREAM_ROWS}-{CLICK_STREAM_SEED}"
    path = workspace.data_directory / f"{name}.tsv"
    probabilities_path = probabilities_beside(path)
    if not (path.exists() and probabilities_path.exists()):
        draft = path.with_name(f"draft-{path.name}")
        stream = write_click_stream(draft, num_rows=CLICK_STREAM_ROWS, seed=CLICK_STREAM_SEED)
        stream.probabilities_path.replace(probabilities_path)
        stream.path.replace(path)
    dataset = prepare_dataset(str(path), schema=CRITEO_SCHEMA, out_dir=workspace.data_directory / name)
    return PreparedClicks(
        directory=str(dataset.directory),
        description=f"synthetic click stream, {CLICK_STREAM_ROWS:,} rows, seed {CLICK_STREAM_SEED}",
        best_reachable=_best_reachable(dataset, [probabilities_path]),
    )


def _best_reachable(dataset: PreparedDataset, probabilities: Sequence[Path]) -> ClickQuality | None:
    """Return what the true probabilities of the held-out rows, the last of those given, reach; None without them."""
    if not probabilities or not all(path.exists() for path in probabilities):
        return None
    import numpy as np

    known = np.concatenate([np.load(path) for path in probabilities])
    if len(known) < dataset.num_eval_rows:
        return None
    labels, weights = dataset.targets(dataset.num_train_rows, dataset.manifest.num_rows)
    return best_reachable_quality(known[len(known) - dataset.num_eval_rows :], labels, weights)


def _file_name(text: str) -> str:
    return "".join(character if character.isalnum() or character in "._-" else "_" for character in text)[:60]


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
