"""The kinds of arrays that the planner computes with, and how candidates are taken out of tables of them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def taken(table: Any, shape: tuple[int, ...], index: tuple[Ints, ...]) -> Any:
    """Return a dataclass whose arrays, which broadcast to a shape, are those at an index of NumPy's.

    Arrays in tuples and in dataclasses among its fields are taken as well.
    """

    def part(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return (value if value.shape == shape else np.broadcast_to(value, shape))[index]
        if isinstance(value, tuple):
            return tuple(map(part, value))
        return taken(value, shape, index) if is_dataclass(value) else value

    return replace(table, **{each.name: part(getattr(table, each.name)) for each in fields(table)})


def run_layers(runs: Ints) -> tuple[Ints, Ints]:
    """Return first and last layers of runs, numbered b (b + 1) / 2 + a for layers a..b."""
    last_layers = ((np.sqrt(8 * runs + 1) - 1) // 2).astype(np.int64)
    return runs - last_layers * (last_layers + 1) // 2, last_layers
