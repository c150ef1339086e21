import sqlite3
from contextlib import closing

import pytest

from heterps_core.errors import ConfigurationError
from infra.checks import CheckState
from infra.database_checks import _newest_revisions, _revisions, database_checks
from infra.ledger.ledger import Ledger
from infra.ledger.ledger_file import SCHEMA_VERSION
from infra.workspace import Workspace


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path).create()


def state_of(workspace, what):
    return {check.what: check for check in database_checks(workspace)}[what]


def make_database(path, revision):
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        database.execute("INSERT INTO alembic_version VALUES (?)", (revision,))


def test_what_is_not_there_yet_is_well(workspace):
    assert {check.found for check in database_checks(workspace)} == {"none yet; made at first use"}


def test_a_database_whose_making_was_interrupted_is_well(workspace):
    path = workspace.prefect_home / "prefect.db"
    path.touch()

    check = state_of(workspace, "Prefect's database")

    assert (check.state, check.found) == (CheckState.OK, "no tables yet; made at first use")


def test_a_ledger_opens_with_its_version(workspace):
    Ledger(workspace.ledger_path)

    check = state_of(workspace, "ledger")

    assert (check.state, check.found) == (CheckState.OK, "opens, whole, tables of revision 3")


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION, SCHEMA_VERSION + 1])
def test_a_ledger_is_well_in_the_check_exactly_where_it_opens(workspace, version):
    Ledger(workspace.ledger_path)
    with closing(sqlite3.connect(workspace.ledger_path)) as database, database:
        database.execute(f"PRAGMA user_version = {version}")

    is_well = state_of(workspace, "ledger").state is CheckState.OK

    if is_well:
        assert Ledger(workspace.ledger_path).entries() == ()
    else:
        with pytest.raises(ConfigurationError, match=f"version {version}: another version"):
            Ledger(workspace.ledger_path)
    with closing(sqlite3.connect(workspace.ledger_path)) as database:
        kept = database.execute("PRAGMA user_version").fetchone()
    assert kept == (version,)


def test_a_database_that_another_process_writes_is_seen_with_the_command_that_finds_it(workspace):
    Ledger(workspace.ledger_path)
    with closing(sqlite3.connect(workspace.ledger_path)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        check = state_of(workspace, "ledger")
        holder.rollback()

    assert (check.state, check.fix) == (
        CheckState.MISSING,
        f"fuser -v {workspace.ledger_path}   (who holds it)",
    )


def test_a_file_that_is_no_database_is_missing_in_the_check_and_one_line_in_the_ledger(workspace):
    workspace.ledger_path.write_text("this is no database, though it is long enough to be one" * 20)

    assert state_of(workspace, "ledger").state is CheckState.MISSING
    with pytest.raises(ConfigurationError, match="file is not a database; heterps doctor"):
        Ledger(workspace.ledger_path)


def test_tables_of_a_newer_version_are_refused_and_older_ones_noted(workspace):
    make_database(workspace.tracking_path, "ffffffffffff")
    make_database(workspace.prefect_home / "prefect.db", "9725c1cbee35")

    newer, older = state_of(workspace, "MLflow's database"), state_of(workspace, "Prefect's database")

    assert newer.state is CheckState.MISSING
    assert "revision ffffffffffff, which the installed code does not know" in newer.found
    assert older.state is CheckState.NOTE


def test_the_newest_revision_is_the_one_that_none_follows(tmp_path):
    (tmp_path / "a.py").write_text('revision = "aaa"\ndown_revision = None\n')
    (tmp_path / "b.py").write_text('revision: str = "bbb"\ndown_revision: str | None = "aaa"\n')

    assert _revisions(tmp_path) == {"aaa", "bbb"}
    assert _newest_revisions(tmp_path) == {"bbb"}
