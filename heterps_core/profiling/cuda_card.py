"""The CUDA device of this machine in words and numbers: what a profile was measured on, and with which driver."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from heterps_core.errors import ConfigurationError
from heterps_core.units import BYTES_PER_GIB

QUERY_TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaCard:
    """One CUDA device."""

    name: str
    memory_bytes: int
    compute_capability: str
    driver: str
    """Version of the driver, as nvidia-smi says it; empty where that does not run."""

    cuda: str
    """Version of CUDA that torch was built for."""

    def __str__(self) -> str:
        memory_gib = self.memory_bytes / BYTES_PER_GIB
        return f"{self.name}, {memory_gib:.0f} GiB, compute capability {self.compute_capability}"

    def fingerprint(self) -> str:
        """Return a short hash of what speed depends on."""
        text = f"{self}/{self.driver}/{self.cuda}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def software_versions(self) -> Mapping[str, str]:
        """Return the versions that come on top of those of a measurement on the host."""
        return {"cuda": self.cuda, "nvidia-driver": self.driver}


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


def this_card(device: torch.device) -> CudaCard:
    """Describe a CUDA device of this machine."""
    properties = torch.cuda.get_device_properties(device)
    return CudaCard(
        name=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=f"{properties.major}.{properties.minor}",
        driver=_driver_version(),
        cuda=torch.version.cuda or "",
    )


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = said.split()
    return lines[0] if lines else ""
