"""Synthetic rows with all kinds of columns that a schema can name, whose click probabilities are known.

The log-odds of a click are a sum of effects of a number, of a site, and the mean of those of the tags, of which a row
has none to twelve; those of a purchase, a second label, fall with the number. Every second row without a click is
left out, and those that stay count twice.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from heterps_core.data.schema import DataSchema, MultiHotColumn, SequenceColumn
from heterps_core.data.synthetic.click_truth import FloatArray

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


def write_rich_rows(path: Path, *, num_rows: int, seed: int) -> FloatArray:
    """Write rows as Parquet, to be read with `RICH_SCHEMA`; returns the click probability of each, [num_rows]."""
    generator = np.random.default_rng(seed)
    of_sites = generator.normal(size=_NUM_SITES)
    # Two in three are left out at most.
    num_drawn = 3 * num_rows
    age = generator.normal(size=num_drawn)
    sites = generator.integers(0, _NUM_SITES, num_drawn)
    of_tags = np.append(3 * generator.normal(size=_NUM_TAGS), 0.0)
    tags = generator.integers(0, _NUM_TAGS, (num_drawn, _MOST_TAGS))
    num_tags = generator.integers(0, _MOST_TAGS + 1, num_drawn)
    tags[np.arange(_MOST_TAGS) >= num_tags[:, None]] = _NUM_TAGS
    logits = age - 1.0 + of_sites[sites] + of_tags[tags].sum(axis=1) / np.maximum(num_tags, 1)
    probabilities = 1.0 / (1.0 + np.exp(-logits))
    clicks = generator.random(num_drawn) < probabilities
    buys = generator.random(num_drawn) < 1.0 / (1.0 + np.exp(age - of_sites[sites]))
    kept = np.flatnonzero(clicks | (generator.random(num_drawn) < 0.5))[:num_rows]
    lists = [
        [f"tag {tag}" for tag in of_row[:count]]
        for of_row, count in zip(tags[kept].tolist(), num_tags[kept].tolist(), strict=True)
    ]
    table = pa.table(
        {
            "click": clicks[kept].astype(np.int8),
            "buy": buys[kept].astype(np.int8),
            "weight": np.where(clicks[kept], 1.0, 2.0),
            "age": age[kept],
            "site": [f"site {site}" for site in sites[kept].tolist()],
            "tags": lists,
            "few_tags": [of_row[:4] or None for of_row in lists],
            "history": [of_row[::-1] for of_row in lists],
        }
    )
    pq.write_table(table, path, row_group_size=_ROWS_PER_GROUP)
    return probabilities[kept]
