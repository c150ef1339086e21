import sqlite3
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from flows.cli import main
from flows.service.prefect_connection import (
    PrefectServer,
    chosen_server,
    connect,
    project_environment,
    wait_for_server,
)
from flows.service.prefect_plugin import FLOW_RUN_VARIABLE, setup_environment
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import ConfigurationError
from infra.workspace import LOOPBACK, ServiceAddresses, Workspace


def test_a_run_whose_own_server_would_meet_a_locked_database_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    workspace = Workspace(root=tmp_path).create()
    for name, value in project_environment(workspace).items():
        monkeypatch.setenv(name, value)  # so that it is restored after the test
    path = workspace.prefect_home / "prefect.db"
    with closing(sqlite3.connect(path)) as holder:
        holder.execute("CREATE TABLE alembic_version (version_num)")
        holder.execute("INSERT INTO alembic_version VALUES ('9725c1cbee35')")
        holder.commit()
        holder.execute("BEGIN EXCLUSIVE")

        with pytest.raises(ConfigurationError) as refused:
            connect(workspace, load="flows.service.schedule")

    assert str(refused.value) == (
        f"Prefect's database must be usable, but {path}: database is locked; fuser -v {path}   (who holds it)"
    )


class Answer(BaseHTTPRequestHandler):
    """A server of something else, or one that is guarded."""

    status = 200
    body = b"<html>_welcome</html>"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def answering_url():
    with HTTPServer((LOOPBACK, 0), Answer) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        yield f"http://{LOOPBACK}:{server.server_port}/api"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "reported"),
    [
        (200, b"<html>_welcome</html>", "does not .*; start it, or unset PREFECT_API_URL"),
        (200, b"[]", r"does not \(its answer is none of Prefect's\)"),
        (404, b"{}", r"does not \(status 404\)"),
        (500, b"", r"does not \(status 500\)"),
        (401, b"{}", r"does not \(status 401, a wrong password or none\); set PREFECT_API_AUTH_STRING"),
    ],
)
def test_a_server_that_the_user_named_and_is_none_is_refused_in_one_line(
    tmp_path, monkeypatch, answering_url, status, body, reported
):
    monkeypatch.setattr(Answer, "status", status)
    monkeypatch.setattr(Answer, "body", body)
    monkeypatch.setenv("PREFECT_API_URL", answering_url)

    with pytest.raises(ConfigurationError, match=f"PREFECT_API_URL must be .*{reported}") as refused:
        chosen_server(Workspace(root=tmp_path)).check_answers()

    assert "\n" not in str(refused.value)


def test_a_server_that_is_down_is_refused_in_one_line_with_status_2(tmp_path, monkeypatch, capsys):
    clicks = write_click_stream(tmp_path / "clicks.tsv", num_rows=50, seed=0).path
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    for name, value in project_environment(Workspace(root=tmp_path / "home")).items():
        monkeypatch.setenv(name, value)  # so that it is restored afterwards

    assert main(["train", "--data", str(clicks)]) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "http://127.0.0.1:9/api does not" in error


class OtherPassword(BaseHTTPRequestHandler):
    """A server that was started with another password than the workspace has now."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.send_response(401)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_password_that_was_changed_while_its_server_runs_is_reported_in_one_line(
    tmp_path, monkeypatch, capsys
):
    clicks = write_click_stream(tmp_path / "clicks.tsv", num_rows=50, seed=0).path
    workspace = Workspace(root=tmp_path / "home").create()
    monkeypatch.setenv("HETERPS_HOME", str(workspace.root))
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in project_environment(workspace).items():
        monkeypatch.setenv(name, value)  # so that it is restored afterwards
    with HTTPServer((LOOPBACK, 0), OtherPassword) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        workspace.write_services(
            ServiceAddresses(
                prefect_url=f"http://{LOOPBACK}:{server.server_port}", mlflow_url="", supervisor_pid=1
            )
        )
        status = main(["train", "--data", str(clicks)])
        server.shutdown()

    assert status == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "must take the user:password of" in error
    assert "start that again" in error


def test_the_password_of_the_workspace_goes_to_its_own_server_alone(tmp_path, monkeypatch):
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"):
        monkeypatch.delenv(name, raising=False)
    workspace = Workspace(root=tmp_path).create()
    assert chosen_server(workspace) is None
    workspace.write_services(
        ServiceAddresses(
            prefect_url="http://127.0.0.1:4200", mlflow_url="http://127.0.0.1:5000", supervisor_pid=1
        )
    )
    own = PrefectServer("http://127.0.0.1:4200/api", workspace.password())

    assert chosen_server(workspace) == own
    monkeypatch.setenv("PREFECT_API_URL", "http://localhost:4200/api/")
    assert chosen_server(workspace).password == own.password
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example/api")
    assert chosen_server(workspace) == PrefectServer("http://prefect.example/api", None)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "team:secret")
    assert chosen_server(workspace) == PrefectServer("http://prefect.example/api", "team:secret")


class Health(BaseHTTPRequestHandler):
    """A server that is still starting the first times that it is asked."""

    asked = 0
    ready_at = 3

    def do_GET(self):
        type(self).asked += 1
        self.send_response(200 if self.asked >= self.ready_at else 503)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def api_url():
    Health.asked = 0
    with HTTPServer((LOOPBACK, 0), Health) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        yield f"http://{LOOPBACK}:{server.server_port}/api"
        server.shutdown()


def test_a_server_that_is_being_started_is_waited_for(api_url):
    wait_for_server(api_url)

    assert Health.asked == Health.ready_at


def test_a_server_that_does_not_come_is_not_waited_for_for_ever(api_url, monkeypatch):
    monkeypatch.setattr(Health, "ready_at", 1_000)

    wait_for_server(api_url, timeout_s=0.5)

    assert 1 < Health.asked < Health.ready_at


def test_the_process_of_a_flow_run_waits_for_its_server(api_url, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", api_url)
    monkeypatch.setenv(FLOW_RUN_VARIABLE, "0190a000-0000-7000-8000-000000000000")

    assert setup_environment(ctx=None) is None

    assert Health.asked == Health.ready_at


def test_other_processes_do_not_wait(api_url, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", api_url)
    monkeypatch.delenv(FLOW_RUN_VARIABLE, raising=False)

    setup_environment(ctx=None)

    assert Health.asked == 0
