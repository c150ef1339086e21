"""JSON files: what a person has written, and results of commands."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heterps_core.errors import ConfigurationError, MalformedDocumentError


def write_json(path: Path, document: object) -> None:
    """Write a document that a person has asked for by `--output`.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    try:
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error


def replace_json(path: Path, document: object, *, indent: int | None = 1) -> None:
    """Write a document in the place of an earlier one, its folder too: a reader sees one of the two, never a part.

    Raises:
        OSError: It cannot be written; the earlier one stays.
    """
    replace_text(path, json.dumps(document, indent=indent) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a text as `replace_json`; a file that a link names is replaced there, and keeps who may read it."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        part.touch(0o600 if path.exists() else 0o666)
        part.write_text(text, encoding="utf-8")
        if path.exists():
            part.chmod(path.stat().st_mode)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_json(path: Path, *, what: str) -> Any:
    """Return what a JSON file holds, where no object may have a name twice.

    Raises:
        ConfigurationError: It cannot be read.
        MalformedDocumentError: It is no JSON; carries the file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise ConfigurationError(f"cannot read the {what} file {path}: {error.strerror}") from error
    except MalformedDocumentError as error:
        raise MalformedDocumentError(str(path), str(error)) from error
    except UnicodeDecodeError as error:
        raise MalformedDocumentError(str(path), f"must be UTF-8 text: {error}") from error
    except json.JSONDecodeError as error:
        raise MalformedDocumentError(str(path), f"is not valid JSON: {error}") from error
    except RecursionError as error:
        raise MalformedDocumentError(str(path), f"is nested too deeply for a {what}") from error
    except ValueError as error:
        # json hands over integers of thousands of digits, which int() refuses.
        raise MalformedDocumentError(str(path), f"holds a number that cannot be read: {error}") from error


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise MalformedDocumentError(name, "stands twice in the same object")
        members[name] = value
    return members
