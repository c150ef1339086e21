"""The two pictures of a run: its pipeline over time, and what each plan costs at which throughput.

Drawn with matplotlib's object interface and no display, so that any process may draw at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from heterps_core.planning.cost_model.evaluation import PlanEvaluation, StageEvaluation
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.search_result import SearchResult
from heterps_core.training.pipeline.pipeline_schedule import one_forward_one_backward
from heterps_core.units import MS_PER_S, SAMPLES_PER_MILLION

FORWARD_SHARE = 1 / 3
"""Of a stage's time: a backward pass multiplies matrices twice where the forward pass does once."""

DEVICE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Told apart by colour-blind readers too (Okabe and Ito 2008)."""

MARKERS = "osD^vPX*hp<>"
MAX_MICROBATCHES_WITH_NUMBERS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One forward or backward pass of a micro-batch in a stage, as a bar of the picture."""

    stage: int
    direction: str
    microbatch: int
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        """When the pass is over."""
        return self.start_s + self.duration_s


def pipeline_passes(stage_seconds: Sequence[float], *, num_microbatches: int) -> list[Pass]:
    """Return when each pass of one training step starts, under the 1F1B order.

    A pass starts when its stage is free and its input is there: a forward pass needs the stage before
    it, a backward pass the stage behind it. A stage of time t takes t/M for each of M micro-batches, a
    third of it forward. Time between stages is part of the stage times of the cost model.

    Args:
        stage_seconds: ET of each stage for one batch.
        num_microbatches: M, at least 1.

    Example:
        >>> [(p.direction, p.start_s, p.end_s) for p in pipeline_passes([3.0], num_microbatches=1)]
        [('forward', 0.0, 1.0), ('backward', 1.0, 3.0)]
    """
    num_stages = len(stage_seconds)
    orders = [
        list(one_forward_one_backward(num_microbatches=num_microbatches, num_stages=num_stages, stage=stage))
        for stage in range(num_stages)
    ]
    done: dict[tuple[int, str, int], Pass] = {}
    free_at_s = [0.0] * num_stages
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                action = order[0]
                needed = _input_of(stage, action.direction, action.microbatch, num_stages)
                if needed is not None and needed not in done:
                    break
                start_s = max(free_at_s[stage], done[needed].end_s if needed else 0.0)
                share = FORWARD_SHARE if action.direction == "forward" else 1 - FORWARD_SHARE
                order.pop(0)
                done[stage, action.direction, action.microbatch] = Pass(
                    stage=stage,
                    direction=action.direction,
                    microbatch=action.microbatch,
                    start_s=start_s,
                    duration_s=stage_seconds[stage] / num_microbatches * share,
                )
                free_at_s[stage] = done[stage, action.direction, action.microbatch].end_s
    return sorted(done.values(), key=lambda item: (item.start_s, item.stage))


