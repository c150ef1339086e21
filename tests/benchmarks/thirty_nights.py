"""The story of thirty nights on a stream that drifts: days arrive one by one, and three things go wrong on the way.

A day's rows are damaged and repaired later, a day arrives a day late, and prices jump. The night of day n trains day
n and judges on day n + 1, which arrived on the evening before. Every third night is one that may lose a machine.
"""

from __future__ import annotations

import gzip
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from pathlib import Path

from heterps_core.data.reading.days import PARTITION_PREFIX
from heterps_core.data.synthetic.click_stream import write_click_days
from infra.prices.price_catalogue import BUNDLED_SNAPSHOT, write_refreshed
from infra.workspace import Workspace
from tasks.prices import price_folder

FIRST_DAY = date(2026, 10, 1)

BAD, REPAIRED, LATE, PRICES = 7, 9, 14, 20
"""Nights before which a damaged day arrives, is repaired, is late, and prices jump; counted from 1."""

NIGHTS_PER_LOSS = 3

PRICE_JUMP = 4.0
"""Accelerators cost so many times as much from then on."""


class Documented(StrEnum):
    """How a night ends, as `docs/OPERATING.md` says."""

    TRAINED = "trained"
    REFUSED = "refused"
    """Fails and names the damaged day."""

    NOTHING_NEW = "nothing new"
    """Its latest whole day is done, and it says so."""


def documented_ending(night: int) -> Documented:
    """Return how a night ends that nothing else disturbs; a day that is back-filled is trained."""
    if night in (BAD, BAD + 1):
        return Documented.REFUSED
    return Documented.NOTHING_NEW if night == LATE else Documented.TRAINED


def loses_a_machine(night: int) -> bool:
    """Return whether a machine of a night is killed while it trains."""
    return night % NIGHTS_PER_LOSS == 0 and documented_ending(night) is Documented.TRAINED


def day_of(number: int) -> date:
    """Return the date of a day; days, like nights, count from 1."""
    return FIRST_DAY + timedelta(days=number - 1)


class ArrivingDays:
    """A folder in which the days arrive.

    Args:
        folder: Gets `clicks`, where they arrive, and `arriving`, where they wait.
        num_nights: One day more is written.
        rows_per_day: Of clicks.
        seed: Of the stream.
    """

    def __init__(self, folder: Path, *, num_nights: int, rows_per_day: int, seed: int) -> None:
        self.data, self._waiting = folder / "clicks", folder / "arriving"
        self.data.mkdir(exist_ok=True)
        write_click_days(
            self._waiting, first_day=FIRST_DAY, num_days=num_nights + 1, rows_per_day=rows_per_day, seed=seed
        )
        self._arrive(1)

    def evening_before(self, night: int, workspace: Workspace) -> list[int]:
        """Let happen what happens before a night, in the order of nights.

        Returns:
            The nights whose days are to be back-filled first.
        """
        if night != LATE:
            self._arrive(night + 1)
        if night == BAD:
            self._damage(night + 1)
        if night == PRICES:
            raise_prices(workspace)
        if night == LATE + 1:
            self._arrive(night)
            return [LATE]
        if night == REPAIRED:
            self._repair(BAD + 1)
            return [BAD, BAD + 1]
        return []

    def _arrive(self, number: int) -> None:
        """Let a day arrive whole."""
        self._partition(number, self._waiting).rename(self._partition(number, self.data))

    def _damage(self, number: int) -> None:
        """Put a line in the middle of a day's file that is no row, and keep the good file beside the folder."""
        [path] = self._partition(number, self.data).glob("*.tsv.gz")
        good = path.read_bytes()
        self._good_file(number).write_bytes(good)
        rows = gzip.decompress(good).splitlines(keepends=True)
        rows[len(rows) // 2] = b"no row at all\n"
        path.write_bytes(gzip.compress(b"".join(rows)))

    def _repair(self, number: int) -> None:
        """Put the good file back."""
        [path] = self._partition(number, self.data).glob("*.tsv.gz")
        path.write_bytes(self._good_file(number).read_bytes())

    def _partition(self, number: int, folder: Path) -> Path:
        return folder / f"{PARTITION_PREFIX}{day_of(number)}"

    def _good_file(self, number: int) -> Path:
        return self._waiting / f"{day_of(number)}.good"


def raise_prices(workspace: Workspace) -> None:
    """Write prices of today in which accelerators have become expensive."""
    offers = [
        replace(offer, price_usd_per_hour=offer.price_usd_per_hour * PRICE_JUMP)
        if offer.instance_type.accelerator_count
        else offer
        for offer in BUNDLED_SNAPSHOT.offers()
    ]
    write_refreshed(price_folder(workspace), offers, at=datetime.now(UTC))
