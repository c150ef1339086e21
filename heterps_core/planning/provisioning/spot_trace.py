"""What a spot pool was seen to do, read from the published forms of traces: its instances or its price by minute.

SkyPilot's JSON (counts at a fixed step), Sailor's JSON (times with counts), Bamboo's CSV of steps or of nodes
that come and go and its text of dated samples, and the price history of EC2 as CSV; told apart by content. Each may
be gzipped.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterps_core.errors import DataError
from heterps_core.units import MS_PER_S, SECONDS_PER_HOUR

TICK_SECONDS = 60
"""What comes and goes within a tick is not seen."""

_KNOWN_FORMS = (
    "SkyPilot's or Sailor's JSON, Bamboo's CSV or text, or EC2's price history as CSV with a SpotPrice"
)

Steps: TypeAlias = list[tuple[float, float]]
"""(seconds from the start, value from then on), in the order of time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotTrace:
    """One pool (zone and instance type) over time: what was last observed when each tick began.

    Exactly one of the two series is there.
    """

    name: str
    instance_counts: NDArray[np.int64] | None = None
    """(ticks,): instances that were to be had, or that ran."""

    price_usd_per_hour: NDArray[np.float64] | None = None
    """(ticks,): the spot price."""


def read_trace(path: Path) -> SpotTrace:
    """Read a trace of any known form, from its first observation to its last.

    Raises:
        DataError: The file cannot be read, has no known form, or breaks it.
    """
    text = _text_of(path)
    name = path.name.removesuffix(".gz").rpartition(".")[0]
    try:
        if text.lstrip()[:1] in ("{", "["):
            steps = _json_steps(json.loads(text))
            return _counts(path, name, steps)
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if row]
        if rows and "SpotPrice" in rows[0]:
            return _prices(path, name, rows)
        return _counts(path, name, _csv_steps(path, rows))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(path, f"is no spot trace that is known ({_KNOWN_FORMS}): {error}") from error


def _text_of(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(path, f"cannot be read: {error}") from error


def _json_steps(document: Any) -> Steps:
    if isinstance(document, dict):
        gap_seconds = float(document["metadata"]["gap_seconds"])
        if not gap_seconds > 0:
            raise ValueError(f"metadata.gap_seconds must be positive, got {gap_seconds}")
        steps = [(index * gap_seconds, float(count)) for index, count in enumerate(document["data"])]
        # The last observation holds as long as every other.
        return [*steps, (len(steps) * gap_seconds, steps[-1][1])] if steps else []
    return [(float(entry["Time"]), float(entry["GPUs"])) for entry in document]


def _csv_steps(path: Path, rows: Sequence[Sequence[str]]) -> Steps:
    if rows and len(rows[0]) == 2:
        # Both units occur without a header; only those in hours are written with a decimal point.
        unit = SECONDS_PER_HOUR if any("." in time for time, _ in rows) else 1.0
        return [(float(time) * unit, float(count)) for time, count in rows]
    if rows and rows[0][1] in ("add", "remove"):
        return _node_steps(path, rows)
    return _dated_steps(rows)


def _node_steps(path: Path, rows: Sequence[Sequence[str]]) -> Steps:
    nodes: set[str] = set()
    steps: Steps = []
    for line, (milliseconds, event, node) in enumerate(rows, start=1):
        if event == "add":
            nodes.add(node)
        elif event == "remove":
            nodes.discard(node)
        else:
            raise DataError(path, f"an event must be add or remove, got {event!r}", line=line)
        steps.append((float(milliseconds) / MS_PER_S, float(len(nodes))))
    return steps


def _dated_steps(rows: Sequence[Sequence[str]]) -> Steps:
    """Read samples that are each repeated for the minutes after them; a newer sample ends the repetition."""
    start: datetime | None = None
    steps: Steps = []
    for date, time, count in rows:
        moment = datetime.fromisoformat(f"{date} {time}")
        start = start or moment
        seconds = (moment - start).total_seconds()
        while steps and steps[-1][0] >= seconds:
            steps.pop()
        steps.append((seconds, float(count)))
    return steps


def _counts(path: Path, name: str, steps: Steps) -> SpotTrace:
    values = _held_steps(path, steps)
    if values.min() < 0 or np.any(values != np.floor(values)):
        raise DataError(path, f"counts must be whole and not negative, got {values.min():g} as the least")
    return SpotTrace(name=name, instance_counts=values.astype(np.int64))


def _prices(path: Path, name: str, rows: Sequence[Sequence[str]]) -> SpotTrace:
    at, price = rows[0].index("Timestamp"), rows[0].index("SpotPrice")
    moments = sorted((datetime.fromisoformat(row[at]), float(row[price])) for row in rows[1:])
    values = _held_steps(path, [((moment - moments[0][0]).total_seconds(), usd) for moment, usd in moments])
    if not values.min() > 0:
        raise DataError(path, f"prices must be positive, got {values.min():g}")
    return SpotTrace(name=name, price_usd_per_hour=values)


def _held_steps(path: Path, steps: Steps) -> NDArray[np.float64]:
    """Return the value of each tick, shape (ticks,); of steps at the same time the last counts."""
    times, values = np.array(steps, dtype=np.float64).reshape(-1, 2).T
    num_ticks = int(times[-1] // TICK_SECONDS) if steps else 0
    if num_ticks == 0:
        raise DataError(path, f"must cover at least one tick of {TICK_SECONDS} s")
    if not (np.isfinite(times).all() and np.isfinite(values).all()) or np.any(np.diff(times) < 0):
        raise DataError(path, "times must rise, and all numbers must be finite")
    at = np.searchsorted(times, np.arange(num_ticks) * float(TICK_SECONDS), side="right") - 1
    held: NDArray[np.float64] = values[np.maximum(at, 0)]
    return held
