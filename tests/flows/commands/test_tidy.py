"""`heterps tidy` as a person or cron calls it; what other commands say of a run is the same before and after."""

import json
import shutil
from datetime import UTC, datetime, timedelta

import pytest

from flows.cli import main
from infra.ledger.ledger import EndReason, Ledger
from infra.workspace import Workspace
from tasks.records.mlflow_names import Tag
from tasks.records.mlflow_store import answering_client
from tasks.records.run_record import note_metrics
from tasks.running import run_lifecycle
from tests.infra.builders import offer, plan

OLD, RECENT, LIVE = "20260101-0430-aaaaaaaa", "20260102-0430-bbbbbbbb", "20260103-0430-cccccccc"
NUM_BYTES = 2_000_000
"""Of the checkpoint of each run."""


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Runs that ended 40 days and a day ago, and one that has not."""
    workspace = Workspace(root=tmp_path_factory.mktemp("template")).create()
    now = datetime.now(UTC)
    for run_id, days_ago in [(OLD, 40), (RECENT, 1), (LIVE, None)]:
        run = run_lifecycle.open_run(
            workspace, run_id=run_id, run_name=f"ctrdnn exact {run_id}", tags={Tag.DAY: "2026-01-01"}
        )
        note_metrics(workspace, run, {"cost/billed_usd": 0.125, "quality/auc": 0.78})
        if days_ago is not None:
            run_lifecycle.close_run(workspace, run, status="FAILED", reason="a bad row")
            with answering_client(workspace) as client:
                ended_at = now - timedelta(days=days_ago)
                client.set_terminated(run.mlflow_run_id, "FAILED", end_time=int(ended_at.timestamp() * 1_000))
        folder = workspace.run_folder(run_id)
        (folder / "checkpoints" / "00000100").mkdir(parents=True)
        (folder / "checkpoints" / "00000100" / "__0_0.distcp").write_bytes(bytes(NUM_BYTES))
        # A run that failed has its explanation here alone, and what it asked of a bucket too.
        (folder / "explanation.json").write_text(json.dumps({"run_id": run_id, "text": "Why this plan"}))
        (folder / "storage.json").write_text(json.dumps({"put_requests": 1_000_000}))
    ledger = Ledger(workspace.ledger_path)
    (request,) = plan(offer(price_usd_per_hour=3.6)).node_requests()
    at = now - timedelta(days=41)
    ledger.intend(OLD, "aws", request, at=at)
    ledger.launched(OLD, request.node_id, provider_instance_id="i-1", at=at)
    ledger.ended(OLD, request.node_id, reason=EndReason.RUN_ENDED, at=at + timedelta(hours=1))
    return workspace


@pytest.fixture
def workspace(template, tmp_path, monkeypatch):
    home = tmp_path / "home"
    shutil.copytree(template.root, home)
    monkeypatch.setenv("HETERPS_HOME", str(home))
    monkeypatch.delenv("HETERPS_RUN_STORE", raising=False)
    return Workspace(root=home)


@pytest.fixture
def heterps(workspace, capsys, monkeypatch):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["heterps", *arguments])
        status = main()
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def has_checkpoint(workspace, run_id):
    return (workspace.run_folder(run_id) / "checkpoints" / "00000100" / "__0_0.distcp").exists()


@pytest.fixture
def without_rented(workspace):
    workspace.ledger_path.unlink()


@pytest.mark.usefixtures("without_rented")
def test_it_says_what_it_removed_and_why_the_rest_stays(heterps, workspace):
    status, out, err = heterps("tidy")

    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] == f"runs: removed 1 ({OLD}), 2.0 MB"
    assert lines[1].startswith(f"  kept 1 ({RECENT}): ended after 20")
    assert lines[2] == f"  kept 1 ({LIVE}): is under way, by its record"
    assert lines[3:] == ["versions of ctr: removed 0, 0.0 MB"]
    assert [has_checkpoint(workspace, run_id) for run_id in (OLD, RECENT, LIVE)] == [False, True, True]


@pytest.mark.usefixtures("without_rented")
def test_a_dry_run_prints_the_same_and_deletes_nothing(heterps, workspace):
    before = sorted(path for path in workspace.root.rglob("*"))

    _, dry, _ = heterps("tidy", "--dry-run")
    assert sorted(path for path in workspace.root.rglob("*")) == before
    _, wet, _ = heterps("tidy")

    # Beginnings of "ended after" differ by the seconds between the two.
    assert dry.splitlines()[0].replace("would remove", "removed") == wet.splitlines()[0]
    assert len(dry.splitlines()) == len(wet.splitlines())


@pytest.mark.usefixtures("without_rented")
@pytest.mark.parametrize(("keep_days", "removed"), [("41", []), ("39", [OLD]), ("1", [OLD, RECENT])])
def test_how_long_is_kept_is_chosen_and_reported_as_json(heterps, keep_days, removed):
    status, out, _ = heterps("tidy", "--keep-days", keep_days, "--dry-run", "--json")

    document = json.loads(out)
    runs = document["kinds"][0]
    assert (status, document["is_dry_run"], document["keep_days"]) == (0, True, int(keep_days))
    assert (runs["removed_count"], runs["removed_bytes"]) == (len(removed), len(removed) * NUM_BYTES)
    assert [entry["name"] for entry in runs["removed"]] == removed
    assert {entry["name"] for entry in runs["kept"]} == {OLD, RECENT, LIVE} - {*removed}


@pytest.mark.parametrize("keep_days", ["0", "-3", "ten", "1.5", "1000000"])
def test_days_that_cannot_be_are_refused(heterps, workspace, capsys, keep_days):
    with pytest.raises(SystemExit, match="2"):
        heterps("tidy", "--keep-days", keep_days)

    assert "must be a whole number from 1 to 36,500" in capsys.readouterr().err
    assert has_checkpoint(workspace, OLD)


def test_other_commands_say_the_same_of_a_run_before_and_after(heterps, workspace):
    asked = [("runs", "--json"), ("cost", OLD), ("cost", "--json"), ("explain", OLD)]
    before = [heterps(*arguments) for arguments in asked]

    # Rented machines, and no store named: reported with a status of its own, while the rest is done.
    status, out, err = heterps("tidy")

    assert (status, out.splitlines()[0]) == (1, f"runs: removed 1 ({OLD}), 2.0 MB")
    assert "HETERPS_RUN_STORE must name" in err
    assert not has_checkpoint(workspace, OLD)
    assert [heterps(*arguments) for arguments in asked] == before
    assert [result[0] for result in before] == [0, 0, 0, 0]
    # A million requests to the bucket at 0.005 USD a thousand are in the bill.
    assert json.loads(before[2][1])["runs"][0]["total_usd"] > 5.0


def test_nothing_is_made_where_nothing_was(heterps, tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "nothing"))

    assert heterps("tidy") == (0, "runs: removed 0, 0.0 MB\nversions of ctr: removed 0, 0.0 MB\n", "")
    assert not (tmp_path / "nothing").exists()
