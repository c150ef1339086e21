"""Nodes of a cluster: the disks that rows of tables go to, and the folder where they meet the flow."""

import pytest

from heterps_core.device_types import OWN_DEVICE_TYPES
from heterps_core.plans.provisioning_plan import NodeRequest, TableDisk
from infra.checks import CheckState
from infra.inventory import MachineKind
from infra.prices.price_catalogue import PriceCatalogue
from infra.providers.launching import node_of, run_directory_check
from infra.workspace import Workspace
from tests.infra.builders import offer_named


@pytest.mark.parametrize(
    ("device_type", "machine", "volume_usd_per_hour", "own_disk_gb"),
    [
        ("cpu-i7i", "i7i.4xlarge", 0.0, 8 * 468),
        ("cpu-i7i-spot", "i7i.4xlarge", 0.03, 8 * 468),
        # Bought in place of c5, which the plan has on volumes: too small for these rows.
        ("cpu-c5", "c5d.xlarge", 0.03, 0),
        # Nobody knows their speed, so the plan has volumes; without those they are all that there is.
        ("cpu-c5ad", "c5ad.xlarge", 0.03, 0),
        ("cpu-c5ad", "c5ad.xlarge", 0.0, 2 * 75),
        ("cpu-c7i", "c7i.xlarge", 0.03, 0),
        ("no-known-type", "c7i.xlarge", 0.0, 0),
    ],
)
def test_a_node_has_the_size_of_its_own_disks_where_rows_go_there(
    device_type, machine, volume_usd_per_hour, own_disk_gb
):
    request = NodeRequest(
        node_id="stage0-node0",
        stage=0,
        device_type=device_type,
        offer=offer_named(machine, PriceCatalogue()),
        num_workers=1,
        table_disk=None
        if volume_usd_per_hour == 0
        else TableDisk(gigabytes=9, mib_per_s=125, usd_per_hour=volume_usd_per_hour),
    )

    node = node_of(request, address="10.0.0.1", provider_instance_id="i-1")

    assert node.own_disk_bytes == pytest.approx(own_disk_gb * 1e9)


def test_a_node_on_an_own_machine_has_the_disk_of_the_inventory():
    kind = MachineKind(
        kind="epyc", home="slurm", count=1, cores=4, memory_gb=16, disk_gb=900, price_usd_per_hour=0.0
    )
    OWN_DEVICE_TYPES.update({each.name: each for each in kind.device_types()})
    request = NodeRequest(
        node_id="stage0-node0", stage=0, device_type="cpu-epyc", offer=next(kind.offers()), num_workers=4
    )

    node = node_of(request, address="10.0.0.1", provider_instance_id="r1/12+0")

    assert node.own_disk_bytes == pytest.approx(900e9)


@pytest.mark.parametrize(
    ("run_store", "state", "said"),
    [
        ("", CheckState.OK, "which all machines must share"),
        ("s3://clicks/runs", CheckState.OK, "s3://clicks/runs"),
        ("s3://user:secret@clicks/runs", CheckState.MISSING, "credentials"),
    ],
)
def test_the_place_where_nodes_meet_the_flow_is_checked(tmp_path, monkeypatch, run_store, state, said):
    monkeypatch.setenv("HETERPS_RUN_STORE", run_store)

    check = run_directory_check(Workspace(root=tmp_path / "not" / "made" / "yet"))

    assert (check.state, said in check.found) == (state, True)
