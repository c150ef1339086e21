"""What the first step of a night sees: the champion's weights and the state of its optimizers, or new ones.

The rows of the night are then prepared with the champion's own table sizes and numeric transform, since they must
mean to its weights what the rows before meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from heterps_core.data.features import TEXT_RULE, FeatureSpec
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.schema import DataSchema
from heterps_core.models import sized_model, sizes_of
from heterps_core.training.job import SCRATCH, OptimizerState, StartModel
from heterps_core.training.storage import exported_files
from heterps_core.training.storage.run_directory import JOB, START_MODEL, RunDirectory
from heterps_core.training.storage.verified_files import find_signed_json
from tasks.records.champion import Champion
from tasks.records.mlflow_names import Tag
from tasks.records.model_registry import RegisteredVersion

_ACCUMULATORS_KEPT = 0.5
"""Share of Adagrad's accumulators that each night keeps: best for clicks that drift (docs/LOG.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Weights to begin with and how rows are prepared for them; new weights where there is no model."""

    reason: str
    """Why so, for people; empty where there was no choice."""

    model: StartModel | None = None
    folder: Path | None = None
    """The exported model; None where the run directory holds it already."""

    slot_rows: tuple[int, ...] | None = None
    """Rows of each table."""

    numeric_transform: NumericTransform | None = None
    text_rule: int = TEXT_RULE
    """By which values become the texts of categories."""


NEW_MODEL = Start(reason="")


def choose_start(
    champion: Champion | None,
    *,
    start_from: str,
    day: date | None,
    model: str,
    schema: DataSchema,
    optimizers: Mapping[str, str],
) -> Start:
    """Return the start of a new run; a champion's weights keep the rule for texts that they were trained by.

    Args:
        day: That the night trains on; None where the data has no days.
        optimizers: Names of those that train: `dense_optimizer` and `embedding_optimizer`.

    Raises:
        CheckpointError: The state of the champion's optimizers is missing, or not that which was registered.
    """
    if day is None:
        return NEW_MODEL
    if start_from == SCRATCH:
        return Start(reason="from scratch, as asked")
    if champion is None:
        return Start(reason="from scratch: there is no champion yet")
    name = f"the champion, version {champion.version}"
    description = exported_files.read_description(champion.folder)
    if _of_weights(champion.model) != _of_weights(model):
        way_out = "ask for that model to go on from it"
        return Start(reason=f"from scratch: {name}, is {champion.model} and not {model}; {way_out}")
    if DataSchema.from_json(description["schema"]).meaning != schema.meaning:
        return Start(reason=f"from scratch: {name}, was trained by another schema")
    if champion.day is None:
        return Start(reason=f"from scratch: {name}, was trained on data that is not cut into days")
    if champion.day >= day.isoformat():
        return Start(
            reason=f"from scratch: {name}, has been trained on {champion.day}, and none was champion that knows only "
            f"days before {day}"
        )
    from heterps_core.serving.exported_model import misfit

    if sizes := misfit(champion.folder, model):
        return Start(reason=f"from scratch: {name}, was made with other sizes of {model}: {sizes}")
    state, of_optimizers = _optimizer_state(champion.folder, description, optimizers)
    return _start_with(
        description,
        StartModel(
            version=champion.version,
            run_id=champion.run_id,
            weights_sha256=description["weights_sha256"],
            optimizer_state=state,
            accumulators_kept=_ACCUMULATORS_KEPT,
        ),
        folder=champion.folder,
        reason=f"goes on from version {champion.version} of {champion.day}, with its tables and numeric transform; "
        f"{of_optimizers}",
    )


def fits_night(registered: RegisteredVersion, *, model: str, schema: DataSchema) -> bool:
    """Tell whether a night of a model and a schema can go on with the weights of a version."""
    # Versions from before there was the tag may fit: their description says so.
    has_meaning = registered.tags.get(Tag.SCHEMA, schema.meaning) == schema.meaning
    return has_meaning and _of_weights(registered.model) == _of_weights(model)


def _of_weights(model: str) -> str:
    """Return a model's name without its dropout, which has no weights."""
    name, settings = sizes_of(model)
    return sized_model(name, **{each: value for each, value in settings.items() if each != "dropout"})


def load_start(run: RunDirectory) -> Start | None:
    """Return the start of a run that is resumed; None where it was not submitted yet and may choose again."""
    document = find_signed_json(run, JOB)
    if document is None:
        return None
    if document.get("start_model") is None:
        return NEW_MODEL
    start_model = StartModel.from_json(document["start_model"])
    description = run.require_json(f"{START_MODEL}/{exported_files.DESCRIPTION}")
    return _start_with(
        description, start_model, folder=None, reason=f"began with version {start_model.version}, as before"
    )


def _optimizer_state(
    folder: Path, description: Mapping[str, Any], optimizers: Mapping[str, str]
) -> tuple[OptimizerState | None, str]:
    """Return the checked optimizer state of an exported model, and a text that says which of it goes on."""
    if "optimizer_state" not in description:
        return None, "the optimizers start again, as the version holds no state of theirs"
    state = OptimizerState(**description["optimizer_state"])
    exported_files.check_sha256(
        folder / exported_files.OPTIMIZER_STATE,
        state.sha256,
        way_out=f"begin with start_from={SCRATCH}, or go back with heterps rollback",
    )
    changes = state.left_aside(**optimizers)
    return state, "; ".join(changes) or "the optimizers go on too"


def _start_with(
    description: Mapping[str, Any], model: StartModel, *, folder: Path | None, reason: str
) -> Start:
    features = FeatureSpec.from_json(description["features"])
    if features.text_rule != TEXT_RULE:
        reason += (
            f"; it keeps reading categories as they are written, so that 5.0 is not 5: start_from={SCRATCH} trains a "
            f"model that tells values alone apart"
        )
    return Start(
        reason=reason,
        model=model,
        folder=folder,
        slot_rows=features.slot_rows,
        text_rule=features.text_rule,
        numeric_transform=NumericTransform.from_json(description["numeric_transform"]),
    )
