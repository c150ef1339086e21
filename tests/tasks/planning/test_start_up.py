"""Start-up as planned against a timeline that is replayed block by block.

The timeline has its own sources. A c5.xlarge is reached 29.3 s after the request (ec2-boot-bench, daemonology.net,
2021-08-12: 1.5 + 4.9 + 17.2 + 5.6 s); EC2 names its id after 5 s (brevdev/ec2-coldboot-research). A gp3 volume whose
snapshot fills it reads 135 MB/s (repost.aws, MGN migrations: 130 to 140); the libraries that torch maps are 652 MB
here, those for cards are taken as 3 GB. A Python with torch starts in 5 s, three times one after the other, sockets
and code take 8 s, and a card's context 12 s. Initial rows are drawn at 0.53 GB/s (one EPYC core, 2026-11-28).
"""

import heapq
from dataclasses import replace

import numpy as np
import pytest

from heterps_core.device_types import get_device_type
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.plans.scheduling_plan import Stage
from tasks.planning.extra_costs import STARTUP_SECONDS, job_extra_costs, with_starts
from tasks.planning.table_disks import with_table_disks
from tests.tasks.planning.test_table_disks import night

BLOCK_BYTES = 64e6
SAMPLES = 1e9
BOOTED_S = 5.0 + 29.3
IMAGE_BYTES_PER_S = 135e6
DRAWN_BYTES_PER_S = 0.53e9
FLOW_BYTES_PER_S = 5e9 / 8


def blocks_done(num_workers, num_blocks, *, source_s, disk_s):
    """When the last block of a machine's workers is through: each takes one from its source, then the disk does.

    A worker takes the next block when the disk has its last one; the disk serves one at a time.
    """
    ready = [(source_s, worker, 1) for worker in range(num_workers)]
    heapq.heapify(ready)
    disk_free = 0.0
    while ready:
        at, worker, block = heapq.heappop(ready)
        disk_free = max(disk_free, at) + disk_s
        if block < num_blocks:
            heapq.heappush(ready, (disk_free + source_s, worker, block + 1))
    return disk_free


def changed_share(num_rows, num_samples):
    """Expected distinct rows of draws by Zipf's law with exponent 1.05, over all rows: summed rank by rank in NumPy.

    Ranks beyond the first million lie in a thousand classes.
    """
    ends = np.unique(np.geomspace(1, num_rows + 1, 200_000).astype(np.int64))
    ranks, sizes = (ends[:-1] + ends[1:] - 1) / 2, np.diff(ends)
    uses = ranks**-1.05
    chances = uses / (uses * sizes).sum()
    return float((sizes * -np.expm1(-num_samples * chances)).sum() / num_rows)


def replayed_seconds(name, machines, shard_bytes, *, unit, from_bucket, changed, on_disk):
    """Seconds from the request to the last loaded byte, and of storing what changed, over all machines."""
    network = min(get_device_type(name).tensor_bandwidth_bytes_per_s, FLOW_BYTES_PER_S)
    is_card = name.startswith("gpu")
    libraries = 0.652e9 + 3e9 * is_card
    up_s = BOOTED_S + libraries / IMAGE_BYTES_PER_S + 3 * 5.0 + 8.0 + 12.0 * is_card
    loaded, stored = [], []
    for num_workers in machines:
        disk_s = BLOCK_BYTES / (num_workers * unit.disk_bytes_per_s) if on_disk else 0.0
        source = network if from_bucket else DRAWN_BYTES_PER_S
        for times, rate, share in ((loaded, source, 1.0), (stored, network, changed)):
            num_blocks = round(shard_bytes * share / BLOCK_BYTES)
            times.append(
                blocks_done(num_workers, num_blocks, source_s=BLOCK_BYTES / rate, disk_s=disk_s)
                if num_blocks
                else 0.0
            )
    return up_s + max(loaded) + max(stored)


@pytest.mark.parametrize("from_bucket", [False, True], ids=["first night", "later night"])
@pytest.mark.parametrize(
    ("name", "table_bytes", "machines"),
    [
        ("cpu-c7i", 1.5e9, [2]),
        ("gpu-t4", 1.5e9, [1]),
        ("cpu-r6in", 177e9, [4, 2, 1]),
        ("cpu-i7i", 500e9, [8, 4]),
        ("cpu-r6in", 500e9, [8, 8]),
    ],
    ids=["small, cores", "small, card", "example", "500 GB, own disks", "500 GB, volumes"],
)
def test_start_up_and_the_last_rows_take_what_a_replayed_timeline_takes(
    name, table_bytes, machines, from_bucket
):
    cpu = name if name.startswith("cpu") else "cpu-c7i"
    graph, problem, offers = night(cpu, table_bytes)
    problem = with_table_disks(replace(problem, num_samples=SAMPLES), graph, offers)
    problem = replace(problem, extra_costs=job_extra_costs(graph))
    problem = with_starts(problem, graph, starts_from_model=from_bucket)
    stages = (Stage(0, len(problem.layers) - 1, name, sum(machines)),)

    evaluation = evaluate(problem, stages)

    assert bool(evaluation.sweeps) == (table_bytes > 100e9)
    num_rows = graph.layers[0].parameter_bytes / graph.layers[0].looked_up_bytes_per_sample
    expected = replayed_seconds(
        name,
        machines,
        table_bytes / sum(machines),
        unit=problem.device_types[name],
        from_bucket=from_bucket,
        changed=changed_share(num_rows, 6e7),
        on_disk=bool(evaluation.sweeps),
    )
    assert STARTUP_SECONDS + evaluation.start_seconds == pytest.approx(expected, rel=0.25)
