"""Candidates that are predicted together get the answers of rows alone, and share the work on their histories."""

import numpy as np
import pytest

from heterps_core.data.features import NO_ID
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.schema import DataSchema, SequenceColumn
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.serving.exported_model import ClickPredictor
from tests.heterps_core.serving.test_network_export import write_model

SCHEMA = DataSchema(
    name="shown",
    label_column="click",
    numeric_columns=("price",),
    categorical_columns=("item",),
    sequence_columns=(
        SequenceColumn(name="items", max_length=6, history="listens"),
        SequenceColumn(name="queries", max_length=3),
        SequenceColumn(name="actions", max_length=6, history="listens"),
    ),
)
FEATURES = SCHEMA.features([101] * 4)
TRANSFORM = NumericTransform(
    is_count=(False,), means=(0.0,), standard_deviations=(1.0,), lows=(-9.0,), highs=(9.0,)
)
# Two users with the items of the first, of whom one did other things, and one without a history.
USERS = [
    {"items": ["a", "b", "c"], "actions": ["look", "buy", "look"], "queries": ["x"]},
    {"items": ["a", "b", "c"], "actions": ["look", "look", "look"], "queries": ["x"]},
    {"items": [], "actions": [], "queries": ["x", "y"]},
]


def rows_of(*candidates):
    rows = [user for user, number in zip(USERS, candidates, strict=True) for _ in range(number)]
    columns = {name: [row[name] for row in rows] for name in USERS[0]}
    return columns | {
        "price": [number / 50 - 1 for number in range(len(rows))],
        "item": [f"item {number % 7}" for number in range(len(rows))],
    }


def ids_looked_up(predictor, columns):
    """Return which values of each sequence a model looks up of each row [N, S]."""
    embedding = next(layer for layer in predictor.layers if isinstance(layer, SlotEmbedding))
    batches = []
    with embedding.register_forward_pre_hook(lambda _, inputs: batches.append(inputs[0])):
        predictor.predict(columns)
    (batch,) = batches
    first_ids = [
        FEATURES.id_columns[FEATURES.slot_names.index(name)][0] for name in ("items", "actions", "queries")
    ]
    return (batch.ids[:, first_ids] != NO_ID).numpy()


@pytest.mark.parametrize("model", ["hstu", "sasrec", "din", "ctrdnn", "wukong"])
def test_each_candidate_has_the_answer_of_its_row_alone(tmp_path, model):
    predictor = ClickPredictor(
        write_model(tmp_path / "model", f"{model}(embedding_dim=4)", FEATURES, SCHEMA, TRANSFORM)
    )
    columns = rows_of(5, 3, 70)

    together = predictor.predict(columns)

    alone = [
        predictor.predict({name: values[row : row + 1] for name, values in columns.items()})
        for row in range(78)
    ]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=0, atol=1e-6)
    assert together.std() > 1e-3


def test_neighbouring_rows_of_one_history_look_it_up_once_and_again_after_64_rows(tmp_path):
    predictor = ClickPredictor(write_model(tmp_path / "model", "hstu", FEATURES, SCHEMA, TRANSFORM))

    items, actions, queries = ids_looked_up(predictor, rows_of(5, 3, 70)).T

    assert np.flatnonzero(items).tolist() == [0, 5, 8, 64]
    assert np.flatnonzero(actions).tolist() == [0, 5, 8, 64]
    assert np.flatnonzero(queries).tolist() == [0, 8, 64]


def test_a_model_that_averages_histories_looks_up_those_of_each_row(tmp_path):
    predictor = ClickPredictor(write_model(tmp_path / "model", "wukong", FEATURES, SCHEMA, TRANSFORM))

    assert ids_looked_up(predictor, rows_of(5, 3, 2)).all()
