"""A trained model as files, and what predicts from them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.distinct_values import IdTurnover
from heterps_core.data.features import NO_ID, SEQUENCE, FeatureSpec
from heterps_core.data.history.event_join import EventJoin, newest_events
from heterps_core.data.manifest import DatasetManifest
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.schema import DataSchema
from heterps_core.embeddings.bags import Bags
from heterps_core.embeddings.id_index import ID_TENSORS, IdIndex, IdLayout
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.errors import CheckpointError, ConfigurationError
from heterps_core.models.chain import build_chain, run_layers
from heterps_core.models.graph_block import tensor_name
from heterps_core.models.slot_embedding import SlotEmbedding, share_sequences
from heterps_core.serving.id_turnover import StoredTable, grown_features
from heterps_core.serving.raw_columns import Columns, model_input
from heterps_core.training.checkpoint import complete_checkpoints, read_checkpoint
from heterps_core.training.job import OptimizerState, TrainingJob
from heterps_core.training.storage.exported_files import (
    DESCRIPTION,
    OPTIMIZER_STATE,
    SCHEMA_VERSION,
    WEIGHTS,
    file_sha256,
    read_description,
)
from heterps_core.training.storage.run_directory import JOB, START_MODEL, RunDirectory
from heterps_core.training.storage.stored_tensors import DTYPES, StoredLayer, TensorRows, read_tensors
from heterps_core.training.storage.verified_files import DamagedFileError, read_signed_json

ROWS_PER_BATCH = 8192

_ROWS_PER_HISTORY = 64
"""Most rows that share a history, as attention compares each with all of them: a power of two."""


class ClickPredictor:
    """Click probabilities from raw columns, as in training.

    An id that was never seen gets the row that its hash gives; with dynamic ids that is the shared one of its bucket,
    trained by ids that were not seen often enough. A missing value gets the row, or the mean, that missing values had
    in training. Columns that the model does not know are ignored. Rows of tables stay in the file until they are
    looked up.

    Neighbouring rows with the same history, as the candidates of a request have, share the work on it in models that
    read histories in order. The events of a history by pointer are read at the first prediction that needs them, and
    stay as they are then.

    Args:
        folder: The exported model.
        events_folder: Holds the store of events, which is brought up to date; None makes one that goes at the end.

    Raises:
        CheckpointError: A file is missing, or the weights are not those that the description was written for.
        ConfigurationError: The model's code cannot be imported, or has other layers than were exported.
    """

    def __init__(self, folder: Path, *, events_folder: Path | None = None) -> None:
        self._events_folder = events_folder
        description = read_description(folder)
        self.features = FeatureSpec.from_json(description["features"])
        self.schema = DataSchema.from_json(description["schema"])
        self.numeric_transform = NumericTransform.from_json(description["numeric_transform"])
        self.layers = _load_layers(description["model"], self.features, load_file(folder / WEIGHTS))
        self._shared_ids = _ids_of_histories(self.features) if share_sequences(self.layers) else []

    def predict(self, columns: Columns) -> npt.NDArray[np.float64]:
        """Return click probabilities [N], or [N, labels], for columns of N raw values each.

        Raises:
            DataError: A column that the model needs is missing, or a number cannot be read.
        """
        logits = self.logits(
            *model_input(columns, self.schema, self.numeric_transform, self.features, lambda: self._events)
        )
        return torch.from_numpy(logits).sigmoid().numpy()

    @cached_property
    def _events(self) -> EventJoin:
        if self._events_folder is not None:
            return newest_events(self.schema, self._events_folder)
        with TemporaryDirectory() as folder:
            return newest_events(self.schema, Path(folder))

    def logits(
        self, dense_ND: npt.NDArray[np.float32], ids_NK: npt.NDArray[np.int32] | npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Return logits [N], or [N, labels], of model input as `model_input` makes it, or as prepared."""
        logits = []
        for first in range(0, len(ids_NK), ROWS_PER_BATCH):
            part = slice(first, first + ROWS_PER_BATCH)
            labels = np.zeros(len(ids_NK[part]), dtype=np.float32)
            # Copies, as torch warns of arrays that it may not write, such as mapped ones.
            ids = ids_NK[part].copy()
            for columns in self._shared_ids:
                ids[_rows_like_the_one_before(ids_NK[part][:, columns])[:, None], columns] = NO_ID
            batch = ClickBatch.from_numpy(dense_ND[part].copy(), ids, labels)
            with torch.no_grad():
                logits.append(run_layers(self.layers, batch, None).squeeze(1).double())
        if not logits:
            return np.empty(0 if self.features.num_labels == 1 else (0, self.features.num_labels))
        return torch.cat(logits).numpy() + self.schema.logit_shift


