"""The registry of trained models in MLflow: versions, the aliases that name two of them, and tags that tell of them.

A version keeps the hash of its files as a tag, beside and not among the files, so that a file that was changed or
damaged later is noticed before it is used. Nothing in a version is pickled: MLflow keeps the name of the module that
loads it, and that module reads safetensors and JSON.

Unlike figures of a run, what is written here does not wait for a store that is away: the steps build on one another.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from heterps_core.data.schema import DataSchema
from heterps_core.errors import CheckpointError, ConfigurationError, UnknownNameError
from heterps_core.training.storage.exported_files import exported_sha256, read_description
from infra.workspace import Workspace
from tasks import click_model
from tasks.click_model import ClickModel, columns_taken, example_rows
from tasks.records.mlflow_names import (
    CHALLENGER_ALIAS,
    CHAMPION_ALIAS,
    MADE_UP_DATA,
    REGISTERED_MODEL,
    Tag,
    TrackedRun,
)
from tasks.records.mlflow_store import answering_client, has_records, local_path

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import ModelSignature


_ARTIFACT_FOLDER = "model"
_NEWEST = 5


class DataKind(IntEnum):
    """Kind of a model's training data: a model of a lesser kind never replaces one of a greater kind."""

    MADE_UP = 0
    FILES = 1
    DAYS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredVersion:
    """A version of the registered model, as its tags tell of it."""

    version: str
    run_id: str
    mlflow_run_id: str
    model: str
    day: str | None
    sha256: str
    """Hash of its files by `exported_sha256`."""

    registered_at: datetime
    tags: Mapping[str, str]

    @property
    def data_kind(self) -> DataKind:
        """Kind of its training data."""
        if self.day is not None:
            return DataKind.DAYS
        return DataKind.MADE_UP if self.tags.get(Tag.DATA) == MADE_UP_DATA else DataKind.FILES


def register_model(
    workspace: Workspace, run: TrackedRun, folder: Path, *, model: str, data: str, day: str | None
) -> str:
    """Register an exported model as the newest challenger; return its version.

    The folder is read back first, so that what is registered is known to load.

    Raises:
        CheckpointError: The folder does not hold a whole model.
        ConfigurationError: MLflow's store does not answer.
    """
    tags: dict[str, str] = {
        Tag.RUN_ID: run.run_id,
        Tag.MODEL: model,
        Tag.DATA: data,
        Tag.SCHEMA: DataSchema.from_json(read_description(folder)["schema"]).meaning,
        Tag.SHA256: exported_sha256(folder),
    }
    if day is not None:
        tags[Tag.DAY] = day
    with answering_client(workspace) as client:
        artifacts = client.get_run(run.mlflow_run_id).info.artifact_uri
        _keep_artifacts(client, run.mlflow_run_id, folder, kept=local_path(artifacts))
        if _aliases(client) is None:
            client.create_registered_model(REGISTERED_MODEL)
        version = client.create_model_version(
            REGISTERED_MODEL,
            source=f"{artifacts}/{_ARTIFACT_FOLDER}",
            run_id=run.mlflow_run_id,
            tags=tags,
            description=f"{model}, trained by run {run.run_id}" + (f" on {day}" if day else ""),
        )
        client.set_registered_model_alias(REGISTERED_MODEL, CHALLENGER_ALIAS, version.version)
    return str(version.version)


def _keep_artifacts(client: MlflowClient, mlflow_run_id: str, folder: Path, *, kept: Path | None) -> None:
    """Save an exported model among the artifacts of a run, in the folder `kept` where MLflow has one here."""
    if kept is not None:
        saved = kept / _ARTIFACT_FOLDER
        shutil.rmtree(saved, ignore_errors=True)
        _save_for_mlflow(folder, saved)
        return
    with TemporaryDirectory(prefix=".mlflow-", dir=folder.parent) as name:
        saved = Path(name) / REGISTERED_MODEL
        _save_for_mlflow(folder, saved)
        client.log_artifacts(mlflow_run_id, str(saved), _ARTIFACT_FOLDER)


