"""A small planning problem whose figures can be checked by hand, and a search result over it."""

from dataclasses import replace

from heterps_core.cluster import Cluster
from heterps_core.hardware import Market
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.extra_costs import ExtraCosts
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem, UnitType
from heterps_core.planning.search.search_result import HistoryPoint, SearchResult
from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan
from heterps_core.plans.scheduling_plan import SchedulingPlan, Stage
from heterps_core.training.storage.run_directory import RunDirectory
from infra.billing.caps import Caps
from infra.providers.launching import node_of
from tasks.provisioning import Provisioning
from tasks.running.fleet import Fleet, FleetRun
from tests.infra.builders import offer

NO_CAPS = Caps()
SPOT_PROBLEM_TYPES = ("cpu-c7i", "cpu-c7i-spot")


def make_problem(*, throughput_floor_samples_per_s=1_000.0):
    """Three layers; on one cpu unit a batch of 100 takes 40, 20 and 20 ms, on one gpu unit 80, 4 and 4 ms."""
    times = {"embedding": (0.040, 0.080), "fc1": (0.020, 0.004), "output": (0.020, 0.004)}
    layers = tuple(
        LayerCosts(
            name=name,
            kind="embedding" if name == "embedding" else "fully_connected",
            is_sharded=name == "embedding",
            state_bytes=1_000.0,
            output_bytes_per_sample=4.0,
            compute_seconds={"cpu-c7i": cpu, "gpu-t4": gpu},
            communication_seconds={"cpu-c7i": 0.0, "gpu-t4": 0.0},
        )
        for name, (cpu, gpu) in times.items()
    )
    unit = {
        "max_units": 8,
        "memory_bytes": 1e9,
        "bandwidth_bytes_per_s": 1e9,
        "compute_parallel_fraction": 1.0,
        "communication_parallel_fraction": 1.0,
    }
    return SchedulingProblem(
        model="tiny",
        batch_size=100,
        profile_batch_size=100,
        num_samples=36_000.0,
        num_epochs=1.0,
        throughput_floor_samples_per_s=throughput_floor_samples_per_s,
        layers=layers,
        device_types={
            "cpu-c7i": UnitType(price_usd_per_hour=0.1, **unit),
            "gpu-t4": UnitType(price_usd_per_hour=0.5, **unit),
        },
    )


def make_spot_problem(
    *, hours, interruptions_per_hour=0.5, spot_price_share=0.3, max_units=8, floor_samples_per_s=0.0
):
    """One layer that trains a sample a second on one unit, which costs 1 USD/h, or less on spot."""
    unit = {
        "memory_bytes": 1e9,
        "bandwidth_bytes_per_s": 1e9,
        "compute_parallel_fraction": 1.0,
        "communication_parallel_fraction": 1.0,
        "max_units": max_units,
    }
    names = SPOT_PROBLEM_TYPES
    layer = LayerCosts(
        name="output",
        kind="fully_connected",
        is_sharded=False,
        state_bytes=1_000.0,
        output_bytes_per_sample=4.0,
        compute_seconds=dict.fromkeys(names, 100.0),
        communication_seconds=dict.fromkeys(names, 0.0),
    )
    return SchedulingProblem(
        model="tiny",
        batch_size=100,
        profile_batch_size=100,
        num_samples=hours * 3_600.0,
        num_epochs=1.0,
        throughput_floor_samples_per_s=floor_samples_per_s,
        layers=(layer,),
        device_types={
            "cpu-c7i": UnitType(price_usd_per_hour=1.0, **unit),
            "cpu-c7i-spot": UnitType(
                price_usd_per_hour=spot_price_share, interruptions_per_hour=interruptions_per_hour, **unit
            ),
        },
        extra_costs=ExtraCosts(startup_seconds=120.0, checkpoint_seconds=5.0, restart_seconds=130.0),
    )


