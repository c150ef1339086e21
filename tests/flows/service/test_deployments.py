import importlib
import json
import logging
from pathlib import Path

import prefect
import pytest
import yaml
from jsonschema import validate

from flows.service.deployments import deployments
from flows.sweep_orphans import sweep_orphans
from heterps_core.errors import ConfigurationError
from infra.workspace import Workspace
from tasks.records import mlflow_store
from tasks.records.mlflow_names import Tag
from tasks.running import run_lifecycle
from tests.paths import PROJECT

WORKER_TEMPLATES = "server/api/collections_data/views/aggregate-worker-metadata.json"


def test_deployments_are_named_as_their_flows():
    training, sweeper, comparison, prices, profiling, backfill = deployments()

    assert (training.flow_name, training.name) == ("train-ctr", "train-ctr")
    assert (sweeper.flow_name, sweeper.name) == ("sweep-orphans", "sweep-orphans")
    assert (comparison.flow_name, comparison.name) == ("compare-schedulers", "compare-schedulers")
    assert (prices.flow_name, prices.name, prices.schedules) == ("refresh-prices", "refresh-prices", [])
    assert (profiling.flow_name, profiling.name, profiling.schedules) == (
        "profile-devices",
        "profile-devices",
        [],
    )
    assert (backfill.flow_name, backfill.name, backfill.schedules) == ("backfill-ctr", "backfill-ctr", [])
    [nightly] = training.schedules
    assert (nightly.schedule.cron, nightly.schedule.timezone) == ("30 4 * * *", "UTC")


def test_sweeps_do_not_pile_up_and_no_run_that_trains_depends_on_a_lease_of_prefects_server():
    """A run under a limit is ended where the server was started again since, as its lease is forgotten."""
    limits = {each.name: each.concurrency_limit for each in deployments()}

    assert {name for name, limit in limits.items() if limit is not None} == {"sweep-orphans"}
    [sweeper] = [each for each in deployments() if each.name == "sweep-orphans"]
    assert (sweeper.concurrency_limit, sweeper.concurrency_options.collision_strategy.value) == (
        1,
        "CANCEL_NEW",
    )


@pytest.mark.parametrize("file", ["prefect.yaml", "prefect.containers.yaml"])
def test_a_worker_is_offered_the_same_deployments_as_make_serve_runs(file):
    offered = yaml.safe_load((PROJECT / file).read_text())["deployments"]

    assert {each["name"] for each in offered} == {each.name for each in deployments()}
    for each in offered:
        path, _, function = each["entrypoint"].partition(":")
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert getattr(module, function).name == each["name"]


@pytest.mark.parametrize(
    ("file", "pool_type"),
    [
        ("prefect.yaml", "process"),
        ("prefect.containers.yaml", "docker"),
        ("prefect.containers.yaml", "kubernetes"),
    ],
)
def test_a_work_pool_knows_each_variable_that_its_deployments_set(file, pool_type):
    """By the job templates of the workers, which come with Prefect; no container was started."""
    workers = json.loads((Path(prefect.__file__).parent / WORKER_TEMPLATES).read_text())
    [template] = [types[pool_type] for types in workers.values() if pool_type in types]
    variables = template["default_base_job_configuration"]["variables"]
    known = variables["properties"]

    [pool] = yaml.safe_load((PROJECT / file).read_text())["definitions"].values()

    assert pool["job_variables"].keys() <= known.keys()
    for name, value in pool["job_variables"].items():
        validate(value, {**known[name], "definitions": variables.get("definitions", {})})


def test_a_sweep_closes_the_record_of_a_dead_run_and_a_second_finds_nothing(
    tmp_path, monkeypatch, caplog, prefect_server
):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path))
    workspace = Workspace(root=tmp_path).create()
    dead = run_lifecycle.open_run(workspace, run_id="run-1", run_name="run-1", tags={})
    client = mlflow_store.client_of(workspace)
    client.set_tag(dead.mlflow_run_id, Tag.PROCESS, "1 1.00")

    with caplog.at_level(logging.INFO):
        assert sweep_orphans() == 1
        assert sweep_orphans() == 0

    run = client.get_run(dead.mlflow_run_id)
    assert (run.info.status, run.data.tags["heterps.end_reason"]) == (
        "KILLED",
        "the process of the flow is gone",
    )


def test_the_nightly_run_has_the_parameters_that_the_environment_sets(monkeypatch):
    nightly = {"data": "/comes/later", "ready_by": "06:00", "max_usd_per_run": "2"}
    monkeypatch.setenv("HETERPS_NIGHTLY", json.dumps(nightly))

    assert deployments()[0].parameters == nightly


@pytest.mark.parametrize(
    ("nightly", "message"),
    [
        ({"dat": "/clicks"}, "'dat' is not a known parameter of train-ctr in HETERPS_NIGHTLY;.* mean 'data'"),
        ({"ready_by": "six"}, "ready_by must be a time of day"),
        ({"ready_by": 6}, "ready_by of train-ctr in HETERPS_NIGHTLY must be text, or left out, got 6"),
        ({"model": 5}, "model of train-ctr in HETERPS_NIGHTLY must be text, got 5"),
        (
            {"epochs": 1.5},
            "epochs of train-ctr in HETERPS_NIGHTLY must be a whole number, at least 1, got 1.5",
        ),
        (
            {"markets": "spot"},
            "markets of train-ctr in HETERPS_NIGHTLY must be a list, length at least 1, each text, got 'spot'",
        ),
        (
            {"promotion_confidence": 95},
            "promotion_confidence .* must be a number, above 0 and below 1, got 95",
        ),
        ({"markets": ["spot"]}, "no price file has spot prices for us-east-1"),
        ({"min_positives": 0}, "min_positives .* must be a whole number of clicks, at least 2"),
    ],
)
def test_a_wrong_parameter_of_the_night_is_reported_before_anything_is_served(nightly, message, monkeypatch):
    monkeypatch.setenv("HETERPS_NIGHTLY", json.dumps(nightly))

    with pytest.raises(ConfigurationError, match=message):
        deployments()
