"""EC2's own clock: it dates launches and ends, and this machine's may be set wrong or be set while a run lives."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

TOLERANCE = timedelta(seconds=5)
"""Answers carry whole seconds and take some time: a smaller difference is none."""


class Ec2Clock:
    """Tells the time of the answers that a client has had, and counts on from the last one.

    Args:
        client: boto3's EC2 client.
    """

    def __init__(self, client: EC2Client) -> None:
        self._answered_at: datetime | None = None
        self._seen_s = 0.0
        client.meta.events.register("after-call.ec2", self._hear)

    @property
    def is_set(self) -> bool:
        """An answer has told the time."""
        return self._answered_at is not None

    def now(self) -> datetime:
        """Return the time; this machine's while there was no answer."""
        if self._answered_at is None:
            return datetime.now(UTC)
        return self._answered_at + timedelta(seconds=time.monotonic() - self._seen_s)

    def _hear(self, http_response: Any, **_: Any) -> None:
        try:
            told = parsedate_to_datetime(http_response.headers["Date"]).astimezone(UTC)
        except (KeyError, TypeError, ValueError):
            return
        here = datetime.now(UTC)
        self._answered_at = here if abs(told - here) <= TOLERANCE else told
        self._seen_s = time.monotonic()
