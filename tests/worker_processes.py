"""Runs a function in several real processes joined by gloo, and brings back what each returned."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_in_processes(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Return `[function(rank, *args) for rank in range(world_size)]`, each run in a process of one gloo world."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(_entry, (world_size, free_port(), results, function, args), nprocs=world_size)
    by_rank = dict(results.get() for _ in range(world_size))
    return [by_rank[rank] for rank in range(world_size)]


def _entry(rank: int, world_size: int, port: int, results: Any, function: Any, args: Any) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results.put((rank, function(rank, *args)))
    dist.barrier()
    dist.destroy_process_group()