def _ids_of_histories(features: FeatureSpec) -> list[list[int]]:
    """Return the columns of ids of each history; rows share all sequences of one together."""
    columns: dict[int, list[int]] = {}
    for slot, history in enumerate(features.slot_histories):
        if features.slot_poolings[slot] == SEQUENCE:
            columns.setdefault(history, []).extend(features.id_columns[slot])
    return list(columns.values())


def _rows_like_the_one_before(ids_NT: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    rows = np.flatnonzero((ids_NT[1:] == ids_NT[:-1]).all(1)) + 1
    return rows[rows % _ROWS_PER_HISTORY > 0]


class _MappedTable(ShardedTable):
    """Rows of an exported model, which come into memory from its file when they are looked up."""

    def __init__(self, weights: Mapping[str, Tensor], bags: Bags | None, ids: IdLayout | None) -> None:
        self.weight_RD, self.peers, self.bags = weights["weight"], None, bags
        self.dimension = self.weight_RD.shape[1]
        self.ids = None
        if ids is not None:
            self.ids = IdIndex(ids, *(weights[name] for name in ID_TENSORS))
        self._anchor, self._expected = torch.zeros(1), None


def _load_layers(model: str, features: FeatureSpec, weights: Mapping[str, Tensor]) -> list[nn.Module]:
    chain = build_chain(model, features, seed=0)
    for name, layer in chain.named_children():
        try:
            if isinstance(layer, SlotEmbedding):
                of_table = (key for key in weights if key.startswith(f"{name}."))
                own = {key.removeprefix(f"{name}."): weights[key] for key in of_table}
                layer.attach_table(_MappedTable(own, layer.bags, layer.ids))
            else:
                names = {key: tensor_name(name, layer, key) for key in layer.state_dict()}
                layer.load_state_dict({key: weights[own] for key, own in names.items() if own in weights})
        except (KeyError, RuntimeError) as error:
            raise ConfigurationError(
                f"{model} must have the layers that it was exported with, but its code has others today: the weights "
                f"of {name!r} do not fit; load it with the code of then, or train it again"
            ) from error
    return list(chain.eval().children())


def export_model(
    run: RunDirectory, manifest: DatasetManifest, folder: Path, *, model: str
) -> tuple[IdTurnover, ...]:
    """Write the newest checkpoint of a run as an exported model.

    Its tensors go from the workers' files into the exported ones block by block; the model is never in memory.
    `model` is the flow's own word: it is imported and called here, and rented machines could have changed the job's.
    Of dynamic ids those that were not seen for long are left out, and columns that are too full get twice the rows.

    Returns:
        What became of the dynamic ids of each column.

    Raises:
        CheckpointError: The run has no complete checkpoint, or the newest is damaged or of another model.
    """
    job = replace(TrainingJob.from_json(read_signed_json(run, JOB)), model=model)
    complete = complete_checkpoints(run)
    if not complete:
        raise CheckpointError(
            f"a run must have a complete checkpoint to be exported, {run.location} has none"
        )
    newest = complete[-1]
    try:
        layers = read_checkpoint(run, newest).layers
        found = {rows.tensor: (rows.dtype, rows.shape) for layer in layers for rows in layer.tensors.rows}
        weights = weight_shapes(job.model, manifest.features)
        for name, shape in weights.items():
            if name not in found or found[name][1] != shape:
                raise CheckpointError(
                    f"{name} must have the sizes {list(shape)} of {job.model} to be exported, got {found.get(name)}"
                )
        tables = _tables_with_ids(run, layers, found, job, manifest.features)
        features, turnover = grown_features(
            manifest.features, [table.turnover() for table in tables], fixed=manifest.schema.table_rows
        )
        kinds = found | _kinds_with_ids(tables, features)
        folder.mkdir(parents=True, exist_ok=True)
        mapped: dict[str, Tensor] = {}
        for file, names in ((WEIGHTS, weights), (OPTIMIZER_STATE, found.keys() - weights)):
            mapped |= _new_safetensors(folder / file, {name: kinds[name] for name in names})
        moved = {f"{table.name}.{key}" for table in tables for key in table.kinds}
        wanted = {name: TensorRows.whole(tensor) for name, tensor in mapped.items() if name not in moved}
        read_tensors(run, layers, wanted)
        for table in tables:
            of_table = {key: mapped[f"{table.name}.{key}"] for key in table.kinds}
            table.move(features, of_table, seed=job.config.seed)
    except DamagedFileError as error:
        before = int(complete[-2]) if len(complete) > 1 else 0
        raise CheckpointError(
            f"the newest checkpoint of a run must be whole to be exported, but that of step {int(newest)} in "
            f"{run.location} is damaged; {error}; resume the run, which trains again from step {before}"
        ) from error
    state = OptimizerState(
        sha256=file_sha256(folder / OPTIMIZER_STATE),
        dense_optimizer=job.config.dense_optimizer,
        embedding_optimizer=job.config.embedding_optimizer,
    )
    description = {
        "schema_version": SCHEMA_VERSION,
        "model": job.model,
        "features": features.to_json(),
        "schema": manifest.schema.to_json(),
        "numeric_transform": manifest.numeric_transform.to_json(),
        "weights_sha256": file_sha256(folder / WEIGHTS),
        "optimizer_state": asdict(state),
        "id_turnover": [each.to_json() for each in turnover],
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1))
    return turnover


