"""The version of a JSON document: one that another version wrote is told as that, and not as damaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heterps_core.errors import ConfigurationError


def check_schema_version(document: Mapping[str, Any], version: int, *, what: str, way_out: str = "") -> None:
    """Check that a document has the version that can be read.

    Args:
        document: With its version as schema_version.
        version: That can be read.
        what: The document, for the message, such as "a model graph".
        way_out: What to do where it has another one.

    Raises:
        ConfigurationError: It has another one, or none.

    Example:
        >>> check_schema_version({"schema_version": 1}, 2, what="a profile", way_out="measure it anew")
        Traceback (most recent call last):
        heterps_core.errors.ConfigurationError: a profile must have schema_version 2, got 1; measure it anew
    """
    found = document.get("schema_version")
    if found != version:
        hint = f"; {way_out}" if way_out else ""
        raise ConfigurationError(f"{what} must have schema_version {version}, got {found!r}{hint}")
