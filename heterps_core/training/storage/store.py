"""Requests of a run to its store, in the two classes that object stores charge for, and the check of its URI."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from urllib.parse import unquote

from heterps_core.errors import ConfigurationError

_SECRET_OPTION = re.compile(r"key|secret|token|password|signature", re.IGNORECASE)
_NAMES_BEFORE_AT = {"abfs": r"[^:]*", "abfss": r"[^:]*", "gs": "anonymous", "gcs": "anonymous"}
"""Schemes that write a container, or that there are no credentials, where others write credentials."""


@dataclass(kw_only=True, slots=True)
class StorageUsage:
    """Requests and bytes of one process, or of all together.

    Counted where the run directory makes the calls, by what each was seen to send (Arrow 25 and a server that counts;
    tests/heterps_core/training/storage/test_storage_usage.py). Repeats after errors are not in it.
    """

    put_requests: int = 0
    """PUT, COPY, POST and LIST: the expensive class."""

    get_requests: int = 0
    """GET, HEAD and all others; deletions are free."""

    bytes_written: int = 0
    bytes_read: int = 0
    stored_byte_s: float = 0.0
    """Bytes times the seconds for which they were kept: what a store charges for, whatever was replaced meanwhile."""

    egress_bytes: int = 0
    """Bytes that were read by a host outside the store's region."""

    crossing_bytes: int = 0
    """Bytes between machines and a store, or rows, of another region of the cloud."""

    def __add__(self, other: StorageUsage) -> StorageUsage:
        return StorageUsage(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )


def check_store_location(location: str) -> None:
    """Check that a store's URI, or what was given for one, holds no credentials; a message never repeats them.

    It stands in the user data of every rented machine, which many can read.

    Args:
        location: For instance s3://bucket/heterps?region=us-east-1; a local path holds none.

    Raises:
        ConfigurationError: It has a user or a key before the bucket, or an option that names one.
    """
    scheme, mark, rest = location.partition("://")
    if not mark:
        scheme, rest = "", location
    if not mark and location.startswith(("/", ".")):
        return
    place, _, options = rest.partition("?")
    authority = place.partition("/")[0]
    # A secret may hold an unescaped slash; a bucket's name holds no colon.
    before_at = place if ":" in authority and "@" in place else authority
    user, at, _ = before_at.rpartition("@")
    if at and not re.fullmatch(_NAMES_BEFORE_AT.get(scheme, "(?!)"), user):
        raise _refusal(f"{scheme}{mark}", "a user or a key before '@'")
    names = [unquote(option.partition("=")[0]) for option in options.split("&")]
    secret = next((name for name in names if _SECRET_OPTION.search(name)), None)
    if secret is not None:
        raise _refusal(f"{scheme}{mark}", f"the option {secret!r}")


def _refusal(start: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"a store's URI must hold no credentials, since every rented machine gets it, but the one that starts "
        f"with {start!r} holds {what}; write it without, as in s3://bucket/prefix: this machine finds credentials as "
        f"boto3 does (aws configure, AWS_PROFILE), and nodes have their run's role"
    )
