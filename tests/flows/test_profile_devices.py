import logging

import pytest
from mlflow import MlflowClient
from prefect.testing.utilities import prefect_test_harness

from flows.parameters import ProfileParameters
from flows.profile_devices import profile_devices
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import ConfigurationError, UnknownNameError
from infra.ledger.ledger import EntryState, Ledger
from infra.providers import provider_of
from infra.workspace import Workspace
from tasks.records.mlflow_names import EXPERIMENT, Tag


def test_what_stands_by_default_can_be_used():
    ProfileParameters().check()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"device_types": ["cpu-c7"]}, UnknownNameError, "cpu-c7i"),
        ({"model": "ctrdn"}, UnknownNameError, "ctrdnn"),
        ({"provider": "aws"}, ConfigurationError, "HETERPS_RUN_STORE"),
        ({"nights": 3}, ConfigurationError, "nights was removed: .* the last 30 days; leave it out"),
    ],
)
def test_what_cannot_be_used_is_reported_before_any_work(monkeypatch, wrong, error, message):
    monkeypatch.delenv("HETERPS_RUN_STORE", raising=False)

    with pytest.raises(error, match=message):
        ProfileParameters.of(wrong).check()


@pytest.mark.slow
@pytest.mark.weekly
def test_a_dry_run_rents_measures_ends_and_records(tmp_path, monkeypatch, caplog):
    home = tmp_path / "home"
    monkeypatch.setenv("HETERPS_HOME", str(home))
    write_click_stream(tmp_path / "clicks.tsv", num_rows=3_000, seed=0)

    with prefect_test_harness(server_startup_timeout=400), caplog.at_level(logging.INFO):
        profile_devices(
            data=str(tmp_path / "clicks.tsv"),
            provider="local",
            device_types=["cpu-c7i", "cpu-m7a"],
            planned_rows_per_slot=1_000_000,
            planned_samples=100_000_000,
            batch_size=256,
        )

    workspace = Workspace(root=home)
    assert caplog.text.count("not kept, since this machine is none of that type") == 2
    assert not (workspace.profiles_directory / "rented").exists()
    assert provider_of(workspace, "local").list_instances() == ()
    assert {entry.state for entry in Ledger(workspace.ledger_path).entries()} == {EntryState.ENDED}
    client = MlflowClient(tracking_uri=workspace.tracking_uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.data.tags[Tag.KIND], run.info.status) == ("profiling", "FINISHED")
    assert run.data.metrics["cost/billed_usd"] > 0
    assert {entry.path for entry in client.list_artifacts(run.info.run_id)} >= {"bills", "profiles"}
