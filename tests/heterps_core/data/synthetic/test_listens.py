from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.schema import DataSchema
from heterps_core.data.synthetic.click_stream import probabilities_beside
from heterps_core.data.synthetic.listens import (
    _INTERCEPT,
    _KEPT,
    _STRENGTH,
    NUM_GENRES,
    schema_beside,
    write_listen_days,
)
from heterps_core.errors import ConfigurationError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "listens"
    write_listen_days(folder, first_day=date(2026, 11, 1), num_days=2, rows_per_day=2_000, seed=5)
    return folder


def read(folder):
    files = sorted(folder.glob("day=*/listens.parquet"))
    rows = pa.concat_tables(pq.read_table(file, partitioning=None) for file in files)
    return rows.to_pandas(), np.concatenate([np.load(probabilities_beside(file)) for file in files])


def test_log_odds_follow_from_the_earlier_listens_of_a_user(folder):
    rows, probabilities = read(folder)
    assert rows["at"].is_monotonic_increasing
    assert rows["at"].dt.date.nunique() == 2
    before = {}
    qualities = {}

    for row, logit in zip(rows.itertuples(), np.log(probabilities / (1 - probabilities)), strict=True):
        genre = row.artist % NUM_GENRES
        earlier = before.setdefault(row.user, [])
        liking = sum(
            _KEPT**age * (1 if action == "played" else -1)
            for age, (of_genre, action) in enumerate(reversed(earlier))
            if of_genre == genre
        )
        qualities.setdefault(row.artist, []).append(logit - _INTERCEPT - _STRENGTH * liking)
        earlier.append((genre, row.action))

    # What is left is the artist's quality, for any user and time.
    several = [each for each in qualities.values() if len(each) > 1]
    assert len(several) > 100
    assert max(np.ptp(each) for each in several) < 1e-6


def test_an_album_has_one_artist_and_actions_are_the_labels(folder):
    rows, _ = read(folder)

    assert rows.groupby("album")["artist"].nunique().max() == 1
    assert rows.groupby("item")["album"].nunique().max() == 1
    assert ((rows["action"] == "played") == (rows["played"] == 1)).all()
    assert 1_000 < rows["item"].nunique() < len(rows)


def test_the_same_seed_writes_the_same_rows_and_a_schema_beside_them(folder, tmp_path):
    again = tmp_path / "listens"
    write_listen_days(again, first_day=date(2026, 11, 1), num_days=1, rows_per_day=2_000, seed=5)

    first = "day=2026-11-01/listens.parquet"
    assert pq.ParquetFile(again / first).read().equals(pq.ParquetFile(folder / first).read())
    schema = DataSchema.load(schema_beside(again))
    assert schema.history.table == str(again)
    assert schema.history.max_length == 32


def test_no_days_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="num_days must be at least 1, got 0"):
        write_listen_days(tmp_path, first_day=date(2026, 11, 1), num_days=0, rows_per_day=10, seed=0)

    assert list(tmp_path.iterdir()) == []
