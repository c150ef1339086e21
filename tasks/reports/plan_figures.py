"""The picture of a plan: its pipeline over one training step.

Drawn with matplotlib's object interface and no display, so that any process may draw at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from heterps_core.planning.cost_model.evaluation import PlanEvaluation, StageEvaluation
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.simulate.pipeline_load import FORWARD_SHARE
from heterps_core.planning.simulate.pipeline_simulation import pass_order
from heterps_core.units import MS_PER_S
from tasks.reports.document import Picture
from tasks.reports.run_report import PlanReport

DEVICE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Told apart by colour-blind readers too (Okabe and Ito 2008)."""

MAX_MICROBATCHES_WITH_NUMBERS = 24
GREY = "#444444"


def stages_picture(report: PlanReport, *, num_microbatches: int) -> Picture:
    """Return the picture of one training step of a plan, with what it shows in words."""
    evaluation = report.chosen.evaluation
    stages = "; ".join(
        f"{part.stage.num_replicas} x {part.stage.device_type} take {part.seconds * MS_PER_S:.2f} ms a batch"
        for part in evaluation.stages
    )
    figure = stages_figure(
        report.problem,
        evaluation,
        num_microbatches=num_microbatches,
        title=f"{report.problem.model}: plan of {report.searches.taken} over time",
    )
    return Picture.of(
        figure,
        name="stages_over_time.png",
        caption="The planned stages within one training step",
        alt=f"Bars of forward and backward passes of {num_microbatches} micro-batches, a row for each stage: "
        f"{stages}.",
    )


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
    free_at_s = [0.0] * num_stages
    ends_s: dict[tuple[int, str, int], float] = {}
    passes = []
    for stage, action in pass_order(num_microbatches=num_microbatches, num_stages=num_stages):
        is_forward = action.direction == "forward"
        source = (stage - 1 if is_forward else stage + 1, action.direction, action.microbatch)
        share = FORWARD_SHARE if is_forward else 1 - FORWARD_SHARE
        made = Pass(
            stage=stage,
            direction=action.direction,
            microbatch=action.microbatch,
            start_s=max(free_at_s[stage], ends_s.get(source, 0.0)),
            duration_s=stage_seconds[stage] / num_microbatches * share,
        )
        free_at_s[stage] = ends_s[stage, action.direction, action.microbatch] = made.end_s
        passes.append(made)
    return sorted(passes, key=lambda item: (item.start_s, item.stage))


def stages_figure(
    problem: SchedulingProblem, evaluation: PlanEvaluation, *, num_microbatches: int, title: str
) -> Figure:
    """Draw one training step: a row per stage, a bar per pass, coloured by device type."""
    num_stages = len(evaluation.stages)
    passes = pipeline_passes(
        [stage.seconds for stage in evaluation.stages], num_microbatches=num_microbatches
    )
    colours = {
        name: DEVICE_COLOURS[index % len(DEVICE_COLOURS)]
        for index, name in enumerate(problem.device_type_names)
    }
    figure = Figure(figsize=(10.0, 1.9 + 0.75 * num_stages), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    for direction, alpha, hatch in (("forward", 0.95, ""), ("backward", 0.55, "////")):
        drawn = [item for item in passes if item.direction == direction]
        axes.barh(
            [item.stage for item in drawn],
            [item.duration_s * MS_PER_S for item in drawn],
            left=[item.start_s * MS_PER_S for item in drawn],
            height=0.62,
            color=[colours[evaluation.stages[item.stage].stage.device_type] for item in drawn],
            alpha=alpha,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.8,
        )
    for item in passes if num_microbatches <= MAX_MICROBATCHES_WITH_NUMBERS else ():
        axes.text(
            (item.start_s + item.duration_s / 2) * MS_PER_S,
            item.stage,
            str(item.microbatch + 1),
            ha="center",
            va="center",
            fontsize=7.5,
            color="white" if item.direction == "forward" else "black",
            clip_on=True,
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
        Patch(facecolor="white", edgecolor=GREY, label="forward"),
        Patch(facecolor="white", edgecolor=GREY, hatch="////", label="backward"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def _stage_label(problem: SchedulingProblem, part: StageEvaluation) -> str:
    stage = part.stage
    first, last = problem.layers[stage.first_layer].name, problem.layers[stage.last_layer].name
    layers = first if stage.first_layer == stage.last_layer else f"{first} .. {last}"
    return f"{layers}\n{stage.num_replicas} x {stage.device_type}"
