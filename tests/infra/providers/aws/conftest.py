from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from infra.ledger.ledger import Ledger
from infra.providers.aws import passing
from infra.providers.aws.provider import AwsEc2Provider
from tests.infra.builders import bootstrap, plan
from tests.infra.moto_ec2 import Wire, moto_process


@pytest.fixture(scope="session")
def one_server():
    with moto_process() as running:
        yield running


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """Repetitions come at once, as many as otherwise."""
    monkeypatch.setattr(passing, "PAUSES_S", (0.0,) * len(passing.PAUSES_S))


@pytest.fixture
def server(one_server):
    one_server.reset()
    return one_server


@pytest.fixture
def client(server):
    return server.client()


@pytest.fixture
def wire(client):
    """What the client sends from now on; client tokens count."""
    wire = Wire()
    wire.attach(client)
    return wire


@pytest.fixture
def provider(client):
    return AwsEc2Provider(client)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.sqlite")


@pytest.fixture
def launch(provider, ledger):
    """Launches a plan as a flow would."""

    def act(launch_plan=None, *, provider=provider, ledger=ledger, run_id="r1", lease_s=600.0):
        return provider.launch(
            launch_plan or plan(),
            run_id=run_id,
            lease_until=datetime.now(UTC) + timedelta(seconds=lease_s),
            bootstrap=bootstrap(Path("/srv/heterps/run"), ("-m", "heterps_core.training.node")),
            ledger=ledger,
        )

    return act
