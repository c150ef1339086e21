"""JSON files of a run that are believed only where they bear a tag made with the run's key.

The key is drawn by the flow's host, kept in its own files, and handed to the nodes of the run when they start; it is
never in the run directory. So whoever may write there but is no node of this run cannot make such a file, nor move
one to another place, since the tag is of the place too (HMAC-SHA256, RFC 2104).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

from heterps_core.errors import CheckpointError, ConfigurationError
from heterps_core.training.storage.run_directory import RunDirectory

_TAG, _DOCUMENT = "hmac_sha256", "document"


class DamagedFileError(CheckpointError):
    """A file of a checkpoint or of a start model is missing, damaged or not authentic; the message names it."""


def write_signed_json(run: RunDirectory, key: str, document: Any) -> None:
    """Write a document with its tag; durable on return.

    Raises:
        OSError: It cannot be written.
        ConfigurationError: A run in a bucket has no key.
    """
    signed = {_TAG: _tag(run, key, document), _DOCUMENT: document}
    run.write_bytes(key, json.dumps(signed, indent=1).encode(), is_durable=True)


def read_signed_json(run: RunDirectory, key: str) -> Any:
    """Return a document after checking its tag.

    Raises:
        DamagedFileError: It is missing, no JSON, or has no tag or another.
        ConfigurationError: A run in a bucket has no key.
    """
    try:
        signed = run.read_json(key)
    except ValueError as error:
        raise DamagedFileError(f"{key} in {run.location} must be JSON, but is damaged: {error}") from error
    if signed is None:
        raise DamagedFileError(f"{key} in {run.location} is missing")
    if not isinstance(signed, dict) or not isinstance(signed.get(_TAG), str):
        raise DamagedFileError(
            f"{key} in {run.location} must bear a tag of the run's key, but has none: it was written by an earlier "
            f"version of heterps, or by another program"
        )
    if not hmac.compare_digest(signed[_TAG].encode(), _tag(run, key, signed.get(_DOCUMENT)).encode()):
        raise DamagedFileError(
            f"{key} in {run.location} must bear the tag that the run's key gives, but has another: it was changed, "
            f"damaged, or written with another key"
        )
    return signed[_DOCUMENT]


def _tag(run: RunDirectory, key: str, document: Any) -> str:
    if not run.secret and not run.is_local:
        raise ConfigurationError(
            f"{key} in {run.location} must be authenticated by the run's key, as others may write there, but this "
            f"process was given none"
        )
    content = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hmac.new(run.secret, f"{key}\n{content}".encode(), hashlib.sha256).hexdigest()
