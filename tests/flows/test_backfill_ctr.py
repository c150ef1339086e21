"""The order of days and what ends a back-fill; that each day is really trained is tests/flows/test_nights.py."""

import json
from datetime import date

import pytest
from prefect.client.schemas.objects import StateType

from flows import backfill_ctr as module
from flows.backfill_ctr import backfill_ctr
from flows.command_line import _parser_for, main
from flows.parameter_checks import days_of
from flows.parameters import BackfillParameters
from heterps_core.data.synthetic.click_stream import write_click_days
from heterps_core.errors import ConfigurationError, DataError, RunStoppedError, UnknownNameError


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    folder = tmp_path_factory.mktemp("days")
    write_click_days(folder, first_day=date(2026, 11, 1), num_days=4, rows_per_day=20, seed=1)
    return str(folder)


@pytest.fixture
def trained(monkeypatch):
    """What train-ctr was asked for; the real one takes half a minute a day. 2026-11-02 fails."""
    calls = []

    def train_ctr(**parameters):
        calls.append(parameters)
        if parameters["day"] == "2026-11-02":
            raise DataError("day 2026-11-02, clicks.tsv.gz", "expected 40 fields, got 3", line=7)
        return f"run of {parameters['day']}"

    monkeypatch.setattr(module, "train_ctr", train_ctr)
    return calls


def backfill(first_day, last_day, data, **others):
    return backfill_ctr.fn(first_day=first_day, last_day=last_day, data=data, **others)


def test_days_are_trained_in_order_with_the_settings(trained, days):
    run_ids = backfill("2026-11-03", "2026-11-04", days, settings={"epochs": 2, "again": True})

    assert run_ids == ["run of 2026-11-03", "run of 2026-11-04"]
    assert trained == [
        {"day": day, "data": days, "epochs": 2, "again": True} for day in ("2026-11-03", "2026-11-04")
    ]


def test_the_first_failure_ends_it(trained, days):
    with pytest.raises(DataError, match=r"line 7: expected 40 fields"):
        backfill("2026-11-01", "2026-11-03", days)

    assert [parameters["day"] for parameters in trained] == ["2026-11-01", "2026-11-02"]


def test_a_stop_that_was_asked_for_ends_it_as_stopped_and_not_as_failed(monkeypatch, days):
    stop = RunStoppedError("run r1 was asked to stop")

    def train_ctr(**_):
        raise stop

    monkeypatch.setattr(module, "train_ctr", train_ctr)

    state = backfill("2026-11-01", "2026-11-03", days)

    assert (state.type, state.name, state.message) == (StateType.CANCELLED, "Stopped", str(stop))
    with pytest.raises(RunStoppedError, match="run r1 was asked to stop"):
        state.result()


def test_a_range_of_days_may_pass_the_end_of_a_month(days):
    found = days_of(BackfillParameters(first_day="2028-02-28", last_day="2028-03-01", data=days))

    assert [str(day) for day in found] == ["2028-02-28", "2028-02-29", "2028-03-01"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"last_day": "2026-10-31"}, ConfigurationError, "the last day must not come before the first"),
        ({"first_day": "today"}, ConfigurationError, "a day must be a date"),
        (
            {"settings": {"epochs": 0}},
            ConfigurationError,
            "epochs of train-ctr in settings must be a whole number, at least 1",
        ),
        ({"settings": {"epoch": 2}}, UnknownNameError, "Did you mean 'epochs'"),
        ({"settings": {"day": "2026-11-01"}}, UnknownNameError, "'day' is not a known setting"),
        ({"settings": {"model": "cnn"}}, UnknownNameError, "not a known model"),
        ({"data": "/nowhere"}, DataError, "there is no such file or folder"),
    ],
)
def test_wrong_parameters_are_reported_before_anything_is_trained(trained, days, changes, error, message):
    parameters = {"first_day": "2026-11-01", "last_day": "2026-11-02", "data": days, "settings": {}}

    with pytest.raises(error, match=message):
        backfill_ctr.fn(**{**parameters, **changes})

    assert trained == []


def test_settings_are_given_as_json_on_the_command_line(capsys):
    parser = _parser_for(BackfillParameters, program="backfill")
    needed = ["--first-day", "2026-11-01", "--last-day", "2026-11-02", "--data", "days"]

    assert parser.parse_args([*needed, "--settings", json.dumps({"epochs": 2})]).settings == {"epochs": 2}
    assert "settings" not in parser.parse_args(needed)
    with pytest.raises(SystemExit):
        parser.parse_args([*needed, "--settings", "epochs=2"])
    assert main("flows.backfill_ctr", BackfillParameters, [*needed, "--settings", "[1]"]) == 2
    assert "settings must be a JSON object, got [1]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser.parse_args(needed[2:])
    assert "--first-day" in capsys.readouterr().err
