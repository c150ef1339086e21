"""Where tensors lie and are computed with: in the host's memory and by its cores, or on a CUDA device.

Between the two they go through pinned memory, which a device reads and writes by itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from heterps_core.errors import ConfigurationError
from heterps_core.machine import multiplies_bfloat16
from heterps_core.units import BYTES_PER_GIB

CPU = torch.device("cpu")

_FIRST_WITH_BFLOAT16 = (8, 0)
"""Least compute capability of cards with units for bfloat16 (NVIDIA CUDA C++ Programming Guide, Ampere)."""


def host_buffer(*shape: int, near: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return host memory, not initialised, for tensors that come from a device or go to it: pinned for CUDA."""
    return torch.empty(shape, dtype=dtype, device=CPU, pin_memory=near.type == "cuda")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the same one where it lies there already.

    A copy to CUDA is only begun. What is computed with it afterwards waits for it, on any thread: all use the
    device's default stream.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)
    return tensor.to(device)


def precision_on(device: torch.device, precision: str) -> str:
    """Return the precision in which layers multiply on a device, one of `PRECISIONS`.

    A device without units for bfloat16 multiplies in float32: products of bfloat16 took 1.5 times as long there
    (docs/log/2026-11.md).
    """
    if device.type == "cuda":
        has_units = torch.cuda.get_device_capability(device) >= _FIRST_WITH_BFLOAT16
    else:
        has_units = multiplies_bfloat16()
    return precision if has_units else "float32"


def use_all_cores() -> None:
    """Let torch use all cores of this process, where nothing else computes meanwhile; see `core_use`."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch on one thread and restore the number after."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def require_cuda() -> None:
    """Check that torch sees a CUDA device.

    Raises:
        ConfigurationError: It does not.
    """
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"measuring a GPU needs a CUDA device that torch sees, but torch {torch.__version__} sees none; install "
            f"a driver and a torch that is built for CUDA, or measure the processor alone"
        )


def card_text(device: torch.device) -> str:
    """Return for people which card a CUDA device is."""
    card = torch.cuda.get_device_properties(device)
    memory_gib = card.total_memory / BYTES_PER_GIB
    return f"{card.name}, {memory_gib:.0f} GiB, compute capability {card.major}.{card.minor}"


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds that first waits for all that a device was given to compute.

    On the processor, with one thread of torch, it is this thread's time on a core: others do not lengthen it.
    """
    if device.type != "cuda":
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor on its way to the host; made by `begin`."""

    tensor: Tensor
    written: torch.cuda.Event | None
    """Happens on the device after the copy; None where nothing is to wait for."""

    @classmethod
    def begin(cls, tensor: Tensor) -> HostCopy:
        """Begin to copy what is or will be computed on a device; on the host this is the tensor itself."""
        if tensor.device.type != "cuda":
            return cls(tensor, None)
        copy = host_buffer(*tensor.shape, near=tensor.device, dtype=tensor.dtype)
        copy.copy_(tensor, non_blocking=True)
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        written.record(torch.cuda.current_stream(tensor.device))
        return cls(copy, written)

    def is_there(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self.written is None or bool(self.written.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Return the tensor on the host, once it is written; may be called on another thread."""
        if self.written is not None:
            self.written.synchronize()
        return self.tensor
