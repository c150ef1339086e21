"""A table that replicas share lies in memory once, also while a checkpoint is written."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save

from heterps_core.embeddings.row_optimizers import RowWiseAdagrad
from heterps_core.embeddings.shared_memory_table import SharedMemoryTable
from heterps_core.transport.rank_layout import RankLayout
from heterps_core.transport.shared_memory_link import SharedMemoryLink
from tests.worker_processes import run_in_processes

NUM_ROWS, DIMENSION = 2_000_000, 16
SHARD_BYTES = NUM_ROWS // 2 * DIMENSION * 4


def resident_bytes(field: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def save_shard(rank: int) -> tuple[int, float]:
    """Return how far resident memory rises while the shard is written, and a row that the other replica changed."""
    link = SharedMemoryLink.connect(dist.group.WORLD, layout=RankLayout(((0, 1),)), silence_limit_s=60.0)
    assert link is not None
    table = SharedMemoryTable(
        name="t",
        num_rows=NUM_ROWS,
        dimension=DIMENSION,
        optimizer=RowWiseAdagrad(),
        seed=3,
        initial_standard_deviation=1.0,
        link=link,
    )
    with TemporaryDirectory() as folder:
        save({"small": torch.zeros(3)}, checkpoint_id=f"{folder}/first", no_dist=True)
        Path("/proc/self/clear_refs").write_text("5")  # the largest size begins again
        before = resident_bytes("VmRSS")
        save({"table": table.weight_RD}, checkpoint_id=f"{folder}/second", no_dist=True)
        risen = resident_bytes("VmHWM") - before
    if rank == 1:
        table.weight_RD[0] = 42.0
    dist.barrier()
    return risen, float(table.lookup(torch.tensor([[NUM_ROWS // 2]]))[0, 0])


def test_a_checkpoint_of_a_shard_takes_no_second_copy_and_all_replicas_still_see_it():
    for risen, seen in run_in_processes(save_shard, 2):
        assert risen < SHARD_BYTES / 4
        assert seen == 42.0
