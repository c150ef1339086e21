"""Stages share memory where all of their replicas are on the cores of one machine that allows it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from heterps_core.training.pipeline.shared_memory_boundary import SharedNeighbour
from heterps_core.training.pipeline.stage_place import connect_neighbours
from heterps_core.transport import shared_memory, token_connections
from heterps_core.transport.rank_layout import RankLayout
from tests.worker_processes import run_in_processes


def connect_where_memory_cannot_be_shared(rank: int) -> tuple[int, list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    shared_memory.logger.addHandler(handler)
    if rank == 1:
        del os.memfd_create
    found = connect_neighbours(RankLayout(((0,), (1,))), rank=rank)
    return sum(isinstance(each, SharedNeighbour) for each in found.values()), messages


def test_all_send_messages_where_one_cannot_share_memory():
    for num_shared, messages in run_in_processes(connect_where_memory_cannot_be_shared, 2):
        assert num_shared == 0
        (message,) = messages
        assert "exchange rows by messages" in message


def connect_with_other_machines(rank: int, folder: str) -> list[int]:
    token_connections.BOOT_ID = Path(folder) / f"machine-{rank // 3}"
    layout = RankLayout(((0,), (1,), (2, 3), (4,), (5,)))
    device = torch.device("meta" if rank == 5 else "cpu")
    found = connect_neighbours(layout, rank=rank, device=device)
    return sorted(number for number, each in found.items() if isinstance(each, SharedNeighbour))


def test_only_stages_whose_replicas_are_all_on_the_cores_of_one_machine_share_memory(tmp_path):
    # Ranks 0 to 2 are on one machine, 3 to 5 on another, and 5 computes on something else.
    for machine in (0, 1):
        (tmp_path / f"machine-{machine}").write_text(f"machine {machine}")
    shared = run_in_processes(connect_with_other_machines, 6, str(tmp_path))

    assert shared == [[1], [0], [], [], [], []]
