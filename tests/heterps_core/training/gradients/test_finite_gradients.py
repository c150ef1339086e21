"""A number that is none ends the run in the step that meets it, whether or not it reaches the loss."""

import pytest
import torch

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.errors import TrainingError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.gradients.finite_gradients import check_losses, check_parameters
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner

FEATURES = FeatureSpec(num_dense=13, slot_rows=(50,) * 26)
CONFIG = TrainingConfig(batch_size=32, num_microbatches=2, num_epochs=1, seed=3)
NUM_LAYERS = 8


@pytest.fixture
def model() -> StageModel:
    return build_stage_model("ctrdnn", FEATURES, CONFIG, [Stage(0, NUM_LAYERS - 1, "cpu", 1)])


def train_and_check(model: StageModel) -> None:
    runner = StageRunner(model, CONFIG)
    generator = torch.Generator().manual_seed(1)
    microbatches = [
        MicroBatch(
            16,
            ClickBatch(
                dense=torch.randn(16, 13, generator=generator),
                ids=torch.randint(0, 50, (16, 26), generator=generator),
                labels=torch.randint(0, 2, (16,), generator=generator).float(),
            ),
        )
        for _ in range(2)
    ]
    (losses,) = runner.train_step(microbatches)
    check_losses(losses, step=7, config=CONFIG)
    model.update_dense(CONFIG.dense_learning_rate)
    check_parameters(model.layers, step=7, config=CONFIG)


def test_numbers_to_learn_from_are_fine(model):
    train_and_check(model)


def test_a_stage_without_dense_layers_has_nothing_to_check():
    check_parameters({}, step=1, config=CONFIG)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("number", [1, 3, 5, 7])
def test_a_weight_that_is_no_number_is_met_in_the_same_step(model, number, value):
    with torch.no_grad():
        list(model.layers.values())[number].weight[0, 2] = value

    with pytest.raises(TrainingError, match=r"step 7;? .*dense_learning_rate 0.001"):
        train_and_check(model)


def test_a_row_that_is_no_number_is_met_in_the_same_step(model):
    (table,) = model.tables.values()
    table.weight_RD[:50] = float("nan")

    with pytest.raises(TrainingError, match=r"step 7;? .*dense_learning_rate 0.001"):
        train_and_check(model)
