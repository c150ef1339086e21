import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from infra.workspace import HOME_VARIABLE, TRACKING_VARIABLE, Workspace
from tasks.records.mlflow_store import _make_store
from tests.waiting import wait_for

MAKE = """
from infra.workspace import Workspace
from tasks.records.mlflow_store import _make_store
_make_store(Workspace.locate())
"""


def revision_of(workspace):
    with closing(sqlite3.connect(workspace.tracking_path)) as database:
        return database.execute("SELECT version_num FROM alembic_version").fetchall()


@pytest.mark.slow
def test_a_store_that_is_killed_while_its_tables_are_made_is_made_by_the_next(tmp_path):
    workspace = Workspace(root=tmp_path).create()
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKE], env={HOME_VARIABLE: str(tmp_path)}, stderr=subprocess.DEVNULL
    )
    wait_for(
        lambda: any(path.stat().st_size for path in tmp_path.glob("mlflow-*/mlflow.db")),
        what="the first tables",
    )
    maker.kill()
    maker.wait()
    assert not workspace.tracking_path.exists()

    _make_store(workspace)

    assert len(revision_of(workspace)) == 1


def test_a_store_that_is_there_is_left_alone(tmp_path):
    workspace = Workspace(root=tmp_path).create()
    workspace.tracking_path.write_bytes(b"somebody else's")

    _make_store(workspace)

    assert workspace.tracking_path.read_bytes() == b"somebody else's"


def test_no_database_is_made_where_a_server_keeps_the_records(tmp_path, monkeypatch):
    monkeypatch.setenv(TRACKING_VARIABLE, "http://127.0.0.1:9")
    workspace = Workspace(root=tmp_path).create()

    _make_store(workspace)

    assert not workspace.tracking_path.exists()
