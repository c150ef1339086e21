"""A parameter that cannot be used ends a flow in one line, before anything is recorded, prepared or measured.

The functions are called as Prefect calls them; the command line checks the same before.
"""

import json
import re
from datetime import date
from functools import partial

import pytest

from flows.backfill_ctr import backfill_ctr
from flows.command_line import main
from flows.compare_schedulers import compare_schedulers
from flows.parameter_checks import resumed_parameters
from flows.parameters import TrainedParameters, TrainParameters
from flows.profile_devices import profile_devices
from flows.refresh_prices import refresh_prices
from flows.train_ctr import train_ctr
from heterps_core.data.synthetic.click_stream import write_click_days, write_click_stream
from heterps_core.errors import ConfigurationError, HeterpsError
from infra.workspace import Workspace
from tasks.records.run_files import save_parameters

NAN = float("nan")
MODELS = f"{__name__}:"


def build_nothing(features):
    """No model."""
    return


def build_for_many_slots(features):
    """A model of people who know their data."""
    raise KeyError(f"slot 30 of {features.num_slots}")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """What names in the parameters stand for."""
    folder = tmp_path_factory.mktemp("inputs")
    write_click_stream(folder / "clicks.tsv", num_rows=40, seed=0)
    (folder / "people.csv").write_text("label,age,town\n1,30,Bonn\n0,40,Jena\n")
    (folder / "wrong_days" / "day=2026-13-40").mkdir(parents=True)
    (folder / "wrong_days" / "day=2026-13-40" / "clicks.tsv").write_text("0\n")
    (folder / "towns.sql").write_text("SELECT town FROM rows")
    write_click_days(folder / "days", first_day=date(2026, 11, 1), num_days=2, rows_per_day=20, seed=0)
    for name, categories in (("people", ["town"]), ("typo", ["twon"])):
        schema = {"schema_version": 1, "name": name, "label_column": "label", "numeric_columns": ["age"]}
        (folder / f"{name}.json").write_text(json.dumps({**schema, "categorical_columns": categories}))
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HETERPS_HOME", str(home))
    monkeypatch.delenv("HETERPS_RUN_STORE", raising=False)
    return home


def placed(parameters, inputs):
    """Replace FILE:name by the path of an input."""
    text = json.dumps(parameters).replace("FILE:", f"{inputs}/")
    return json.loads(text)


def refused(flow, parameters, home, inputs):
    """Return the message of a flow that refuses its parameters, and check that it has left nothing."""
    with pytest.raises(HeterpsError) as caught:
        getattr(flow, "fn", flow)(**placed(parameters, inputs))
    left = sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())
    assert left == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


