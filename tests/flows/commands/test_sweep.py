import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from infra.ledger.ledger import Ledger
from infra.providers.local import LocalProvider
from infra.workspace import Workspace
from tests.infra.builders import bootstrap, offer, plan
from tests.paths import PROJECT


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return Workspace.locate().create()


@pytest.fixture
def left(workspace, tmp_path):
    """The provider of a node at 1 USD a second whose lease is over."""
    provider = LocalProvider(workspace.leases_directory)
    provider.launch(
        plan(offer(price_usd_per_hour=3600.0)),
        run_id="left",
        lease_until=datetime.now(UTC) - timedelta(seconds=1),
        bootstrap=bootstrap(tmp_path / "run"),
        ledger=Ledger(workspace.ledger_path),
    )
    instances = provider.list_instances()
    yield provider
    # Another process has ended it, but only this one, its parent, can clear it away.
    for instance in instances:
        provider.terminate_instances([instance])


def cron(*arguments):
    """Run the sweeper as plain cron does, in a process that has no Prefect."""
    program = "import sys; sys.modules['prefect'] = None; from flows.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, "sweep", *arguments],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_cron_sweeps_without_prefect_and_tells_what_it_did(workspace, left):
    done = cron()

    assert done.returncode == 0, done.stderr
    assert "ended left/stage0-node0 of run left: lease expired" in done.stdout
    (entry,) = Ledger(workspace.ledger_path).entries()
    usd = (entry.ended_at - entry.launched_at).total_seconds() * 1.0  # 3600 USD an hour
    assert f"{usd:.6f} USD in all" in done.stdout
    assert left.list_instances() == ()
    assert "ended" not in cron().stdout


def test_cron_fails_where_a_provider_does_not_answer_and_sweeps_the_others(left):
    done = cron("--provider", "aws", "--provider", "local")

    assert done.returncode == 5
    assert (
        "aws in us-east-1 was not swept: AWS could not look for instances: Unable to locate credentials"
        in done.stderr
    )
    assert "ended left/stage0-node0 of run left: lease expired" in done.stdout