def _tables_with_ids(
    run: RunDirectory,
    layers: Sequence[StoredLayer],
    found: Mapping[str, tuple[str, tuple[int, ...]]],
    job: TrainingJob,
    features: FeatureSpec,
) -> list[StoredTable]:
    if features.dynamic_ids is None:
        return []
    before = run.read_json(f"{START_MODEL}/{DESCRIPTION}") or {}
    turnovers = [IdTurnover.from_json(each) for each in before.get("id_turnover", ())]
    with_row_before = {turnover.column: turnover.num_with_row for turnover in turnovers}
    return [
        StoredTable(
            run=run,
            layers=layers,
            name=name,
            embedding=layer,
            kinds={
                key.removeprefix(f"{name}."): kind
                for key, kind in found.items()
                if key.startswith(f"{name}.")
            },
            day=job.config.day_number,
            time_to_live_days=features.dynamic_ids.time_to_live_days,
            with_row_before=with_row_before,
        )
        for name, layer in build_chain(job.model, features, seed=0).named_children()
        if isinstance(layer, SlotEmbedding)
    ]


def _kinds_with_ids(
    tables: Sequence[StoredTable], features: FeatureSpec
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return types and sizes of the tensors of tables for other features."""
    kinds = {}
    for table in tables:
        num_rows = IdLayout.of(features, table.embedding.slots).num_rows
        for key, (dtype, shape) in table.kinds.items():
            kinds[f"{table.name}.{key}"] = (dtype, (num_rows, *shape[1:]))
    return kinds


def weight_shapes(model: str, features: FeatureSpec) -> dict[str, tuple[int, ...]]:
    """Return the sizes of all tensors that predictions depend on, by the names of `named_tensors.weights_of`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in build_chain(model, features, seed=0).named_children():
        if isinstance(layer, SlotEmbedding):
            shapes[f"{name}.weight"] = (layer.num_rows, layer.dimension)
            if layer.ids is not None:
                shapes |= {f"{name}.{key}": (layer.num_rows,) for key in ID_TENSORS}
        shapes |= {
            tensor_name(name, layer, key): tuple(tensor.shape) for key, tensor in layer.state_dict().items()
        }
    return shapes


def misfit(folder: Path, model: str) -> str:
    """Return the first weights of an exported model that a model of today lacks or has in other sizes, else "".

    Only the header of the file is read.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    wanted = weight_shapes(model, FeatureSpec.from_json(read_description(folder)["features"]))
    with safe_open(folder / WEIGHTS, "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            sizes = [
                "none" if shape is None else list(shape) for shape in (wanted.get(name), found.get(name))
            ]
            return f"{name} has {sizes[1]} there and {sizes[0]} today"
    return ""


def _new_safetensors(path: Path, kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Write a file in the safetensors format, and return its tensors, all 0: what is written to them goes there.

    Args:
        kinds: Names of types in the format, and sizes, by the names of tensors.
    """
    # As the format's own library orders them, so that each is aligned to its type.
    ordered = sorted(kinds.items(), key=lambda item: (-DTYPES[item[1][0]].itemsize, item[0]))
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape) in ordered:
        num_bytes = DTYPES[dtype].itemsize * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, offset + num_bytes)}
        offset += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    if not offset:
        return {}
    content = torch.from_numpy(np.memmap(path, np.uint8, mode="r+", offset=8 + len(text)))
    return {
        name: content[slice(*entry["data_offsets"])].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }
