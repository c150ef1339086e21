"""Device types that are measured by nodes of this machine, and by machines of a cloud that is not there."""

import os
import threading
from dataclasses import replace
from datetime import UTC, datetime

import boto3
import pytest
import torch

from heterps_core.cluster import Cluster, Node
from heterps_core.data.features import FeatureSpec
from heterps_core.device_types import DEVICE_TYPES
from heterps_core.errors import (
    BudgetExceededError,
    ConfigurationError,
    HeterpsError,
    ProvisioningError,
    TrainingError,
)
from heterps_core.hardware import Market
from heterps_core.machine import software_versions
from heterps_core.profiling import profiling_node
from heterps_core.profiling.analytic_profile import estimate_profile
from heterps_core.profiling.device_profile import DeviceProfile, DeviceProfileCache
from heterps_core.profiling.measuring_process import ProfileRequest
from heterps_core.profiling.profiling_node import PROFILE_JOB, _measure_node, _profile_key, follow_profiling
from heterps_core.training.monitor import publish_cluster
from heterps_core.training.node.node_life import HEARTBEAT, exit_key, node_key
from heterps_core.training.storage.run_directory import CLUSTER, RunDirectory
from heterps_core.training.storage.verified_files import read_unverified_json, write_signed_json
from infra.billing.caps import Caps
from infra.providers import provider_of
from infra.providers.aws.node_role import BOUNDARY_VARIABLE
from infra.workspace import RUN_STORE_VARIABLE, Workspace
from tasks.clusters import bills_of_run, directory_of_run
from tasks.planning.device_profiles import (
    check_all_measured,
    keep_profiles,
    measure_device_types,
    measuring_plan,
    rented_for_measuring,
    with_costs,
)
from tasks.profiling import ProfiledModel, _measured_device_types, _measured_sibling, charge_measurements
from tasks.records import mlflow_store
from tasks.records.mlflow_names import Kind, Tag
from tasks.running import run_lifecycle
from tests.heterps_core.profiling.builders import GRAPH, make_profile
from tests.infra.builders import offer
from tests.s3_server import bucket_location
from tests.waiting import wait_for

NO_CAPS = Caps()
RUN_ID = "20261121-1200-1a2b3c4d"
OFFERS = [
    replace(offer("c7i.large", price_usd_per_hour=0.09), price_source="test"),
    replace(offer("r6in.large", price_usd_per_hour=0.18), price_source="test"),
]
SMALL = ProfileRequest(
    model="ctrdnn",
    features=FeatureSpec(num_dense=2, slot_rows=(50, 50)),
    batch_size=64,
    dataset="clicks",
    dataset_fingerprint="f1",
    budget_s=0.3,
)


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path).create()


def profiled_for(request, graph=GRAPH):
    estimates = {
        name: estimate_profile(GRAPH, make_profile(), DEVICE_TYPES[name]) for name in ("cpu-c7i", "cpu-r6in")
    }
    return ProfiledModel(
        graph=graph,
        local_profile=make_profile(),
        planned_graph=graph,
        profiles=estimates,
        planned_request=request,
    )


def measure(
    workspace, provider, profiled, device_types=("cpu-c7i", "cpu-r6in"), caps=NO_CAPS, on_launch=None
):
    """Do what the flow does, from the plan to the bill."""
    run = directory_of_run(workspace, provider, RUN_ID)
    with rented_for_measuring(
        workspace,
        provider,
        measuring_plan(device_types, OFFERS, GRAPH),
        profiled.planned_request,
        run_id=RUN_ID,
        run_directory=run,
        caps=caps,
        spent_this_month_usd=0.0,
    ) as cluster:
        if on_launch is not None:
            on_launch(run)
        results = measure_device_types.fn(run, cluster)
    return with_costs(results, cluster, bills_of_run(workspace, provider, RUN_ID), run_id=RUN_ID)


