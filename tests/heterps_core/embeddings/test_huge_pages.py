"""Large pages change where values lie, never the values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heterps_core.embeddings.huge_pages import use_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("num_values", [0, 1, 5_000_000])
def test_values_stay(num_values):
    values = torch.arange(num_values)

    use_huge_pages(values)

    assert torch.equal(values, torch.arange(num_values))


@pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="no huge pages here")
def test_the_mapping_of_a_table_is_advised():
    values = torch.ones(16_000_000)

    use_huge_pages(values)

    # VmFlags of a mapping names "hg" where huge pages were asked for.
    inside, flags = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, dash, rest = line.partition("-")
        if dash and " " in rest and ":" not in first:
            middle = values.data_ptr() + values.nbytes // 2
            inside = int(first, 16) <= middle < int(rest.split()[0], 16)
        elif inside and line.startswith("VmFlags"):
            flags = line
    assert " hg" in flags