def registered_versions(workspace: Workspace) -> list[RegisteredVersion]:
    """Return all versions, the newest first; none where nothing was ever registered."""
    if not has_records(workspace):
        return []
    with answering_client(workspace) as client:
        found = client.search_model_versions(f"name = '{REGISTERED_MODEL}'", order_by=["version_number DESC"])
    return [_read(version) for version in found]


def find_version(workspace: Workspace, version: str) -> RegisteredVersion:
    """Return a version.

    Raises:
        UnknownNameError: There is no such version; the newest are named.
    """
    versions = {registered.version: registered for registered in registered_versions(workspace)}
    if version not in versions:
        raise UnknownNameError(f"version of {REGISTERED_MODEL}", version, list(versions)[:_NEWEST])
    return versions[version]


def version_to_serve(workspace: Workspace, version: str | None = None) -> RegisteredVersion:
    """Return a version, by default the champion.

    Raises:
        ConfigurationError: There is no such version, or no champion yet.
    """
    if version is not None:
        return find_version(workspace, version)
    if (champion := version_called(workspace, CHAMPION_ALIAS)) is None:
        raise ConfigurationError(
            "there must be a champion to predict with, but there is none yet; train one, or name a --version"
        )
    return champion


def version_called(workspace: Workspace, alias: str) -> RegisteredVersion | None:
    """Return the version that an alias names, or None where it names none."""
    if not has_records(workspace):
        return None
    with answering_client(workspace) as client:
        version = (_aliases(client) or {}).get(alias)
        if version is None:
            return None
        return _read(client.get_model_version(REGISTERED_MODEL, version))


def aliases_of(workspace: Workspace) -> Mapping[str, str]:
    """Return the versions that aliases name; none where no model is registered."""
    if not has_records(workspace):
        return {}
    with answering_client(workspace) as client:
        return _aliases(client) or {}


def call_version(workspace: Workspace, version: str | None, alias: str) -> None:
    """Let an alias name a version, or none, in one step; whatever it named before, it names no longer."""
    with answering_client(workspace) as client:
        if version is None:
            client.delete_registered_model_alias(REGISTERED_MODEL, alias)
        else:
            client.set_registered_model_alias(REGISTERED_MODEL, alias, version)


def tag_version(workspace: Workspace, version: str, tags: Mapping[Tag, str]) -> None:
    """Write tags of a version, one after the other in their order."""
    with answering_client(workspace) as client:
        for name, value in tags.items():
            client.set_model_version_tag(REGISTERED_MODEL, version, name, value)


def tag_run_of(workspace: Workspace, registered: RegisteredVersion, tags: Mapping[Tag, str]) -> None:
    """Write tags of the run that trained a version, where that is known."""
    if not registered.mlflow_run_id:
        return
    with answering_client(workspace) as client:
        for name, value in tags.items():
            client.set_tag(registered.mlflow_run_id, name, value)


def verified_folder(workspace: Workspace, registered: RegisteredVersion) -> Path:
    """Return the exported model of a version after checking its files against the hash that it was registered with.

    It is read where it lies if that is on this machine, else fetched once into the workspace.

    Raises:
        CheckpointError: A file is missing, or they are not those that were registered.
        ConfigurationError: MLflow's store does not answer.
    """
    import yaml

    root = _root_of(workspace, registered)
    if not (root / "MLmodel").is_file():
        raise _changed(registered, f"{root} holds no MLmodel")
    # MLflow's own reading of it loads MLflow, which takes two seconds.
    try:
        flavor = yaml.safe_load((root / "MLmodel").read_text())["flavors"]["python_function"]
        loader, folder = flavor["loader_module"], root / str(flavor["data"])
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise _changed(registered, f"{root / 'MLmodel'} cannot be read ({type(error).__name__})") from error
    if loader != click_model.__name__:
        # MLflow imports what this names, so it must not be exchanged either.
        raise _changed(registered, f"MLmodel names the loader {loader!r}")
    found = exported_sha256(folder)
    if found != registered.sha256:
        raise _changed(
            registered, f"the SHA-256 of {folder} is {found}, registered was {registered.sha256 or 'none'}"
        )
    return folder


