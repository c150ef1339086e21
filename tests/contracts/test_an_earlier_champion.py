"""A champion that an earlier version registered loads, predicts what it predicted, and is gone on from.

It lies in tests/golden/champion as commit bd0b6ad left it: `train-ctr` on 1,200 synthetic rows of three columns.
"""

import json

import mlflow
import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

from heterps_core.data.features import FIRST_TEXT_RULE, FeatureSpec
from heterps_core.data.manifest import FORMAT_VERSION, DatasetManifest
from heterps_core.data.schema import DataSchema
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import ClickPredictor
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.start_model import _load_start_model, publish_start_model
from heterps_core.training.storage.named_tensors import (
    dense_optimizer_state,
    row_optimizer_state,
    weights_of,
)
from heterps_core.training.storage.run_directory import RunDirectory
from tests.heterps_core.training.test_start_model import make_start
from tests.paths import TESTS

CHAMPION = TESTS / "golden" / "champion"
EXPORTED = CHAMPION / "data" / "click_model"
ROWS = pd.DataFrame(
    {
        "price": [1.0, 7.5, None, 3.25],
        "site": ["x", "y", "", "new"],
        "banner": ["c0", "c5", "c3", ""],
    }
)
PREDICTED_THEN = [0.3639236744236378, 0.39373509600551565, 0.37108657719993515, 0.3682585301917346]


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred")
def test_it_predicts_what_it_predicted_when_it_was_registered():
    model = mlflow.pyfunc.load_model(str(CHAMPION))

    assert model.predict(ROWS).tolist() == pytest.approx(PREDICTED_THEN, rel=1e-12)


def test_what_it_says_of_its_columns_stands_for_the_same_input_as_now():
    description = json.loads((EXPORTED / "model.json").read_text())
    added = {
        "slot_lengths",
        "slot_poolings",
        "slot_dimensions",
        "negative_share",
        "table_rows",
        "dimensions",
        "num_labels",
        "multi_hot_columns",
        "sequence_columns",
        "weight_column",
        "text_rule",
    }
    assert not added & {*description["features"], *description["schema"]}

    schema = DataSchema.from_json(description["schema"])

    features = FeatureSpec.from_json(description["features"])
    assert schema.features(features.slot_rows, text_rule=FIRST_TEXT_RULE) == features
    assert (features.num_ids, features.num_labels, schema.weight_columns) == (2, 1, ())
    sources = {"columns": [], "sources": [], "file_groups": [3], "fingerprint": "f", "eval_fraction": 0.2}
    counts = {"num_train_rows": 8, "num_eval_rows": 2, "num_sampled_rows": 8, "num_sampled_clicks": 2}
    written = {key: description[key] for key in ("schema", "features", "numeric_transform")}
    manifest = DatasetManifest.from_json({"format_version": FORMAT_VERSION, **sources, **counts, **written})
    assert (manifest.schema, manifest.features) == (schema, features)


def test_training_begins_with_its_weights_and_the_state_of_its_optimizers(tmp_path):
    run, start = RunDirectory(str(tmp_path)), make_start(EXPORTED)
    publish_start_model(run, start, EXPORTED)
    features = ClickPredictor(EXPORTED).features
    config = TrainingConfig(batch_size=64, num_microbatches=1, num_epochs=1, seed=5)
    model = build_stage_model(
        "tests.golden.champion.small_model:build", features, config, [Stage(0, 3, "cpu", 1)]
    )

    _load_start_model(run, start, model, config=config)

    state = dense_optimizer_state(model) | row_optimizer_state(model)
    for file, tensors in (("model", weights_of(model)), ("optimizer", state)):
        kept = load_file(EXPORTED / f"{file}.safetensors")
        assert tensors.keys() == kept.keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor.numpy(), kept[name])
