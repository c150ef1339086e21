import hashlib
import json
from dataclasses import asdict, replace
from datetime import UTC, date, datetime
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from heterps_core.data.features import FIRST_TEXT_RULE, TEXT_RULE, FeatureSpec
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema
from heterps_core.errors import CheckpointError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import weight_shapes
from heterps_core.training.job import OptimizerState, StartModel, TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.storage.run_directory import RunDirectory
from tasks.records.champion import Champion
from tasks.running.start import choose_start, load_start

DAY = date(2026, 11, 9)
FEATURES = FeatureSpec(num_dense=13, slot_rows=(64,) * 26)


def weights(model="ctrdnn", features=FEATURES):
    """Return a file in the safetensors format with the tensors of a model, all 0."""
    return save({name: np.zeros(shape, np.float32) for name, shape in weight_shapes(model, features).items()})


WEIGHTS = weights()
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
STATE = OptimizerState(
    sha256=SHA256,
    dense_optimizer="adam",
    embedding_optimizer="rowwise-adagrad",
)
TRANSFORM = NumericTransform(
    is_count=CRITEO_SCHEMA.count_flags, means=(1.5,) * 13, standard_deviations=(2.5,) * 13
)


@pytest.fixture
def champion(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write_description(folder)
    (folder / "optimizer.safetensors").write_bytes(WEIGHTS)
    return Champion(
        version="7",
        run_id="run-7",
        mlflow_run_id="",
        model="ctrdnn",
        day="2026-11-08",
        sha256="",
        registered_at=datetime(2026, 11, 9, 4, tzinfo=UTC),
        tags={},
        folder=folder,
    )


def write_description(folder, *, slot_rows=(64,) * 26, state=STATE, text_rule=TEXT_RULE, content=WEIGHTS):
    (folder / "model.safetensors").write_bytes(content)
    description = {
        "schema_version": 1,
        "model": "ctrdnn",
        "features": FeatureSpec(num_dense=13, slot_rows=slot_rows, text_rule=text_rule).to_json(),
        "schema": CRITEO_SCHEMA.to_json(),
        "numeric_transform": TRANSFORM.to_json(),
        "weights_sha256": hashlib.sha256(content).hexdigest(),
    }
    if state is not None:
        description["optimizer_state"] = asdict(state)
    (folder / "model.json").write_text(json.dumps(description))


def choose(champion, **changes):
    optimizers = {"dense_optimizer": "adam", "embedding_optimizer": "rowwise-adagrad"}
    wanted = {"start_from": "champion", "day": DAY, "model": "ctrdnn", "schema": CRITEO_SCHEMA}
    wanted["optimizers"] = {**optimizers, **changes.pop("optimizers", {})}
    return choose_start(champion, **{**wanted, **changes})


def test_a_champions_optimizer_of_another_kind_starts_anew(champion):
    reason = choose(champion, optimizers={"dense_optimizer": "sgd"}).reason

    assert reason.endswith("the dense optimizer starts again, as it is sgd and not adam any more")


def test_a_night_goes_on_with_the_champions_weights_tables_and_transform(champion):
    start = choose(champion)

    assert start.model == StartModel(
        version="7",
        run_id="run-7",
        weights_sha256=SHA256,
        optimizer_state=STATE,
        accumulators_kept=0.5,
    )
    assert start.folder == champion.folder
    assert (start.slot_rows, start.numeric_transform) == ((64,) * 26, TRANSFORM)
    assert start.reason == (
        "goes on from version 7 of 2026-11-08, with its tables and numeric transform; "
        "the optimizers go on too"
    )


def test_a_champion_of_the_first_rule_for_texts_keeps_it_and_says_so(champion):
    write_description(champion.folder, text_rule=FIRST_TEXT_RULE)

    start = choose(champion)

    assert (start.text_rule, choose(None).text_rule) == (FIRST_TEXT_RULE, TEXT_RULE)
    assert "it keeps reading categories as they are written, so that 5.0 is not 5" in start.reason


def test_the_optimizers_of_a_version_without_their_state_start_anew(champion):
    write_description(champion.folder, state=None)
    (champion.folder / "optimizer.safetensors").unlink()

    start = choose(champion)

    assert start.model.optimizer_state is None
    assert start.reason.endswith("; the optimizers start again, as the version holds no state of theirs")


def test_state_of_another_optimizer_is_said_to_be_left_aside(champion):
    write_description(champion.folder, state=replace(STATE, embedding_optimizer="sgd"))

    assert choose(champion).reason.endswith(
        "; the embedding optimizer starts again, as it is rowwise-adagrad and not sgd any more"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"stale",
            "must have the SHA-256 .*; it was changed or damaged: begin with start_from=scratch, or go",
        ),
        (None, "an exported model must have the file .*optimizer.safetensors, but it cannot be read"),
    ],
    ids=["another", "missing"],
)
def test_optimizer_state_that_is_not_as_registered_is_refused_in_one_line(champion, content, message):
    path = champion.folder / "optimizer.safetensors"
    path.unlink()
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(CheckpointError, match=message) as caught:
        choose(champion)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("of_champion", "model"),
    [
        ("ctrdnn", "ctrdnn(dropout=0.2)"),
        ("ctrdnn(dropout=0.2)", "ctrdnn"),
        ("ctrdnn(embedding_dim=16, dropout=0.2)", "ctrdnn(embedding_dim=16, dropout=0.5)"),
    ],
)
def test_another_dropout_goes_on_from_the_champion_as_it_has_no_weights(champion, of_champion, model):
    start = choose(replace(champion, model=of_champion), model=model)

    assert start.model is not None
    assert start.model.version == "7"


