"""What a run trains on, for tests of how it ends."""

from datetime import UTC, datetime

from heterps_core.cluster import Cluster, Node
from heterps_core.hardware import Market


def spot_cluster(launch_id: str) -> Cluster:
    """Return the one spot machine of a launch."""
    node = Node(
        node_id="stage0-node0",
        address="10.0.0.1",
        device_type="cpu-c7i-spot",
        instance_type="c7i.large",
        market=Market.SPOT,
        stage=0,
        num_workers=1,
        price_usd_per_hour=0.03,
        provider_instance_id="i-1",
    )
    created_at = datetime.now(UTC).isoformat()
    return Cluster(
        run_id=launch_id, provider="aws", nodes=(node,), rendezvous="10.0.0.1:1", created_at=created_at
    )
