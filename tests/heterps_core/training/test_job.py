"""The job that nodes read."""

import dataclasses

import pytest

from heterps_core.embeddings.row_optimizers import ROW_OPTIMIZERS
from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.gradients import optimizers
from heterps_core.training.job import DENSE_OPTIMIZERS, EMBEDDING_OPTIMIZERS, TrainingConfig, TrainingJob

CONFIG = TrainingConfig(batch_size=64, num_microbatches=4, num_epochs=2, seed=1)
JOB = TrainingJob(
    run_id="r1",
    model="ctrdnn",
    dataset="/data",
    stages=(Stage(0, 0, "cpu", 2), Stage(1, 7, "gpu", 1)),
    config=CONFIG,
)


def test_a_job_survives_json():
    assert TrainingJob.from_json(JOB.to_json()) == JOB


def test_the_optimizers_that_a_form_offers_without_torch_are_those_of_the_engine():
    assert sorted(DENSE_OPTIMIZERS) == sorted(optimizers.DENSE_OPTIMIZERS)
    assert sorted(EMBEDDING_OPTIMIZERS) == sorted(ROW_OPTIMIZERS)


def test_an_uneven_batch_names_the_next_even_one():
    with pytest.raises(ConfigurationError, match="take a batch size of 68"):
        dataclasses.replace(CONFIG, batch_size=65)


@pytest.mark.parametrize("field", ["batch_size", "num_microbatches", "num_epochs", "num_threads"])
def test_counts_start_at_one(field):
    with pytest.raises(ConfigurationError, match=f"{field}: must lie in 1.*, got 0"):
        dataclasses.replace(CONFIG, **{field: 0})


def test_an_unknown_precision_names_the_known_ones():
    with pytest.raises(UnknownNameError, match="known are: bfloat16, float32"):
        dataclasses.replace(CONFIG, precision="fp16")


def test_a_learning_rate_must_be_positive():
    with pytest.raises(ConfigurationError, match="dense_learning_rate: must be a finite number, got nan"):
        dataclasses.replace(CONFIG, dense_learning_rate=float("nan"))


def test_every_replica_needs_a_row_of_each_micro_batch():
    with pytest.raises(ConfigurationError, match="raise batch_size to 80"):
        dataclasses.replace(JOB, stages=(Stage(0, 7, "cpu", 20),))


def test_the_replica_with_the_least_share_needs_a_row_of_each_micro_batch():
    dataclasses.replace(JOB, stages=(Stage(0, 7, "cpu", 2, shares=(15, 1)),))
    with pytest.raises(ConfigurationError, match=r"16 rows for shares \(31, 1\); raise batch_size to 128"):
        dataclasses.replace(JOB, stages=(Stage(0, 7, "cpu", 2, shares=(31, 1)),))


@pytest.mark.parametrize("shares", [(1,), (1, 2, 3), (0, 1)])
def test_each_replica_needs_a_share(shares):
    with pytest.raises(ConfigurationError, match="for each of its 2 replicas"):
        Stage(0, 7, "cpu", 2, shares=shares)


def test_unequal_shares_survive_json_and_equal_ones_are_not_written():
    unequal = dataclasses.replace(JOB, stages=(Stage(0, 0, "cpu", 2, shares=(3, 1)), Stage(1, 7, "gpu", 1)))

    assert TrainingJob.from_json(unequal.to_json()) == unequal
    assert unequal.shares == ((3, 1), (1,))
    assert JOB.to_json()["stages"][0].keys() == {"first_layer", "last_layer", "device_type", "num_replicas"}


def test_stages_without_a_gap_are_required():
    with pytest.raises(ConfigurationError, match="starts at layer 1, got 2"):
        dataclasses.replace(JOB, stages=(Stage(0, 0, "cpu", 1), Stage(2, 7, "cpu", 1)))
