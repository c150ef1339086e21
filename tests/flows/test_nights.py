"""Nights as they follow one another, with everything real: flow, machines of this one, records, registry."""

import gzip
import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client

from flows.backfill_ctr import backfill_ctr
from flows.train_ctr import train_ctr
from heterps_core.errors import ConfigurationError, DataError, ProvisioningError
from infra.billing.caps import Caps
from infra.ledger.ledger import Ledger
from infra.machines.lifecycle import running_cluster
from infra.prices.price_catalogue import BUNDLED_SNAPSHOT, write_refreshed
from infra.providers import provider_of
from infra.providers.base import QuotaExceededError, UnitLimits
from infra.providers.local import LocalProvider
from infra.workspace import HOME_VARIABLE
from tasks.records.champion import champion_of
from tasks.records.past_runs import finished_run
from tests.infra.builders import bootstrap, offer, plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]

SETTINGS = {
    "provider": "local",
    "scheduler": "exact",
    "budget_evaluations": 64,
    "batch_size": 128,
    "epochs": 2,
    "device_types": ["cpu-c7i", "gpu-t4"],
    "baseline": False,
}


@pytest.fixture(scope="module")
def days(days_of_runs):
    return days_of_runs


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, workspace_of_runs):
    home = tmp_path_factory.mktemp("nights") / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(home))
        yield workspace_of_runs(home)


@pytest.fixture(scope="module")
def first_night(workspace, days):
    return train_ctr(data=str(days), day="2026-11-02", **SETTINGS)


def records(workspace):
    client = MlflowClient(workspace.tracking_uri)
    experiment = client.get_experiment_by_name("train-ctr")
    runs = client.search_runs([experiment.experiment_id], filter_string="tags.`heterps.kind` = 'training'")
    return {run.data.tags["heterps.run_id"]: run for run in runs}


def job_of(workspace, run_id):
    return json.loads((workspace.run_folder(run_id) / "job.json").read_text())["document"]


def test_the_first_night_begins_from_scratch_and_its_model_becomes_champion(workspace, days, first_night):
    run = records(workspace)[first_night]

    assert run.info.status == "FINISHED"
    assert (run.data.tags["heterps.day"], run.data.tags["heterps.data"]) == ("2026-11-02", str(days))
    assert job_of(workspace, first_night)["start_model"] is None
    assert run.data.metrics["quality/best_reachable_auc"] > run.data.metrics["quality/auc"] > 0.5
    champion = champion_of(workspace)
    assert (champion.run_id, champion.day) == (first_night, "2026-11-02")


def test_no_machine_is_paid_for_while_the_model_is_exported(workspace, first_night):
    machines = Ledger(workspace.ledger_path).entries(run_id=first_night)
    exported = [path.stat().st_mtime for path in workspace.root.rglob("click_model/**/*") if path.is_file()]

    assert machines
    assert exported
    assert max(machine.ended_at.timestamp() for machine in machines) <= min(exported)


def test_a_finished_night_keeps_no_checkpoint_and_is_not_resumed(workspace, days, first_night):
    left = {path.name for path in workspace.run_folder(first_night).iterdir()}
    assert {"parameters.json", "explanation.json", "job.json", "steps", "result.json"} <= left
    assert not left & {"checkpoints", "start_model", "reserve"}
    before = records(workspace)[first_night]

    with pytest.raises(ConfigurationError, match=rf"{first_night} finished at .* nothing is left to resume"):
        train_ctr(data=str(days), day="2026-11-02", resume_run_id=first_night, **SETTINGS)

    after = records(workspace)[first_night]
    assert (after.info.to_proto(), after.data.to_dictionary()) == (
        before.info.to_proto(),
        before.data.to_dictionary(),
    )


def test_a_night_that_is_done_does_nothing_and_names_the_run_that_did_it(
    workspace, days, first_night, caplog
):
    with caplog.at_level("INFO"):
        again = train_ctr(data=str(days), day="2026-11-02", **SETTINGS)

    assert again == first_night
    assert f"run {first_night} has trained cross-deep on 2026-11-02" in caplog.text
    assert set(records(workspace)) == {first_night}


def test_a_night_that_does_nothing_is_called_skipped_in_both_records(workspace, days, first_night):
    state = train_ctr(data=str(days), day="2026-11-02", **SETTINGS, return_state=True)

    assert (state.type.value, state.name, state.result()) == ("COMPLETED", "Skipped", first_night)
    assert "heterps.skipped" in records(workspace)[first_night].data.tags


def test_a_night_has_one_name_in_prefect_and_mlflow(workspace, first_night):
    record = records(workspace)[first_night]

    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(UUID(record.data.tags["prefect.flow_run_id"]))
    assert flow_run.name == "2026-11-02 cross-deep exact"
    assert record.info.run_name.startswith(f"{flow_run.name} ")


@pytest.mark.weekly
def test_a_night_is_planned_for_the_rows_that_a_query_makes_of_its_day(workspace, days, tmp_path, caplog):
    query = tmp_path / "rows.sql"
    query.write_text("SELECT * FROM rows WHERE label = '1'")
    lines = gzip.decompress((days / "day=2026-11-03" / "clicks.tsv.gz").read_bytes()).splitlines()
    num_clicks = sum(line.startswith(b"1\t") for line in lines)

    with caplog.at_level("INFO"):
        train_ctr(
            data=str(days),
            day="2026-11-03",
            prepare_sql=str(query),
            plan_only=True,
            start_from="scratch",
            **SETTINGS,
        )

    assert f" {num_clicks:,} rows to train on" in caplog.text
    assert "100.0% clicks" in caplog.text


