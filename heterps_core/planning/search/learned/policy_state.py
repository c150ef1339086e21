"""What a policy has learned, as plain arrays: kept after one search to start the next.

The file is safetensors: numbers and their names, no pickle, so reading one runs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import nn

from heterps_core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyState:
    """The parameters of a policy network by name."""

    arrays: Mapping[str, NDArray[np.float32]]

    @classmethod
    def of(cls, policy: nn.Module) -> PolicyState:
        """Return a copy of what a policy has learned so far."""
        return cls(arrays={name: tensor.numpy().copy() for name, tensor in policy.state_dict().items()})

    def load_into(self, policy: nn.Module) -> None:
        """Overwrite a policy of the same shape.

        Raises:
            ConfigurationError: The policy has other parameters, or parameters of other shapes.
        """
        wanted = {name: tuple(tensor.shape) for name, tensor in policy.state_dict().items()}
        held = {name: array.shape for name, array in self.arrays.items()}
        if wanted != held:
            raise ConfigurationError(
                f"the warm start must come from a problem with as many device types and kinds of layers, "
                f"searched with the same settings: it holds {_shown(held)}, this search needs "
                f"{_shown(wanted)}; start without it"
            )
        policy.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in self.arrays.items()})

    def save(self, path: Path) -> None:
        """Write the state as a safetensors file; a reader sees the old file or the new one, never a part.

        Raises:
            OSError: The file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_bytes(save(dict(self.arrays)))
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> PolicyState:
        """Read a state that `save` has written.

        Raises:
            ConfigurationError: The file cannot be read, is no safetensors file, or holds a number that is not finite.
        """
        try:
            arrays = load_file(path)
        except OSError as error:
            raise ConfigurationError(f"cannot read the policy file {path}: {error.strerror}") from error
        except SafetensorError as error:
            raise ConfigurationError(f"the policy file {path} must be a safetensors file: {error}") from error
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise ConfigurationError(
                    f"the parameters in the policy file {path} must be finite, but {name} has one that is not"
                )
        return cls(arrays=arrays)


def _shown(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in sorted(shapes.items()))