def without_spot(problem):
    """The same problem with on-demand units alone."""
    names = [name for name in problem.device_types if not name.endswith("-spot")]
    return replace(
        problem,
        device_types={name: problem.device_types[name] for name in names},
        layers=tuple(
            replace(
                layer,
                compute_seconds={name: layer.compute_seconds[name] for name in names},
                communication_seconds={name: layer.communication_seconds[name] for name in names},
            )
            for layer in problem.layers
        ),
    )


def slowed(problem, factor):
    """The same problem, whose layers take so many times as long to compute."""
    layers = (
        replace(layer, compute_seconds={name: factor * s for name, s in layer.compute_seconds.items()})
        for layer in problem.layers
    )
    return replace(problem, layers=tuple(layers))


def bought(*counts, markets=(Market.ON_DEMAND,), price_usd_per_hour=1.0, types=SPOT_PROBLEM_TYPES):
    """A machine for each replica; the first of a stage in the first market, the others in the last."""
    groups = []
    for stage, count in enumerate(counts):
        for market, number in {markets[0]: 1, markets[-1]: count - (len(markets) > 1)}.items():
            machine = offer(price_usd_per_hour=price_usd_per_hour, market=market)
            groups.append(
                InstanceGroup(
                    stage=stage, device_type=types[stage], offer=machine, count=number, units_per_instance=1
                )
            )
    plan = ProvisioningPlan(
        replicas=counts, groups=tuple(groups), planned_price_usd_per_hour=sum(counts) * price_usd_per_hour
    )
    stages = tuple(Stage(index, index, types[index], count) for index, count in enumerate(counts))
    return Provisioning(
        cloud_plan=plan, launch_plan=plan, launch_stages=stages, predicted_cost_usd=1.0, is_dry_run=False
    )


def cluster_of(provisioning):
    nodes = tuple(
        node_of(request, address="127.0.0.1", provider_instance_id=request.node_id)
        for request in provisioning.launch_plan.node_requests()
    )
    return Cluster(
        run_id="r1", provider="local", nodes=nodes, rendezvous="127.0.0.1:1", created_at="2026-11-23T00:00:00"
    )


def fleet_of(provisioning):
    return Fleet(cluster_of(provisioning), provisioning)


def fleet_run(workspace, *, run_id="r1", caps=NO_CAPS, **others):
    """A run on processes of this machine, as its fleet knows it."""
    return FleetRun(
        workspace=workspace,
        run_id=run_id,
        directory=RunDirectory(str(workspace.run_folder(run_id))),
        provider_name="local",
        region="us-east-1",
        model="ctrdnn",
        caps=caps,
        problem=make_spot_problem(hours=8),
        num_steps=1_000,
        **others,
    )


def make_result(problem, *, scheduler="exact", stages=None, cost_lower_bound_usd=None):
    """A plan as a search would hand it back: by default the embedding on 4 cpu units, the rest on a gpu."""
    stages = stages or (Stage(0, 0, "cpu-c7i", 4), Stage(1, 2, "gpu-t4", 1))
    evaluation = evaluate(problem, stages)
    bound = cost_lower_bound_usd or evaluation.cost_usd
    plan = SchedulingPlan(
        scheduler=scheduler,
        seed=0,
        stages=stages,
        throughput_samples_per_s=evaluation.throughput_samples_per_s,
        price_usd_per_hour=evaluation.price_usd_per_hour,
        cost_usd=evaluation.cost_usd,
        cost_lower_bound_usd=bound,
        optimality_gap=evaluation.cost_usd / bound - 1,
        num_evaluations=12,
        search_seconds=0.5,
    )
    history = (
        HistoryPoint(1, 0.1, 4 * evaluation.cost_usd),
        HistoryPoint(7, 0.3, evaluation.cost_usd),
    )
    return SearchResult(
        plan=plan, evaluation=evaluation, history=history, search_seconds=0.5, certificate_seconds=0.0
    )