def stages_figure(
    problem: SchedulingProblem, evaluation: PlanEvaluation, *, num_microbatches: int, title: str
) -> Figure:
    """Draw one training step: a row per stage, a bar per pass, coloured by device type."""
    num_stages = len(evaluation.stages)
    passes = pipeline_passes(
        [stage.seconds for stage in evaluation.stages], num_microbatches=num_microbatches
    )
    colours = device_colours(problem)
    figure, axes = canvas(height_inches=1.9 + 0.75 * num_stages)
    for item in passes:
        _draw_pass(
            axes,
            item,
            colour=colours[evaluation.stages[item.stage].stage.device_type],
            has_number=num_microbatches <= MAX_MICROBATCHES_WITH_NUMBERS,
        )
    end_ms = max(item.end_s for item in passes) * MS_PER_S
    axes.set_yticks(range(num_stages), [_stage_label(problem, part) for part in evaluation.stages])
    axes.invert_yaxis()
    axes.set_xlim(0, end_ms)
    axes.set_xlabel("time within one training step (ms)")
    busy = sum(item.duration_s for item in passes) * MS_PER_S / (end_ms * num_stages)
    axes.set_title(
        f"{title}\n{problem.batch_size:,} samples in {num_microbatches} micro-batches; "
        f"step {end_ms:,.1f} ms, stages busy {busy:.0%} of the time",
        fontsize=10,
        loc="left",
    )
    used = dict.fromkeys(part.stage.device_type for part in evaluation.stages)
    handles = [Patch(facecolor=colours[name], label=name) for name in used]
    handles += [
        Patch(facecolor="white", edgecolor="#444444", label="forward"),
        Patch(facecolor="white", edgecolor="#444444", hatch="////", label="backward"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def cost_figure(problem: SchedulingProblem, results: Mapping[str, SearchResult], *, chosen: str) -> Figure:
    """Draw what the best plan of each searcher costs per million samples, at which throughput.

    The floor and the proven lower bound are lines: no plan lies right of the one and below the other.
    """
    figure, axes = canvas(height_inches=4.6)
    num_samples = problem.num_epochs * problem.num_samples
    for index, (name, result) in enumerate(results.items()):
        usd = usd_per_million_samples(result.plan.cost_usd, num_samples=num_samples)
        axes.scatter(
            result.plan.throughput_samples_per_s,
            usd,
            marker=MARKERS[index % len(MARKERS)],
            s=70,
            facecolor=DEVICE_COLOURS[index % len(DEVICE_COLOURS)],
            edgecolor="black",
            linewidth=0.6,
            alpha=0.85,
            zorder=3,
            label=f"{name}: {usd:.4g} USD",
        )
    # A ring, as several searchers often end at the same plan and would hide one another.
    axes.scatter(
        results[chosen].plan.throughput_samples_per_s,
        usd_per_million_samples(results[chosen].plan.cost_usd, num_samples=num_samples),
        s=320,
        facecolor="none",
        edgecolor="#D55E00",
        linewidth=2.0,
        zorder=4,
        label=f"chosen: the plan of {chosen}",
    )
    bound_usd = max(result.plan.cost_lower_bound_usd for result in results.values())
    axes.axhline(
        usd_per_million_samples(bound_usd, num_samples=num_samples),
        color="#009E73",
        linestyle="--",
        linewidth=1.2,
        label="proven: no plan is cheaper",
    )
    if problem.throughput_floor_samples_per_s:
        axes.axvline(
            problem.throughput_floor_samples_per_s,
            color="#444444",
            linestyle=":",
            linewidth=1.4,
            label=f"floor {problem.throughput_floor_samples_per_s:,.0f} samples/s",
        )
    axes.set_xlabel("predicted throughput (samples/s)")
    axes.set_ylabel("predicted cost (USD per million samples)")
    axes.set_title(f"{problem.model}: best plan of each search method", fontsize=10, loc="left")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.margins(x=0.08, y=0.12)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def usd_per_million_samples(cost_usd: float, *, num_samples: float) -> float:
    """Return the cost of a run for each million of its samples."""
    return cost_usd / num_samples * SAMPLES_PER_MILLION


def canvas(*, height_inches: float) -> tuple[Figure, Axes]:
    """Return an empty picture in the size and manner that all have."""
    figure = Figure(figsize=(10.0, height_inches), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def device_colours(problem: SchedulingProblem) -> dict[str, str]:
    """Return a colour for each device type of a problem, the same in every picture of it."""
    return {
        name: DEVICE_COLOURS[index % len(DEVICE_COLOURS)]
        for index, name in enumerate(problem.device_type_names)
    }


def _input_of(stage: int, direction: str, microbatch: int, num_stages: int) -> tuple[int, str, int] | None:
    """Return the pass that must be over first; None where only the stage itself must be free."""
    if direction == "forward":
        return (stage - 1, "forward", microbatch) if stage > 0 else None
    if stage < num_stages - 1:
        return (stage + 1, "backward", microbatch)
    return (stage, "forward", microbatch)


def _draw_pass(axes: Axes, item: Pass, *, colour: str, has_number: bool) -> None:
    is_forward = item.direction == "forward"
    axes.barh(
        item.stage,
        item.duration_s * MS_PER_S,
        left=item.start_s * MS_PER_S,
        height=0.62,
        color=colour,
        alpha=0.95 if is_forward else 0.55,
        hatch="" if is_forward else "////",
        edgecolor="white",
        linewidth=0.8,
    )
    if has_number:
        axes.text(
            (item.start_s + item.duration_s / 2) * MS_PER_S,
            item.stage,
            str(item.microbatch + 1),
            ha="center",
            va="center",
            fontsize=7.5,
            color="white" if is_forward else "black",
            clip_on=True,
        )


def _stage_label(problem: SchedulingProblem, part: StageEvaluation) -> str:
    stage = part.stage
    first, last = problem.layers[stage.first_layer].name, problem.layers[stage.last_layer].name
    layers = first if stage.first_layer == stage.last_layer else f"{first} .. {last}"
    return f"{layers}\n{stage.num_replicas} x {stage.device_type}"
