"""The machines of one run as a description, which is all that a node needs to know its neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import Market, is_gpu
from heterps_core.json_codec import JsonDocument, JsonForm


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine of a run; with the local provider, one process tree that stands for a machine."""

    node_id: str
    """Unique within the run, for instance "stage0-node0"."""

    address: str
    """The other nodes reach this node at it."""

    device_type: str
    instance_type: str
    market: Market
    stage: int
    """Index of the pipeline stage, counted from 0."""

    num_workers: int
    """Worker processes, each one replica of the stage on one unit."""

    price_usd_per_hour: float
    provider_instance_id: str
    disk_usd_per_hour: float = 0.0
    """Price of the disk that holds rows of tables, beside the machine's."""

    own_disk_bytes: float = 0.0
    """Size of the machine's own disks, where these hold rows of tables; 0 where its volume does."""

    zone: str | None = None
    """The price holds there; None where it holds in the whole region."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster(JsonDocument):
    """All machines of one run, ordered by stage."""

    json_form = JsonForm(what="cluster", version=1)

    run_id: str
    provider: str
    nodes: tuple[Node, ...]
    rendezvous: str
    """host:port at which the workers find one another."""

    created_at: str
    """ISO 8601 time at which the launch was complete."""

    generation: int = 1
    """Counts the worlds of workers that train the run one after the other; a machine that takes the place of a lost
    one, or workers that are started again, are the next."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigurationError(f"a cluster needs at least one node, run {self.run_id} has none")
        ids = [node.node_id for node in self.nodes]
        if len(set(ids)) != len(ids):
            raise ConfigurationError(f"node ids must be unique within a run, got {', '.join(ids)}")
        for stage, nodes in itertools.groupby(self.nodes, key=lambda node: node.stage):
            types = sorted({node.device_type for node in nodes})
            if len(set(map(is_gpu, types))) > 1:
                raise ConfigurationError(
                    f"all machines of a stage must compute on cards or all on cores, got {', '.join(types)} for "
                    f"stage {stage}; place its layers on the ones or the others"
                )

    @property
    def price_usd_per_hour(self) -> float:
        """Sum over all nodes."""
        return sum(node.price_usd_per_hour for node in self.nodes)

    @property
    def rendezvous_node(self) -> Node:
        """The node at which the workers meet."""
        host = self.rendezvous.rpartition(":")[0]
        return next((node for node in self.nodes if node.address == host), self.nodes[0])

    def next_generation(self, replacing: Mapping[str, Node] | None = None) -> Cluster:
        """Return the cluster whose workers continue where the workers of this one ended.

        Args:
            replacing: New machines by the node ids of the lost machines whose places they take.
        """
        nodes = tuple((replacing or {}).get(node.node_id, node) for node in self.nodes)
        host, _, port = self.rendezvous.rpartition(":")
        if all(node.address != host for node in nodes):
            steady = [node for node in nodes if node.market is Market.ON_DEMAND]
            host = (steady or nodes)[0].address
        return replace(self, nodes=nodes, rendezvous=f"{host}:{port}", generation=self.generation + 1)

    def replicas_of(self, node: Node) -> range:
        """Return the replicas that a node runs: they are numbered over the nodes of its stage, in order."""
        before = itertools.takewhile(lambda other: other is not node, self.nodes)
        first = sum(other.num_workers for other in before if other.stage == node.stage)
        return range(first, first + node.num_workers)

    def node_of(self, stage: int, replica: int) -> Node:
        """Return the node that runs a replica of a stage."""
        return next(node for node in self.nodes if node.stage == stage and replica in self.replicas_of(node))
