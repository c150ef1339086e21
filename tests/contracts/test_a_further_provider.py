"""A provider that is one module and one line in the registry goes through the whole line, as the listed ones do."""

from datetime import UTC, datetime

import pytest

from heterps_core.training.step_metrics import read_progress
from heterps_core.training.storage.run_directory import RunDirectory
from infra.ledger.ledger import EndReason, EntryState, Ledger
from infra.machines.sweeper import sweep_workspace
from infra.providers import PROVIDERS, provider_of
from tasks.clusters import bills_of_run, end_machines_of, machines_of_run
from tasks.reports.bills import bill_text
from tests.contracts import pretend_provider
from tests.contracts.pretend_provider import PLACE, USD_PER_HOUR, PretendPrices, PretendProvider
from tests.started_runs import started_runs
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 300.0
SETTINGS = [
    *("--provider", PretendProvider.name, "--regions", PLACE, "--device-types", "cpu-c7i"),
    *("--batch-size", "128", "--scheduler", "exact", "--budget-evaluations", "64"),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, workspace_of_runs, prefect_server):
    return workspace_of_runs(tmp_path_factory.mktemp("pretend") / "home")


@pytest.fixture
def start(workspace, clicks_of_runs, monkeypatch):
    """Starts a run as a person does, and ends it whatever becomes of the test."""
    monkeypatch.setitem(PROVIDERS, PretendProvider.name, PretendProvider)
    earlier = set(workspace.runs_directory.iterdir())
    program = ("-m", pretend_provider.__name__, "--data", clicks_of_runs, *SETTINGS)
    with started_runs(workspace, *program) as started:
        yield started, lambda: {path.name for path in set(workspace.runs_directory.iterdir()) - earlier}
    for path in set(workspace.runs_directory.iterdir()) - earlier:
        end_machines_of(workspace, path.name)


def check_bill(workspace, run_id, *, reason):
    """Check that the machines of a run are charged by the second at the price of right before their launch."""
    entries = Ledger(workspace.ledger_path).entries(run_id=run_id)
    [bill] = bills_of_run(workspace, PretendProvider.name, run_id)

    assert {(e.provider, e.region, e.state, e.reason) for e in entries} == {
        (PretendProvider.name, PLACE, EntryState.ENDED, reason)
    }
    seconds = [max(30.0, (e.ended_at - e.launched_at).total_seconds()) for e in entries]
    assert bill.total_usd == pytest.approx(sum(seconds) * USD_PER_HOUR / 3600)
    assert (bill.is_dry_run, bill.services) == (False, ())
    assert {line.price_source for line in bill.lines} == {PretendPrices.on_demand_source}
    assert f"provider {PretendProvider.name}, charged: " in bill_text(bill)


@pytest.mark.weekly
def test_it_plans_launches_trains_and_is_billed(workspace, start):
    run, new_run_ids = start
    done = run()
    said, errors = done.communicate(timeout=LIMIT_S)

    assert (done.returncode, errors) == (0, "")
    [run_id] = new_run_ids()
    assert "dry run" not in said
    assert f"cost {USD_PER_HOUR:.4f} USD/hour" in said
    assert machines_of_run(workspace, run_id) == ()
    check_bill(workspace, run_id, reason=EndReason.RUN_ENDED)


@pytest.mark.weekly
def test_a_killed_run_is_swept_and_billed_until_its_machines_end(workspace, start):
    start_run, new_run_ids = start
    run = start_run("--epochs", "1000")

    def step():
        assert run.poll() is None, run.stderr.read()
        return any(
            read_progress(RunDirectory(str(workspace.runs_directory / name))) for name in new_run_ids()
        )

    wait_for(step, timeout_s=LIMIT_S, what="the first training step")
    run.kill()
    run.wait()
    [run_id] = new_run_ids()
    live = {machine.provider_instance_id for machine in machines_of_run(workspace, run_id)}
    assert live

    swept = sweep_workspace(workspace)

    assert {machine.provider_instance_id for machine in swept.machines} == live
    assert (swept.problems, f"{PretendProvider.name} in {PLACE}" in swept.places) == ((), True)
    assert provider_of(workspace, PretendProvider.name).list_instances() == ()
    assert Ledger(workspace.ledger_path).entries(run_id=run_id)[0].ended_at <= datetime.now(UTC)
    check_bill(workspace, run_id, reason=EndReason.OWNER_DEAD)
