"""The exported network answers as the model does, for rows that are read by the documented rule alone."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from heterps_core.data.features import NO_ID, DynamicIds, FeatureSpec
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.schema import DataSchema
from heterps_core.embeddings.id_index import ID_TENSORS
from heterps_core.errors import ConfigurationError
from heterps_core.models import CTR_MODELS
from heterps_core.models.chain import build_chain
from heterps_core.models.graph_block import tensor_name
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.serving.exported_model import ClickPredictor
from heterps_core.serving.network_export import export_network
from heterps_core.training.storage.exported_files import file_sha256

SCHEMA = DataSchema.from_json(
    {
        "schema_version": 1,
        "name": "shop",
        "label_column": "clicked",
        "numeric_columns": ["age", "price"],
        "count_columns": ["price"],
        "categorical_columns": ["site"],
        "multi_hot_columns": [
            {"name": "tags", "max_length": 3, "pooling": "mean"},
            {"name": "banners", "max_length": 2, "pooling": "sum"},
        ],
        "sequence_columns": [{"name": "seen", "max_length": 4}],
    }
)
FEATURES = FeatureSpec(
    num_dense=2,
    slot_rows=(11, 7, 13, 17),
    slot_lengths=(1, 3, 2, 4),
    slot_poolings=("sum", "mean", "sum", "sequence"),
    text_rule=2,
)
TRANSFORM = NumericTransform(
    is_count=(False, True),
    means=(30.0, 2.0),
    standard_deviations=(10.0, 0.5),
    lows=(0.0, 0.0),
    highs=(70.0, 4.0),
)
ROWS = [
    {
        "age": 35.0,
        "price": 12.0,
        "site": "shop.example",
        "tags": ["a", "b"],
        "banners": ["x"],
        "seen": ["p", "q"],
    },
    {"age": None, "price": 900.0, "site": None, "tags": ["long-name-of-a-tag"], "banners": [], "seen": []},
    {
        "age": 99.0,
        "price": None,
        "site": "Ü",
        "tags": [],
        "banners": ["x", "y"],
        "seen": ["p", "q", "r", "s"],
    },
]
WORD = 2**64 - 1


def mixed(value):
    """Splitmix64, in whole numbers of Python."""
    value = (value + 0x9E3779B97F4A7C15) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def row_of(text, slot):
    if not text:
        return 0
    content, found = text.encode(), mixed(slot)
    for start in range(0, len(content), 8):
        found = mixed(found ^ int.from_bytes(content[start : start + 8], "little"))
    return 1 + mixed(found ^ len(content)) % (FEATURES.slot_rows[slot] - 1)


def dense_of(row):
    def standard(value, column):
        value = min(max(value, TRANSFORM.lows[column]), TRANSFORM.highs[column])
        return (value - TRANSFORM.means[column]) / TRANSFORM.standard_deviations[column]

    age, price = row["age"], row["price"]
    return [0.0 if age is None else standard(age, 0), 0.0 if price is None else standard(np.log1p(price), 1)]


def ids_of(row):
    ids = []
    for slot, (name, length) in enumerate({"site": 1, "tags": 3, "banners": 2, "seen": 4}.items()):
        values = row[name] if isinstance(row[name], list) else [row[name]]
        own = [row_of(value, slot) for value in values] or [0]
        ids += own + [NO_ID] * (length - len(own))
    return ids


def write_model(folder, model, features, schema=SCHEMA, transform=TRANSFORM):
    """Write an exported model with drawn weights."""
    torch.manual_seed(3)
    weights = {}
    for name, layer in build_chain(model, features, seed=0).named_children():
        if isinstance(layer, SlotEmbedding):
            weights[f"{name}.weight"] = torch.randn(layer.num_rows, layer.dimension)
            if features.dynamic_ids is not None:
                weights |= {f"{name}.{key}": torch.zeros(layer.num_rows).long() for key in ID_TENSORS}
        weights |= {tensor_name(name, layer, key): value for key, value in layer.state_dict().items()}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    description = {
        "schema_version": 1,
        "model": model,
        "features": features.to_json(),
        "schema": schema.to_json(),
        "numeric_transform": transform.to_json(),
        "weights_sha256": file_sha256(folder / "model.safetensors"),
    }
    (folder / "model.json").write_text(json.dumps(description))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        name if name in ("cross-deep", "hstu") else pytest.param(name, marks=pytest.mark.weekly)
        for name in CTR_MODELS
    ],
)
def test_a_network_answers_as_the_model_does_for_any_number_of_rows_that_are_hashed_by_hand(model, tmp_path):
    exported = write_model(tmp_path / "model", model, FEATURES)

    export_network(exported, tmp_path / "served")

    network = torch.export.load(tmp_path / "served" / "network.pt2").module()
    answers = network(
        torch.tensor([dense_of(row) for row in ROWS]).float(), torch.tensor([ids_of(row) for row in ROWS])
    )
    expected = ClickPredictor(exported).predict({name: [row[name] for row in ROWS] for name in ROWS[0]})
    np.testing.assert_allclose(answers.numpy(), expected, atol=1e-6)
    # Rows have different answers, by more than the tolerance.
    assert expected.std() > 1e-5
    examples = json.loads((tmp_path / "served" / "examples.json").read_text())
    answers = network(torch.tensor(examples["dense"]), torch.tensor(examples["ids"]))
    np.testing.assert_allclose(answers.numpy(), examples["probabilities"], atol=1e-6)


def test_a_model_with_dynamic_ids_is_refused_as_a_hash_gives_no_row(tmp_path):
    features = FeatureSpec(
        num_dense=2, slot_rows=(512,) * 4, slot_lengths=FEATURES.slot_lengths, dynamic_ids=DynamicIds()
    )
    exported = write_model(tmp_path / "model", "cross-deep", features)

    with pytest.raises(ConfigurationError, match="has dynamic ids; serve it with heterps predict or MLflow"):
        export_network(exported, tmp_path / "served")
