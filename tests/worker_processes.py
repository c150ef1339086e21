"""Runs a function in several real processes joined by gloo, and brings back what each returned.

They are forked from one process that has imported torch and done nothing else, so that six begin five times as
fast as where each imports it.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from heterps_core.embeddings.row_exchange import TablePeers

START_METHOD = "forkserver"
SILENCE_LIMIT_S = 60.0

multiprocessing.set_forkserver_preload(
    [__name__, "heterps_core.training.worker", "torch.fx.experimental.symbolic_shapes"]
)


def run_in_processes(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Return `[function(rank, *args) for rank in range(world_size)]`, each run in a process of one gloo world."""
    results = mp.get_context(START_METHOD).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _entry,
            (world_size, (Path(folder) / "store").as_uri(), results, function, args),
            nprocs=world_size,
            start_method=START_METHOD,
        )
    by_rank = dict(results.get() for _ in range(world_size))
    return [by_rank[rank] for rank in range(world_size)]


def connected(group: dist.ProcessGroup | None) -> TablePeers | None:
    """Return the connections of the members of a group that share a table by messages; None for one process."""
    return None if group is None else TablePeers.connect(group, silence_limit_s=SILENCE_LIMIT_S)


def _entry(rank: int, world_size: int, store: str, results: Any, function: Any, args: Any) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    results.put((rank, function(rank, *args)))
    dist.barrier()
    dist.destroy_process_group()
