from __future__ import annotations

import time

import pytest
import torch

from heterps_core import compute_device
from heterps_core.compute_device import CPU, HostCopy, clock_of, host_buffer, precision_on, to_device
from heterps_core.data.batch import ClickBatch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_nothing_is_copied_for_a_stage_on_the_host():
    rows = torch.rand(3, 2)
    batch = ClickBatch(dense=rows, ids=torch.zeros(3, 1, dtype=torch.int64), labels=torch.zeros(3))

    assert to_device(rows, CPU) is rows
    assert HostCopy.begin(rows).wait() is rows
    assert batch.to(CPU) is batch
    assert not host_buffer(3, 2, near=CPU).is_pinned()


@pytest.mark.parametrize(("num_threads", "clock"), [(1, time.thread_time), (2, time.perf_counter)])
def test_one_thread_is_timed_on_its_core_and_several_by_the_clock(num_threads, clock, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)

    assert clock_of(CPU) is clock


@pytest.mark.parametrize(
    ("kind", "has_instruction", "capability", "precision"),
    [
        ("cpu", True, (0, 0), "bfloat16"),
        ("cpu", False, (9, 0), "float32"),
        ("cuda", True, (7, 5), "float32"),
        ("cuda", False, (8, 9), "bfloat16"),
    ],
    ids=["cpu with the instruction", "cpu without", "T4", "L4"],
)
def test_hardware_without_units_for_bfloat16_multiplies_in_float32(
    kind, has_instruction, capability, precision, monkeypatch
):
    monkeypatch.setattr(compute_device, "multiplies_bfloat16", lambda: has_instruction)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    assert precision_on(torch.device(kind), "bfloat16") == precision
    assert precision_on(torch.device(kind), "float32") == "float32"


@pytest.mark.gpu
@needs_cuda
def test_a_tensor_goes_to_a_card_and_comes_back_the_same():
    rows = torch.rand(1000, 37)
    on_card = to_device(rows, torch.device("cuda", 0))
    returned = HostCopy.begin(on_card * 2)

    assert on_card.device == torch.device("cuda", 0)
    assert torch.equal(returned.wait(), rows * 2)
    assert returned.tensor.is_pinned()


@pytest.mark.gpu
@needs_cuda
def test_the_clock_waits_for_the_card():
    device = torch.device("cuda", 0)
    matrix = torch.rand(4096, 4096, device=device)
    clock = clock_of(device)
    clock()

    for _ in range(20):
        matrix = matrix @ matrix
    done = torch.cuda.Event()
    done.record()
    clock()

    assert done.query()
