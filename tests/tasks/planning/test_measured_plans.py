"""A search by measurements on real clicks: the trainer itself runs every plan."""

from dataclasses import replace

import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.models.model_graph import ModelGraph, host_bytes_of_worker
from heterps_core.profiling.measurement.layer_profiler import trace_model
from heterps_core.profiling.measuring_process import ProfileRequest, measure_in_fresh_process
from tasks.planning import measured_plans
from tasks.planning.measured_plans import measured_table, search_measured, stages_of
from tasks.profiling import ProfiledModel
from tests.heterps_core.profiling.builders import EMBEDDING

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
        local_profile=measure_in_fresh_process(request)[0],
        planned_graph=graph,
        profiles={},
        planned_request=request,
    )


@pytest.mark.weekly
def test_each_method_runs_as_many_plans_and_the_faster_step_comes_first(profiled, dataset):
    found = search_measured.fn(
        profiled,
        dataset=dataset,
        batch_size=BATCH_SIZE,
        methods=["genetic", "tapp"],
        budget_measurements=3,
        num_seeds=2,
        num_cores=2,
    )

    last_layer = len(profiled.graph.layers) - 1
    searches = [search for each in found for search in each.searches]
    assert {each.method for each in found} == {"genetic", "tapp"}
    assert [len(search.plans) for search in searches] == [3, 3, 3, 3]
    # Both begin with the model in one stage and the same cut in two.
    assert {search.plans[0].assignment for search in searches} == {(0,) * (last_layer + 1)}
    (half,) = {stages_of(search.plans[1].assignment) for search in searches}
    assert (half[0].first_layer, half[-1].last_layer, len(half)) == (0, last_layer, 2)
    assert all(cut[-1].last_layer == last_layer for each in found for cut in each.cuts)
    table = measured_table("ctrdnn", found, batch_size=BATCH_SIZE)
    assert [row[0] for row in table.rows] == [each.method for each in found]
    assert table.rows[0][1] <= table.rows[1][1]


def test_as_many_stages_are_run_as_the_free_memory_holds(monkeypatch):
    """By hand: three workers beside tables of 1 GB, and a byte too few for four."""
    tables = replace(EMBEDDING, parameter_bytes=10**9, optimizer_state_bytes=0)
    graph = ModelGraph(name="tables", layers=(tables,))

    monkeypatch.setattr(measured_plans, "available_bytes", lambda: 10**9 + 4 * host_bytes_of_worker(0) - 1)
    assert measured_plans._most_stages(graph, num_train_rows=0) == 3

    monkeypatch.setattr(measured_plans, "available_bytes", lambda: 0)
    assert measured_plans._most_stages(graph, num_train_rows=0) == 1
