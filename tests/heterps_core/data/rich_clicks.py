"""Synthetic clicks with all kinds of columns that a schema can name: lists, a sequence, weights and two labels.

The log-odds of a click are a sum of effects of a number, of a site, the mean of those of the tags, of which a row has
none to twelve, and that of the last tag in a row's history; those of a purchase, the second label, fall with the
number. Every second row without a click is left out, and those that stay count twice. The effects of days move as
those of `click_stream.py` do.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from heterps_core.data.schema import DataSchema, MultiHotColumn, SequenceColumn
from heterps_core.data.synthetic.click_stream import (
    DEFAULT_DRIFT,
    best_reachable_quality,
    probabilities_beside,
)
from heterps_core.data.synthetic.click_truth import FloatArray
from heterps_core.judging.quality import ClickQuality

RICH_SCHEMA = DataSchema(
    name="rich",
    label_columns=("click", "buy"),
    weight_column="weight",
    numeric_columns=("age",),
    categorical_columns=("site",),
    multi_hot_columns=(
        MultiHotColumn(name="tags", max_length=8),
        MultiHotColumn(name="few_tags", max_length=3, pooling="sum"),
    ),
    sequence_columns=(SequenceColumn(name="history", max_length=5),),
)

_NUM_SITES, _NUM_TAGS, _MOST_TAGS = 20, 50, 12
_ROWS_PER_GROUP = 1_024


def write_rich_rows(path: Path, *, num_rows: int, seed: int, number: int = 0) -> ClickQuality:
    """Write rows of a day by its number as Parquet, to be read with `RICH_SCHEMA`, and the probabilities beside.

    Returns:
        What these reach.
    """
    of_sites, of_tags = _effects(seed, number)
    generator = np.random.default_rng([seed, 1, number])
    # Two in three are left out at most.
    num_drawn = 3 * num_rows
    age = generator.normal(size=num_drawn)
    sites = generator.integers(0, _NUM_SITES, num_drawn)
    tags, num_tags = _lists(generator, num_drawn)
    history, num_seen = _lists(generator, num_drawn)
    # `_NUM_TAGS` stands for no tag.
    last = np.where(num_seen > 0, history[np.arange(num_drawn), num_seen - 1], _NUM_TAGS)
    logits = age - 1.0 + of_sites[sites] + of_tags[last] / 3
    logits += of_tags[tags].sum(axis=1) / np.maximum(num_tags, 1)
    probabilities = 1.0 / (1.0 + np.exp(-logits))
    clicks = generator.random(num_drawn) < probabilities
    buys = generator.random(num_drawn) < 1.0 / (1.0 + np.exp(age - of_sites[sites]))
    kept = np.flatnonzero(clicks | (generator.random(num_drawn) < 0.5))[:num_rows]
    weights = np.where(clicks[kept], 1.0, 2.0)
    of_rows = _texts(tags[kept], num_tags[kept])
    table = pa.table(
        {
            "click": clicks[kept].astype(np.int8),
            "buy": buys[kept].astype(np.int8),
            "weight": weights,
            "age": age[kept],
            "site": [f"site {site}" for site in sites[kept].tolist()],
            "tags": of_rows,
            "few_tags": [texts[:4] or None for texts in of_rows],
            "history": _texts(history[kept], num_seen[kept]),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=_ROWS_PER_GROUP)
    np.save(probabilities_beside(path), probabilities[kept])
    return best_reachable_quality(probabilities[kept], clicks[kept].astype(np.uint8), weights)


def _effects(seed: int, number: int) -> tuple[FloatArray, FloatArray]:
    """Return the effects of each site and of each tag, the last that of none; see `click_stream.py`."""
    generator = np.random.default_rng([seed, 0])
    first, last = generator.normal(size=(2, _NUM_SITES + _NUM_TAGS))
    moved = math.cos(DEFAULT_DRIFT * number) * first + math.sin(DEFAULT_DRIFT * number) * last
    return moved[:_NUM_SITES], np.append(3 * moved[_NUM_SITES:], 0.0)


def _lists(
    generator: np.random.Generator, num_rows: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Draw tags [N, 12], `_NUM_TAGS` after the end of a list, and their number [N]."""
    tags = generator.integers(0, _NUM_TAGS, (num_rows, _MOST_TAGS))
    counts = generator.integers(0, _MOST_TAGS + 1, num_rows)
    tags[np.arange(_MOST_TAGS) >= counts[:, None]] = _NUM_TAGS
    return tags, counts


def _texts(tags: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> list[list[str]]:
    return [
        [f"tag {tag}" for tag in of_row[:count]]
        for of_row, count in zip(tags.tolist(), counts.tolist(), strict=True)
    ]
