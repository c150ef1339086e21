"""The hardware and the software of this machine, which profiles record.

No torch here unless there is a card, so that a cached profile can be looked up at once.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from heterps_core import __version__

_NUMBERS = ("cpu family", "model", "stepping", "CPU implementer", "CPU part")
"""Fields of /proc/cpuinfo that tell processors apart, of x86 and of Arm."""

_CARD_DRIVER = Path("/proc/driver/nvidia")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The hardware that this process runs on."""

    processor: str
    num_cores: int
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.processor}, {self.num_cores} cores"

    def fingerprint(self) -> str:
        """Return a short hash of what speed depends on."""
        text = "/".join(str(value) for value in asdict(self).values())
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def this_machine() -> Machine:
    """Describe this machine.

    The numbers of the processor are part of its name, because a virtual machine may show a vendor alone as the
    model's name, and Arm processors have no such name.
    """
    return Machine(
        processor=_processor(),
        num_cores=num_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def software_versions() -> Mapping[str, str]:
    """Return the versions of what the measured code is made of."""
    return {
        "heterps": __version__,
        "torch": version("torch"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
    }


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def card_names() -> list[str]:
    """Return the names of the cards that torch sees; it takes seconds to load, so a driver is looked for first."""
    if not _CARD_DRIVER.exists():
        return []
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def multiplies_bfloat16() -> bool:
    """Tell whether the processor has an instruction that multiplies bfloat16."""
    fields = _processor_fields()
    flags = f"{fields.get('flags', '')} {fields.get('Features', '')}".split()
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags)


def _processor() -> str:
    first = _processor_fields()
    name = first.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{field} {first[field]}" for field in _NUMBERS if field in first]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def _processor_fields() -> Mapping[str, str]:
    """Return what the system says of the first core, by name."""
    first: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        first.setdefault(name.strip(), value.strip())
    return first
