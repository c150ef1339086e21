"""The file of the ledger: its table, and the repair of a damaged one.

A damaged file is never written again: it is set aside beside the new one, which takes over the rows that can still
be read. What is missing then, the sweeper writes down from the tags of the machines.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from heterps_core.errors import ConfigurationError, LedgerError
from infra.ledger.ledger_entry import LedgerEntry, entry_of_row

_LOCK_TIMEOUT_S = 30.0
"""How long a writer waits for another; a write takes milliseconds."""

COLUMNS = tuple(LedgerEntry.__dataclass_fields__)
TABLE = f"machines ({', '.join(COLUMNS)}, PRIMARY KEY (run_id, attempt, node_id))"
SELECT = f"SELECT {', '.join(COLUMNS)} FROM machines"
SCHEMA_VERSION = 3

_DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PRIMARY_CODE = 0xFF


def is_read_only(path: Path) -> bool:
    """Tell whether a file is on a file system that nothing can write now."""
    return path.exists() and bool(os.statvfs(path).f_flag & os.ST_RDONLY)


@contextmanager
def transaction(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file, and commit the writes of the block.

    Raises:
        LedgerError: It is no whole database, its disk is full, or another process holds it too long.
    """
    # Without a lock, and past the journal of a cut write, where the file cannot change.
    address = f"{path.absolute().as_uri()}?immutable={is_read_only(path):d}"
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=_LOCK_TIMEOUT_S)) as database, database:
            yield database
    except sqlite3.DatabaseError as error:
        raise LedgerError(
            f"the ledger must be a database that this process can read and write within {_LOCK_TIMEOUT_S:.0f} s, "
            f"but {path}: {error}; heterps doctor says what holds it, heterps sweep sets a damaged one aside"
        ) from error


def make_ledger_file(path: Path) -> None:
    """Make an empty ledger where there is no file.

    It gets its name when it is whole, so that a file without a table is known to have been damaged.

    Raises:
        LedgerError: It cannot be written.
    """
    if path.exists():
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with transaction(draft) as database:
            database.execute(f"CREATE TABLE {TABLE}")
            database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        # Another process may have been faster.
        with suppress(FileExistsError):
            os.link(draft, path)
    except OSError as error:
        raise LedgerError(f"the ledger must be a file that can be made, but {path}: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
        draft.with_name(f"{draft.name}-journal").unlink(missing_ok=True)


def check_version(database: sqlite3.Connection, path: Path) -> None:
    """Check that the table is one of this version.

    Raises:
        LedgerError: There is none, or another version of this program wrote it.
    """
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if not database.execute("PRAGMA table_info(machines)").fetchall():
        raise LedgerError(
            f"the ledger must have a table of machines, and {path} has none: it was emptied; heterps sweep sets it "
            f"aside and rebuilds it from the machines' tags"
        )
    if version != SCHEMA_VERSION:
        raise LedgerError(
            f"the ledger must be of version {SCHEMA_VERSION}, but {path} has version {version}: another version of "
            f"this program wrote it; install that one, or set HETERPS_HOME to another folder"
        )


def _damage_of(path: Path) -> str | None:
    """Return why a file can be no ledger; None where it is one, there is no file, or none can take its place.

    Raises:
        LedgerError: It cannot be looked at now, as another process holds it.
    """
    if not path.exists() or is_read_only(path):
        return None
    address = f"file:{path}?mode=rw"
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=_LOCK_TIMEOUT_S)) as database:
            # Waits for a process that is making it right now.
            database.execute("BEGIN IMMEDIATE")
            health: str = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            tables = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'machines'").fetchone()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & _PRIMARY_CODE in _DAMAGE_CODES:
            return str(error)
        raise LedgerError(
            f"the ledger must be a database that can be looked at within {_LOCK_TIMEOUT_S:.0f} s, but {path}: "
            f"{error}; heterps doctor says what holds it"
        ) from error
    if tables == (0,):
        return "it has no table of machines"
    return None if health == "ok" else health


@contextmanager
def set_aside_if_damaged(path: Path, *, now: datetime) -> Iterator[Path | None]:
    """Rename a damaged file, and yield its new name; None where nothing is wrong with it.

    Another process that does the same waits until the block, which makes the new file, is over.

    Raises:
        LedgerError: It cannot be looked at now.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        aside = None
        if _damage_of(path) is not None:
            aside = path.with_name(f"{path.name}.damaged-{now:%Y%m%dT%H%M%S.%fZ}")
            path.rename(aside)
        yield aside
    finally:
        os.close(folder)


def readable_entries(path: Path) -> list[LedgerEntry]:
    """Return the entries of a damaged file that can be read from its beginning and from its end."""
    found: dict[tuple[object, ...], LedgerEntry] = {}
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            # SQLite would refuse a file that is shorter than its header says.
            database.execute("PRAGMA writable_schema = ON")
            for order in ("ASC", "DESC"):
                # Stops at the first page that is missing.
                with suppress(sqlite3.DatabaseError):
                    for row in database.execute(f"{SELECT} NOT INDEXED ORDER BY rowid {order}"):
                        with suppress(ConfigurationError):
                            entry = entry_of_row(row)
                            found[entry.run_id, entry.attempt, entry.node_id] = entry
    except sqlite3.DatabaseError:
        pass
    return list(found.values())
