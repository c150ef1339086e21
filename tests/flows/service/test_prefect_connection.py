import sqlite3
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from flows.service.prefect_connection import connect, project_environment, wait_for_server
from flows.service.prefect_plugin import FLOW_RUN_VARIABLE, setup_environment
from heterps_core.errors import ConfigurationError
from infra.workspace import LOOPBACK, Workspace


def test_a_run_whose_own_server_would_meet_a_locked_database_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    workspace = Workspace(root=tmp_path).create()
    for name, value in project_environment(workspace).items():
        monkeypatch.setenv(name, value)  # so that it is restored behind the test
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
