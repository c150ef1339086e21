r"""Synthetic listens of a known truth, by days: who played which track to its end, as in the Yambda logs of music.

Rows have user, time, item, artist, album and action; histories are joined by pointer from the same files, and
the schema is written beside them. Tracks of a genre are played by Zipf's law, and users stay in one for a session.
The log-odds that user u plays a track of genre g and artist a to its end are

.. math:: b + q_a + s \sum_{j < n,\ g_j = g} \rho^{n - 1 - j} y_j

over the listens j of u before listen n, with :math:`y_j` 1 for one that was played and -1 for one that was skipped.
So all that a model needs stands in the history, and genres must be learned from artists.
Shape of the logs: Ploshkin et al. 2025, "Yambda-5B: A Large-Scale Multi-modal Dataset for Ranking And Retrieval".
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from heterps_core.data.reading.days import PARTITION_PREFIX
from heterps_core.data.synthetic.click_stream import (
    best_reachable_quality,
    consecutive_days,
    probabilities_beside,
)
from heterps_core.errors import DataError
from heterps_core.judging.quality import ClickQuality

NUM_ITEMS, NUM_GENRES, ARTISTS_PER_GENRE, ALBUMS_PER_ARTIST = 1_000_000, 64, 256, 8
ROWS_PER_USER_AND_DAY = 25
MAX_HISTORY = 32
_NEW_SESSION, _OUT_OF_SESSION = 0.1, 0.2
_INTERCEPT, _QUALITY, _STRENGTH, _KEPT = 0.2, 0.7, 0.8, 0.9
_SECONDS_PER_DAY = 86_400
_SPREAD = 7_919
"""Coprime to the number of tracks: neighbours by popularity are no neighbours by number."""

SCHEMA = """# Written by heterps make-days --listens.
[schema]
schema_version = 1
name = "listens"
label_column = "played"
categorical_columns = ["item", "artist", "album"]
tables = {{item = "items", past_items = "items", artist = "artists", past_artists = "artists"}}

[schema.history]
table = {table!r}
key = "user"
time = "at"
columns = {{past_items = "item", past_artists = "artist", past_actions = "action"}}
max_length = {length}
"""


def schema_beside(folder: Path) -> Path:
    """Return where the schema of a folder of listens is written."""
    return folder.with_name(f"{folder.name}.schema.toml")


def write_listen_days(
    folder: Path, *, first_day: date, num_days: int, rows_per_day: int, seed: int
) -> tuple[ClickQuality, ...]:
    """Write days of listens as folder/day=YYYY-MM-DD/listens.parquet, and return the best quality on each.

    Users begin without a history on the first day, so days are written together. Probabilities are beside each file.

    Raises:
        ConfigurationError: A number is out of its range.
        DataError: A file cannot be written.
    """
    days = consecutive_days(first_day, num_days=num_days, rows_per_day=rows_per_day, seed=seed)
    folder = folder.absolute()
    qualities = []
    try:
        for day, (columns, probabilities) in zip(days, _drawn(rows_per_day, seed), strict=False):
            path = folder / f"{PARTITION_PREFIX}{day}" / "listens.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
            columns["at"] = pa.array(
                np.datetime64(midnight.replace(tzinfo=None), "us") + columns["at"].astype("timedelta64[us]")
            )
            played = columns["played"]
            columns["action"] = pa.array(np.where(played, "played", "skipped"))
            np.save(probabilities_beside(path), probabilities)
            pq.write_table(pa.table(columns), path)
            qualities.append(best_reachable_quality(probabilities, played))
        schema_beside(folder).write_text(SCHEMA.format(table=str(folder), length=MAX_HISTORY))
    except OSError as error:
        raise DataError(
            folder, f"cannot be written: {error.strerror or error}; free space or choose another folder"
        ) from error
    return tuple(qualities)


def _drawn(rows_per_day: int, seed: int) -> Iterator[tuple[dict[str, Any], npt.NDArray[np.float64]]]:
    """Yield the columns and probabilities [rows] of day after day, in the order of time."""
    generator = np.random.default_rng([seed, 2])
    num_users = max(1, rows_per_day // ROWS_PER_USER_AND_DAY)
    quality = generator.normal(0, _QUALITY, (NUM_GENRES, ARTISTS_PER_GENRE))
    liking = np.zeros((num_users, NUM_GENRES))
    sessions = generator.integers(0, NUM_GENRES, num_users)
    per_genre = NUM_ITEMS // NUM_GENRES
    while True:
        at = np.sort(generator.integers(0, _SECONDS_PER_DAY * 1_000_000, rows_per_day))
        users = generator.integers(0, num_users, rows_per_day)
        columns = {name: np.empty(rows_per_day, np.int64) for name in ("item", "artist", "album", "played")}
        probabilities = np.empty(rows_per_day)
        for rows in _turns(users):
            who = users[rows]
            is_new = generator.random(len(rows)) < _NEW_SESSION
            sessions[who] = np.where(is_new, generator.integers(0, NUM_GENRES, len(rows)), sessions[who])
            is_other = generator.random(len(rows)) < _OUT_OF_SESSION
            genres = np.where(is_other, generator.integers(0, NUM_GENRES, len(rows)), sessions[who])
            # Equal shares of the logarithm of the rank are Zipf's law of exponent 1.
            ranks = np.minimum(per_genre ** generator.random(len(rows)), per_genre).astype(np.int64) - 1
            artists, albums = ranks % ARTISTS_PER_GENRE, ranks // ARTISTS_PER_GENRE % ALBUMS_PER_ARTIST
            logits = _INTERCEPT + quality[genres, artists] + _STRENGTH * liking[who, genres]
            probabilities[rows] = 1 / (1 + np.exp(-logits))
            played = generator.random(len(rows)) < probabilities[rows]
            liking[who] *= _KEPT
            liking[who, genres] += np.where(played, 1.0, -1.0)
            of_genre = artists * NUM_GENRES + genres
            columns["item"][rows] = (ranks * NUM_GENRES + genres) * _SPREAD % NUM_ITEMS
            columns["artist"][rows] = of_genre
            columns["album"][rows] = of_genre * ALBUMS_PER_ARTIST + albums
            columns["played"][rows] = played
        yield {"user": users, "at": at, **columns}, probabilities


def _turns(users: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the rows of the first listen of each user, then of the second, and so on."""
    order = np.argsort(users, kind="stable")
    firsts = np.flatnonzero(np.r_[True, np.diff(users[order]) != 0])
    turns = np.arange(len(users)) - np.repeat(firsts, np.diff(np.r_[firsts, len(users)]))
    for turn in range(int(turns.max()) + 1):
        yield order[turns == turn]
