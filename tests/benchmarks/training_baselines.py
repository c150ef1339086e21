"""What the engine's speed is compared with: FBGEMM's fused table, and two workers beside one process."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.nn.functional as F

from heterps_core.data.features import NO_ID
from infra.workspace import free_loopback_port
from tests.benchmarks.training_engine import (
    BATCH_SIZE,
    DIMENSION,
    NUM_SLOTS,
    dense_layers,
    make_batches,
    make_step,
)

FBGEMM_INSTALL = "for the comparison: pip install --no-deps fbgemm-gpu-cpu==1.8.0"
NUM_WORKERS = 2


def fbgemm_step(num_rows: int, *, seed: int, list_length: int = 1) -> Callable[[], None] | None:
    """Return a step of plain torch layers behind FBGEMM's table with fused row-wise Adagrad; None without FBGEMM.

    The batches are those of `make_batches`.
    """
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError:
        return None
    spec = (num_rows // NUM_SLOTS, DIMENSION, EmbeddingLocation.HOST, ComputeDevice.CPU)
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [spec] * NUM_SLOTS, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.05, eps=1e-8
    )
    table.init_embedding_weights_uniform(-0.05, 0.05)
    dense = dense_layers()
    optimizer = torch.optim.Adam(dense.parameters(), lr=1e-3, fused=True)
    batches = []
    for batch in make_batches(num_rows, seed=seed, list_length=list_length):
        # FBGEMM wants all samples of a slot side by side.
        ids = batch.ids.view(BATCH_SIZE, NUM_SLOTS, list_length).transpose(0, 1)
        offsets = F.pad((ids != NO_ID).sum(2).flatten().cumsum(0), (1, 0))
        batches.append((batch, ids[ids != NO_ID], offsets))
    upcoming = itertools.cycle(batches)

    def step() -> None:
        batch, rows, offsets = next(upcoming)
        logits = dense(torch.cat([table(rows, offsets), batch.dense], 1))
        loss = F.binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def two_workers(make: Callable[..., Callable[[], None]], *args: object) -> Iterator[Callable[[], None]]:
    """Yield a step of two processes of one thread, joined by gloo; they sleep between calls.

    Args:
        make: Called in each as `make(rank, NUM_WORKERS, *args)`, returns its part of a step; must be importable.
        args: Of it.
    """
    context = multiprocessing.get_context("spawn")
    port = free_loopback_port()
    ends, processes = [], []
    for rank in range(NUM_WORKERS):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=_work, args=(rank, port, theirs, make, args), daemon=True))
        processes[-1].start()
        ends.append(mine)

    def step() -> None:
        for end in ends:
            end.send(True)
        for end in ends:
            end.recv()

    try:
        for end in ends:
            end.recv()
        yield step
    finally:
        for end in ends:
            end.send(False)
        for process in processes:
            process.join()


def make_worker_step(
    rank: int, num_replicas: int, num_rows: int, seed: int, shares_memory: bool
) -> Callable[[], None]:
    """Return the engine's step of one of several workers, for `two_workers`."""
    return make_step(
        num_rows,
        precision="float32",
        seed=seed,
        replica=rank,
        group=dist.group.WORLD,
        num_replicas=num_replicas,
        shares_memory=shares_memory,
    )


def _work(
    rank: int,
    port: int,
    end: Connection,
    make: Callable[..., Callable[[], None]],
    args: tuple[object, ...],
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        RANK=str(rank),
        WORLD_SIZE=str(NUM_WORKERS),
        LOCAL_WORLD_SIZE=str(NUM_WORKERS),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    step = make(rank, NUM_WORKERS, *args)
    end.send(True)
    while end.recv():
        step()
        end.send(True)
    dist.destroy_process_group()
