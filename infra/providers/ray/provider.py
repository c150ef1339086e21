"""Ray as a provider: the machines of a launch are placed as one group, and each node is a process of an actor.

Ray places a group whole or not at all; a pending group is a request to its autoscaler. Groups and actors are not
detached: they belong to the process of the flow, and Ray ends them seconds after its death, sooner than a lease
would; detached ones would need an end of their own. Other processes find the actors by name, and ask them for kind,
lease and address.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any, ClassVar, Self

from heterps_core.errors import ProvisioningError
from heterps_core.plans.provisioning_plan import NodeRequest
from heterps_core.training.node import NODE_ID_VARIABLE
from infra.bootstrap.node_start import BOOTSTRAP_SCRIPT
from infra.checks import Check, tried
from infra.inventory import MachineKind, kind_name
from infra.ledger.ledger_entry import Instance
from infra.providers.base import InsufficientCapacityError, Launch
from infra.providers.launching import (
    ProcessProvider,
    Started,
    prepared_console,
    run_directory_check,
    workspace_mark,
)
from infra.providers.ray.connection import ADDRESS_VARIABLE, ANSWER_LIMIT_S, NAMESPACE, asked
from infra.providers.ray.node_actor import END_LIMIT_S, NODE_END_S, WITH_ACTOR, node_class
from infra.workspace import Workspace, check_run_id

_POLL_INTERVAL_S = 0.1
_WAIT_S = 600.0
_SILENCE_S = 3.0
"""Longest wait for the answer of an actor whose last one is known."""

_SWAP_S = 10.0
"""Longest time from a group of all machines to a group of each."""

_LEAST = 0.001
"""Of a resource that marks a kind of machines; such a resource counts nothing."""

_OWN_RESOURCES = re.compile(
    r"CPU|GPU|memory|object_store_memory|node:.*|accelerator_type:.*|bundle_.*|.*_group_.*"
)


_HELD: dict[str, Any] = {}
"""Actors of this process by mark and name: Ray ends an actor once no process holds it."""

_KNOWN: dict[str, dict[str, Any]] = {}
"""Their last descriptions: one that does not answer may live, and is ended without a word from it."""


class RayProvider(ProcessProvider):
    """Runs each node on a machine of the Ray cluster at RAY_ADDRESS, as a process of an actor.

    Args:
        workspace: Its inventory has a resource or labels of each kind of machine.
        wait_s: Longest wait for machines.
    """

    name: ClassVar[str] = "ray"
    has_inventory: ClassVar[bool] = True
    machines_text: ClassVar[str] = "machines of Ray"

    def __init__(self, workspace: Workspace, *, wait_s: float = _WAIT_S) -> None:
        super().__init__()
        self._workspace = workspace
        self._wait_s = wait_s
        self._mark = workspace_mark(workspace)
        self._nodes_end_at = datetime.min.replace(tzinfo=UTC)

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

    def now(self) -> datetime:
        """Return the time, or the later one by which nodes of lost actors have ended; see `Provider.now`."""
        return max(super().now(), self._nodes_end_at)

    def checks(self) -> Iterator[Check]:
        """Check address, version and machines; see `Provider.checks`."""
        yield tried("Ray cluster", lambda: f"{len(self._actors())} machines of heterps")
        found = ", ".join
        yield tried(
            "Ray machines",
            lambda: found(f"{kind.count} x {kind.kind}" for kind in self.found_machines(self._workspace)),
        )
        yield run_directory_check(self._workspace)

    def start(self, requests: Sequence[NodeRequest], launch: Launch) -> Iterator[Started]:
        """Place a group and start an actor in each of its bundles; see `ProcessProvider.start`."""
        selectors = {kind.kind: kind.selector for kind in self.kinds(self._workspace)}
        return self._start(requests, selectors, launch)

    def _start(
        self, requests: Sequence[NodeRequest], selectors: Mapping[str, Mapping[str, Any]], launch: Launch
    ) -> Iterator[Started]:
        if not self._actors(launch.run_id):
            self._place(requests, selectors, launch)
        actors = self._actors(launch.run_id)
        for name in (f"{launch.run_id}/{request.node_id}" for request in requests):
            _, answer = actors[name]
            yield Started(answer["address"], name, answer["launched_at"])

    def living_nodes(self, run_id: str) -> set[str]:
        """Return the nodes with a living process, as their actors say; see `ProcessProvider.living_nodes`."""
        actors = self._actors(run_id).items()
        return {name.partition("/")[2] for name, (_, answer) in actors if answer["is_alive"]}

    def renew_lease(self, run_id: str, *, until: datetime) -> None:
        """Tell the actors of a run their lease; see `Provider.renew_lease`."""
        actors = self._actors(run_id)
        with asked() as ray:
            ray.get([actor.renew.remote(until) for actor, _ in actors.values()], timeout=ANSWER_LIMIT_S)

    def terminate(self, run_id: str) -> tuple[str, ...]:
        """End the actors of a run, whether they answer or not; see `Provider.terminate`."""
        check_run_id(run_id)
        return self._end(self._names(run_id))

    def terminate_instances(self, instances: Sequence[Instance]) -> None:
        """End actors, and give back their machines; see `Provider.terminate_instances`."""
        self._end({instance.provider_instance_id for instance in instances})

    def list_instances(self, run_id: str | None = None) -> tuple[Instance, ...]:
        """Return the actors that Ray knows by name; see `Provider.list_instances`."""
        return tuple(
            Instance(
                provider_instance_id=name,
                run_id=name.partition("/")[0],
                node_id=name.partition("/")[2],
                instance_type=answer["instance_type"],
                launched_at=answer["launched_at"],
                lease_until=answer["lease_until"],
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
                marked = f"{self._mark}/{name}"
                limit_s = _SILENCE_S if marked in _KNOWN else ANSWER_LIMIT_S
                # One that has died since is no machine any more.
                with suppress(ValueError, ray.exceptions.ActorDiedError):
                    actor = ray.get_actor(marked, namespace=NAMESPACE)
                    try:
                        answer = ray.get(actor.describe.remote(), timeout=limit_s)
                    except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
                        if marked not in _KNOWN:
                            raise
                        answer = _KNOWN[marked]
                    if marked in _HELD:
                        _KNOWN[marked] = answer
                    found[name] = (actor, answer)
        return found

    def _placed(
        self,
        ray: Any,
        requests: Sequence[NodeRequest],
        selectors: Mapping[str, Mapping[str, Any]],
        run_id: str,
    ) -> list[Any]:
        """Return a group of one bundle for each request, all or none.

        A group of all bundles waits, which holds nothing. Once it is placed, groups of one bundle take its place: a
        machine can then be given back or replaced alone, where Ray would keep its place.

        Raises:
            InsufficientCapacityError: They are not placed within the longest wait.
        """
        bundles, labels = [], []
        for machine in (request.offer.instance_type for request in requests):
            selector = {**selectors.get(machine.family, {})}
            resource, cards = selector.pop("resource", None), machine.accelerator_count
            # Each bundle takes the cores of a whole machine, which is what spreads them.
            bundles.append(
                {"CPU": machine.vcpus, "memory": machine.memory_bytes}
                | ({"GPU": cards} if cards else {})
                | ({str(resource): _LEAST} if resource else {})
            )
            labels.append(selector)

        def group(some: slice, name: str) -> Any:
            return ray.util.placement_group(
                bundles[some],
                strategy="SPREAD",
                name=name,
                bundle_label_selector=labels[some] if any(labels) else None,
            )

        deadline_s = time.monotonic() + self._wait_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            together = group(slice(None), f"{self._mark}/{run_id}")
            is_placed = together.wait(left_s)
            ray.util.remove_placement_group(together)
            if not is_placed:
                break
            names = (f"{self._mark}/{run_id}/{request.node_id}" for request in requests)
            groups = [group(slice(n, n + 1), name) for n, name in enumerate(names)]
            # Another's group may have come between.
            if all(each.wait(_SWAP_S) for each in groups):
                return groups
            for each in groups:
                ray.util.remove_placement_group(each)
        raise InsufficientCapacityError(_not_placed(run_id, len(requests), self._wait_s))

    def _place(
        self,
        requests: Sequence[NodeRequest],
        selectors: Mapping[str, Mapping[str, Any]],
        launch: Launch,
    ) -> None:
        """Place the actors of a launch.

        Raises:
            InsufficientCapacityError: They are not placed within the longest wait.
            ProvisioningError: Ray does not answer.
        """
        run_id, bootstrap = launch.run_id, launch.bootstrap
        environment = self.variables(launch)
        # The interpreter of an actor has torch where the cluster has it.
        environment.pop("HETERPS_PYTHON")
        node = ["bash", "-c", BOOTSTRAP_SCRIPT.read_text(), "bootstrap", *bootstrap.arguments]
        command = ["bash", "-c", WITH_ACTOR, "node", *node]
        with asked() as ray:
            began_s = time.monotonic()
            self._end(())
            groups = self._placed(ray, requests, selectors, run_id)
            # No process renews it while the group waits.
            lease_until = launch.lease_until + timedelta(seconds=time.monotonic() - began_s)
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            actor_class = ray.remote(node_class())
            actors = []
            for request, group in zip(requests, groups, strict=True):
                machine = request.offer.instance_type
                name = f"{self._mark}/{run_id}/{request.node_id}"
                options = actor_class.options(
                    name=name,
                    namespace=NAMESPACE,
                    num_cpus=machine.vcpus,
                    num_gpus=machine.accelerator_count,
                    scheduling_strategy=strategy(placement_group=group, placement_group_bundle_index=0),
                )
                own = {**environment, NODE_ID_VARIABLE: request.node_id}
                console = prepared_console(bootstrap.run_location, request.node_id)
                _HELD[name] = options.remote(machine.name, command, own, console, lease_until)
                actors.append(_HELD[name])
            try:
                ray.get([actor.describe.remote() for actor in actors], timeout=self._wait_s)
            except ray.exceptions.GetTimeoutError as problem:
                for actor in actors:
                    ray.kill(actor)
                raise InsufficientCapacityError(_not_placed(run_id, len(requests), self._wait_s)) from problem
            except ray.exceptions.ActorDiedError as problem:
                raise ProvisioningError(
                    f"a node of run {run_id} could not start: {str(problem).strip().splitlines()[-1]}; "
                    f"{bootstrap.run_location} must be a folder that all machines share, or name a run store"
                ) from problem

    def _end(self, names: Collection[str]) -> tuple[str, ...]:
        """End actors with their processes, and wait until Ray does not know them.

        Their machines are given back, and those of actors that have died.

        Raises:
            ProvisioningError: One is left, or Ray does not answer.
        """
        alive = self._names()
        there = [name for name in alive if name in names]
        held = {name.partition("/")[2] for name in _HELD if name.startswith(f"{self._mark}/")}
        lost = held.difference(alive)
        with asked() as ray:
            for name in there:
                with suppress(ValueError):
                    actor = ray.get_actor(f"{self._mark}/{name}", namespace=NAMESPACE)
                    try:
                        ray.get(actor.end.remote(), timeout=ANSWER_LIMIT_S)
                    except ray.exceptions.RayError:
                        lost.add(name)
                    ray.kill(actor)
        if lost:
            self._nodes_end_at = super().now() + timedelta(seconds=NODE_END_S)
        deadline_s = time.monotonic() + END_LIMIT_S
        while left := {*there} & {*self._names()}:
            if time.monotonic() > deadline_s:
                raise ProvisioningError(
                    f"{', '.join(sorted(left))} must end when they are killed, and did not; "
                    f"look at them with ray list actors, the next sweep will try again"
                )
            time.sleep(_POLL_INTERVAL_S)
        with asked() as ray:
            for marked in (f"{self._mark}/{name}" for name in {*there, *lost}):
                with suppress(ValueError):
                    ray.util.remove_placement_group(ray.util.get_placement_group(marked))
                _HELD.pop(marked, None)
                _KNOWN.pop(marked, None)
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
