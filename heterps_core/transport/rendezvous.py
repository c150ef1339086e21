"""The store at which the workers of a generation find one another; the first worker of one machine holds it."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

REOPENED_WITHIN_S = 30.0
"""From the end of a store of a generation before: until then the next one is there, or its machine is lost."""

_IS_OPEN = "is open"


def open_store(host: str, port: int, *, generation: int, is_host: bool, limit: timedelta) -> PrefixStore:
    """Return the store of a generation, which has nothing of those before.

    A worker may be earlier than the one that holds the store: it then meets that of the generation before, which is
    about to end, and looks again.

    Args:
        is_host: This process holds it.
        limit: Longest wait for it.

    Raises:
        DistNetworkError: It is not there, or ends before it is open.
    """
    until_s = None
    while True:
        left = limit if until_s is None else timedelta(seconds=max(until_s - time.monotonic(), 1.0))
        of_all = TCPStore(host, port, is_master=is_host, wait_for_workers=False, timeout=left)
        store = PrefixStore(f"generation-{generation}", of_all)
        if is_host:
            store.set(_IS_OPEN, "yes")
            return store
        try:
            store.wait([_IS_OPEN], left)
        except dist.DistNetworkError:
            until_s = until_s or time.monotonic() + REOPENED_WITHIN_S
            if time.monotonic() >= until_s:
                raise
        else:
            return store
