"""From a source of clicks, or a synthetic stream, to rows that workers can map into memory."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.distinct_values import outgrown_tables
from heterps_core.data.features import TEXT_RULE
from heterps_core.data.manifest import MANIFEST_NAME, SourceFile, describe_source, folder_of, read_manifest
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.proposal.day_check import check_day
from heterps_core.data.reading.bucket_path import SourcePath, source_path
from heterps_core.data.reading.days import Night, find_night, parse_day, partitions_of
from heterps_core.data.reading.readers import check_columns, list_source_files
from heterps_core.data.reading.source_files import files_of_day
from heterps_core.data.reading.time_order import times_of
from heterps_core.data.row_query import RowQuery, inputs_of
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema
from heterps_core.data.synthetic.click_stream import (
    best_reachable_quality,
    probabilities_beside,
    write_click_stream,
)
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.judging.quality import ClickQuality
from heterps_core.training.job import STOP, TELL, TRAIN
from heterps_core.training.storage.store import check_store_location
from infra.workspace import Workspace
from tasks.records.mlflow_names import MADE_UP_DATA
from tasks.running.progress import log_step

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


def check_source(
    data: str | None, *, schema_file: str | None, prepare_sql: str | None = None, day: str | None = None
) -> None:
    """Check that a source, a day of it, a schema file and a query can be found, without reading the rows.

    Raises:
        DataError: There is no such source, or the day or the one after it is missing.
        ConfigurationError: A file is missing, or no schema; or a day is asked for where there are none.
    """
    for file, use in (
        (schema_file, "a schema file describes"),
        (prepare_sql, "a query of prepare_sql makes"),
    ):
        if file is not None and data is None:
            raise ConfigurationError(
                f"{use} the columns of data, but there is no data beside {file}; give both"
            )
    if prepare_sql is not None:
        RowQuery.load(Path(prepare_sql))
    if schema_file is not None:
        DataSchema.load(Path(schema_file))
    if find_night_of(data, day) is None and data is not None:
        list_source_files(_source_path(data))


def check_source_columns(
    data: str | None, *, schema_file: str | None, prepare_sql: str | None = None, day: str | None = None
) -> None:
    """Check by the first file of a source, or of each of both days, or by a query, that it has the schema's columns.

    Raises:
        DataError: It has not; names day, file and line.
        ConfigurationError: The schema or the query cannot be used.
    """
    if data is None:
        return
    schema, night = schema_of(schema_file), find_night_of(data, day)
    if prepare_sql is not None:
        files = list_source_files(_source_path(data)) if night is None else night.train_files
        RowQuery.load(Path(prepare_sql)).check(files, day=None if night is None else night.day, schema=schema)
        return
    try:
        if night is None:
            _check_columns(list_source_files(_source_path(data))[0], schema)
            return
        with _damage_of(night):
            for files in (night.train_files, night.eval_files):
                _check_columns(files[0], schema)
    except DataError as error:
        if schema_file is not None:
            raise
        raise DataError(
            error.path,
            f"{error.problem}; rows of another format than Criteo's need a schema file: heterps init proposes one",
            line=error.line,
        ) from error


def _check_columns(file: SourcePath, schema: DataSchema) -> None:
    check_columns(file, schema)
    if schema.time_column is not None:
        next(times_of(file, schema), None)


def find_night_of(data: str | None, day: str | None) -> Night | None:
    """Return what a night trains on and is judged on; None where the data is not cut into days.

    Args:
        data: File, folder or pattern, here or in a bucket (s3://bucket/prefix); None for the synthetic click stream.
        day: To train on; None for the latest whose next day is there too.

    Raises:
        DataError: The day or the one after it is missing or has no file.
        ConfigurationError: It is no date, or the data has no days.
    """
    wanted = None if day is None else parse_day(day)
    if data is not None:
        return find_night(_source_path(data), wanted)
    if wanted is not None:
        raise ConfigurationError(
            f"day {wanted} can be chosen only of data that is cut into days, but no data is given; name the folder "
            f"that holds day={wanted}, or make one with heterps make-days"
        )
    return None


def schema_of(schema_file: str | None) -> DataSchema:
    """Return the schema of a schema file; None stands for the Criteo format.

    Raises:
        ConfigurationError: The schema cannot be used.
    """
    return CRITEO_SCHEMA if schema_file is None else DataSchema.load(Path(schema_file))


def source_name(data: str | None, schema_file: str | None, prepare_sql: str | None = None) -> str:
    """Return one name for a source of rows, the same from whatever folder a run is started."""
    if data is None:
        return MADE_UP_DATA
    source = str(_source_path(data))
    for word, file in (("through", prepare_sql), ("by", schema_file)):
        source += "" if file is None else f" {word} {_source_path(file)}"
    return source


@task(name="prepare data", cache_policy=NO_CACHE)
def prepare_data(
    workspace: Workspace,
    *,
    data: str | None,
    schema_file: str | None,
    prepare_sql: str | None = None,
    night: Night | None = None,
    slot_rows: tuple[int, ...] | None = None,
    numeric_transform: NumericTransform | None = None,
    text_rule: int = TEXT_RULE,
    late_rows: str = TELL,
    data_checks: str | None = None,
) -> PreparedClicks:
    """Read the source once, or reuse what an earlier run made of the same source.

    Args:
        prepare_sql: File of a query that makes the rows, see `row_query.py`; None takes the source as it lies.
        night: Which days of the source to train on and to hold out; None for all rows, the latest held out.
        late_rows: What to do with files that days trained on before have got since: tell, or train them, too.
        data_checks: What to do where the day to be judged on looks otherwise than the one to train on: tell, or stop;
            None does not look.
        slot_rows: Rows of each table, of the model that is to go on; None to choose them by the values.
        numeric_transform: Of the model that is to go on; None to fit it on the rows to train on.
        text_rule: Of that model, see `FeatureSpec`.

    Raises:
        DataError: The source cannot be read; names day, file and line.
        ConfigurationError: The schema cannot be used.
    """
    if data is None:
        return _prepare_click_stream(workspace)
    schema, source = schema_of(schema_file), _source_path(data)
    asked = f"{source} {schema_file}" + f" {prepare_sql}" * (prepare_sql is not None)
    name = f"{_file_name(source.name)}-{_short_hash(asked)}"

    query = None if prepare_sql is None else RowQuery.load(Path(prepare_sql))
    results = workspace.data_directory / f"{name}-{_RESULTS}"

    def made(files: Sequence[SourcePath], day: date | None) -> tuple[SourcePath, ...]:
        """Return files as a query makes them, or as they are."""
        return (
            tuple(files) if query is None else (query.result(files, day=day, schema=schema, folder=results),)
        )

    if night is None:
        rows = source if query is None else made(list_source_files(source), None)
        with _made_by(prepare_sql):
            dataset = prepare_dataset(rows, schema=schema, out_dir=workspace.data_directory / name)
        _forget_unused_results(workspace, name)
        return PreparedClicks(
            directory=str(dataset.directory),
            description=f"{data} ({schema.name} format)",
            best_reachable=None,
        )
    night = _with_late_files(workspace, source, night, name=name, late_rows=late_rows)
    with _damage_of(night):
        night = replace(
            night,
            train_files=made(night.train_files, night.day),
            eval_files=made(night.eval_files, night.day + timedelta(days=1)),
        )
    # A folder of its own, so that no other night takes its place.
    way = _short_hash(f"{slot_rows} {numeric_transform} {text_rule}")
    with _made_by(prepare_sql), _damage_of(night):
        if data_checks is not None:
            _check_last_day(night, schema, data_checks)
        dataset = prepare_dataset(
            night.train_files,
            schema=schema,
            buckets_per_slot=slot_rows,
            eval_source=night.eval_files,
            numeric_transform=numeric_transform,
            text_rule=text_rule,
            out_dir=workspace.data_directory / f"{name}-{night.day}-{way}",
        )
    _forget_old_nights(workspace, name, keep=Path(dataset.directory))
    _forget_unused_results(workspace, name)
    if slot_rows is not None and schema.dynamic_ids is None:
        _log_outgrown_tables(dataset)
    return _clicks_of_night(night, dataset, data=data, name=name)


def _clicks_of_night(night: Night, dataset: PreparedDataset, *, data: str, name: str) -> PreparedClicks:
    return PreparedClicks(
        directory=str(dataset.directory),
        description=f"{data}, {night.day} judged on the day after ({dataset.manifest.schema.name} format)",
        best_reachable=_best_reachable(
            dataset, [probabilities_beside(file) for file in night.eval_files if isinstance(file, Path)]
        ),
        profiled_as=f"{name} in {night.day:%G-W%V}",
    )


def _log_outgrown_tables(dataset: PreparedDataset) -> None:
    outgrown = outgrown_tables(
        dataset.manifest.columns, dataset.features.slot_rows, num_rows=dataset.num_train_rows
    )
    if outgrown is not None:
        log_step("tables", outgrown)


@contextmanager
def _damage_of(night: Night) -> Iterator[None]:
    """Name the day where a file of a night cannot be read."""
    try:
        yield
    except DataError as error:
        day = night.day_of(error.path)
        if day is None:
            raise
        raise DataError(
            f"day {day}, {error.path}",
            f"{error.problem}; nothing was launched, and the champion stays: fix that day, or choose another",
            line=error.line,
        ) from error


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
    """Tell where the newer day of a night looks otherwise than the one before.

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
    workspace: Workspace, source: SourcePath, night: Night, *, name: str, late_rows: str
) -> Night:
    """Tell of files that days trained on before have got since; returns a night that trains them, where it shall.

    Known is what the prepared nights before it have read: those of a day itself, and of the day after it.
    """
    trained = set()
    known: dict[str, SourceFile] = {}
    # In the order of days, which the names end with.
    for path in sorted(workspace.data_directory.glob(f"{name}-*")):
        found = _NIGHT_FOLDER.search(path.name)
        manifest = read_manifest(folder_of(path))
        if found is not None and manifest is not None and parse_day(found[1]) < night.day:
            trained.add(parse_day(found[1]))
            known |= {file.path: file for source in manifest.sources for file in inputs_of(source)}
    partitions = partitions_of(source)
    late: list[SourcePath] = []
    for day in sorted(partitions.keys() & trained):
        files = files_of_day(partitions[day])
        new = [file for file in files if str(file) not in known]
        changed = [
            file for file in files if file not in new and not describe_source(file).is_same(known[str(file)])
        ]
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


def _source_path(data: str) -> SourcePath:
    path = source_path(data)
    if isinstance(path, Path):
        return path.expanduser().absolute()
    check_store_location(data)
    return path


def _file_name(text: str) -> str:
    return "".join(character if character.isalnum() or character in "._-" else "_" for character in text)[:60]


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
