"""The costs by hand; one real measurement of a small model in two stages, one of them with replicas."""

import json
from pathlib import Path

import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import ConfigurationError, HeterpsError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.measuring_process import WorkerCosts, measure_worker_costs
from heterps_core.training.job import TrainingConfig, TrainingJob
from tests.heterps_core.profiling.builders import make_stage_costs, make_worker_costs


def make_job(dataset: Path, **changes) -> TrainingJob:
    config = TrainingConfig(batch_size=64, num_microbatches=2, num_epochs=1, seed=0)
    stages = (Stage(0, 1, "cpu", 2), Stage(2, 7, "cpu", 1))
    values = {
        "run_id": "none",
        "model": "ctrdnn",
        "dataset": str(dataset),
        "stages": stages,
        "config": config,
    }
    return TrainingJob(**(values | changes))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    stream = write_click_stream(folder / "clicks.tsv", num_rows=400, seed=0)
    return prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=50, out_dir=folder / "prepared"
    ).directory


@pytest.fixture(scope="module")
def measured(dataset):
    return measure_worker_costs(make_job(dataset))


def test_all_parts_of_workers_are_measured(measured):
    first, last = measured.stages

    for stage in measured.stages:
        assert stage.forward_seconds > 0
        assert stage.backward_seconds > 0
        assert stage.weight_gradient_seconds > 0
        assert stage.update_seconds > 0
        assert stage.reading_seconds >= 0
    # A fully connected layer before the cut, and three behind it.
    assert (first.num_weight_gradients, last.num_weight_gradients) == (1, 3)
    assert (first.updates_together, last.updates_together) == (True, False)
    assert first.gradient_sum_seconds > last.gradient_sum_seconds


def test_costs_survive_json(measured):
    assert WorkerCosts.from_json(json.loads(json.dumps(measured.to_json()))) == measured


def test_a_measurement_that_fails_says_why(tmp_path):
    with pytest.raises(HeterpsError, match=r"profiling .ctrdnn. failed with exit status 1:(.|\n)*manifest"):
        measure_worker_costs(make_job(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 0}, "schema_version: must be 4, got 0; measure them again"),
        ({"stages": None}, "stages: must be a list, got None; measure them again"),
    ],
)
def test_json_of_another_form_is_refused(change, message):
    with pytest.raises(ConfigurationError, match=message):
        WorkerCosts.from_json(make_worker_costs(make_stage_costs()).to_json() | change)