TRAINING = [
    ({"data": "/nowhere"}, "there is no such file or folder"),
    ({"data": "FILE:people.csv"}, "must have the columns I1.*heterps init proposes one"),
    ({"data": "FILE:wrong_days"}, "must name the days of its folders as day=2026-11-21, got day=2026-13-40"),
    ({"data": "FILE:people.csv", "snapshot": "1"}, "snapshot 1 can be chosen only of a table"),
    ({"snapshot": "1"}, "but the data is the synthetic stream"),
    ({"schema_file": "FILE:people.json"}, "there is no data beside"),
    ({"data": "FILE:people.csv", "schema_file": "FILE:none.json"}, "cannot read the data schema"),
    ({"data": "FILE:people.csv", "schema_file": "FILE:typo.json"}, "must have the columns twon"),
    (
        {"prepare_sql": "FILE:towns.sql"},
        "a query of prepare_sql makes the columns of data, but there is no data",
    ),
    (
        {"data": "FILE:people.csv", "prepare_sql": "FILE:none.sql"},
        "query of prepare_sql cannot be read: .*none",
    ),
    (
        {"data": "FILE:people.csv", "schema_file": "FILE:people.json", "prepare_sql": "FILE:towns.sql"},
        "towns.sql: must return the columns label, age of the schema; returns town",
    ),
    ({"data": "FILE:days", "schema_file": "FILE:people.json"}, "day 2026-11-01, .*header"),
    ({"data": "FILE:days", "day": "yesterday"}, "a day must be a date"),
    ({"data": "FILE:days", "day": "2026-11-02"}, "must have the day 2026-11-03"),
    ({"data": "FILE:clicks.tsv", "day": "2026-11-01"}, "can be chosen only where the data is cut"),
    ({"start_from": "zero"}, "not a known start"),
    ({"model": "ctrdn"}, "Did you mean 'ctrdnn'"),
    ({"model": "no_such_package:build"}, "there is no 'no_such_package'"),
    ({"model": f"{MODELS}bild_nothing"}, "cannot be imported: .*bild_nothing"),
    ({"model": f"{MODELS}build_nothing"}, "must be a torch.nn.Module .* got NoneType"),
    ({"model": f"{MODELS}build_for_many_slots"}, "that raised KeyError: 'slot 30 of 26'"),
    (
        {"model": "matchnet", "data": "FILE:people.csv", "schema_file": "FILE:people.json"},
        "matchnet needs at least 2 slots",
    ),
    ({"scheduler": "exakt"}, "Did you mean 'exact'"),
    ({"provider": "gcp"}, "not a known provider"),
    ({"provider": "aws"}, "HETERPS_RUN_STORE"),
    ({"device_types": ["tpu"]}, "'tpu' is not a known device type"),
    (
        {"device_types": ["cpu-c7i"]},
        "'cpu-c7i' is not a known device type of the home here; known are: cpu-here.* With provider local",
    ),
    ({"planned_samples": 10**9}, "planned_samples is of a larger night that a dry run .* add provider local"),
    ({"device_types": ["gpu-z*"]}, r"'gpu-z\*' is not a known device type"),
    ({"markets": []}, "markets must be a list, length at least 1, each text"),
    ({"markets": ["auction"]}, "not a known market"),
    ({"markets": ["spot"]}, "no price file has spot prices for us-east-1"),
    (
        {"regions": ["mars"]},
        "'mars' is not a known region with prices; known are: us-east-1. Get the prices of others with heterps "
        "refresh-prices --regions mars",
    ),
    ({"regions": ["us-east-1", "eu-*"]}, r"'eu-\*' is not a known region .*refresh-prices --regions 'eu-\*'"),
    (
        {"throughput_floor_samples_per_s": -1.0},
        "throughput_floor_samples_per_s must be a number of samples/s, at least 0, got -1.0",
    ),
    ({"ready_by": "6"}, "ready_by must be a time of day"),
    (
        {"planned_samples": 0},
        "planned_samples must be a whole number of samples, at least 1, or left out, got 0",
    ),
    ({"planned_rows_per_slot": 1}, "planned_rows_per_slot must be a whole number of rows, at least 2"),
    ({"target_auc": 0.5}, "target_auc must be a number, above 0.5 and below 1, or left out, got 0.5"),
    ({"max_samples": 0}, "max_samples must be a whole number of samples, at least 1, or left out, got 0"),
    ({"target_auc": 0.78, "epochs": 2}, "end the first epoch early, so epochs must be 1, got 2"),
    ({"epochs": 0}, "epochs must be a whole number, at least 1, got 0"),
    ({"batch_size": 2}, "batch_size must be a whole number of samples, at least 4"),
    (
        {"hidden_widths": []},
        "hidden_widths must be a list, length at least 1, each a whole number, at least 1",
    ),
    ({"hidden_widths": [8], "model": "nce"}, "hidden_widths must be a parameter .* builds 'nce'"),
    (
        {"model_settings": {"dropout": 0.1}, "model": "nce"},
        "dropout must be a parameter .* take one of: embed",
    ),
    (
        {"model_settings": {"dropout": 1.5}, "model": "deepfm"},
        "dropout probability has to be between 0 and 1",
    ),
    (
        {"model_settings": {"cross_widths": 3}, "model": "dcnv2"},
        "cross_widths must be a list of whole numbers",
    ),
    ({"model_settings": {"dropout": [1, 2]}, "model": "deepfm"}, "dropout must be a number, got"),
    ({"model_settings": {"a b": 1}}, "a model setting must be named as a parameter in Python is, got 'a b'"),
    ({"model_settings": {"dropout": "much"}}, "model_settings must be a JSON object"),
    ({"dense_l2": -1.0}, "dense_l2 must be a number, at least 0"),
    ({"embedding_l2": NAN}, "embedding_l2 must be a number, at least 0"),
    ({"clip_norm": 0.0}, "clip_norm must be a number, above 0, or left out, got 0.0"),
    ({"warmup_steps": 0}, "warmup_steps must be a whole number of steps, at least 1, or left out, got 0"),
    ({"label_weights": {"buy": 3}}, "'buy' is not a known label in label_weights; known are: label"),
    ({"size": "s", "model": "ctrdnn"}, "so it must be m for ctrdnn, got 's'; set hidden_widths and"),
    ({"embedding_dim": 0}, "embedding_dim must be a whole number, at least 1, or left out, got 0"),
    ({"dense_optimizer": "adan"}, "Did you mean 'adam'"),
    ({"embedding_optimizer": "adam"}, "not a known embedding optimizer; known are: rowwise-adagrad"),
    ({"update_mode": "late"}, "not a known update mode; known are: delayed, sync"),
    ({"precision": "fp16"}, "not a known precision; known are: auto, bfloat16, float32"),
    ({"wire_dtype": "int4"}, "not a known wire dtype; known are: bfloat16, float32"),
    ({"dense_learning_rate": 0.0}, "dense_learning_rate must be a number, above 0, or left out, got 0.0"),
    ({"embedding_learning_rate": NAN}, "embedding_learning_rate must be a number, above 0"),
    ({"num_threads": 0}, "num_threads must be a whole number of threads, at least 1"),
    ({"embedding_folders": ["scratch"]}, "embedding_folders must be whole paths, .* got 'scratch'"),
    ({"embedding_memory_bytes": 0}, "embedding_memory_bytes must be a whole number of bytes, at least 1"),
    (
        {"max_usd_per_hour": 0.0},
        "max_usd_per_hour must be a number of USD/hour, above 0, or left out, got 0.0",
    ),
    ({"max_usd_per_run": -1.0}, "max_usd_per_run must be a number of USD, above 0"),
    ({"max_usd_per_month": NAN}, "max_usd_per_month must be a number of USD, above 0"),
    ({"max_usd_per_month": float("inf")}, "max_usd_per_month must be a number of USD, above 0"),
    ({"plan_only": True, "resume_run_id": "20261101-0430-00000000"}, "resume_run_id must be left out"),
    ({"budget_evaluations": 0}, "budget_evaluations must be a whole number, at least 1"),
    ({"max_wait_minutes": -1}, "max_wait_minutes must be a number of minutes, at least 0"),
    ({"max_restarts_per_hour": -1}, "max_restarts_per_hour must be a whole number, at least 0"),
    ({"max_planning_seconds": 0}, "max_planning_seconds must be .*seconds"),
    ({"seed": -1}, "seed must be a whole number, at least 0 and at most 4294967295, got -1"),
    ({"seed": 2**32}, "seed must be .*, got 4294967296"),
    ({"min_auc_gain": NAN}, "min_auc_gain must be a number"),
    ({"max_log_loss_increase": NAN}, "max_log_loss_increase must be a number of nats"),
    ({"max_calibration_increase": NAN}, "max_calibration_increase must be a number"),
    ({"max_cost_ratio": 0.0}, "max_cost_ratio must be a number, above 0"),
    ({"data_checks": "fail"}, "is not a known use of data checks; known are: stop, tell"),
    ({"late_rows": "drop"}, "is not a known use of late rows; known are: tell, train"),
    ({"min_positives": 1}, "min_positives must be a whole number of clicks, at least 2"),
    ({"promotion_confidence": 95.0}, "promotion_confidence must be a number, above 0 and below 1"),
    ({"resume_run_id": "20261101-0430-00000000"}, "resume_run_id must be a run in"),
]


