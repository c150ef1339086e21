"""Problems whose tables may lie on disks: what is offered at which price, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.device_types import DEVICE_TYPES
from heterps_core.embeddings.row_optimizers import ROW_OPTIMIZERS
from heterps_core.embeddings.swept.sweep_memory import slots_by_table
from heterps_core.models.chain import build_chain
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.problem_builder import build_problem, unit_type
from heterps_core.planning.provisioning.offer_choice import instance_sizes
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan
from heterps_core.plans.scheduling_plan import Stage
from infra.prices.service_charges import RATES
from tasks.planning.table_disks import (
    HOT_SHARES,
    VOLUME,
    VOLUME_BYTES,
    ReplicaDisk,
    dry_run_table_memory_bytes,
    offers_with_disks,
    replica_disks,
    table_memory_bytes,
    with_table_disk,
    with_table_disks,
)
from tasks.provisioning import find_offers
from tests.heterps_core.profiling.builders import GRAPH, make_profile

TABLE_BYTES = 200e9


def night(cpu="cpu-c7i", table_bytes=TABLE_BYTES):
    """Return a model with a large table, the problem of training it, and the offers for it."""
    names = (cpu, "gpu-t4")
    embedding, *others = GRAPH.layers
    graph = replace(
        GRAPH,
        layers=(
            replace(
                embedding,
                parameter_bytes=int(0.8 * table_bytes),
                optimizer_state_bytes=int(0.2 * table_bytes),
            ),
            *others,
        ),
    )
    offers = find_offers.fn(names)
    profiles = {
        name: replace(make_profile(), device_type=name, graph_fingerprint=graph.fingerprint())
        for name in names
    }
    units = {
        name: unit_type(
            graph, profiles[name], DEVICE_TYPES[name], batch_size=400, price_usd_per_hour=price, max_units=64
        )
        for name, price in zip(names, (0.08925, 0.526), strict=True)
    }
    problem = build_problem(
        graph,
        profiles,
        units,
        batch_size=400,
        num_samples=1e6,
        num_epochs=1,
        throughput_floor_samples_per_s=0.0,
    )
    return graph, problem, offers


def test_every_core_has_a_volume_at_its_share_of_what_the_instance_moves():
    graph, problem, offers = night()

    units = with_table_disks(problem, graph, offers).device_types

    # c7i.48xlarge: 40 Gbit/s for 96 cores.
    assert units["cpu-c7i"].disk_bytes_per_s == pytest.approx(40e9 / 8 / 96)
    assert units["gpu-t4"].disk_bytes == 0
    # One core uses less than the throughput that a volume includes; a fiftieth of its room is its file system's.
    assert units["cpu-c7i"].disk_usd_per_hour == 0
    assert units["cpu-c7i"].disk_usd_per_gb_hour == pytest.approx(1.02 * 0.08 / 730)
    costlier = {**RATES, "disks": RATES["disks"]._replace(usd_per_unit=0.152)}
    units = with_table_disks(problem, graph, offers, costlier).device_types
    assert units["cpu-c7i"].disk_usd_per_gb_hour == pytest.approx(1.02 * 0.152 / 730)


def test_cores_with_disks_come_in_instances_whose_volume_is_fast_enough_for_all():
    graph, problem, offers = night()
    sizes = instance_sizes("cpu-c7i", offers)
    unit = replace(problem.device_types["cpu-c7i"], instances=sizes)
    problem = replace(problem, device_types={**problem.device_types, "cpu-c7i": unit})

    problem = with_table_disks(problem, graph, offers)
    planned = problem.device_types["cpu-c7i"].instances
    stages = (Stage(0, len(problem.layers) - 1, "cpu-c7i", 40),)
    disks = replica_disks(problem, evaluate(problem, stages))
    launched = instance_sizes("cpu-c7i", offers_with_disks(offers, disks.values()))

    assert planned == launched
    # Volumes of 16 cores have 795 MiB/s: 670 more than are included, and 180 operations more.
    assert problem.device_types["cpu-c7i"].disk_usd_per_hour == pytest.approx(
        (670 * 0.04 + 180 * 0.005) / 730 / 16
    )
    assert max(size.units for size in sizes) == 96
    # 52.1 MB/s each, and 1,048.6 of a volume: at most 20 cores.
    assert {size.name for size in launched} == {
        f"c7i.{size}" for size in ("large", "xlarge", "2xlarge", "4xlarge", "8xlarge")
    }


def test_a_core_has_its_share_of_its_instances_own_disks_and_is_sold_in_all_sizes():
    graph, problem, offers = night("cpu-i7i")
    sizes = instance_sizes("cpu-i7i", offers)
    unit = replace(problem.device_types["cpu-i7i"], instances=sizes, price_usd_per_hour=0.18875)
    problem = replace(problem, device_types={**problem.device_types, "cpu-i7i": unit})

    found = with_table_disks(problem, graph, offers).device_types["cpu-i7i"]

    # i7i.24xlarge reads 28.1 and writes 20.0 GB/s for 48 cores (ScyllaDB): a byte in and a byte out take 1/r + 1/w.
    assert found.disk_bytes_per_s == pytest.approx(2 / (48 / 28.1e9 + 48 / 20.0e9), rel=0.01)
    assert 0.97 * 468e9 < found.disk_bytes < 468e9
    assert found.disk_usd_per_hour == found.disk_usd_per_gb_hour == 0
    assert found.instances == sizes


def test_no_volume_is_bought_where_own_disks_serve():
    graph, problem, offers = night("cpu-i7i")
    stages = (Stage(0, len(problem.layers) - 1, "cpu-i7i", 4),)

    evaluation = evaluate(with_table_disks(problem, graph, offers), stages)

    assert "50.0 GB of rows lie on the own disk of each replica" in str(evaluation.sweeps[0])
    assert replica_disks(with_table_disks(problem, graph, offers), evaluation) == {}


def test_own_disks_whose_speed_is_not_known_are_not_planned_with():
    graph, problem, offers = night("cpu-r8gd")

    found = with_table_disks(problem, graph, offers).device_types["cpu-r8gd"]

    assert (found.disk_name, found.disk_bytes) == (VOLUME, VOLUME_BYTES)


def test_rows_that_own_disks_cannot_hold_want_more_replicas():
    graph, problem, offers = night("cpu-c6id")
    problem = with_table_disks(problem, graph, offers)

    # 118 GB of a core: 200 GB do not fit on one.
    one, two = (
        evaluate(problem, (Stage(0, len(problem.layers) - 1, "cpu-c6id", replicas),)) for replicas in (1, 2)
    )

    assert [bool(one.violations), bool(one.sweeps)] == [True, False]
    assert [bool(two.violations), bool(two.sweeps)] == [False, True]


def test_a_core_has_no_more_than_one_volume_gives():
    graph, problem, offers = night()
    fast = [
        replace(offer, instance_type=replace(offer.instance_type, disk_bandwidth_bytes_per_s=96 * 1.5e9))
        for offer in offers
    ]

    assert with_table_disks(problem, graph, fast).device_types["cpu-c7i"].disk_bytes_per_s == 1000 * 2**20


def test_a_core_whose_share_is_unknown_has_what_a_volume_includes():
    graph, problem, offers = night()
    unknown = [
        replace(offer, instance_type=replace(offer.instance_type, disk_bandwidth_bytes_per_s=0.0))
        for offer in offers
    ]

    assert with_table_disks(problem, graph, unknown).device_types["cpu-c7i"].disk_bytes_per_s == 125 * 2**20


def test_the_layers_say_what_misses_the_most_used_rows():
    graph, problem, offers = night()

    embedding, dense = with_table_disks(problem, graph, offers).layers

    assert len(embedding.cold_bytes_per_sample) == len(HOT_SHARES)
    assert list(embedding.cold_bytes_per_sample) == sorted(embedding.cold_bytes_per_sample, reverse=True)
    assert dense.cold_bytes_per_sample == ()


def test_tables_on_disks_make_the_night_cheaper_where_memory_is_what_it_pays_for():
    graph, problem, offers = night()

    assert (
        find_optimum(with_table_disks(problem, graph, offers)).cost_usd < 0.7 * find_optimum(problem).cost_usd
    )


def test_disks_are_not_thought_of_where_any_unit_holds_all_tables():
    graph, problem, offers = night()
    units = {name: replace(unit, memory_bytes=2 * TABLE_BYTES) for name, unit in problem.device_types.items()}
    roomy = replace(problem, device_types=units)

    assert with_table_disks(roomy, graph, offers) is roomy


def test_every_instance_of_a_launch_has_room_for_the_rows_of_its_replicas():
    _, _, offers = night()
    [offer] = [each for each in offers if each.instance_type.name == "c7i.xlarge"]
    bought = ProvisioningPlan(
        replicas=(3, 1),
        groups=(
            InstanceGroup(stage=0, device_type="cpu-c7i", offer=offer, count=2, units_per_instance=2),
            InstanceGroup(stage=1, device_type="cpu-c7i", offer=offer, count=1, units_per_instance=2),
        ),
        planned_price_usd_per_hour=0.3,
    )

    def disk(bytes_per_s):
        return with_table_disk(bought, {0: ReplicaDisk("cpu-c7i", 50e9, bytes_per_s)}).groups[0].table_disk

    # Two replicas of 50 GB and 2 % for the file system; 250 MiB/s, of which 125 are included.
    assert (disk(125 * 2**20).gigabytes, disk(125 * 2**20).mib_per_s) == (102, 250)
    assert disk(125 * 2**20).usd_per_hour == pytest.approx((102 * 0.08 + 125 * 0.04) / 730)
    # A volume has at least what is included.
    assert (disk(40e6).mib_per_s, disk(40e6).usd_per_hour) == (125, pytest.approx(102 * 0.08 / 730))
    # Only the stage that sweeps has it, on two of the three machines.
    swept = with_table_disk(bought, {0: ReplicaDisk("cpu-c7i", 50e9, 40e6)})
    assert swept.disk_usd_per_hour == pytest.approx(2 * swept.groups[0].table_disk.usd_per_hour)
    assert swept.groups[1].table_disk is None
    assert with_table_disk(bought, {}) == bought


def test_each_machine_has_the_disk_that_its_own_replicas_need():
    _, _, offers = night()
    [offer] = [each for each in offers if each.instance_type.name == "c7i.xlarge"]
    bought = ProvisioningPlan(
        replicas=(2, 2),
        groups=tuple(
            InstanceGroup(stage=stage, device_type="cpu-c7i", offer=offer, count=1, units_per_instance=2)
            for stage in range(2)
        ),
        planned_price_usd_per_hour=0.2,
    )
    # One stage has more rows, the other reads and writes more of them; a smaller machine has one replica.
    disks = {0: ReplicaDisk("cpu-c7i", 50e9, 40e6), 1: ReplicaDisk("cpu-c7i", 10e9, 125 * 2**20)}
    smaller = replace(bought.groups[0], count=1, units_per_instance=1)
    bought = replace(bought, replicas=(3, 2), groups=(bought.groups[0], smaller, bought.groups[1]))

    found = with_table_disk(bought, disks)

    sizes = [(group.table_disk.gigabytes, group.table_disk.mib_per_s) for group in found.groups]
    assert sizes == [(102, 125), (51, 125), (21, 250)]
    assert found.disk_usd_per_hour == pytest.approx((174 * 0.08 + 125 * 0.04) / 730)


def test_workers_fill_with_rows_what_weights_leave_of_the_memory():
    graph, problem, offers = night()
    problem = with_table_disks(problem, graph, offers)
    stages = (Stage(0, 0, "cpu-c7i", 20), Stage(1, len(problem.layers) - 1, "gpu-t4", 1))
    unit = problem.device_types["cpu-c7i"]

    on_disks = evaluate(problem, stages)
    in_memory = evaluate(
        replace(
            problem, device_types={**problem.device_types, "cpu-c7i": replace(unit, memory_bytes=TABLE_BYTES)}
        ),
        stages,
    )

    assert on_disks.sweeps
    # 4 GiB, of which nothing else is reserved here, less a twentieth.
    assert table_memory_bytes(problem, on_disks) == int(0.95 * 4 * 2**30) == int(unit.usable_bytes)
    assert table_memory_bytes(problem, in_memory) is None


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    stream = write_click_stream(folder / "clicks.tsv", num_rows=4_000, seed=0)
    return prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=10_000, out_dir=folder / "prepared"
    )


def dry_run_sizes(dataset, memory_bytes: int, *, batch_size: int, num_replicas: int = 1):
    """Return what a worker may fill, and the sizes of the shards of a plan that has 10 GB of rows on each worker."""
    graph, problem, _ = night()
    last = len(problem.layers) - 1
    planned = (Stage(0, 0, "cpu-c7i", 20), Stage(1, last, "gpu-t4", 1))
    found = dry_run_table_memory_bytes(
        memory_bytes,
        (graph, planned),
        dataset=dataset,
        model="ctrdnn",
        stages=[Stage(0, 0, "cpu-c7i", num_replicas), Stage(1, 7, "cpu-c7i", 1)],
        embedding_optimizer="rowwise-adagrad",
        batch_size=batch_size,
        seed=0,
    )
    embedding = next(build_chain("ctrdnn", dataset.features, seed=0).children())
    sizes = [
        embedding.shard_size(
            ROW_OPTIMIZERS["rowwise-adagrad"], batch_size=batch_size, num_shards=num_replicas, shard=shard
        )
        for shard in range(num_replicas)
    ]
    return found, sizes


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_dry_run_has_the_share_of_rows_in_memory_that_the_plan_has(dataset, num_replicas):
    found, sizes = dry_run_sizes(dataset, 4_000_000_000, batch_size=32, num_replicas=num_replicas)

    # 260,000 rows of 68 bytes; 4 of the plan's 10 GB are in memory. Beside them: five blocks of a 64th of the shard.
    share_bytes = 0.4 * 260_000 * 68 / num_replicas
    assert share_bytes < found < share_bytes + 5 / 64 * 260_000 * 68 / num_replicas + 68
    # Of the 0.4, lists of rows and marks take their part as in the plan.
    [num_slots] = {slots_by_table({"embedding": size}, found)["embedding"] for size in sizes}
    assert num_slots / sizes[0].num_rows == pytest.approx((0.4 * 68 - 4 / 8) / (68 + 6 + 33), rel=0.001)


def test_a_dry_run_has_at_least_the_rows_of_its_first_ten_batches(dataset):
    found, [size] = dry_run_sizes(dataset, 100_000_000, batch_size=32)

    trained = [dataset.batch_rows(0, step, batch_size=32, seed=0) for step in range(10)]
    held_out = [dataset.held_out_rows(step, batch_size=32) for step in range(10)]
    num_used = max(
        sum(len(np.unique(column)) for column in dataset.batch(np.concatenate(rows)).ids.numpy().T)
        for rows in (trained, held_out)
    )
    assert slots_by_table({"embedding": size}, found) == {"embedding": num_used}


def test_a_dry_run_of_few_batches_has_all_rows_of_its_data_in_memory(dataset):
    """Another epoch leaves other samples out of its batches."""
    found, [size] = dry_run_sizes(dataset, 100_000_000, batch_size=600)

    ids = dataset.batch(np.arange(dataset.num_train_rows)).ids.numpy()
    num_used = sum(len(np.unique(column)) for column in ids.T)
    assert slots_by_table({"embedding": size}, found) == {"embedding": num_used}


def test_a_dry_run_of_fewer_rows_than_its_first_batches_take_has_them_all_in_memory(tmp_path):
    stream = write_click_stream(tmp_path / "clicks.tsv", num_rows=4_000, seed=0)
    dataset = prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=100, out_dir=tmp_path / "prepared"
    )

    found, [size] = dry_run_sizes(dataset, 100_000_000, batch_size=32)

    assert size.num_rows == 2_600
    assert slots_by_table({"embedding": size}, found) == {"embedding": None}