@pytest.mark.slow
def test_a_node_of_this_machine_really_measures_and_is_only_a_dry_run(workspace):
    from heterps_core.profiling.measurement.layer_profiler import trace_model

    graph = trace_model(SMALL)
    profiled = profiled_for(SMALL, graph)

    devices = measure(workspace, "local", profiled, ["cpu-c7i"])

    [measured] = devices.profiles
    assert measured.is_dry_run
    assert measured.profile.graph_fingerprint == graph.fingerprint()
    assert all(timing.forward.num_repeats > 0 for timing in measured.profile.timings)
    assert measured.profile.ids_source.startswith("Zipf's law")
    [line] = keep_profiles(workspace, profiled, devices)
    assert "not kept, since this machine is none of that type" in line
    assert _measured_device_types(workspace, SMALL, graph, ["cpu-c7i"]) == {}
    [bill] = devices.bills
    assert (bill.is_dry_run, [entry.instance_type for entry in bill.lines]) == (True, ["c7i.large"])
    assert measured.cost_usd == pytest.approx(bill.total_usd) != 0
    assert provider_of(workspace, "local").list_instances() == ()


def test_a_node_that_fails_is_named_and_its_machine_ended(workspace):
    def spoil(run):
        write_signed_json(run, PROFILE_JOB, {**SMALL.to_json(), "batch_size": 1})

    devices = measure(workspace, "local", profiled_for(SMALL), ["cpu-c7i"], on_launch=spoil)

    with pytest.raises(
        TrainingError, match=r"stage0-node0 \(cpu-c7i\): it ended with status 2: .*at least 2 rows"
    ):
        check_all_measured(devices)
    assert devices.profiles == ()
    assert provider_of(workspace, "local").list_instances() == ()
    assert devices.cost_usd > 0


def test_what_it_may_cost_is_held_against_the_cap_before_anything_is_launched(workspace):
    with pytest.raises(BudgetExceededError, match="USD per run"):
        measure(workspace, "local", profiled_for(SMALL), caps=Caps(max_usd_per_run=0.001))

    assert bills_of_run(workspace, "local", RUN_ID) == ()


