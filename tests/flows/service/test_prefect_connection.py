import sqlite3
from contextlib import closing

import pytest

from flows.service.prefect_connection import connect
from heterps_core.errors import ConfigurationError
from infra.workspace import Workspace


def test_a_run_whose_own_server_would_meet_a_locked_database_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    workspace = Workspace(root=tmp_path).create()
    path = workspace.prefect_home / "prefect.db"
    with closing(sqlite3.connect(path)) as holder:
        holder.execute("CREATE TABLE alembic_version (version_num)")
        holder.execute("INSERT INTO alembic_version VALUES ('9725c1cbee35')")
        holder.commit()
        holder.execute("BEGIN EXCLUSIVE")

        with pytest.raises(ConfigurationError) as refused:
            connect(workspace)

    assert str(refused.value) == (
        f"Prefect's database must be usable, but {path}: database is locked; fuser -v {path}   (who holds it)"
    )
