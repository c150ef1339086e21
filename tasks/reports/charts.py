"""Charts of a page as SVG text, drawn by matplotlib: no script, no font and no picture is loaded.

Axes and texts take the colours of the page, which differ in the dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from heterps_core.planning.simulate.pipeline_load import PipelineLoad
from heterps_core.planning.simulate.pipeline_simulation import pass_order
from heterps_core.units import MS_PER_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXT, _FAINT = "#010203", "#040506"
_PAGE_COLOURS = {_TEXT: "var(--text)", _FAINT: "var(--line)"}
"""Colours that nothing else has -> the page's own."""

_BLUE, _ORANGE, _GREEN = "#3b7dd8", "#d97b16", "#2a9d6f"

_MOST_POINTS = 80
"""A longer curve is drawn by the means of so many parts."""

_SHOWN_BATCHES = 2


class Night(NamedTuple):
    """One night as a point of a chart."""

    day: str
    usd: float | None
    auc: float | None
    samples_per_s: float | None
    became_champion: bool | None


class Chart(NamedTuple):
    """A drawing with its caption and, for those who cannot see it, its content in words."""

    caption: str
    words: str
    svg: str


def night_charts(nights: Sequence[Night]) -> list[Chart]:
    """Return cost, quality and speed of nights in their order; champions are filled, the last night is larger."""
    series = {
        "USD of each night": [night.usd for night in nights],
        "AUC on held-out rows (filled = champion)": [night.auc for night in nights],
        "Samples/s of each night": [night.samples_per_s for night in nights],
    }
    return [_night_chart(caption, nights, values) for caption, values in series.items()]


def loss_chart(losses: Sequence[float]) -> Chart:
    """Return the log-loss of each training step."""
    parts = np.array_split(np.asarray(losses), min(_MOST_POINTS, len(losses)))
    ends = np.cumsum([len(part) for part in parts])
    means = [float(part.mean()) for part in parts]

    def draw(axes: Axes) -> None:
        axes.plot(ends, means, color=_BLUE, linewidth=1.2)
        axes.set_xlabel("step")

    words = f"{len(losses):,} steps, from {means[0]:.4f} to {means[-1]:.4f}"
    return Chart("Log-loss of the training steps", words, _svg(draw))


def pipeline_chart(load: PipelineLoad) -> Chart:
    """Return the passes of the first batches in each stage, by the plan's times; gaps are waits."""
    num_batches = 1 if load.drains else _SHOWN_BATCHES
    passes = _passes(load, num_microbatches=num_batches * load.num_microbatches)
    colours = {"forward": _BLUE, "backward": _ORANGE}

    def draw(axes: Axes) -> None:
        for (stage, direction), bars in passes.items():
            ms = [(start * MS_PER_S, seconds * MS_PER_S) for start, seconds in bars]
            axes.broken_barh(ms, (stage - 0.35, 0.7), facecolors=colours[direction], label=direction)
        axes.set_yticks(range(len(load.stages)), [f"stage {index}" for index in range(len(load.stages))])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        axes.legend(
            handles.values(),
            handles,
            frameon=False,
            labelcolor=_TEXT,
            ncols=2,
            loc="lower left",
            bbox_to_anchor=(0, 1),
        )

    shown = "First batch" if num_batches == 1 else f"First {num_batches} batches"
    caption = f"{shown} in the pipeline by the plan, {load.num_microbatches} x micro-batch"
    words = f"{len(load.stages)} stages, forward and backward passes; gaps are waits"
    return Chart(caption, words, _svg(draw))


def _passes(load: PipelineLoad, *, num_microbatches: int) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """Return start and length of each pass, by stage and direction; a pass waits for its stage and for its rows."""
    free = [0.0] * len(load.stages)
    ends: dict[tuple[int, str, int], float] = {}
    passes: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for stage, action in pass_order(num_microbatches=num_microbatches, num_stages=len(load.stages)):
        its = load.stages[stage]
        is_forward = action.direction == "forward"
        seconds = its.forward_seconds if is_forward else its.backward_seconds + its.weight_gradient_seconds
        source = ends.get((stage + (-1 if is_forward else 1), action.direction, action.microbatch), 0.0)
        start = max(free[stage], source + (its.input_seconds if is_forward else its.output_seconds))
        start += its.exchange_seconds if is_forward else 0.0
        passes.setdefault((stage, action.direction), []).append((start, seconds))
        ends[stage, action.direction, action.microbatch] = free[stage] = start + seconds
        free[stage] += 0.0 if is_forward else its.exchange_seconds
    return passes


def _night_chart(caption: str, nights: Sequence[Night], values: Sequence[float | None]) -> Chart:
    known = [(at, value) for at, value in enumerate(values) if value is not None]

    def draw(axes: Axes) -> None:
        axes.plot(*zip(*known, strict=True), color=_BLUE, linewidth=1.2)
        for at, value in known:
            filling = _GREEN if nights[at].became_champion else "none"
            size = 9 if at == len(nights) - 1 else 6
            axes.plot(at, value, "o", markeredgecolor=_GREEN, markerfacecolor=filling, markersize=size)
        step = max(1, len(nights) // 4)
        axes.set_xticks(range(0, len(nights), step), [night.day[5:] for night in nights[::step]])
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.margins(y=0.2)

    words = ", ".join(f"{nights[at].day}: {value:.6g}" for at, value in known)
    return Chart(caption, words, _svg(draw) if known else "")


def _svg(draw: Callable[[Axes], None]) -> str:
    """Return a drawing in the colours of the page, without what a viewer of files needs."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _TEXT
    )
    style |= dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), _FAINT)
    style |= {"svg.fonttype": "none", "svg.hashsalt": "heterps", "font.size": 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.4, 2.4), layout="constrained")
        axes = figure.subplots()
        axes.patch.set_visible(False)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>|\sxmlns(:\w+)?=\"[^\"]*\"", "", text.getvalue(), flags=re.DOTALL)
    for colour, variable in _PAGE_COLOURS.items():
        svg = svg.replace(colour, variable)
    return svg[svg.index("<svg") :]
