"""The region that machines are rented in, and those in which some may be left."""

from __future__ import annotations

from collections.abc import Iterable

from infra.ledger.ledger_entry import LedgerEntry

REGION = "us-east-1"
"""Of the bundled prices; whatever the shell's AWS_DEFAULT_REGION says, machines are rented here."""


def regions_of(entries: Iterable[LedgerEntry], provider: str, *, configured: str | None = None) -> list[str]:
    """Return where machines of a provider may be: where runs rent, where the ledger has had some, and one more.

    Entries that are over count too: one may have been closed by mistake.
    """
    known = {entry.region for entry in entries if entry.provider == provider}
    return sorted({REGION, *known, *([configured] if configured else [])})
