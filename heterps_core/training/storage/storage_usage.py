"""What a run asks of its bucket, in the two classes that object stores charge for.

Counted where the run directory makes the calls, by what each was seen to send (Arrow 25 and a server that counts;
tests/heterps_core/training/storage/test_storage_usage.py). Repeats after errors are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(kw_only=True, slots=True)
class StorageUsage:
    """Requests and bytes of one process, or of all together."""

    put_requests: int = 0
    """PUT, COPY, POST and LIST: the expensive class."""

    get_requests: int = 0
    """GET, HEAD and all others; deletions are free."""

    bytes_written: int = 0
    bytes_read: int = 0
    stored_byte_s: float = 0.0
    """Bytes times the seconds for which they were kept: what a store charges for, whatever was replaced meanwhile."""

    egress_bytes: int = 0
    """Of what was read, by a host outside the store's region."""

    def __add__(self, other: StorageUsage) -> StorageUsage:
        return StorageUsage(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )
