"""A run's numbers, and plans that cannot be trained with the update mode that was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic import write_click_stream
from heterps_core.errors import ConfigurationError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig
from heterps_core.training.run_directory import RunDirectory
from tasks.start import Start
from tasks.training import check_update_mode, training_config, write_job


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    folder = tmp_path_factory.mktemp("clicks")
    stream = write_click_stream(folder / "clicks.tsv", num_rows=500, seed=0)
    prepare_dataset(stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=50, out_dir=folder / "prepared")
    return PreparedDataset.open(folder / "prepared")


def config_for(dataset: PreparedDataset, *, num_stages: int, update_mode: str) -> TrainingConfig:
    return training_config(
        dataset, batch_size=4096, epochs=1, seed=0, num_stages=num_stages, update_mode=update_mode
    )


def test_parameter_servers_are_no_stage_of_the_pipeline(dataset):
    hybrid = config_for(dataset, num_stages=3, update_mode="hybrid")

    assert hybrid.has_servers
    assert hybrid.num_microbatches == config_for(dataset, num_stages=2, update_mode="sync").num_microbatches
    assert config_for(dataset, num_stages=2, update_mode="hybrid").num_microbatches == 1


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        (
            [Stage(0, 2, "cpu", 1), Stage(3, 7, "gpu", 1)],
            "the first of 2 is layers 0..2 with fc1, relu1;",
        ),
        ([Stage(0, 7, "cpu", 1)], "the first of 1 is layers 0..7 with fc1"),
    ],
)
def test_a_plan_whose_first_stage_has_dense_layers_is_refused_with_the_way_out(dataset, stages, named):
    config = config_for(dataset, num_stages=len(stages), update_mode="hybrid")

    with pytest.raises(
        ConfigurationError, match=r"cut behind layer 0 .embedding.*update_mode sync"
    ) as refusal:
        check_update_mode(config, model="ctrdnn", dataset=dataset, stages=stages)

    assert named in str(refusal.value)


def test_a_local_run_whose_workers_do_not_fit_is_refused_with_figures_before_it_starts(dataset, tmp_path):
    """A table of 10^12 rows is no file yet: it is counted, not made."""
    rows = (10**12,) * dataset.features.num_slots
    huge = replace(dataset.manifest, features=replace(dataset.features, slot_rows=rows))
    stages = [Stage(0, 0, "cpu", 2), Stage(1, 7, "cpu", 1)]
    run = RunDirectory(str(tmp_path))

    with pytest.raises(
        ConfigurationError, match=r"need [0-9,]+\.\d\d GB \(2 of stage 0 .* are free; use smaller"
    ):
        write_job(
            run,
            run_id="r1",
            model="ctrdnn",
            dataset=PreparedDataset(dataset.directory, huge),
            stages=stages,
            config=config_for(dataset, num_stages=2, update_mode="sync"),
            start=Start(reason=""),
            is_rehearsal=True,
        )

    assert not run.exists("job.json")


@pytest.mark.parametrize("update_mode", ["sync", "hybrid"])
def test_a_plan_that_is_cut_behind_the_embedding_takes_both_modes(dataset, update_mode):
    stages = [Stage(0, 0, "cpu", 3), Stage(1, 7, "gpu", 1)]
    config = config_for(dataset, num_stages=2, update_mode=update_mode)

    check_update_mode(config, model="ctrdnn", dataset=dataset, stages=stages)
