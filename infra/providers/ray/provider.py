"""Ray as a provider: the machines of a launch are one placement group, and each node a process of an actor in it.

Ray places a group whole or not at all; a pending group is a request to its autoscaler. Group and actors are not
detached: they belong to the process of the flow, and Ray ends them seconds after its death, sooner than a lease
would; detached ones would need an end of their own. Other processes find the actors by name, and ask them for kind,
lease and address.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, Self

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import ProvisioningError
from heterps_core.plans.provisioning_plan import NodeRequest, ProvisioningPlan
from heterps_core.training.node import NODE_ID_VARIABLE
from infra.bootstrap.node_start import BOOTSTRAP_SCRIPT, Bootstrap, node_environment
from infra.checks import Check, tried
from infra.inventory import MachineKind, kind_name
from infra.ledger.ledger import Ledger
from infra.ledger.ledger_entry import Instance
from infra.providers.base import InsufficientCapacityError, Provider
from infra.providers.launching import (
    DISK_OF_MACHINE,
    Started,
    launched_together,
    rendezvous_port,
    run_directory_check,
    wait_until_up,
    workspace_mark,
)
from infra.providers.ray.connection import ADDRESS_VARIABLE, ANSWER_LIMIT_S, NAMESPACE, asked
from infra.providers.ray.node_actor import END_LIMIT_S, WITH_ACTOR, node_class
from infra.workspace import Workspace, check_run_id, run_of_launch

_POLL_INTERVAL_S = 0.1
_WAIT_S = 600.0
_LEAST = 0.001
"""Of a resource that marks a kind of machines; such a resource counts nothing."""

_OWN_RESOURCES = re.compile(
    r"CPU|GPU|memory|object_store_memory|node:.*|accelerator_type:.*|bundle_.*|.*_group_.*"
)


class _Held(NamedTuple):
    """A group of this process, and its actors: Ray ends an actor once no process holds it."""

    group: Any
    bundles: Mapping[tuple[str, str], int]
    """Numbers of bundles by node and kind of machine."""

    actors: list[Any]


_HELD: dict[str, _Held] = {}
"""By launch."""


class RayProvider(Provider):
    """Runs each node on a machine of the Ray cluster at RAY_ADDRESS, as a process of an actor.

    Args:
        workspace: Its inventory has a resource or labels of each kind of machine.
        wait_s: Longest wait for machines.
    """

    name: ClassVar[str] = "ray"
    has_inventory: ClassVar[bool] = True
    machines_text: ClassVar[str] = "machines of Ray"

    def __init__(self, workspace: Workspace, *, wait_s: float = _WAIT_S) -> None:
        self._workspace = workspace
        self._wait_s = wait_s
        self._mark = workspace_mark(workspace)

    @classmethod
    def for_workspace(cls, workspace: Workspace, *, region: str) -> Self:
        """Make the provider; see `Provider.for_workspace`."""
        return cls(workspace)

    @classmethod
    def found_machines(cls, workspace: Workspace) -> tuple[MachineKind, ...]:
        """Return the nodes that are alike as a kind; see `Provider.found_machines`."""
        with asked() as ray:
            sizes = Counter(_size_of(node["Resources"]) for node in ray.nodes() if node["Alive"])
        kinds = (
            _kind_of(*size, number, count) for number, (size, count) in enumerate(sorted(sizes.items()), 1)
        )
        return tuple(kind for kind in kinds if kind is not None)

    @staticmethod
    def is_set_up() -> bool:
        """Tell whether Ray is installed and a cluster named; see `Provider.is_set_up`."""
        return bool(os.environ.get(ADDRESS_VARIABLE)) and find_spec("ray") is not None

    def checks(self) -> Iterator[Check]:
        """Check address, version and machines; see `Provider.checks`."""
        yield tried("Ray cluster", lambda: f"{len(self._actors())} machines of heterps")
        found = ", ".join
        yield tried(
            "Ray machines",
            lambda: found(f"{kind.count} x {kind.kind}" for kind in self.found_machines(self._workspace)),
        )
        yield run_directory_check(self._workspace)

    def launch(
        self,
        plan: ProvisioningPlan,
        *,
        run_id: str,
        lease_until: datetime,
        bootstrap: Bootstrap,
        ledger: Ledger,
    ) -> Cluster:
        """Place a group and start an actor in each of its bundles; see `Provider.launch`."""
        selectors = {kind.kind: kind.selector for kind in self.kinds(self._workspace)}

        def start(requests: Sequence[NodeRequest]) -> Iterator[Started]:
            if not self._actors(run_id):
                self._start(requests, selectors, run_id=run_id, lease_until=lease_until, bootstrap=bootstrap)
            described = {name: answer for name, (_, answer) in self._actors(run_id).items()}
            for request in requests:
                answer = described[f"{run_id}/{request.node_id}"]
                yield Started(answer["address"], f"{run_id}/{request.node_id}", answer["launched_at"])

        def rendezvous(nodes: Sequence[Node]) -> str:
            return f"{nodes[0].address}:{rendezvous_port(zlib.crc32(run_id.encode()))}"

        return launched_together(self, plan, run_id=run_id, ledger=ledger, start=start, rendezvous=rendezvous)

    def wait_until_ready(self, cluster: Cluster, *, timeout_s: float) -> None:
        """Return once the process of each actor is up; see `Provider.wait_until_ready`."""

        def look() -> tuple[set[str], set[str]]:
            described = {
                name.partition("/")[2]: answer for name, (_, answer) in self._actors(cluster.run_id).items()
            }
            alive = {node_id for node_id, answer in described.items() if answer["is_alive"]}
            return alive, {node_id for node_id in alive if described[node_id]["is_up"]}

        wait_until_up(cluster, look, timeout_s=timeout_s)

    def renew_lease(self, run_id: str, *, until: datetime) -> None:
        """Tell the actors of a run their lease; see `Provider.renew_lease`."""
        actors = self._actors(run_id)
        with asked() as ray:
            ray.get([actor.renew.remote(until) for actor, _ in actors.values()], timeout=ANSWER_LIMIT_S)

    def terminate(self, run_id: str) -> tuple[str, ...]:
        """End the actors of a run and remove its group; see `Provider.terminate`."""
        check_run_id(run_id)
        ended = self._end(self._names(run_id))
        with asked() as ray, suppress(ValueError):
            ray.util.remove_placement_group(ray.util.get_placement_group(f"{self._mark}/{run_id}"))
        _HELD.pop(f"{self._mark}/{run_id}", None)
        return ended

    def terminate_instance(self, instance: Instance) -> None:
        """End one actor; its bundle stays with the group; see `Provider.terminate_instance`."""
        self._end([instance.provider_instance_id])

    def list_instances(self, run_id: str | None = None) -> tuple[Instance, ...]:
        """Return the actors that Ray knows by name; see `Provider.list_instances`."""
        return tuple(
            Instance(
                provider_instance_id=name,
                run_id=name.partition("/")[0],
                node_id=name.partition("/")[2],
                instance_type=answer["instance_type"],
                launched_at=answer["launched_at"],
                is_ended=False,
                ended_at=None,
                lease_until=answer["lease_until"],
                is_owner_dead=False,
                terms=None,
            )
            for name, (_, answer) in self._actors(run_id).items()
        )

    def _names(self, run_id: str | None = None) -> list[str]:
        """Return the names of actors without this workspace's mark."""
        with asked() as ray:
            named = ray.util.list_named_actors(all_namespaces=True)
        marked = [each["name"].partition("/") for each in named if each["namespace"] == NAMESPACE]
        own = [name for mark, _, name in marked if mark == self._mark]
        return sorted(name for name in own if run_id in (None, name.partition("/")[0]))

    def _actors(self, run_id: str | None = None) -> dict[str, tuple[Any, dict[str, Any]]]:
        """Return actors by name, with their own descriptions.

        Raises:
            ProvisioningError: Ray or an actor does not answer.
        """
        found = {}
        names = self._names(run_id)
        with asked() as ray:
            for name in names:
                # One that has died since is no machine any more.
                with suppress(ValueError, ray.exceptions.ActorDiedError):
                    actor = ray.get_actor(f"{self._mark}/{name}", namespace=NAMESPACE)
                    found[name] = (actor, ray.get(actor.describe.remote(), timeout=ANSWER_LIMIT_S))
        return found

    def _placed(
        self,
        ray: Any,
        requests: Sequence[NodeRequest],
        selectors: Mapping[str, Mapping[str, Any]],
        run_id: str,
    ) -> _Held:
        """Return a group with a bundle for each request, that of an earlier launch of the run where it has them.

        Ray places the bundle of a lost machine again, where a second group would wait for a second machine.

        Raises:
            InsufficientCapacityError: The group is not placed within the longest wait.
        """
        wanted = {
            (request.node_id, request.offer.instance_type.name): n for n, request in enumerate(requests)
        }
        for launch, held in _HELD.items():
            if (
                run_of_launch(launch) == f"{self._mark}/{run_of_launch(run_id)}"
                and wanted.keys() <= held.bundles.keys()
            ):
                return _Held(held.group, held.bundles, [])
        bundles, labels = [], []
        for machine in (request.offer.instance_type for request in requests):
            selector = {**selectors.get(machine.family, {})}
            resource, cards = selector.pop("resource", None), machine.accelerator_count
            bundles.append(
                {"CPU": machine.vcpus, "memory": machine.memory_bytes}
                | ({"GPU": cards} if cards else {})
                | ({str(resource): _LEAST} if resource else {})
            )
            labels.append(selector)
        # Each bundle takes the cores of a whole machine, which is what spreads them.
        group = ray.util.placement_group(
            bundles,
            strategy="SPREAD",
            name=f"{self._mark}/{run_id}",
            bundle_label_selector=labels if any(labels) else None,
        )
        if not group.wait(self._wait_s):
            ray.util.remove_placement_group(group)
            raise InsufficientCapacityError(_not_placed(run_id, len(requests), self._wait_s))
        return _Held(group, wanted, [])

    def _start(
        self,
        requests: Sequence[NodeRequest],
        selectors: Mapping[str, Mapping[str, Any]],
        *,
        run_id: str,
        lease_until: datetime,
        bootstrap: Bootstrap,
    ) -> None:
        """Start the actors of a launch in a group.

        Raises:
            InsufficientCapacityError: They are not placed within the longest wait.
            ProvisioningError: Ray does not answer.
        """
        environment = node_environment(
            bootstrap, run_id=run_id, lease_s=self.lease_s, is_process=True, is_dry_run=False
        )
        # The interpreter of an actor has torch where the cluster has it.
        environment.pop("HETERPS_PYTHON")
        node = ["bash", "-c", BOOTSTRAP_SCRIPT.read_text(), "bootstrap", *bootstrap.arguments]
        command = ["bash", "-c", WITH_ACTOR, "node", *node]
        with asked() as ray:
            began_s = time.monotonic()
            held = self._placed(ray, requests, selectors, run_id)
            # No process renews it while the group waits.
            lease_until += timedelta(seconds=time.monotonic() - began_s)
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            actor_class = ray.remote(node_class())
            for request in requests:
                machine = request.offer.instance_type
                options = actor_class.options(
                    name=f"{self._mark}/{run_id}/{request.node_id}",
                    namespace=NAMESPACE,
                    num_cpus=machine.vcpus,
                    num_gpus=machine.accelerator_count,
                    scheduling_strategy=strategy(
                        placement_group=held.group,
                        placement_group_bundle_index=held.bundles[request.node_id, machine.name],
                    ),
                )
                own = {**environment, **DISK_OF_MACHINE, NODE_ID_VARIABLE: request.node_id}
                held.actors.append(options.remote(machine.name, command, own, lease_until))
            _HELD[f"{self._mark}/{run_id}"] = held
            try:
                ray.get([actor.describe.remote() for actor in held.actors], timeout=self._wait_s)
            except ray.exceptions.GetTimeoutError as problem:
                for actor in held.actors:
                    ray.kill(actor)
                raise InsufficientCapacityError(_not_placed(run_id, len(requests), self._wait_s)) from problem

    def _end(self, names: Sequence[str]) -> tuple[str, ...]:
        """End actors with their processes, and wait until Ray does not know them.

        Raises:
            ProvisioningError: One is left, or Ray does not answer.
        """
        there = [name for name in self._names() if name in names]
        with asked() as ray:
            for name in there:
                with suppress(ValueError):
                    actor = ray.get_actor(f"{self._mark}/{name}", namespace=NAMESPACE)
                    with suppress(ray.exceptions.RayError):
                        ray.get(actor.end.remote(), timeout=ANSWER_LIMIT_S)
                    ray.kill(actor)
        deadline_s = time.monotonic() + END_LIMIT_S
        while left := {*there} & {*self._names()}:
            if time.monotonic() > deadline_s:
                raise ProvisioningError(
                    f"{', '.join(sorted(left))} must end when they are killed, and did not; "
                    f"look at them with ray list actors, the next sweep will try again"
                )
            time.sleep(_POLL_INTERVAL_S)
        return tuple(there)


def _not_placed(run_id: str, num_machines: int, wait_s: float) -> str:
    return (
        f"Ray did not place the {num_machines} machines of run {run_id} within {wait_s:.0f} s; see ray status, add "
        f"machines, or plan with fewer"
    )


def _size_of(resources: Mapping[str, float]) -> tuple[int, int, int, str, str]:
    """Return what makes nodes alike: cores, bytes of memory in steps of 1e8, cards, their name and own resources."""
    card = next((name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")), "")
    own = sorted(name for name in resources if not _OWN_RESOURCES.fullmatch(name))
    cores, cards = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    return cores, int(resources.get("memory", 0) / 1e8), cards, card, own[0] if own else ""


def _kind_of(
    cores: int, memory: int, cards: int, card: str, resource: str, number: int, count: int
) -> MachineKind | None:
    """Return nodes as a kind; None where they have no cores to give, as a head often has none."""
    if not cores or not memory:
        return None
    return MachineKind(
        kind=kind_name(RayProvider.name, resource, cores, number),
        home=RayProvider.name,
        count=count,
        cores=cores,
        memory_gb=memory / 10,
        cards=cards,
        card=card,
        price_usd_per_hour=0.0,
        selector={"resource": resource} if resource else {},
    )
