"""The one place where Arrow's file system of a bucket is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

before_first_use: list[Callable[[], None]] = []
"""Called before a file system is made. The host of a flow lends Arrow its credentials there (`infra`); a rented node
has its role, which Arrow finds itself."""


def files_of(uri: str) -> tuple[FileSystem, str]:
    """Return Arrow's file system of a URI such as s3://bucket/clicks?region=eu-central-1, and the path in it.

    Raises:
        ValueError: Arrow does not know the scheme or an option.
        OSError: The file system cannot be set up.
    """
    from pyarrow.fs import FileSystem  # a tenth of a second, for those who read

    for prepare in before_first_use:
        prepare()
    files, path = FileSystem.from_uri(uri)
    return files, path
