"""The sweep as a flow run: red where a machine is left, after everything else was swept."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest

from flows.sweep_orphans import sweep_orphans
from heterps_core.errors import ProvisioningError
from infra.ledger.ledger import Ledger
from infra.providers import provider_of
from infra.workspace import Workspace
from tests.infra.builders import bootstrap, moto_ec2, offer, plan
from tests.moto_server import REGION

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    with moto_ec2() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield Workspace.locate().create()


def test_a_machine_that_cannot_be_terminated_fails_the_flow_run_and_is_named_when_all_others_are_ended(
    workspace,
):
    provider_of(workspace, "aws", region=REGION).launch(
        plan(offer(), offer(), offer()),
        run_id="left",
        lease_until=datetime.now(UTC) - timedelta(seconds=1),
        bootstrap=bootstrap(Path("/srv/heterps/run")),
        ledger=Ledger(workspace.ledger_path),
    )
    client = boto3.client("ec2", region_name=REGION)
    stubborn, *others = [entry.provider_instance_id for entry in Ledger(workspace.ledger_path).entries()]
    client.modify_instance_attribute(InstanceId=stubborn, DisableApiTermination={"Value": True})

    state = sweep_orphans(return_state=True)

    assert state.is_failed()
    with pytest.raises(ProvisioningError, match=f"could not end {stubborn} of run left") as failure:
        state.result()
    assert "\n" not in str(failure.value)
    assert not any(other in str(failure.value) for other in others)
    described = client.describe_instances(InstanceIds=others)["Reservations"]
    states = [instance["State"]["Name"] for each in described for instance in each["Instances"]]
    assert states == ["terminated"] * len(others)

    client.modify_instance_attribute(InstanceId=stubborn, DisableApiTermination={"Value": False})
    assert sweep_orphans(return_state=True).is_completed()
