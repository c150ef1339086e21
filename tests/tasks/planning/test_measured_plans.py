"""A search by measurements on real clicks: the trainer itself runs every plan."""

from pathlib import Path

import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.profiling.layer_profiler import trace_model
from heterps_core.profiling.measuring_process import ProfileRequest, measure_in_fresh_process
from tasks.planning.measured_plans import measured_table, search_measured
from tasks.profiling import ProfiledModel

BATCH_SIZE = 64


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    folder = tmp_path_factory.mktemp("clicks")
    stream = write_click_stream(folder / "clicks.tsv", num_rows=600, seed=0)
    prepare_dataset(stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=50, out_dir=folder / "prepared")
    return PreparedDataset.open(folder / "prepared")


@pytest.fixture(scope="module")
def profiled(dataset: PreparedDataset) -> ProfiledModel:
    request = ProfileRequest(
        model="ctrdnn",
        features=dataset.features,
        batch_size=BATCH_SIZE,
        dataset=str(dataset.directory),
        budget_s=0.2,
    )
    graph = trace_model(request)
    return ProfiledModel(
        graph=graph,
        local_profile=measure_in_fresh_process(request),
        planned_graph=graph,
        profiles={},
        planned_request=request,
    )


@pytest.mark.slow
def test_each_method_runs_as_many_plans_and_the_faster_step_comes_first(profiled, dataset):
    found = search_measured.fn(
        profiled,
        dataset=str(Path(dataset.directory)),
        batch_size=BATCH_SIZE,
        methods=["genetic", "reinforce"],
        budget_measurements=3,
        seed=0,
        num_cores=2,
    )

    assert {each.method for each in found} == {"genetic", "reinforce"}
    assert [len(each.search.plans) for each in found] == [3, 3]
    assert found[0].step_seconds <= found[1].step_seconds
    assert all(each.stages[-1].last_layer == len(profiled.graph.layers) - 1 for each in found)
    assert [row[0] for row in measured_table("ctrdnn", found, batch_size=BATCH_SIZE).rows] == [
        each.method for each in found
    ]
