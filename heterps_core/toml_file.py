"""TOML files that a person edits, as `heterps init` writes them: a schema of rows, and parameters of a training."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from heterps_core.errors import ConfigurationError, MalformedDocumentError

SUFFIX = ".toml"
SCHEMA_TABLE, PARAMETERS_TABLE = "schema", "parameters"


def read_toml(path: Path, *, what: str) -> dict[str, dict[str, Any]]:
    """Return the tables of a file, of which it has those of this module and no others.

    Raises:
        ConfigurationError: It cannot be read.
        MalformedDocumentError: It is no TOML, or holds something else; carries the file.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read the {what} file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MalformedDocumentError(str(path), f"must be UTF-8 text: {error}") from error
    except (ValueError, RecursionError) as error:
        raise MalformedDocumentError(str(path), f"is not valid TOML: {error}") from error
    known = (SCHEMA_TABLE, PARAMETERS_TABLE)
    for name, table in tables.items():
        if name not in known or not isinstance(table, dict):
            raise MalformedDocumentError(
                str(path),
                f"must hold the tables {' and '.join(f'[{each}]' for each in known)}, but has {name}",
            )
    return tables