def test_another_width_begins_from_scratch(champion):
    start = choose(champion, model="ctrdnn(embedding_dim=8, dropout=0.2)")

    assert start.model is None


def test_a_champion_of_other_default_sizes_is_found_before_any_machine_is_launched(champion):
    write_description(champion.folder, content=weights("ctrdnn(embedding_dim=4)"))

    start = choose(champion)

    assert start.model is None
    assert start.reason == (
        "from scratch: the champion, version 7, was made with other sizes of ctrdnn: embedding.weight has [1664, 4] "
        "there and [1664, 16] today"
    )


def test_a_schema_that_names_its_time_now_goes_on_from_the_champion(champion):
    assert choose(champion, schema=replace(CRITEO_SCHEMA, time_column="I1")).model is not None


OTHER_SCHEMA = DataSchema(name="other", label_column="label", categorical_columns=("C1",))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"start_from": "scratch"}, "from scratch, as asked"),
        (
            {"model": "2emb"},
            "from scratch: the champion, version 7, is ctrdnn and not 2emb; ask for that model to go on from it",
        ),
        ({"schema": OTHER_SCHEMA}, "from scratch: the champion, version 7, was trained by another schema"),
        (
            {"day": date(2026, 11, 8)},
            "from scratch: the champion, version 7, has been trained on 2026-11-08, and none was champion that knows "
            "only days before 2026-11-08",
        ),
    ],
)
def test_what_cannot_go_on_begins_from_scratch_and_says_why(champion, changes, reason):
    start = choose(champion, **changes)

    assert start.reason == reason
    assert (start.model, start.folder, start.slot_rows, start.numeric_transform) == (None,) * 4


def test_days_do_not_go_on_from_a_model_of_other_than_days(champion):
    """Such as one that was trained on the synthetic stream, in the first hour."""
    start = choose(replace(champion, day=None))

    assert start.model is None
    assert (
        start.reason == "from scratch: the champion, version 7, was trained on data that is not cut into days"
    )


def test_tables_of_unlike_sizes_go_on_as_they_are(champion):
    slot_rows = (64,) * 25 + (4,)
    content = weights(features=replace(FEATURES, slot_rows=slot_rows))
    write_description(champion.folder, slot_rows=slot_rows, content=content)

    assert choose(champion).slot_rows == slot_rows


def test_without_a_champion_a_night_begins_from_scratch():
    assert choose(None).reason == "from scratch: there is no champion yet"


def test_data_without_days_begins_as_ever_and_says_nothing(champion):
    start = choose(champion, day=None)

    assert (start.reason, start.model) == ("", None)


def make_job(start_model):
    return TrainingJob(
        run_id="r",
        model="ctrdnn",
        dataset="/d",
        stages=(Stage(0, 7, "cpu", 1),),
        config=TrainingConfig(batch_size=4, num_microbatches=1, num_epochs=1, seed=0),
        start_model=start_model,
    )


def test_a_resumed_run_keeps_what_it_began_with_whoever_is_champion_by_then(champion, tmp_path):
    run = RunDirectory(str(tmp_path / "run"))
    chosen = choose(champion)
    submit_job(run, make_job(chosen.model), start_folder=chosen.folder)
    # The champion of then is gone, and another job is submitted, as a resumed run does.
    for path in champion.folder.iterdir():
        path.unlink()
    submit_job(run, make_job(chosen.model))

    kept = load_start(run)

    assert (kept.model, kept.slot_rows, kept.numeric_transform) == (chosen.model, (64,) * 26, TRANSFORM)
    assert kept.folder is None
    assert (Path(run.location) / "start_model" / "model.safetensors").read_bytes() == WEIGHTS


def test_a_resumed_run_that_began_from_scratch_stays_so(tmp_path):
    run = RunDirectory(str(tmp_path))
    assert load_start(run) is None

    submit_job(run, make_job(None))

    assert load_start(run).model is None
