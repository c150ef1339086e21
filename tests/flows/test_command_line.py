import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.utilities.schema_tools.validation import ValidationError, validate

from flows import command_line
from flows.command_line import _parser_for, main
from flows.parameter_checks import check_parameters
from flows.parameters import TrainParameters
from flows.service.prefect_connection import LOGGERS_IN_FLOW_LOG
from flows.train_ctr import train_ctr
from heterps_core.errors import ConfigurationError, DataError, UnknownNameError


def test_the_form_and_the_command_line_have_the_fields_of_the_model_with_their_defaults():
    form = train_ctr.parameters.model_dump()["properties"]
    parsed = _parser_for(TrainParameters, program="train").parse_args([])

    assert vars(parsed) == {}
    assert {name: each["default"] for name, each in form.items()} == TrainParameters().model_dump()


def test_the_server_refuses_what_is_outside_the_form():
    schema = train_ctr.parameters.model_dump_for_openapi()

    validate({"epochs": 1, "batch_size": None, "max_usd_per_run": 0.5}, schema, raise_on_error=True)
    for wrong in ({"epochs": 0}, {"max_usd_per_run": 0}, {"scheduler": "exakt"}, {"markets": []}):
        with pytest.raises(ValidationError):
            validate(wrong, schema, raise_on_error=True)


def test_values_have_the_type_of_their_parameter():
    arguments = "--epochs 2 --max-usd-per-hour 0.5 --device-types cpu-c7i gpu-t4 --data x.tsv --no-again"

    parsed = TrainParameters.of(
        vars(_parser_for(TrainParameters, program="train").parse_args(arguments.split()))
    )

    assert (parsed.epochs, parsed.max_usd_per_hour, parsed.data, parsed.again) == (2, 0.5, "x.tsv", False)
    assert parsed.device_types == ["cpu-c7i", "gpu-t4"]


def test_a_later_file_of_parameters_wins_and_an_option_over_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("first.toml").write_text("[parameters]\nmodel = 'lr'\nepochs = 2\nseed = 5\n")
    Path("second.json").write_text('{"model": "deepfm", "epochs": 3}')
    ran = []
    monkeypatch.setattr(command_line, "run_here", lambda module, asked: ran.append(asked))

    arguments = ["--parameters", "first.toml", "second.json", "--epochs", "4"]
    assert main("flows.train_ctr", TrainParameters, arguments) == 0

    assert (ran[0].model, ran[0].epochs, ran[0].seed) == ("deepfm", 4, 5)


def test_a_wrong_parameter_is_reported_with_its_file(tmp_path, capsys):
    (tmp_path / "x.toml").write_text("[parameters]\nepoch = 2\n")

    assert main("flows.train_ctr", TrainParameters, ["--parameters", str(tmp_path / "x.toml")]) == 2

    reported = capsys.readouterr().err
    assert re.search(r"'epoch' is not a known parameter in .*x\.toml;.*Did you mean 'epochs'", reported)


def test_an_option_of_an_earlier_version_is_answered_by_its_successor(capsys):
    with pytest.raises(SystemExit, match="2"):
        main("flows.train_ctr", TrainParameters, ["--redo-log", "--epochs", "2"])

    reported = capsys.readouterr().err
    assert re.fullmatch(r"[^\n]*--redo-log was removed: checkpoints, [^\n]*; leave it out;[^\n]*\n", reported)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"model": "ctrdn"}, UnknownNameError, "ctrdnn"),
        ({"model": "no_such_package.models:build"}, ConfigurationError, "PYTHONPATH"),
        ({"scheduler": "exakt"}, UnknownNameError, "Did you mean 'exact'"),
        ({"provider": "gcp"}, UnknownNameError, "aws, here, local"),
        ({"device_types": ["cpu-c7i", "tpu"]}, UnknownNameError, "heterps catalogue shows all"),
        ({"markets": ["auction"]}, UnknownNameError, "on-demand, spot"),
        ({"markets": []}, ConfigurationError, "at least 1"),
        ({"data": "no-such-file.tsv"}, DataError, "no-such-file.tsv"),
        ({"schema_file": "no-such-schema.json"}, ConfigurationError, "no-such-schema.json"),
        ({"provider": "aws"}, ConfigurationError, "HETERPS_RUN_STORE"),
        ({"plan_only": True, "resume_run_id": "run-1"}, ConfigurationError, "resume_run_id must be left out"),
        ({"region": "us-east-1"}, ConfigurationError, "region was removed: regions names where"),
        ({"redo_log": True}, ConfigurationError, "redo_log was removed: checkpoints, .*; leave it out"),
    ],
)
def test_a_wrong_name_is_reported_before_any_work(monkeypatch, wrong, error, message):
    monkeypatch.delenv("HETERPS_RUN_STORE", raising=False)

    with pytest.raises(error, match=message):
        check_parameters(TrainParameters.of(wrong))


@pytest.mark.parametrize(
    ("own_layers", "message"),
    [
        (
            "nn.Linear(embedding.output_width, 1), nn.Sigmoid()",
            r"must give logits, .* remove that sigmoid\n$",
        ),
        (
            "nn.LSTM(embedding.output_width, 1)",
            r"layer '1' .* must return one tensor, but LSTM returns a tuple",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_reported_in_one_line_before_any_work(
    tmp_path, monkeypatch, capsys, own_layers, message
):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    module = f"own_model_of_{len(own_layers)}_characters"
    (tmp_path / f"{module}.py").write_text(
        "from torch import nn\n"
        "from heterps_core.models.slot_embedding import SlotEmbedding\n"
        "def build(features):\n"
        "    embedding = SlotEmbedding(features, dimension=4)\n"
        f"    return nn.Sequential(embedding, {own_layers})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    status = main("flows.train_ctr", TrainParameters, ["--model", f"{module}:build"])

    said = capsys.readouterr().err
    assert status == 2
    assert said.count("\n") == 1
    assert re.search(message, said)
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
def test_the_command_finds_a_model_in_the_current_folder(tmp_path):
    (tmp_path / "my_models.py").write_text("build = None\n")

    done = subprocess.run(
        [Path(sys.executable).with_name("heterps"), "train", "--model", "my_models:build"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2
    assert done.stderr.startswith("error: the model 'my_models:build' must name a function")
    assert "is its folder on PYTHONPATH" not in done.stderr


def test_an_error_is_one_line_and_leaves_no_workspace(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))

    status = main("flows.train_ctr", TrainParameters, ["--scheduler", "magic"])

    assert status == 2
    assert capsys.readouterr().err.startswith("error: 'magic' is not a known scheduler")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_the_core_tells_is_on_its_way_to_the_log_of_the_flow():
    """Prefect adds its handler to these loggers, and leaves their level at the root's, which is WARNING."""
    program = (
        "import logging, flows.sweep_orphans\n"
        "from prefect.logging.configuration import setup_logging\n"
        "setup_logging(incremental=False)\n"
        "for name in ('heterps_core.training.monitor', 'infra.machines.sweeper', 'tasks.running.progress'):\n"
        "    top = logging.getLogger(name.partition('.')[0])\n"
        "    print(logging.getLogger(name).isEnabledFor(logging.INFO), *map(type, top.handlers))\n"
    )
    environment = {**os.environ, "PREFECT_LOGGING_EXTRA_LOGGERS": LOGGERS_IN_FLOW_LOG}

    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )

    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("True <class 'prefect.logging.handlers.APILogHandler'>") for line in lines)


def test_a_workspace_that_is_a_file_is_reported_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))

    assert main("flows.train_ctr", TrainParameters, []) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "the workspace must be a folder, but" in error
