import fcntl
import os
import sqlite3
from contextlib import closing

import pytest

from flows.cli import main
from flows.service.addresses import choose_addresses
from flows.service.prefect_connection import own_password
from flows.service.serve import LOCK_FILE, _service_environment, _services_to_run, _welcome
from heterps_core.errors import ConfigurationError
from infra.workspace import ServiceAddresses, Workspace


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("HETERPS_TRACKING_URI", "HETERPS_TIMEZONE"):
        monkeypatch.delenv(name, raising=False)
    # Ports that are free on most machines: nothing is bound but for a moment.
    monkeypatch.setenv("HETERPS_PREFECT_PORT", "24173")
    monkeypatch.setenv("HETERPS_MLFLOW_PORT", "24174")


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1"])
def test_refuses_what_is_no_port(tmp_path, monkeypatch, port):
    monkeypatch.setenv("HETERPS_MLFLOW_PORT", port)

    with pytest.raises(ConfigurationError, match="HETERPS_MLFLOW_PORT must be a port"):
        choose_addresses(Workspace(root=tmp_path))


def test_refuses_one_port_for_two_services(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_PREFECT_PORT", "4711")
    monkeypatch.setenv("HETERPS_MLFLOW_PORT", "4711")

    with pytest.raises(ConfigurationError, match="are both 4711"):
        choose_addresses(Workspace(root=tmp_path))


def test_an_error_is_one_line_and_an_exit_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HETERPS_TIMEZONE", "Mars/Olympus")

    assert main(["serve"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("heterps: error: HETERPS_TIMEZONE must be a name")
    assert captured.out == ""


@pytest.mark.parametrize(
    ("nightly", "message"),
    [
        ("{", "HETERPS_NIGHTLY must be parameters of train-ctr as JSON"),
        ('{"dada": 1}', "'dada' is not a known parameter of train-ctr in HETERPS_NIGHTLY"),
    ],
)
def test_wrong_parameters_of_the_night_are_reported_before_anything_starts(
    tmp_path, monkeypatch, capsys, nightly, message
):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HETERPS_NIGHTLY", nightly)

    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_is_locked_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path))
    workspace = Workspace(root=tmp_path).create()
    path = workspace.prefect_home / "prefect.db"
    with closing(sqlite3.connect(path)) as holder:
        holder.execute("CREATE TABLE alembic_version (version_num)")
        holder.execute("INSERT INTO alembic_version VALUES ('9725c1cbee35')")
        holder.commit()
        holder.execute("BEGIN EXCLUSIVE")
        assert main(["serve"]) == 2

    error = capsys.readouterr().err
    assert error.startswith(
        f"heterps: error: Prefect's database must be usable, but {path}: database is locked"
    )
    assert f"fuser -v {path}" in error
    assert not workspace.services_path.exists()


def test_a_workspace_that_is_served_is_refused_with_who_serves_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path))
    workspace = Workspace(root=tmp_path).create()
    workspace.write_services(
        ServiceAddresses(
            prefect_url="http://127.0.0.1:1", mlflow_url="http://127.0.0.1:2", supervisor_pid=os.getpid()
        )
    )
    with (tmp_path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["serve"]) == 2

    assert (
        f"is being served already by process {os.getpid()} at http://127.0.0.1:1" in capsys.readouterr().err
    )


def test_a_teams_mlflow_is_not_started_a_second_time(tmp_path, monkeypatch):
    workspace = Workspace(root=tmp_path)
    own = [service.name for service in _services_to_run(workspace, choose_addresses(workspace))]
    monkeypatch.setenv("HETERPS_TRACKING_URI", "http://mlflow.example:5000/")

    addresses = choose_addresses(workspace)

    assert addresses.mlflow_url == "http://mlflow.example:5000"
    assert [service.name for service in _services_to_run(workspace, addresses)] == [
        "Prefect server",
        "serving process",
    ]
    assert own == ["Prefect server", "MLflow UI", "serving process"]


def test_help_is_shown_and_nothing_started(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])

    assert ended.value.code == 0
    assert "HETERPS_PREFECT_PORT" in capsys.readouterr().out


def test_a_password_reaches_the_server_and_those_who_ask_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "team:secret")
    workspace = Workspace(root=tmp_path)

    environment = _service_environment(workspace, choose_addresses(workspace))

    assert environment["PREFECT_API_AUTH_STRING"] == environment["PREFECT_SERVER_API_AUTH_STRING"]


@pytest.mark.parametrize("text", ["secret", "team:", ":"])
def test_a_password_of_the_environment_without_its_parts_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", text)

    with pytest.raises(ConfigurationError, match="PREFECT_SERVER_API_AUTH_STRING must be user:password"):
        own_password(Workspace(root=tmp_path))


def test_the_pages_of_prefect_ask_the_server_by_the_name_that_the_browser_has(tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_UI_API_URL", raising=False)
    workspace = Workspace(root=tmp_path)

    environment = _service_environment(workspace, choose_addresses(workspace))

    # An absolute one would be foreign to a page at http://localhost:4200 or at the other end of a tunnel.
    assert environment["PREFECT_UI_API_URL"] == "/api"


def test_a_password_of_the_environment_is_neither_printed_nor_said_to_be_in_the_workspace(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "team:secret")
    workspace = Workspace(root=tmp_path)

    table = _welcome(workspace, choose_addresses(workspace), is_first=False)

    assert "team:secret" not in table
    assert str(workspace.password_path) not in table
    assert "user:password is PREFECT_SERVER_API_AUTH_STRING" in table


def test_a_wrong_port_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HETERPS_PREFECT_PORT", "99999")

    assert main(["serve"]) == 2
    assert "must be a port between 1 and 65535, got '99999'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