def fetched_directory(workspace: Workspace) -> Path:
    """Return where versions that lie on a server are fetched to, in folders such as "12-0f3a..."."""
    return workspace.root / "registered"


def _save_for_mlflow(folder: Path, saved: Path) -> None:
    """Write an exported model as MLflow keeps it: by the name of the module that loads it, not as an object.

    On the same file system its files are linked, not copied: weights may be larger than memory.
    """
    import mlflow

    model = ClickModel(folder)
    example = example_rows(model.schema)
    with warnings.catch_warnings(), TemporaryDirectory() as name:
        described = Path(name) / folder.name
        described.mkdir()
        # MLflow warns of packages that it cannot find on an index.
        warnings.simplefilter("ignore")
        mlflow.pyfunc.save_model(
            saved,
            loader_module=click_model.__name__,
            data_path=str(described),
            signature=_signature(model),
            input_example=example,
            metadata={"columns": columns_taken(model.schema)},
            pip_requirements=["heterps"],
        )
    shutil.copytree(folder, saved / "data" / folder.name, copy_function=_link_or_copy, dirs_exist_ok=True)
    written = mlflow.models.Model.load(saved)
    written.model_size_bytes = sum(path.stat().st_size for path in saved.rglob("*"))
    written.save(saved / "MLmodel")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _signature(model: ClickModel) -> ModelSignature:
    """Return that the model answers with one float64 per row and label.

    Inputs are left out, as MLflow would check them before the model does: of declared types it refuses whole numbers
    in a column of numbers, and of any type it takes 50 ms for 1,000 rows. The model checks its columns itself, and
    the version's metadata names them.
    """
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    num_labels = len(model.schema.labels)
    shape = (-1, num_labels) if num_labels > 1 else (-1,)
    return ModelSignature(outputs=Schema([TensorSpec(np.dtype(np.float64), shape)]))


def _aliases(client: MlflowClient) -> Mapping[str, str] | None:
    """Return the versions that aliases name, or None where no model is registered."""
    found = client.search_registered_models(filter_string=f"name = '{REGISTERED_MODEL}'")
    return {alias: str(version) for alias, version in found[0].aliases.items()} if found else None


def _read(version: ModelVersion) -> RegisteredVersion:
    tags = dict(version.tags)
    return RegisteredVersion(
        version=str(version.version),
        run_id=tags.get(Tag.RUN_ID, ""),
        mlflow_run_id=version.run_id or "",
        model=tags.get(Tag.MODEL, ""),
        day=tags.get(Tag.DAY),
        sha256=tags.get(Tag.SHA256, ""),
        registered_at=datetime.fromtimestamp(version.creation_timestamp / 1_000, UTC),
        tags=tags,
    )


def _root_of(workspace: Workspace, registered: RegisteredVersion) -> Path:
    """Return the folder that MLflow keeps for a version, on this machine."""
    with answering_client(workspace) as client:
        uri = client.get_model_version_download_uri(REGISTERED_MODEL, registered.version)
    path = local_path(uri)
    if path is not None:
        return path
    with answering_client(workspace):
        from mlflow.artifacts import download_artifacts

        root = fetched_directory(workspace) / f"{registered.version}-{registered.sha256[:12]}"
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".fetched-", dir=root.parent) as name:
                fetched = download_artifacts(
                    artifact_uri=uri, dst_path=name, tracking_uri=workspace.tracking_uri
                )
                Path(fetched).rename(root)
        return root


def _changed(registered: RegisteredVersion, found: str) -> CheckpointError:
    return CheckpointError(
        f"version {registered.version} of {REGISTERED_MODEL} must have the files that it was registered with, but "
        f"{found}; they were changed or damaged: train it again, or go back with heterps rollback"
    )
