"""What a search of parameters finds, held against trainings with the defaults on rows that it never saw."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from flows.cli import main
from flows.parameters import TrainParameters
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import ConfigurationError, TrainingError
from heterps_core.models import sized_model
from heterps_core.training.job import TrainingConfig
from heterps_core.training.tuning import search
from heterps_core.training.tuning.in_one_process import train_in_turns
from heterps_core.training.tuning.search import Trial, Tuning, _check_any_complete, tune
from infra.workspace import HOME_VARIABLE
from tests.heterps_core.data.synthetic_rows import held_out_labels

BATCH_SIZE = 64


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuning")
    return write_click_stream(folder / "clicks.tsv", num_rows=3_000, seed=2).path


@pytest.fixture(scope="module")
def dataset(clicks):
    return prepare_dataset(clicks, schema=CRITEO_SCHEMA, out_dir=clicks.parent / "prepared")


def held_out_log_loss(dataset, model, **numbers):
    epochs = numbers.pop("epochs", 1)
    sizes = {name: numbers.pop(name, None) for name in ("hidden_widths", "embedding_dim")}
    model = sized_model(model, **sizes | numbers.pop("model_settings", {}))
    config = TrainingConfig(batch_size=BATCH_SIZE, num_microbatches=1, num_epochs=epochs, seed=0, **numbers)
    held_out = (dataset.num_train_rows, dataset.manifest.num_rows)
    *_, quality = train_in_turns(dataset, model, config, rated=held_out, num_turns=3)
    return quality.log_loss


@pytest.mark.weekly
def test_what_is_found_is_better_than_the_defaults_on_rows_that_no_trial_saw(dataset):
    seen = []

    tuning = tune(
        dataset,
        ["lr", "deepfm"],
        batch_size=BATCH_SIZE,
        max_epochs=2,
        seconds=600,
        max_trials=10,
        seed=0,
        on_trial=seen.append,
    )

    assert tuple(seen) == tuning.trials
    assert [trial.model for trial in tuning.trials[:2]] == ["lr", "deepfm"]
    assert all(trial.is_complete for trial in tuning.trials[:2])
    assert tuning.default.parameters.items() >= {"epochs": 1, "dense_learning_rate": 1e-2}.items()
    assert tuning.best.quality.log_loss == min(
        trial.quality.log_loss for trial in tuning.trials if trial.is_complete
    )
    assert tuning.num_train_rows + tuning.num_validation_rows == dataset.num_train_rows == 2_400
    found = held_out_log_loss(dataset, tuning.best.model, **tuning.best.parameters)
    assert found < held_out_log_loss(dataset, "lr") - 0.005
    assert TrainParameters.of({"model": tuning.best.model, **tuning.best.parameters}).epochs <= 2


def test_trials_are_trained_and_judged_on_training_rows_alone(dataset, monkeypatch):
    read = set()
    gathered = dataset._rows.gather
    monkeypatch.setattr(dataset._rows, "gather", lambda rows: read.update(rows.tolist()) or gathered(rows))

    tune(dataset, ["lr"], batch_size=BATCH_SIZE, max_epochs=1, seconds=60, max_trials=1, seed=0)

    # The last short batch of an epoch may be left out, the validation rows are all read.
    assert max(read) == dataset.num_train_rows - 1
    assert len([row for row in read if row < 1_920]) >= 1_920 - BATCH_SIZE
    assert set(range(1_920, 2_400)) <= read


def test_a_search_ends_with_its_time_and_a_time_that_is_too_short_is_reported_in_a_line(dataset, monkeypatch):
    # A clock that moves on by a second whenever it is read, as before each step.
    readings = itertools.count()
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: float(next(readings))))

    with pytest.raises(
        ConfigurationError,
        match=r"budget must last for one trial .* \(deepfm out of time after [0-9]/9 of its training in .* s\); "
        r"(one needs about .* minutes of a core; )?raise it, or take fewer rows",
    ):
        tune(dataset, ["deepfm"], batch_size=BATCH_SIZE, max_epochs=1, seconds=20, max_trials=None, seed=0)
    assert next(readings) < 25  # a whole trial would be 30 steps

    first = tune(dataset, ["lr"], batch_size=BATCH_SIZE, max_epochs=1, seconds=600, max_trials=1, seed=0)
    budget_s = 4 * first.seconds
    tuning = tune(
        dataset, ["lr"], batch_size=BATCH_SIZE, max_epochs=1, seconds=budget_s, max_trials=None, seed=0
    )
    assert budget_s <= tuning.seconds < budget_s + 5
    assert len(tuning.trials) > 1


@pytest.mark.parametrize(
    ("ends", "error", "message"),
    [
        (
            ["diverged"],
            TrainingError,
            r"finite loss, but lr diverged after 3/9 of its training in 60\.0 s; look",
        ),
        (["out of time"], ConfigurationError, "one needs about 3 minutes of a core"),
        (
            ["diverged", "out of time"],
            ConfigurationError,
            "lr diverged after 3/9 .*, lr out of time after 3/9",
        ),
        ([], ConfigurationError, r"in 2 minutes none came to its end on 1,000 rows \(none began\); raise it"),
    ],
)
def test_a_search_without_a_complete_trial_says_how_each_ended_and_how_long_one_takes(ends, error, message):
    trials = [
        Trial(model="lr", parameters={}, quality=None, end=end, num_turns=3, seconds=60.0) for end in ends
    ]
    tuning = Tuning(trials=tuple(trials), num_train_rows=1_000, num_validation_rows=250, seconds=120.0)
    with pytest.raises(error, match=message):
        _check_any_complete(tuning, 120.0)


def test_turns_are_those_of_the_training_and_a_view_of_fewer_rows_trains_what_they_would(dataset, tmp_path):
    view = dataset.until(1_000)
    rows = [
        row
        for batch in range(view.num_batches(BATCH_SIZE))
        for row in view.batch_rows(0, batch, batch_size=BATCH_SIZE, seed=0).tolist()
    ]

    assert view.num_train_rows + view.num_eval_rows == dataset.manifest.num_rows
    assert len(set(rows)) == len(rows) <= 1_000
    assert max(rows) < 1_000
    assert np.array_equal(held_out_labels(dataset), dataset.targets(dataset.num_train_rows, 3_000)[0])
    config = TrainingConfig(batch_size=BATCH_SIZE, num_microbatches=1, num_epochs=1, seed=0)
    rated = (2_400, 3_000)
    parts = list(train_in_turns(dataset, "lr", config, rated=rated, num_turns=3))
    assert len(parts) == 3
    assert parts[-1] == list(train_in_turns(dataset, "lr", config, rated=rated, num_turns=1))[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "a search needs a budget: give --minutes or --usd"),
        (["--minutes", "0"], "minutes must be a number of minutes, above 0"),
        (["--minutes", "1", "--models", "deepfn"], "'deepfn' is not a known model"),
        (["--minutes", "1", "--data", "/nowhere"], "/nowhere"),
        (["--minutes", "0.00001"], "the budget must last for one trial at least"),
    ],
)
def test_a_wrong_argument_of_the_command_is_reported_in_a_line(
    options, message, clicks, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    given = options if "--data" in options else [*options, "--data", str(clicks)]

    status = main(["tune", "--output", str(tmp_path / "tuned.json"), *given])

    assert status == 2
    # Log lines stand beside it where another test has set logging up.
    lines = capsys.readouterr().err.strip().splitlines()
    [line] = [line for line in lines if line.startswith("heterps")]
    assert message in line
    assert not (tmp_path / "tuned.json").exists()


@pytest.mark.slow
def test_the_command_writes_a_file_that_training_takes_and_one_run_in_mlflow(
    clicks, tmp_path, monkeypatch, capsys
):
    from mlflow import MlflowClient

    from flows.command_line import _parser_for, _read_parameters
    from infra.workspace import Workspace

    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    output = tmp_path / "tuned.json"

    # A cent on one core lasts some minutes, so the trials end it.
    options = [
        "--data",
        str(clicks),
        "--models",
        "lr",
        "--usd",
        "0.01",
        "--trials",
        "2",
        "--output",
        str(output),
    ]
    assert main(["tune", *options]) == 0

    text = capsys.readouterr().out
    assert text.count("trial  ") == 2
    assert "held out" in text
    assert "2 trials in" in text.splitlines()[-1]
    found = _read_parameters(output)
    assert found == json.loads(output.read_text())
    asked = TrainParameters.of(found)
    assert (asked.model, asked.batch_size) == ("lr", 32)
    parsed = _parser_for(TrainParameters, program="x").parse_args(
        ["--parameters", str(output), "--epochs", "7"]
    )
    assert vars(parsed) == {"parameters": [str(output)], "epochs": "7"}
    client = MlflowClient(tracking_uri=Workspace(root=tmp_path / "home").tracking_uri)
    [experiment] = [each for each in client.search_experiments() if each.name == "train-ctr"]
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.tags["heterps.kind"] == "tuning"
    assert run.data.params["model"] == "lr"
    assert run.data.metrics["tuning/num_trials"] == 2
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {"parameters.json", "trials.md"}


def test_a_training_ends_after_its_most_steps_and_no_later_than_its_epochs(dataset):
    held_out = (dataset.num_train_rows, dataset.manifest.num_rows)
    short = TrainingConfig(batch_size=BATCH_SIZE, num_microbatches=1, num_epochs=1, seed=0, max_steps=3)
    asked = []

    qualities = train_in_turns(
        dataset, "lr", short, rated=held_out, num_turns=3, is_over=lambda: bool(asked.append(1))
    )

    assert len(list(qualities)) == len(asked) == 3
    assert short.num_steps(2) == 2
