"""The run store: where the flow's host and rented machines meet; a variable names it."""

from __future__ import annotations

import os

from heterps_core.errors import ConfigurationError
from heterps_core.training.storage.store import check_store_location

RUN_STORE_VARIABLE = "HETERPS_RUN_STORE"
"""For instance s3://bucket/heterps; not needed by nodes that are processes of this machine."""


def has_run_store() -> bool:
    """Tell whether one is named."""
    return bool(os.environ.get(RUN_STORE_VARIABLE))


def location_in_store(run_id: str) -> str:
    """Return the URI of a run in the store.

    Raises:
        ConfigurationError: No store is named that other machines reach; or its URI holds credentials.
    """
    check_store_location(os.environ.get(RUN_STORE_VARIABLE, ""))
    # What stands behind a question mark are options of the store, such as its region.
    store, mark, options = os.environ.get(RUN_STORE_VARIABLE, "").partition("?")
    if "://" not in store:
        raise ConfigurationError(
            f"{RUN_STORE_VARIABLE} must be a URI that this machine and rented ones reach, got {store!r}; "
            f"export {RUN_STORE_VARIABLE}=s3://your-bucket/heterps"
        )
    return f"{store.rstrip('/')}/{run_id}{mark}{options}"