@pytest.mark.parametrize(("wrong", "message"), TRAINING, ids=[str(case[0])[:60] for case in TRAINING])
def test_a_training_with_a_wrong_parameter_leaves_nothing(wrong, message, home, inputs):
    assert re.search(message, refused(train_ctr, wrong, home, inputs))


def test_a_refusal_passes_through_prefect(prefect_server, home, inputs):
    assert "epochs must be" in refused(partial(train_ctr), {"epochs": 0}, home, inputs)
    of_days = {"first_day": "2026-11-01", "last_day": "2026-11-01", "data": "FILE:days"}
    wrong = of_days | {"settings": {"model": f"{MODELS}bild"}}
    assert "cannot be imported" in refused(partial(backfill_ctr), wrong, home, inputs)


def test_every_parameter_of_a_training_that_can_be_wrong_is_tried_here():
    cannot_be_wrong = {"again", "baseline"}

    tried = {name for wrong, _ in TRAINING for name in wrong}
    assert tried | cannot_be_wrong == set(TrainParameters.model_fields)


def test_a_time_zone_that_is_none_is_reported_before_the_deadline_is_needed(home, inputs, monkeypatch):
    monkeypatch.setenv("HETERPS_TIMEZONE", "Europe/Berlln")

    said = refused(train_ctr, {"ready_by": "06:00"}, home, inputs)

    assert "HETERPS_TIMEZONE must be a name" in said


