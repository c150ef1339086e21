"""Runs that do not fit where they are to train."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import ConfigurationError
from heterps_core.planning.provisioning.offer_choice import choose_instances
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig
from heterps_core.training.storage.run_directory import RunDirectory
from tasks.provisioning import Provisioning
from tasks.running.start import Start
from tasks.training import training_config, write_job
from tests.infra.builders import offer


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    folder = tmp_path_factory.mktemp("clicks")
    stream = write_click_stream(folder / "clicks.tsv", num_rows=500, seed=0)
    prepare_dataset(stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=50, out_dir=folder / "prepared")
    return PreparedDataset.open(folder / "prepared")


def config_for(
    dataset: PreparedDataset,
    *,
    num_stages: int,
    samples_per_s: float = 0.0,
    interruptions_per_hour: float = 0.0,
) -> TrainingConfig:
    return training_config(
        dataset,
        batch_size=4096,
        epochs=1,
        seed=0,
        num_stages=num_stages,
        samples_per_s=samples_per_s,
        interruptions_per_hour=interruptions_per_hour,
        update_mode=None,
    )


def test_a_long_run_is_saved_every_ten_minutes_and_a_short_one_five_times(dataset):
    """26 million rows a night: 6,347 steps of 4,096."""
    night: Any = SimpleNamespace(num_batches=lambda batch_size: 26_000_000 // batch_size)

    def interval(samples_per_s: float) -> int:
        return config_for(night, num_stages=1, samples_per_s=samples_per_s).checkpoint_interval_steps

    assert interval(4096.0) == 600
    assert interval(409_600.0) == 6_347 // 5
    assert interval(0.0) == 200
    assert config_for(dataset, num_stages=1).checkpoint_interval_steps == 50


def test_a_run_on_spot_is_saved_as_often_as_its_interruptions_want(dataset):
    """Young: with a pause of 1 s and half an interruption an hour sqrt(2 * 3,600 / 0.5) = 120 s."""
    night: Any = SimpleNamespace(num_batches=lambda batch_size: 26_000_000 // batch_size)

    def interval(interruptions_per_hour: float) -> int:
        return config_for(
            night, num_stages=1, samples_per_s=40_960.0, interruptions_per_hour=interruptions_per_hour
        ).checkpoint_interval_steps

    assert [interval(rate) for rate in (0.0, 0.5, 50.0)] == [6_347 // 5, 1_200, 600]


def provisioned(*stages: Stage, is_dry_run: bool) -> Provisioning:
    plan = choose_instances(stages, [offer("c7i.large", price_usd_per_hour=0.10)])
    return Provisioning(
        cloud_plan=plan,
        launch_plan=plan,
        launch_stages=stages,
        predicted_cost_usd=1.0,
        is_dry_run=is_dry_run,
    )


def test_a_local_run_whose_workers_do_not_fit_is_refused_with_figures_before_it_starts(dataset, tmp_path):
    """A table of 10^12 rows is no file yet: it is counted, not made."""
    rows = (10**12,) * dataset.features.num_slots
    huge = replace(dataset.manifest, features=replace(dataset.features, slot_rows=rows))
    run = RunDirectory(str(tmp_path))

    with pytest.raises(
        ConfigurationError, match=r"need [0-9,]+\.\d\d GB \(2 of stage 0 .* are free; use smaller"
    ):
        write_job(
            run,
            provisioned(Stage(0, 0, "cpu-c7i", 2), Stage(1, 7, "cpu-c7i", 1), is_dry_run=True),
            run_id="r1",
            model="ctrdnn",
            dataset=PreparedDataset(dataset.directory, huge),
            config=config_for(dataset, num_stages=2),
            start=Start(reason=""),
        )

    assert not run.exists("job.json")
