"""Processor time of a replica for the exchange of rows, as a law of four terms. No torch here.

With k replicas a step of B samples and t tables takes a replica, beside the work of a single process on as many
samples as each replica has,

    F (2 + c / k) + P (2 (k - 1) + c) + G t + W b,   c = B / 4,096

seconds of all its threads. A message takes F, and P for each of the k - 1 others. A step has one for rows and one for
gradients, and requests of rows take one for each 4,096 samples of a replica (`ROWS_AT_ONCE`); a replica with more
samples in a step has only one. b are the bytes of indices, rows and gradients of the distinct rows that a replica
looks up, its own among them (`planning/cost_model/step_model.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.training.job import ROWS_AT_ONCE

MESSAGES_OF_STEP = 2
"""Rows and gradients, for any number of tables (`embeddings/row_exchange.py`)."""

MOST_RELATIVE_ERROR = 0.2
"""Largest error of a law that counts for long: 0.02 to 0.12 in 12 measurements at a load of 20 to 30 on 2 cores."""


class PathSample(NamedTuple):
    """The mean step of the replicas of some tables."""

    batch_size: int
    """B."""

    num_replicas: int
    """k."""

    num_tables: int
    """t."""

    num_bytes: float
    """b."""

    alone_seconds: float
    """Processor time of a single process with as many samples as each replica has."""

    seconds: float
    """Processor time of a replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPath(JsonDocument):
    """The terms of the law on one machine."""

    json_form = JsonForm(what="a replica path", version=1, way_out="measure it again")

    message_seconds: float
    """F."""

    peer_seconds: float
    """P."""

    byte_seconds: float
    """W."""

    table_seconds: float = 0.0
    """G; 0 in older documents, where F includes it."""

    relative_error: float
    """Largest difference of the law from a measured step of tables, as a share of it; 1 without a measurement."""

    measured_at: str = ""
    """ISO 8601; empty where nothing was measured."""

    def exchange_seconds(self) -> dict[str, Any]:
        """Return the terms by the names of a unit type's fields."""
        return {
            "exchange_seconds": self.message_seconds,
            "exchange_seconds_per_peer": self.peer_seconds,
            "exchange_seconds_per_table": self.table_seconds,
            "exchange_seconds_per_byte": self.byte_seconds,
        }

    def __str__(self) -> str:
        """Return the terms for people."""
        return (
            f"a message among them takes each {1e3 * self.message_seconds:.3f} ms of a core and "
            f"{1e3 * self.peer_seconds:.3f} ms a peer, a table {1e3 * self.table_seconds:.3f} ms, a megabyte of "
            f"rows {1e9 * self.byte_seconds:.3f} ms (within {self.relative_error:.0%})"
        )

    @classmethod
    def assumed(cls, message_seconds: float) -> ReplicaPath:
        """Return the law where a message to each peer takes as long as one between two idle processes."""
        return cls(message_seconds=0.0, peer_seconds=message_seconds, byte_seconds=0.0, relative_error=1.0)


def fitted_path(samples: Sequence[PathSample], *, measured_at: str) -> ReplicaPath:
    """Return the law whose relative squared errors are least, of those without negative terms.

    Example:
        >>> samples = [
        ...     PathSample(
        ...         4096, k, t, b, 0.001, 0.001 + 2e-4 * (2 + 1 / k) + 5e-5 * (2 * k - 1) + 4e-4 * t + 1e-9 * b
        ...     )
        ...     for k, t, b in ((2, 1, 8e5), (4, 2, 1e5), (8, 1, 2e5), (8, 2, 2e5))
        ... ]
        >>> path = fitted_path(samples, measured_at="")
        >>> [round(1e6 * each) for each in (path.message_seconds, path.peer_seconds, path.table_seconds)]
        [200, 50, 400]
    """
    # Here, as it loads for a fifth of a second.
    from scipy.optimize import nnls

    rows, replicas, tables, num_bytes, alone, seconds = np.array(samples, dtype=np.float64).T
    requests = rows / ROWS_AT_ONCE
    messages, to_peers = MESSAGES_OF_STEP + requests / replicas, MESSAGES_OF_STEP * (replicas - 1) + requests
    terms = np.stack([messages, to_peers, tables, num_bytes], axis=1) / seconds[:, None]
    wanted = (seconds - alone) / seconds
    found, _ = nnls(terms, wanted)
    return ReplicaPath(
        message_seconds=float(found[0]),
        peer_seconds=float(found[1]),
        table_seconds=float(found[2]),
        byte_seconds=float(found[3]),
        relative_error=float(np.abs(terms @ found - wanted).max()),
        measured_at=measured_at,
    )
