"""Placements in words: which layers are where, and in what two of them differ.

A placement is the device type of each layer. Two plans that differ in replica counts alone have the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from heterps_core.plans.scheduling_plan import Stage

MAX_STAGES_IN_WORDS = 3
MAX_RUNS_IN_WORDS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Consecutive layers that are on one device type in one plan and on another in the other."""

    first_layer: int
    last_layer: int
    from_type: str
    to_type: str


def device_type_of_layers(stages: Sequence[Stage]) -> tuple[str, ...]:
    """Return the device type of each layer, or both of them in one text.

    Example:
        >>> device_type_of_layers([Stage(0, 1, "cpu", 4), Stage(2, 2, "gpu", 1)])
        ('cpu', 'cpu', 'gpu')
    """
    return tuple(
        stage.device_types for stage in stages for _ in range(stage.first_layer, stage.last_layer + 1)
    )


def moves_between(before: Sequence[Stage], after: Sequence[Stage]) -> tuple[Move, ...]:
    """Return what changes place from one plan to another, empty where only replica counts differ.

    Example:
        >>> moves_between([Stage(0, 2, "gpu", 1)], [Stage(0, 1, "cpu", 4), Stage(2, 2, "gpu", 1)])
        (Move(first_layer=0, last_layer=1, from_type='gpu', to_type='cpu'),)
    """
    pairs = list(zip(device_type_of_layers(before), device_type_of_layers(after), strict=True))
    moves = []
    for (from_type, to_type), layers in groupby(range(len(pairs)), key=pairs.__getitem__):
        indices = list(layers)
        if from_type != to_type:
            moves.append(
                Move(first_layer=indices[0], last_layer=indices[-1], from_type=from_type, to_type=to_type)
            )
    return tuple(moves)


def layers_text(runs: Sequence[tuple[int, int]]) -> str:
    """Return runs of layers in words, with a count instead of the last ones where there are many.

    Example:
        >>> layers_text([(3, 3)]), layers_text([(1, 4), (7, 7)])
        ('layer 3', 'layers 1..4, 7')
    """
    shown = [f"{first}..{last}" if first < last else f"{first}" for first, last in runs[:MAX_RUNS_IN_WORDS]]
    num_hidden = len(runs) - len(shown)
    hidden = f" and {num_hidden} more runs" if num_hidden else ""
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"{'layer' if is_one else 'layers'} {', '.join(shown)}{hidden}"


def moves_text(moves: Sequence[Move]) -> str:
    """Return moves in words, by where they go.

    Example:
        >>> up = Move(first_layer=1, last_layer=7, from_type="cpu", to_type="gpu")
        >>> moves_text([up, Move(first_layer=9, last_layer=9, from_type="gpu", to_type="cpu")])
        'layers 1..7 to gpu, layer 9 to cpu'
    """
    runs: dict[str, list[tuple[int, int]]] = {}
    for move in moves:
        mine = runs.setdefault(move.to_type, [])
        if mine and mine[-1][1] + 1 == move.first_layer:  # from two types to the same one
            mine[-1] = (mine[-1][0], move.last_layer)
        else:
            mine.append((move.first_layer, move.last_layer))
    return ", ".join(f"{layers_text(mine)} to {to_type}" for to_type, mine in runs.items())


def plan_text(stages: Sequence[Stage]) -> str:
    """Return a plan in a few words: its stages, or where there are many, the units of each device type.

    Example:
        >>> plan_text([Stage(0, 0, "cpu", 31), Stage(1, 7, "gpu", 2)])
        'layer 0 on 31 x cpu, layers 1..7 on 2 x gpu'
    """
    if len(stages) == 1:
        return f"all on {stages[0].units}"
    if len(stages) <= MAX_STAGES_IN_WORDS:
        return ", ".join(
            f"{layers_text([(stage.first_layer, stage.last_layer)])} on {stage.units}" for stage in stages
        )
    units: Counter[str] = Counter()
    for stage in stages:
        units.update(stage.replicas_by_type)
    return f"{' + '.join(f'{count} x {name}' for name, count in units.items())} in {len(stages)} stages"
