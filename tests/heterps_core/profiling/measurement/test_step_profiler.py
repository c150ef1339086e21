"""A real measurement of a small model in two stages, one of them with replicas."""

from pathlib import Path

import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import HeterpsError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.measuring_process import measure_step_seconds
from heterps_core.training.job import TrainingConfig, TrainingJob


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


@pytest.mark.slow
def test_a_step_of_two_stages_with_replicas_is_timed(dataset):
    assert 0 < measure_step_seconds(make_job(dataset)) < 60


def test_a_measurement_that_fails_says_why(tmp_path):
    with pytest.raises(HeterpsError, match=r"profiling .ctrdnn. failed with exit status 1:(.|\n)*manifest"):
        measure_step_seconds(make_job(tmp_path / "nothing"))
