"""What EC2 says of machines that a run lost stands in its loss, in the ledger and in the bill."""

from datetime import timedelta

import pytest

from heterps_core.hardware import Market
from heterps_core.training.outcome import MachinesLost
from infra.billing.bill import FREE
from infra.ledger.ledger import EndReason, Ledger
from infra.workspace import Workspace
from tasks.clusters import bills_of_run
from tasks.running.fleet import FleetRun, with_causes
from tests.infra.builders import offer, plan
from tests.tasks.builders import fleet_run

TAKEN = "Server.SpotInstanceTermination: Instance terminated due to a Spot request interruption"


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path / "home").create()


def test_a_preempted_machine_ends_in_the_ledger_when_and_why_ec2_says(
    workspace, launch, client, provider, monkeypatch
):
    monkeypatch.setattr(FleetRun, "provider", provider)
    ledger = Ledger(workspace.ledger_path)
    spot = offer("c7i.xlarge", price_usd_per_hour=0.36, market=Market.SPOT)
    cluster = launch(plan(offer(), spot), ledger=ledger)
    lost = cluster.nodes[1]
    client.terminate_instances(InstanceIds=[lost.provider_instance_id])
    launched_at = max(entry.launched_at for entry in ledger.entries())
    ended_at = (launched_at + timedelta(minutes=20)).replace(microsecond=0)

    def say_why(parsed, **_):
        for reservation in parsed.get("Reservations", ()):
            for instance in reservation["Instances"]:
                if instance["InstanceId"] == lost.provider_instance_id:
                    instance["StateReason"] = {"Code": "Server.SpotInstanceTermination", "Message": TAKEN}
                    instance["StateTransitionReason"] = (
                        f"Server.SpotInstanceTermination ({ended_at:%Y-%m-%d %H:%M:%S} GMT)"
                    )

    client.meta.events.register("after-call.ec2.DescribeInstances", say_why)

    loss = with_causes(
        fleet_run(workspace),
        cluster,
        MachinesLost(message="stage1-node0 is silent", node_ids=(lost.node_id,)),
    )

    assert loss.message == (
        f"stage1-node0 is silent; {lost.node_id} ({lost.provider_instance_id}) ended: {TAKEN}"
    )
    kept, taken = sorted(ledger.entries(), key=lambda entry: entry.stage)
    assert (kept.ended_at, kept.reason) == (None, None)
    assert (taken.ended_at, taken.reason) == (ended_at, EndReason.PREEMPTED)
    # What EC2 takes within the first hour is not charged.
    (bill,) = bills_of_run(workspace, "aws", "r1")
    assert [(line.usd, line.ended_because) for line in bill.lines if line.market == "spot"] == [(0.0, FREE)]


def test_where_ec2_does_not_answer_the_loss_stays_as_it_is(
    workspace, launch, client, provider, monkeypatch, caplog
):
    monkeypatch.setattr(FleetRun, "provider", provider)
    cluster = launch(plan(offer()), ledger=Ledger(workspace.ledger_path))
    lost = MachinesLost(message="silent", node_ids=(cluster.nodes[0].node_id,))
    provider.client.meta.events.register(
        "before-parameter-build.ec2.DescribeInstances",
        lambda **_: client.describe_images(ImageIds=["ami-none"]),
    )

    assert with_causes(fleet_run(workspace), cluster, lost) == lost
    assert "why machines of run r1 ended is not known" in caplog.text
