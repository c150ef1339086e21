"""Reads the graph files that PipeDream's profiler writes: nodes with times and sizes, then edges.

A node is a line `node12 -- Conv2d(64, 64, ...) -- forward_compute_time=1.2, backward_compute_time=2.3,
activation_size=4.0, parameter_size=5.0` with milliseconds and bytes of a whole mini-batch; an edge is a line
`node11 -- node12`. The format is that of Narayanan et al., PipeDream (SOSP 2019), https://github.com/msr-fiddle/pipedream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from heterps_core.errors import DataError

_SEPARATOR = " -- "
_STAGE = "stage_id="
"""Begins a fourth part, which PipeDream's optimizer adds and nobody needs here."""

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationNode:
    """One operation of the profiled model."""

    name: str
    text: str
    """As torch prints the module, for instance "Conv2d(3, 64, kernel_size=(3, 3), stride=(1, 1))"."""

    forward_ms: float
    backward_ms: float
    activation_bytes: tuple[float, ...]
    """Of each tensor that leaves, for the whole mini-batch."""

    parameter_bytes: float

    @property
    def operator(self) -> str:
        """The text without its arguments."""
        return self.text.partition("(")[0]

    @property
    def is_input(self) -> bool:
        """Stands for the loading of data; its time is no computation of the model."""
        return self.operator.startswith("Input")


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationGraph:
    """All operations, with inputs left out."""

    nodes: Mapping[str, OperationNode]
    edges: tuple[tuple[str, str], ...]


def read_graph(path: Path) -> OperationGraph:
    """Read a graph file.

    Raises:
        DataError: The file cannot be read, or a line breaks the format; carries the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(path, f"must be text: {error}") from error
    nodes: dict[str, OperationNode] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        parts = [part for part in line.strip().split(_SEPARATOR) if not part.startswith(_STAGE)]
        if len(parts) == 3:
            node = _node(path, number, *parts)
            if node.name in nodes:
                raise DataError(path, f"{node.name} stands twice", line=number)
            nodes[node.name] = node
        elif len(parts) == 2:
            edges[parts[0], parts[1]] = number
        elif line.strip():
            raise DataError(
                path,
                f"must be 'node -- operation -- times and sizes' or 'node -- node', got {_shown(line)}; "
                f"is the file cut off?",
                line=number,
            )
    for edge, number in edges.items():
        for name in edge:
            if name not in nodes:
                raise DataError(
                    path,
                    f"an edge must join two nodes of the file, got {name!r}; is it cut off?",
                    line=number,
                )
    operations = {name: node for name, node in nodes.items() if not node.is_input}
    if not operations:
        raise DataError(path, "holds no operation; is it a PipeDream graph file?")
    return OperationGraph(
        nodes=operations,
        edges=tuple(edge for edge in edges if edge[0] in operations and edge[1] in operations),
    )


def _node(path: Path, number: int, name: str, text: str, fields: str) -> OperationNode:
    values = dict(part.partition("=")[::2] for part in fields.split(", "))
    missing = [field for field in _FIELDS if field not in values]
    if missing:
        raise DataError(path, f"{name} lacks {', '.join(missing)}; is the file cut off?", line=number)
    forward, backward, activation, parameters = (values[field] for field in _FIELDS)
    return OperationNode(
        name=name,
        text=text,
        forward_ms=_number(path, number, "forward_compute_time", forward),
        backward_ms=_number(path, number, "backward_compute_time", backward),
        activation_bytes=tuple(
            _number(path, number, "activation_size", part) for part in activation.strip("[]").split("; ")
        ),
        parameter_bytes=_number(path, number, "parameter_size", parameters),
    )


def _number(path: Path, line: int, field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise DataError(path, f"{field} must be a number, got {_shown(text)}", line=line) from None
    if not (math.isfinite(value) and value >= 0):
        raise DataError(path, f"{field} must be finite and not negative, got {text}", line=line)
    return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
