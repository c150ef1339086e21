"""Large pages change where values lie, never the values."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest
import torch

from heterps_core.transport.shared_memory import HUGE_PAGE_BYTES, map_aligned, use_huge_pages

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
SETTING, SHARED_SETTING = SETTINGS / "enabled", SETTINGS / "shmem_enabled"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux' own")


@pytest.mark.parametrize("num_values", [0, 1, 5_000_000])
def test_values_stay(num_values):
    values = torch.arange(num_values)

    use_huge_pages(values)

    assert torch.equal(values, torch.arange(num_values))


@pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="no huge pages here")
def test_the_mapping_of_a_table_is_advised():
    values = torch.ones(16_000_000)

    use_huge_pages(values)

    # VmFlags names "hg" where huge pages were asked for.
    assert "hg" in entry_of_mapping(values, "VmFlags")


@on_linux
def test_two_mappings_of_a_file_are_one_memory_and_go_with_their_tensors():
    file = os.memfd_create("test")
    os.ftruncate(file, 5_000_000)
    first, second = (torch.frombuffer(map_aligned(file, 5_000_000), dtype=torch.uint8) for _ in range(2))
    os.close(file)

    first[4_999_999] = 7
    assert second[4_999_999] == 7
    assert first.data_ptr() % HUGE_PAGE_BYTES == second.data_ptr() % HUGE_PAGE_BYTES == 0
    assert entry_of_mapping(first, "Size") == ["4884", "kB"]

    address = f"{first.data_ptr():x}-"
    assert address in Path("/proc/self/maps").read_text()
    del first
    assert address not in Path("/proc/self/maps").read_text()
    assert second[4_999_999] == 7


@on_linux
def test_what_is_no_file_cannot_be_mapped():
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_aligned(-1, 1)


@pytest.mark.skipif(
    not SHARED_SETTING.exists()
    or "[deny]" in SHARED_SETTING.read_text()
    or tuple(map(int, platform.release().split(".")[:2])) < (6, 1),
    reason="the system joins no pages of files on request",
)
def test_pages_of_a_memory_file_are_joined_too():
    file = os.memfd_create("test")
    os.ftruncate(file, 4 * HUGE_PAGE_BYTES)
    values = torch.frombuffer(map_aligned(file, 4 * HUGE_PAGE_BYTES), dtype=torch.int64)
    os.close(file)
    values.copy_(torch.arange(len(values)))

    use_huge_pages(values)

    joined_kib, _ = entry_of_mapping(values, "ShmemPmdMapped")
    assert int(joined_kib) > 0
    assert torch.equal(values, torch.arange(len(values)))


def entry_of_mapping(values: torch.Tensor, name: str) -> list[str]:
    """Return what the system says under that name of the mapping that holds the middle of a tensor."""
    middle = values.data_ptr() + values.nbytes // 2
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *entry = line.split()
        first, dash, stop = key.partition("-")
        if dash:
            is_inside = int(first, 16) <= middle < int(stop, 16)
        elif is_inside and key == f"{name}:":
            return entry
    raise AssertionError(f"{name} is not listed")
