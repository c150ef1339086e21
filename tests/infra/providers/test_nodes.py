"""What a cluster says of its machines: the disks that rows of tables go to."""

import pytest

from heterps_core.plans.provisioning_plan import NodeRequest
from infra.prices.price_catalogue import PriceCatalogue
from infra.providers.launching import node_of
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
        disk_usd_per_hour=volume_usd_per_hour,
    )

    node = node_of(request, address="10.0.0.1", provider_instance_id="i-1")

    assert node.own_disk_bytes == pytest.approx(own_disk_gb * 1e9)
