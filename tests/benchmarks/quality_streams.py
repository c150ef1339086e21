"""Synthetic rows on which one part of a model must pay: clicks that depend on a history, and two labels of one cause.

Both are drawn from a known truth, so what is reachable with that part, and without it, is known too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import DataSchema, SequenceColumn
from heterps_core.data.synthetic.click_stream import best_reachable_quality
from heterps_core.judging.quality import ClickQuality
from heterps_core.models.architectures.histories.din import DIN
from heterps_core.models.architectures.parts import mlp
from heterps_core.models.embedding_layers import Embeddings

HELD_OUT = 0.2
NUM_TOPICS, HISTORY_LENGTH, STRENGTH = 40, 8, 2.5
NUM_SITES, NUM_COLUMNS = 100, 6
CLICK_INTERCEPT, PURCHASE_INTERCEPT = -1.0, -3.0
SHARED_DEVIATION, OWN_DEVIATION = 1.5, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownStream:
    """Prepared rows, and what known probabilities reach on those that are held out."""

    dataset: PreparedDataset
    best: ClickQuality
    """Of the truth."""

    without: ClickQuality | None = None
    """Of the truth for a reader who does not know which values of the history fit the candidate."""


class MeanPooled(nn.Module):
    """DIN without its attention: the mean of a history's vectors in its place, all else alike."""

    def __init__(self, features: FeatureSpec) -> None:
        super().__init__()
        self.vectors = Embeddings(features, dimension=DIN.DIMENSION)
        self.deep = mlp(self.vectors.width, DIN.WIDTHS)
        self.output = nn.Linear(DIN.WIDTHS[-1], features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        logits_BL: Tensor = self.output(self.deep(self.vectors(batch)))
        return logits_BL


def history_stream(folder: Path, *, num_rows: int, seed: int) -> KnownStream:
    """Write and prepare rows whose click depends on those values of a history that are of the candidate's topic.

    A value is a topic that was liked or disliked. The candidate's topic is in each history once to thrice, among
    values of other topics, which say nothing; the log-odds are `STRENGTH` times the mean of likes (1) and dislikes
    (-1) of that topic. Likes and dislikes are equally frequent, so a reader who cannot tell topics apart has the mean
    of all values alone: `without` are the log-odds that it expects by that mean, fitted on the training rows.
    """
    generator = np.random.default_rng([seed, 0])
    topics = generator.integers(0, NUM_TOPICS, num_rows)
    others = generator.integers(0, NUM_TOPICS - 1, (num_rows, HISTORY_LENGTH))
    others += others >= topics[:, None]
    num_own = generator.integers(1, 4, num_rows)
    is_own = np.argsort(generator.random((num_rows, HISTORY_LENGTH)), axis=1) < num_own[:, None]
    seen = np.where(is_own, topics[:, None], others)
    liked = generator.choice([-1, 1], (num_rows, HISTORY_LENGTH))
    probabilities = _sigmoid(STRENGTH * (liked * is_own).sum(1) / num_own)
    clicks = generator.random(num_rows) < probabilities
    texts = [
        [f"{topic} {'liked' if sign > 0 else 'disliked'}" for topic, sign in zip(*of_row, strict=True)]
        for of_row in zip(seen.tolist(), liked.tolist(), strict=True)
    ]
    columns = {
        "click": clicks.astype(np.int8),
        "topic": [f"topic {topic}" for topic in topics.tolist()],
        "history": texts,
    }
    schema = DataSchema(
        name="history",
        label_column="click",
        categorical_columns=("topic",),
        sequence_columns=(SequenceColumn(name="history", max_length=HISTORY_LENGTH),),
    )
    dataset = _prepared(folder, columns, schema)
    first = dataset.num_train_rows
    means = liked.sum(1)
    rates = {mean: clicks[:first][means[:first] == mean].mean() for mean in np.unique(means)}
    guessed = np.clip(np.vectorize(rates.__getitem__)(means[first:]), 1e-3, 1 - 1e-3)
    return KnownStream(
        dataset=dataset,
        best=best_reachable_quality(probabilities[first:], clicks[first:]),
        without=best_reachable_quality(guessed, clicks[first:]),
    )


def two_label_stream(folder: Path, labels: Sequence[str], *, num_rows: int, seed: int) -> KnownStream:
    """Write and prepare rows with the labels click and buy, or one of them; qualities are of the first.

    The log-odds of both are a sum of the same effects of six columns and the products of two pairs of them, of
    standard deviation 1.5, and of own effects of 0.5. About a third of the rows are clicked, a tenth are bought: what
    both have in common is seen better in the clicks. The same seed gives the same rows, whichever labels are asked.
    """
    generator = np.random.default_rng([seed, 1])
    values = (generator.random((num_rows, NUM_COLUMNS)) ** 2 * NUM_SITES).astype(np.int64)
    shared, *own = (_effects(generator, values) for _ in range(3))
    logits = {
        "click": CLICK_INTERCEPT + SHARED_DEVIATION * shared + OWN_DEVIATION * own[0],
        "buy": PURCHASE_INTERCEPT + SHARED_DEVIATION * shared + OWN_DEVIATION * own[1],
    }
    drawn = {name: generator.random(num_rows) < _sigmoid(each) for name, each in logits.items()}
    columns = {f"C{number}": list(map(str, column)) for number, column in enumerate(values.T.tolist())}
    schema = DataSchema(
        name="labels",
        categorical_columns=tuple(columns),
        **({"label_columns": tuple(labels)} if len(labels) > 1 else {"label_column": labels[0]}),
    )
    dataset = _prepared(folder, {name: drawn[name].astype(np.int8) for name in labels} | columns, schema)
    first = dataset.num_train_rows
    best = best_reachable_quality(_sigmoid(logits[labels[0]][first:]), drawn[labels[0]][first:])
    return KnownStream(dataset=dataset, best=best)


def _effects(generator: np.random.Generator, values: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return effects [N] of values and of two pairs of columns, of mean 0 and standard deviation 1."""
    single = generator.normal(size=(NUM_COLUMNS, NUM_SITES))
    factors = generator.normal(size=(2, 2, NUM_SITES))
    total = sum(single[column][values[:, column]] for column in range(NUM_COLUMNS))
    total += sum(
        first[values[:, 2 * n]] * last[values[:, 2 * n + 1]] for n, (first, last) in enumerate(factors)
    )
    standardised: npt.NDArray[np.float64] = (total - total.mean()) / total.std()
    return standardised


def _prepared(folder: Path, columns: dict[str, object], schema: DataSchema) -> PreparedDataset:
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return prepare_dataset(
        folder / "rows.parquet", schema=schema, eval_fraction=HELD_OUT, out_dir=folder / "prepared"
    )


def _sigmoid(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-logits))