def test_its_disks_and_addresses_are_held_against_the_cap_too(workspace, tmp_path):
    # By hand: 0.09 and 0.18 USD/hour, each with 0.005 for an address, 40 GB at 0.08 USD a month of 730 h, and the
    # bucket's 360 heartbeats at 5 USD and 120 looks at 0.4 USD a million: 0.2925.
    renting = rented_for_measuring(
        workspace,
        "aws",
        measuring_plan(("cpu-c7i", "cpu-r6in"), OFFERS, GRAPH),
        SMALL,
        run_id=RUN_ID,
        run_directory=RunDirectory(str(tmp_path / "run")),
        caps=Caps(max_usd_per_hour=0.28),
        spent_this_month_usd=0.0,
    )

    with pytest.raises(BudgetExceededError, match=r"takes 0\.2925"), renting:
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_host_whose_card_is_not_seen_does_not_pass_for_the_card():
    node = Cluster.from_json(CARD_CLUSTER).nodes[0]

    with pytest.raises(HeterpsError, match="measuring a GPU needs a CUDA device that torch sees"):
        _measure_node(replace(SMALL, dataset=None), node, is_dry_run=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_node_with_a_card_measures_the_card_and_its_profile_takes_the_place_of_the_estimate():
    node = Cluster.from_json(CARD_CLUSTER).nodes[0]

    measured = _measure_node(replace(SMALL, dataset=None), node, is_dry_run=False)

    assert (measured.device_type, measured.profile.device_type) == ("gpu-t4", "gpu-t4")
    assert torch.cuda.get_device_name(0) in measured.profile.hardware
    assert all(timing.forward.num_repeats > 0 for timing in measured.profile.timings)
    # The layers, each by itself, take about as long as the step: the clock waits for the card.
    assert 0.5 < measured.profile.sum_over_step < 2


CARD_CLUSTER = {
    "schema_version": 1,
    "run_id": "r1",
    "provider": "aws",
    "rendezvous": "10.0.0.1:29400",
    "created_at": "2026-11-21T00:00:00+00:00",
    "nodes": [
        {
            "node_id": "stage0-node0",
            "address": "10.0.0.1",
            "device_type": "gpu-t4",
            "instance_type": "g4dn.xlarge",
            "market": "on-demand",
            "stage": 0,
            "num_workers": 1,
            "price_usd_per_hour": 0.526,
            "provider_instance_id": "i-1",
        }
    ],
}


@pytest.fixture
def cloud(monkeypatch):
    """EC2 with an image, and a bucket."""
    with bucket_location(monkeypatch) as location:
        ec2 = boto3.client("ec2")
        ec2.register_image(Name="heterps-node-1", Architecture="x86_64", RootDeviceName="/dev/sda1")
        monkeypatch.setenv(RUN_STORE_VARIABLE, location)
        monkeypatch.setenv(BOUNDARY_VARIABLE, "arn:aws:iam::123456789012:policy/heterps-node")
        monkeypatch.delenv("HETERPS_AWS_WORKSPACE", raising=False)
        yield ec2


REQUEST = replace(SMALL, model="small", batch_size=100)


def answer_as_nodes(run, *, failing=()):
    """Write in the bucket what nodes write there, once they know who they are."""

    def act():
        document = wait_for(lambda: read_unverified_json(run, CLUSTER), what="the cluster", poll_s=0.05)
        assert ProfileRequest.from_json(read_unverified_json(run, PROFILE_JOB)).dataset is None
        for node in Cluster.from_json(document).nodes:
            run.write_json(node_key(node.node_id, HEARTBEAT), {})
            status, said = (1, "no memory") if node.device_type in failing else (0, "")
            if not status:
                profile = replace(
                    make_profile(),
                    software=software_versions(),
                    measured_at=datetime.now(UTC).isoformat(),
                )
                measured = DeviceProfile(
                    device_type=node.device_type,
                    instance_type=node.instance_type,
                    is_dry_run=False,
                    profile=profile,
                )
                run.write_json(_profile_key(node.node_id), measured.to_json())
            run.write_json(exit_key(node.node_id), {"exit_status": status, "log_tail": said})

    threading.Thread(target=act, daemon=True).start()


def states(ec2):
    found = ec2.describe_instances()["Reservations"]
    return {i["InstanceType"]: i["State"]["Name"] for each in found for i in each["Instances"]}


def test_rented_machines_measure_are_ended_and_paid_by_the_next_run(workspace, cloud):
    profiled = profiled_for(REQUEST)
    running = {}

    def on_launch(run):
        running.update(states(cloud))
        answer_as_nodes(RunDirectory(run.location))

    devices = measure(workspace, "aws", profiled, on_launch=on_launch)

    assert running == {"c7i.large": "running", "r6in.large": "running"}
    assert set(states(cloud).values()) == {"terminated"}
    lines = keep_profiles(workspace, profiled, devices)
    assert lines[0].startswith("cpu-c7i measured on c7i.large ")
    kept = _measured_device_types(workspace, REQUEST, GRAPH, ["cpu-c7i", "cpu-r6in", "gpu-t4"])
    assert set(kept) == {"cpu-c7i", "cpu-r6in"}
    # At least a minute is billed: 0.0015 and 0.003 USD, and the disks on top.
    [bill] = devices.bills
    machines_usd = sum(line.usd for line in bill.lines)
    assert machines_usd == pytest.approx((0.09 + 0.18) / 60)
    assert kept["cpu-r6in"].cost_usd == pytest.approx(2 * kept["cpu-c7i"].cost_usd)
    planning = replace(profiled, measured=kept)
    assert planning.profiling_usd("next") == pytest.approx(bill.total_usd)
    assert bill.total_usd > machines_usd
    assert "cpu-c7i measured on c7i.large" in planning.summary

    charge_measurements(workspace, planning, run_id="next")

    charged = replace(
        profiled, measured=_measured_device_types(workspace, REQUEST, GRAPH, ["cpu-c7i", "cpu-r6in"])
    )
    assert charged.profiling_usd("the one after") == 0.0
    assert charged.profiling_usd("next") == pytest.approx(bill.total_usd)


def test_a_rented_machine_that_fails_is_named_and_borne_by_what_was_measured(workspace, cloud):
    profiled = profiled_for(REQUEST)

    devices = measure(
        workspace,
        "aws",
        profiled,
        on_launch=lambda run: answer_as_nodes(RunDirectory(run.location), failing=["cpu-r6in"]),
    )
    keep_profiles(workspace, profiled, devices)

    with pytest.raises(TrainingError, match=r"1 were not.*stage1-node0 \(cpu-r6in\): .*status 1: no memory"):
        check_all_measured(devices)
    assert set(states(cloud).values()) == {"terminated"}
    kept = _measured_device_types(workspace, REQUEST, GRAPH, ["cpu-c7i", "cpu-r6in"])
    assert set(kept) == {"cpu-c7i"}
    assert kept["cpu-c7i"].cost_usd == pytest.approx(devices.cost_usd)


@pytest.fixture
def one_machine():
    return Cluster(
        run_id="r",
        provider="aws",
        nodes=(
            Node(
                node_id="stage0-node0",
                address="127.0.0.1",
                device_type="cpu-c7i",
                instance_type="c7i.large",
                market=Market.ON_DEMAND,
                stage=0,
                num_workers=1,
                price_usd_per_hour=0.1,
                provider_instance_id="i-1",
            ),
        ),
        rendezvous="127.0.0.1:1",
        created_at="2026-11-21T00:00:00+00:00",
    )


def test_a_node_that_is_not_in_the_cluster_names_the_cluster_s_nodes_in_one_line(
    one_machine, tmp_path, monkeypatch, caplog
):
    environment = {
        "HETERPS_RUN_DIR": str(tmp_path),
        "HETERPS_RUN_KEY": "6b",
        "HETERPS_NODE_ID": "stage1-node0",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    publish_cluster(RunDirectory(str(tmp_path), secret=b"k"), one_machine)

    assert profiling_node.main() == ConfigurationError.exit_status
    assert caplog.messages == ["this node must be one of the cluster's: stage0-node0"]


def test_a_machine_that_says_it_was_another_device_type_is_not_believed(one_machine, tmp_path):
    """Files are named after the device type, also with a path in it."""
    run = RunDirectory(str(tmp_path))
    said = DeviceProfile(
        device_type="../../other", instance_type="c7i.large", is_dry_run=False, profile=make_profile()
    )
    run.write_json(_profile_key("stage0-node0"), said.to_json())
    run.write_json(exit_key("stage0-node0"), {"exit_status": 0, "log_tail": ""})

    results = follow_profiling(run, one_machine, time_limit_s=10)

    assert results.measured == {}
    assert results.problems == {
        "stage0-node0": "it must have measured a cpu-c7i, but says that it measured '../../other'"
    }


def test_a_damaged_measurement_counts_as_missing(workspace):
    cache = DeviceProfileCache(workspace.profiles_directory)
    profile = replace(make_profile(), software=software_versions(), measured_at=datetime.now(UTC).isoformat())
    cache.keep(
        REQUEST,
        GRAPH,
        DeviceProfile(device_type="cpu-c7i", instance_type="c7i.large", is_dry_run=False, profile=profile),
    )
    [path] = (workspace.profiles_directory / "rented").iterdir()
    os.truncate(path, 100)

    assert _measured_device_types(workspace, REQUEST, GRAPH, ["cpu-c7i"]) == {}


def test_a_measurement_serves_types_of_the_same_processor_by_the_ratio_of_their_clocks():
    kept = DeviceProfile(
        device_type="cpu-c5", instance_type="c5.large", is_dry_run=False, profile=make_profile()
    )

    sibling = _measured_sibling({"cpu-c5-spot": kept}, "cpu-m5n")

    # 3.4 GHz and 3.1 GHz, both Cascade Lake.
    for found, timing in zip(sibling.profile.timings, kept.profile.timings, strict=True):
        assert found.compute_ms(update_share=1.0) == pytest.approx(
            3.4 / 3.1 * timing.compute_ms(update_share=1.0)
        )
    assert not sibling.profile.is_estimated
    assert _measured_sibling({"cpu-c5-spot": kept}, "cpu-m5") is None


def test_the_record_of_a_measurement_whose_process_died_is_found_as_those_of_trainings_are(workspace):
    alive = run_lifecycle.open_run(workspace, run_id="alive", run_name="alive", tags={}, kind=Kind.PROFILING)
    dead = run_lifecycle.open_run(workspace, run_id="dead", run_name="dead", tags={}, kind=Kind.PROFILING)
    client = mlflow_store.client_of(workspace)
    client.set_tag(dead.mlflow_run_id, Tag.PROCESS, "1 1.00")

    assert run_lifecycle.runs_without_process(workspace) == ["dead"]
    assert run_lifecycle.close_dead_run(workspace, "dead", status="KILLED", reason="test") == 1
    assert client.get_run(alive.mlflow_run_id).info.status == "RUNNING"


def test_a_card_that_is_too_small_for_the_tables_is_refused_before_machines_are_rented():
    # By hand: a T4 has 16 GiB, of which 2 GiB stay free.
    large = replace(GRAPH, layers=(replace(GRAPH.layers[0], parameter_bytes=17_000_000_000), GRAPH.layers[1]))

    with pytest.raises(ProvisioningError, match=r"gpu-t4 has .*; leave it out of device_types"):
        measuring_plan(("cpu-c7i", "gpu-t4"), OFFERS, large)
