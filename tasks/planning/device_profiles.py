"""Rents a machine of each device type, measures the model there, and keeps the profiles with their costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from heterps_core.cluster import Cluster
from heterps_core.device_types import get_device_type
from heterps_core.errors import ProvisioningError, TrainingError
from heterps_core.hardware import DeviceKind, InstanceOffer, Market
from heterps_core.models.model_graph import ModelGraph
from heterps_core.planning.provisioning.offer_choice import choose_instances
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.device_profile import DeviceProfile, DeviceProfileCache, without_dataset
from heterps_core.profiling.measuring_process import ProfileRequest
from heterps_core.profiling.profiling_node import PROFILE_JOB, ProfilingResults, follow_profiling
from heterps_core.training.monitor import publish_cluster
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.storage.verified_files import write_signed_json
from heterps_core.units import BYTES_PER_GIB, MS_PER_S
from infra.billing.bill import Bill
from infra.billing.caps import Caps, Spent
from infra.ledger.ledger import Ledger
from infra.machines.lifecycle import running_cluster
from infra.providers import get_provider, provider_of
from infra.workspace import Workspace
from tasks.clusters import next_launch_id, node_bootstrap
from tasks.profiling import ProfiledModel
from tasks.provisioning import usd_for
from tasks.records.mlflow_names import TrackedRun
from tasks.records.run_record import note_file, note_metrics
from tasks.running.live_fleet import only_fleet
from tasks.steps import step

PROFILING_NODE = ("-m", "heterps_core.profiling.profiling_node")
"""Arguments of Python that make a process a node that measures."""

TIME_LIMIT_S = 600.0
"""From the launch to the last profile: five minutes to boot and five minutes to measure."""

LIFETIME_S = 1800
"""A node ends itself after this time, also where the flow has died."""

FREE_MEMORY_BYTES = 2 * BYTES_PER_GIB
"""Assumed memory for system, torch and batches beside the tables, in a machine and on a card."""


def measuring_plan(
    device_types: Sequence[str], offers: Sequence[InstanceOffer], graph: ModelGraph
) -> ProvisioningPlan:
    """Return the cheapest on-demand machines to measure each device type on one, each a stage of its own.

    Raises:
        ProvisioningError: A card or all offers of a type lack memory for the tables, or no zone has all types.
    """
    least_bytes = graph.state_bytes + FREE_MEMORY_BYTES
    for card in map(get_device_type, device_types):
        if card.kind is DeviceKind.GPU and card.memory_bytes < least_bytes:
            raise ProvisioningError(
                f"a card must hold the tables to be measured, but {card.name} has {card.memory_bytes:,.0f} bytes "
                f"and {least_bytes:,.0f} are needed; leave it out of device_types, or take smaller tables"
            )
    able = [
        offer
        for offer in offers
        if offer.market is Market.ON_DEMAND and offer.instance_type.memory_bytes >= least_bytes
    ]
    return choose_instances([Stage(0, 0, name, 1) for name in device_types], able)


@contextmanager
def rented_for_measuring(
    workspace: Workspace,
    provider: str,
    plan: ProvisioningPlan,
    request: ProfileRequest,
    *,
    run_id: str,
    run_directory: RunDirectory,
    caps: Caps,
    spent_this_month_usd: float,
) -> Iterator[Cluster]:
    """Write the request, launch one machine of each device type, and end them all afterwards.

    The caps are held against the most that it can cost: all machines until the time limit.

    Raises:
        BudgetExceededError: A cap is exceeded; nothing was launched.
        ProvisioningError: Another run has machines alive, or machines were not available, or could not be ended.
    """
    rented_from = get_provider(provider)
    price_usd_per_hour = rented_from.billed_usd_per_hour(plan)
    most_usd = usd_for(price_usd_per_hour, rented_from.ready_timeout_s + TIME_LIMIT_S)
    spent = Spent(month_usd=spent_this_month_usd)
    caps.check(price_usd_per_hour=price_usd_per_hour, predicted_cost_usd=most_usd, spent=spent)
    request = without_dataset(request)
    write_signed_json(run_directory, PROFILE_JOB, request.to_json())
    ledger = Ledger(workspace.ledger_path)
    with (
        only_fleet(workspace, run_id),
        running_cluster(
            provider_of(workspace, provider, region=plan.groups[0].offer.region),
            plan,
            run_id=next_launch_id(ledger, run_id),
            bootstrap=replace(
                node_bootstrap(provider, run_directory, model=request.model),
                arguments=PROFILING_NODE,
                lifetime_s=LIFETIME_S,
            ),
            ledger=ledger,
            caps=caps,
            predicted_cost_usd=most_usd,
        ) as cluster,
    ):
        yield cluster


@step("measure device types")
def measure_device_types(run: RunDirectory, cluster: Cluster) -> ProfilingResults:
    """Publish the cluster to its nodes, and wait for their profiles."""
    publish_cluster(run, cluster)
    return follow_profiling(run, cluster, time_limit_s=TIME_LIMIT_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class _MeasuredDevices:
    """Profiles, problems and bills of a profiling run."""

    profiles: tuple[DeviceProfile, ...]
    """Each with its share of the bills."""

    problems: Mapping[str, str]
    """Machine -> the reason that it has no profile."""

    bills: tuple[Bill, ...]

    @property
    def cost_usd(self) -> float:
        """Cost of all machines, also of those that failed."""
        return sum(bill.total_usd for bill in self.bills)


def with_costs(
    results: ProfilingResults, cluster: Cluster, bills: Sequence[Bill], *, run_id: str
) -> _MeasuredDevices:
    """Divide the bills among the profiles in proportion to the costs of their machines; all bear the failed ones."""
    usd: dict[str, float] = {}
    for line in (line for bill in bills for line in bill.lines):
        usd[line.device_type] = usd.get(line.device_type, 0.0) + line.usd
    total_usd = sum(bill.total_usd for bill in bills)
    shares = {node_id: usd.get(profile.device_type, 0.0) for node_id, profile in results.measured.items()}
    useful_usd = sum(shares.values())
    nodes = {node.node_id: f"{node.node_id} ({node.device_type})" for node in cluster.nodes}
    return _MeasuredDevices(
        profiles=tuple(
            replace(
                profile,
                run_id=run_id,
                cost_usd=total_usd * shares[node_id] / useful_usd if useful_usd > 0 else 0.0,
            )
            for node_id, profile in sorted(results.measured.items())
        ),
        problems={nodes[node_id]: problem for node_id, problem in sorted(results.problems.items())},
        bills=tuple(bills),
    )


def keep_profiles(workspace: Workspace, profiled: ProfiledModel, devices: _MeasuredDevices) -> list[str]:
    """Keep the profiles of rented machines, and return a line for each; dry runs are only reported."""
    cache = DeviceProfileCache(workspace.profiles_directory)
    lines = []
    for measured in devices.profiles:
        profile = measured.profile
        milliseconds = sum(timing.compute_ms(update_share=1.0) for timing in profile.timings)
        speed = f"{profile.batch_size / milliseconds * MS_PER_S:,.0f} samples/s on one unit"
        if measured.is_dry_run:
            lines.append(
                f"{measured.device_type} measured in a dry run on {profile.hardware}: {speed}; not kept, since this "
                f"machine is none of that type"
            )
            continue
        cache.keep(profiled.planned_request, profiled.graph, measured)
        lines.append(
            f"{measured.device_type} {measured}: {speed}; kept until {measured.expires_at:%Y-%m-%d}, "
            f"{measured.cost_usd:.4f} USD"
        )
    return lines


def check_all_measured(devices: _MeasuredDevices) -> None:
    """Check that no machine failed.

    Raises:
        TrainingError: Some failed, with their names; the profiles of the others are kept.
    """
    if devices.problems:
        reasons = "; ".join(f"{machine}: {problem}" for machine, problem in devices.problems.items())
        raise TrainingError(
            f"each rented machine must be measured, but {len(devices.problems)} were not, which are ended as the "
            f"others are: {reasons}"
        )


@step("record profiling")
def record_profiling(
    workspace: Workspace,
    run: TrackedRun,
    devices: _MeasuredDevices,
) -> None:
    """Add profiles and bills to the run's record."""
    note_metrics(workspace, run, {"cost/billed_usd": devices.cost_usd})
    documents = {f"profiles/{measured.device_type}": measured.to_json() for measured in devices.profiles}
    documents |= {f"bills/{bill.run_id}": bill.to_json() for bill in devices.bills}
    for name, document in documents.items():
        note_file(workspace, run.run_id, f"{name}.json", document)