def test_a_bad_day_launches_nothing_and_leaves_the_champion(workspace, days, first_night):
    launched = len(Ledger(workspace.ledger_path).entries())

    with pytest.raises(DataError, match=r"day 2026-11-07, .*clicks\.tsv\.gz, line \d+: expected 40 fields"):
        train_ctr(data=str(days), **SETTINGS)

    assert len(Ledger(workspace.ledger_path).entries()) == launched
    assert champion_of(workspace).run_id == first_night
    assert {run.info.status for run in records(workspace).values()} == {"FINISHED", "FAILED"}


def test_a_second_fleet_that_may_not_wait_is_refused(workspace, days, first_night):
    with (
        running_cluster(
            provider_of(workspace, "local"),
            plan(offer()),
            run_id="other",
            bootstrap=bootstrap(workspace.run_folder("other")),
            ledger=Ledger(workspace.ledger_path),
            caps=Caps(),
            predicted_cost_usd=1.0,
        ),
        pytest.raises(ProvisioningError, match="heterps stop other"),
    ):
        train_ctr(data=str(days), day="2026-11-03", max_wait_minutes=0, **SETTINGS)


def test_a_back_fill_skips_the_day_that_is_done_and_the_other_goes_on_from_the_champion(
    workspace, days, first_night
):
    run_ids = backfill_ctr(first_day="2026-11-02", last_day="2026-11-03", data=str(days), settings=SETTINGS)

    assert run_ids[0] == first_night
    assert len(set(run_ids)) == 2
    finished = records(workspace)
    assert [finished[run_id].data.tags["heterps.day"] for run_id in run_ids] == ["2026-11-02", "2026-11-03"]
    assert job_of(workspace, run_ids[1])["start_model"]["run_id"] == first_night
    assert finished[run_ids[1]].data.tags["heterps.start_version"] == "1"
    assert not list(workspace.runs_directory.glob("*/checkpoints"))
    assert not list(workspace.runs_directory.glob("*/start_model"))


def test_a_run_that_plans_only_says_what_would_be_bought_in_the_cheaper_region_and_trains_nothing(
    workspace, days, first_night, caplog
):
    launched = Ledger(workspace.ledger_path).entries()
    half = [
        replace(each, region="eu-west-1", price_usd_per_hour=each.price_usd_per_hour / 2)
        for each in BUNDLED_SNAPSHOT.offers()
    ]
    write_refreshed(workspace.price_folder, half, at=datetime.now(UTC))
    night = {"data": str(days), "day": "2026-11-04", "plan_only": True, "regions": ["us-east-1", "eu-*"]}

    with caplog.at_level("INFO"):
        run_id = train_ctr(**night, **SETTINGS)

    said = " ".join(caplog.text.split())
    assert re.search(r"would cost [0-9.]+ USD/hour", said)
    assert re.search(r"plan +exact: .*, optimal", said)
    assert "region eu-west-1, the cheapest of 2; nearest us-east-1: +0.0" in said
    assert re.search(r"GB cross between regions for 0\.0\d+ USD, and checkpoints for at most", said)
    planned = records(workspace)[run_id]
    assert (planned.info.status, planned.data.tags["heterps.end_reason"]) == ("FINISHED", "plan only")
    assert Ledger(workspace.ledger_path).entries() == launched
    assert finished_run(workspace, day="2026-11-04", data=str(days), model="cross-deep") is None


def test_a_plan_beyond_a_quota_that_no_other_plan_keeps_within_says_so_and_is_planned(
    workspace, days, first_night, caplog, monkeypatch
):
    """Both types count against one quota, of which the plan uses too much; it is of one type alone."""

    def refuse(provider, planned):
        types = " and ".join(sorted({group.device_type for group in planned.groups}))
        raise QuotaExceededError(f"{types} must keep within it; ask less", quotas=("one",))

    both = {"one": SETTINGS["device_types"]}
    monkeypatch.setattr(LocalProvider, "unit_limits", lambda *_: UnitLimits({}, both, "one 0 of 0"))
    monkeypatch.setattr(LocalProvider, "check_quotas", refuse)

    with caplog.at_level("INFO"):
        run_id = train_ctr(data=str(days), day="2026-11-04", plan_only=True, **SETTINGS)

    said = " ".join(caplog.text.split())
    assert re.search(r"quotas +(cpu-c7i|gpu-t4) must keep within it; ask less", said)
    assert records(workspace)[run_id].info.status == "FINISHED"


@pytest.mark.weekly
def test_a_night_of_cores_with_units_for_bfloat16_is_planned_in_it(workspace, days, first_night, caplog):
    # Batches as large as such a night has.
    night = SETTINGS | {"model": "ctrdnn", "device_types": ["cpu-c7i"], "batch_size": None}

    with caplog.at_level("INFO"):
        run_id = train_ctr(
            data=str(days),
            day="2026-11-04",
            plan_only=True,
            precision="auto",
            planned_samples=10**9,
            planned_rows_per_slot=100_000,
            **night,
        )

    assert re.search(r"precision +bfloat16: the plan costs .* in float32, .* in bfloat16", caplog.text)
    assert records(workspace)[run_id].data.params["training.precision"] == "bfloat16"
