import hashlib
import json

import deltalake
import pyarrow as pa
import pytest
from mlflow import MlflowClient

from heterps_core.data.history.event_store import EventStore
from heterps_core.data.manifest import SourceFile
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.plans.scheduling_plan import Stage
from infra.workspace import Workspace
from tasks.records import mlflow_store, tracking
from tasks.records.run_record import note, note_metrics, note_series
from tasks.records.tracking import run_settings
from tasks.running import run_lifecycle
from tests.tasks.builders import make_problem, make_result
from tests.tasks.report_builders import make_night


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """One store for all tests here, as MLflow takes seconds to write its tables."""
    return Workspace(root=tmp_path_factory.mktemp("home")).create()


@pytest.fixture(scope="module")
def client(workspace):
    return MlflowClient(tracking_uri=workspace.tracking_uri)


def open_run(workspace, run_id):
    return run_lifecycle.open_run(workspace, run_id=run_id, run_name=run_id, tags={"git.commit": "0" * 7})


def close(workspace, run):
    run_lifecycle.close_run(workspace, run, status="FINISHED", reason="completed")


def children_of(client, run):
    return client.search_runs(
        [run.experiment_id], filter_string=f"tags.`mlflow.parentRunId` = '{run.mlflow_run_id}'"
    )


def settings(result):
    return run_settings(result.plan.stages, method="exact", model="tiny", batch_size=100, seed=0)


def test_the_snapshot_of_a_table_is_the_dataset_of_a_run(workspace, client, tmp_path):
    for town in ("Ulm", "Bonn"):
        deltalake.write_deltalake(str(tmp_path / "clicks"), pa.table({"town": [town]}), mode="append")
    run = open_run(workspace, "run-table")
    table = TablePath(uri=f"delta://{tmp_path}/clicks", snapshot_id="0")

    mlflow_store.record_table(workspace, run, table)
    close(workspace, run)

    [found] = client.get_run(run.mlflow_run_id).inputs.dataset_inputs
    assert (found.dataset.name, found.dataset.digest, found.dataset.source_type) == ("clicks", "0", "delta")
    [action] = [line for line in map(json.loads, _log(tmp_path / "clicks")) if "add" in line]
    name = f"{tmp_path}/clicks/{action['add']['path']}"
    assert json.loads(found.dataset.source) == {
        "uri": table.uri,
        "snapshot": "0",
        "num_files": 1,
        "files_sha256": hashlib.sha256(name.encode()).hexdigest(),
    }
    assert '"name": "town", "type": "string"' in found.dataset.schema


def test_events_in_files_are_an_input_that_is_known_by_their_content(workspace, client):
    files = [
        SourceFile(path=f"/events/{n}.parquet", size_bytes=n, modified_ns=0, tag=f"{n:064x}") for n in (1, 2)
    ]
    digests = []
    for name, sources in (("run-one", files[:1]), ("run-two", files)):
        run = open_run(workspace, name)
        mlflow_store.record_events(
            workspace, run, EventStore(table="/events", columns=(), sources=tuple(sources))
        )
        close(workspace, run)
        [found] = client.get_run(run.mlflow_run_id).inputs.dataset_inputs
        assert (found.dataset.name, found.dataset.source_type) == ("events", "files")
        assert json.loads(found.dataset.source)["num_files"] == len(sources)
        digests.append(found.dataset.digest)

    assert digests[0] != digests[1]


def _log(folder):
    return (folder / f"_delta_log/{0:020d}.json").read_text().splitlines()


def test_a_searcher_becomes_a_finished_child_with_the_plans_figures(workspace, client):
    problem = make_problem()
    result = make_result(problem, cost_lower_bound_usd=0.0020)
    parent = open_run(workspace, "run-search")

    tracking.record_search(workspace, parent, result, settings(result), name="search exact", is_chosen=True)
    close(workspace, parent)

    [child] = children_of(client, parent)
    assert child.info.status == "FINISHED"
    assert child.data.tags["heterps.chosen"] == "true"
    assert child.data.params == {
        "method": "exact",
        "model": "tiny",
        "device_types": "cpu-c7i | gpu-t4",
        "replicas": "4 | 1",
        "market": "on-demand | on-demand",
        "batch_size": "100",
        "seed": "0",
    }
    # By hand: the slower stage takes 40 ms / 4 = 10 ms for 100 samples, at 4 * 0.1 + 0.5 USD/hour.
    assert child.data.metrics["predicted/throughput_samples_per_s"] == pytest.approx(10_000)
    assert child.data.metrics["predicted/price_usd_per_hour"] == pytest.approx(0.9)
    assert child.data.metrics["cost/usd_per_million_samples"] == pytest.approx(0.9 / 3600 * 100)
    assert child.data.metrics["predicted/cost_usd"] == pytest.approx(0.9 / 3600 * 3.6)
    assert child.data.metrics["search/optimality_gap"] == pytest.approx(0.0009 / 0.0020 - 1)
    assert [file.path for file in client.list_artifacts(child.info.run_id)] == ["plan.json"]
    history = client.get_metric_history(child.info.run_id, "search/best_cost_usd")
    assert {point.step: point.value for point in history} == pytest.approx({1: 0.0036, 7: 0.0009})


def test_figures_that_are_missing_or_not_finite_are_left_out(workspace, client):
    run = open_run(workspace, "run-gaps")

    note_metrics(
        workspace, run, {"quality/auc": None, "a": float("nan"), "b": float("inf"), "quality/log_loss": 0.5}
    )
    close(workspace, run)

    assert client.get_run(run.mlflow_run_id).data.metrics == {"quality/log_loss": 0.5}


def test_long_series_are_written_whole(workspace, client):
    run = open_run(workspace, "run-series")

    note_series(workspace, run, {"train/log_loss": [(step, 1 / (step + 1)) for step in range(2_345)]})
    close(workspace, run)

    history = client.get_metric_history(run.mlflow_run_id, "train/log_loss")
    assert len(history) == 2_345
    assert history[-1].value == pytest.approx(1 / 2_345)


def test_a_resumed_run_goes_on_in_its_old_record(workspace, client):
    result = make_result(make_problem())
    first = open_run(workspace, "run-resumed")
    note(workspace, first, parameters=settings(result))
    run_lifecycle.close_run(workspace, first, status="FAILED", reason="out of memory")

    again = open_run(workspace, "run-resumed")
    assert client.get_run(again.mlflow_run_id).info.status == "RUNNING"
    note(workspace, again, parameters={**settings(result), "method": "genetic"})
    close(workspace, again)

    assert again == first
    run = client.get_run(again.mlflow_run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["method"] == "exact"


def test_a_run_is_shown_with_the_units_of_both_device_types_of_a_stage():
    stages = [Stage(0, 0, "gpu-t4", 35, "gpu-t4-20gbit", 9), Stage(1, 2, "cpu-c7i", 4)]
    settings = run_settings(stages, method="exact", model="tiny", batch_size=100, seed=0)

    run = make_night(0, parameters=settings)

    assert run.plan == "26 x gpu-t4 + 9 x gpu-t4-20gbit + 4 x cpu-c7i"
