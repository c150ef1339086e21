import logging
import sys

import pytest
from prefect.plugins import HookContext

from flows.service.prefect_plugin import (
    FLOW_RUN_VARIABLE,
    _is_prefect_command,
    _with_full_deployment_name,
    setup_environment,
)
from infra.workspace import ServiceAddresses, Workspace


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("deployment run train-ctr", "deployment run train-ctr/train-ctr"),
        ("deployment inspect sweep-orphans", "deployment inspect sweep-orphans/sweep-orphans"),
        ("deployments run train-ctr", "deployments run train-ctr/train-ctr"),
        ("--profile team deployment run train-ctr", "--profile team deployment run train-ctr/train-ctr"),
        ("deployment run --watch train-ctr", "deployment run --watch train-ctr/train-ctr"),
        ("deployment run -p seed=3 train-ctr", "deployment run -p seed=3 train-ctr/train-ctr"),
        ("deployment run --param=seed=3 train-ctr", "deployment run --param=seed=3 train-ctr/train-ctr"),
        ("deployment run train-ctr --tag x", "deployment run train-ctr/train-ctr --tag x"),
    ],
)
def test_completes_a_bare_deployment_name(typed, meant):
    assert _with_full_deployment_name(typed.split()) == meant.split()


@pytest.mark.parametrize(
    "typed",
    [
        "deployment run train-ctr/train-ctr",
        "deployment run other/nightly",
        "deployment run --id 4f1c",
        "deployment run",
        "deployment ls",
        "deployment delete train-ctr",
        "flow-run inspect train-ctr",
        "deployment schedule ls train-ctr",
        "server start",
        "",
    ],
)
def test_leaves_every_other_command_alone(typed):
    assert _with_full_deployment_name(typed.split()) == typed.split()


@pytest.mark.parametrize(
    ("argv", "original", "expected"),
    [
        (["/venv/bin/prefect", "version"], ["python", "/venv/bin/prefect", "version"], True),
        (["-m", "version"], ["python", "-m", "prefect", "version"], True),
        (["/x/prefect/__main__.py", "version"], ["python", "-m", "prefect", "version"], True),
        (["-m"], ["python", "-m", "flows.service.serve"], False),
        (["-m", "prefect"], ["python", "-m", "pytest", "prefect"], False),
        (["train.py"], ["python", "train.py"], False),
        (["-c"], ["python", "-c", "import prefect"], False),
    ],
)
def test_acts_only_inside_the_prefect_command(argv, original, expected):
    assert _is_prefect_command(argv, original) is expected


def test_a_deployment_of_a_workspace_that_nobody_serves_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    for name in ("PREFECT_API_URL", FLOW_RUN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["/venv/bin/prefect", "deployment", "run", "train-ctr"])

    with pytest.raises(SystemExit) as ended:
        setup_environment(ctx=HookContext("3.8.8", None, logging.getLogger))

    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{tmp_path} must be served, but is not; start heterps serve" in error


def test_a_password_that_cannot_be_used_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    for name in ("PREFECT_API_URL", "PREFECT_SERVER_API_AUTH_STRING", FLOW_RUN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["/venv/bin/prefect", "deployment", "run", "train-ctr"])
    workspace = Workspace(root=tmp_path)
    workspace.write_services(
        ServiceAddresses(prefect_url="http://127.0.0.1:9", mlflow_url="", supervisor_pid=1)
    )
    workspace.password_path.write_text("")

    with pytest.raises(SystemExit) as ended:
        setup_environment(ctx=HookContext("3.8.8", None, logging.getLogger))

    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "must hold user:password" in error


@pytest.mark.parametrize(
    ("typed", "api_url"),
    [("deployment ls", None), ("deployment run train-ctr", "http://prefect.example/api")],
)
def test_every_other_command_goes_on_where_nobody_serves(tmp_path, monkeypatch, typed, api_url):
    for name in ("PREFECT_API_URL", FLOW_RUN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["/venv/bin/prefect", *typed.split()])

    assert setup_environment(ctx=HookContext("3.8.8", api_url, logging.getLogger)) is None
