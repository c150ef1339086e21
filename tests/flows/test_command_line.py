import inspect
import os
import re
import subprocess
import sys

import pytest

from flows.command_line import main, parameter_helps, parser_for
from flows.parameter_checks import check_parameters, check_run
from flows.service.prefect_connection import LOGGERS_IN_FLOW_LOG
from flows.train_ctr import train_ctr
from heterps_core.errors import ConfigurationError, DataError, UnknownNameError


def test_the_command_line_has_the_parameters_of_the_flow_with_their_defaults():
    parsed = vars(parser_for(train_ctr.fn, program="train").parse_args([]))

    defaults = {
        name: parameter.default for name, parameter in inspect.signature(train_ctr.fn).parameters.items()
    }
    assert parsed == defaults


def test_every_parameter_of_the_flow_is_documented():
    assert set(parameter_helps(inspect.getdoc(train_ctr.fn))) == set(
        inspect.signature(train_ctr.fn).parameters
    )


def test_values_have_the_type_of_their_parameter():
    arguments = "--epochs 2 --max-usd-per-hour 0.5 --device-types cpu-c7i gpu-t4 --data x.tsv"

    parsed = parser_for(train_ctr.fn, program="train").parse_args(arguments.split())

    assert (parsed.epochs, parsed.max_usd_per_hour, parsed.data) == (2, 0.5, "x.tsv")
    assert parsed.device_types == ["cpu-c7i", "gpu-t4"]


@pytest.fixture
def good_names():
    return {
        "data": None,
        "schema_file": None,
        "model": "ctrdnn",
        "scheduler": "exact",
        "provider": "local",
        "device_types": ["cpu-c7i"],
        "leave_out_costs": ["startup"],
        "markets": ["on-demand"],
        "catalogue": None,
        "region": "us-east-1",
    }


def test_good_names_pass(good_names):
    check_parameters(**good_names, epochs=1)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"model": "ctrdn"}, UnknownNameError, "ctrdnn"),
        ({"model": "no_such_package.models:build"}, ConfigurationError, "PYTHONPATH"),
        ({"scheduler": "exakt"}, UnknownNameError, "Did you mean 'exact'"),
        ({"provider": "gcp"}, UnknownNameError, "aws, local"),
        ({"device_types": ["cpu-c7i", "tpu"]}, UnknownNameError, "cpu-c7i"),
        ({"leave_out_costs": ["electricity"]}, UnknownNameError, "spot-risk"),
        ({"markets": ["auction"]}, UnknownNameError, "on-demand, spot"),
        ({"markets": []}, ConfigurationError, "at least one of"),
        ({"catalogue": "no-such-prices.csv"}, ConfigurationError, "no-such-prices.csv"),
        ({"data": "no-such-file.tsv"}, DataError, "no-such-file.tsv"),
        ({"schema_file": "no-such-schema.json"}, ConfigurationError, "no-such-schema.json"),
        ({"provider": "aws"}, ConfigurationError, "HETERPS_RUN_STORE"),
        ({"plan_only": True, "resume_run_id": "run-1"}, ConfigurationError, "resume_run_id must be left out"),
    ],
)
def test_a_wrong_name_is_told_before_any_work(good_names, monkeypatch, wrong, error, message):
    monkeypatch.delenv("HETERPS_RUN_STORE", raising=False)

    with pytest.raises(error, match=message):
        check_parameters(**{**good_names, **wrong})


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
def test_a_model_that_cannot_be_trained_is_told_in_one_line_before_any_work(
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

    status = main(train_ctr, program="train", check=check_run, arguments=["--model", f"{module}:build"])

    said = capsys.readouterr().err
    assert status == 2
    assert said.count("\n") == 1
    assert re.search(message, said)
    assert not (tmp_path / "home").exists()


def test_an_error_is_one_line_and_leaves_no_workspace(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))

    status = main(train_ctr, program="train", check=check_parameters, arguments=["--scheduler", "magic"])

    assert status == 2
    assert capsys.readouterr().err.startswith("error: 'magic' is not a known scheduler")
    assert list(tmp_path.iterdir()) == []


def test_what_the_core_tells_is_on_its_way_to_the_log_of_the_flow():
    """Prefect adds its handler to these loggers, and leaves their level at the root's, which is WARNING."""
    program = (
        "import logging, flows.sweep_orphans\n"
        "from prefect.logging.configuration import setup_logging\n"
        "setup_logging(incremental=False)\n"
        "for name in ('heterps_core.training.monitor', 'infra.machines.sweeper', 'tasks.running.story'):\n"
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
