"""Results of commands as JSON files."""

from __future__ import annotations

import json
from pathlib import Path

from heterps_core.errors import ConfigurationError


def write_json(path: Path, document: object) -> None:
    """Write a document that a person has asked for by `--output`.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    try:
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