OTHERS = [
    (profile_devices, {"regions": ["mars"]}, "'mars' is not a known region"),
    (profile_devices, {"model": f"{MODELS}bild"}, "cannot be imported"),
    (profile_devices, {"data": "FILE:people.csv"}, "must have the columns I1"),
    (profile_devices, {"epochs": 0}, "epochs must be a whole number, at least 1"),
    (compare_schedulers, {"device_types": []}, "device_types must be a list, length at least 1, each text"),
    (compare_schedulers, {"device_types": ["gpu-z*"]}, r"'gpu-z\*' is not a known device type"),
    (compare_schedulers, {"device_types": ["gpu-t4-spot"]}, "no price file has spot prices"),
    (refresh_prices, {"regions": []}, "regions must be a list, length at least 1, each text"),
    (refresh_prices, {"regions": ["us-east-1", "us-east1"]}, "Did you mean 'us-east-1'"),
    (refresh_prices, {"regions": ["mars-*"]}, r"'mars-\*' is not a known region of AWS"),
    (backfill_ctr, {"settings": {"epochs": "two"}}, "epochs of train-ctr in settings must be a whole number"),
    (backfill_ctr, {"settings": {"regions": ["mars"]}}, "'mars' is not a known region"),
    (
        backfill_ctr,
        {"settings": {"min_auc_gain": NAN}},
        "min_auc_gain of train-ctr in settings must be a number",
    ),
]


@pytest.mark.parametrize(
    ("flow", "wrong", "message"), OTHERS, ids=[f"{case[0].name} {case[1]}"[:60] for case in OTHERS]
)
def test_another_flow_with_a_wrong_parameter_leaves_nothing(flow, wrong, message, home, inputs):
    of_days = {"first_day": "2026-11-01", "last_day": "2026-11-01", "data": "FILE:days"}

    said = refused(flow, {**(of_days if flow is backfill_ctr else {}), **wrong}, home, inputs)

    assert re.search(message, said)


@pytest.mark.parametrize("arguments", [["--regions", "mars"], ["--model", f"{MODELS}bild_nothing"]])
def test_the_command_line_refuses_in_one_line_before_prefect_is_asked(arguments, home, capsys):
    status = main("flows.train_ctr", TrainParameters, arguments)

    assert status == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not home.exists()


def test_good_parameters_of_own_data_and_an_own_model_pass(home, inputs):
    own = {
        "data": "FILE:people.csv",
        "schema_file": "FILE:people.json",
        "model": "heterps_core.models.architectures.ctr_dnn:build",
        "provider": "local",
        "device_types": ["cpu-c7i"],
    }

    TrainParameters.of(placed(own, inputs)).check()


def test_a_resumed_run_reads_what_was_saved_by_an_earlier_version(tmp_path):
    save_parameters(
        Workspace(root=tmp_path),
        "run-1",
        {"data": "clicks.tsv", "epochs": 3, "batch_size": None, "redo_log": False},
    )

    kept = resumed_parameters(Workspace(root=tmp_path), "run-1")

    assert kept == TrainedParameters(data="clicks.tsv", epochs=3).model_dump()


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (
            {"epoch": 3},
            "'epoch' is not a known parameter in the saved parameters of run run-1;.* mean 'epochs'",
        ),
        (
            {"batch_size": 2},
            "batch_size in the saved parameters of run run-1 must be .* at least 4, .* got 2",
        ),
    ],
)
def test_saved_parameters_that_cannot_be_used_are_named(saved, message, tmp_path):
    save_parameters(Workspace(root=tmp_path), "run-1", saved)

    with pytest.raises(ConfigurationError, match=message):
        resumed_parameters(Workspace(root=tmp_path), "run-1")
