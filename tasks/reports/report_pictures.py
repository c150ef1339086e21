"""The pictures of a report, each drawn once for the record and for the page, with what it shows in words."""

from __future__ import annotations

from collections.abc import Sequence

from heterps_core.units import MS_PER_S
from tasks.judging.nights import Night
from tasks.reports.figures import cost_figure, stages_figure
from tasks.reports.front_figure import front_figure
from tasks.reports.nights_figure import error_figure
from tasks.reports.pages import Picture
from tasks.reports.run_report import PlanReport

STAGES_PICTURE, SEARCHES_PICTURE = "stages_over_time.png", "plans_compared.png"
FRONT_PICTURE, ERROR_PICTURE = "cost_of_throughput.png", "prediction_error.png"


def plan_pictures(report: PlanReport, *, num_microbatches: int) -> dict[str, Picture]:
    """Return the pictures of a plan by their file names."""
    pictures = [stages_picture(report, num_microbatches=num_microbatches), searches_picture(report)]
    if report.explanation.front:
        pictures.append(front_picture(report))
    return {picture.name: picture for picture in pictures}


def stages_picture(report: PlanReport, *, num_microbatches: int) -> Picture:
    """Return one training step of the plan: a row per stage, a bar per pass."""
    evaluation = report.chosen.evaluation
    stages = "; ".join(
        f"{part.stage.num_replicas} x {part.stage.device_type} take {part.seconds * MS_PER_S:.2f} ms a batch"
        for part in evaluation.stages
    )
    return Picture.of(
        stages_figure(
            report.problem,
            evaluation,
            num_microbatches=num_microbatches,
            title=f"{report.problem.model}: plan of {report.searches.taken} over time",
        ),
        name=STAGES_PICTURE,
        caption="The planned stages within one training step",
        alt=f"Bars of forward and backward passes of {num_microbatches} micro-batches, a row for each stage: "
        f"{stages}.",
    )


def searches_picture(report: PlanReport) -> Picture:
    """Return cost against throughput of each search method's best plan."""
    results = report.searches.results
    cheapest = min(results, key=lambda name: results[name].plan.cost_usd)
    return Picture.of(
        cost_figure(report.problem, results, chosen=report.searches.taken),
        name=SEARCHES_PICTURE,
        caption="The best plan of each search method, and the proven bound on cost",
        alt=f"A point for each of {len(results)} search methods, cost against throughput. The cheapest plan is that "
        f"of {cheapest}, the chosen one that of {report.searches.taken}. The table beside it holds the figures.",
    )


def front_picture(report: PlanReport) -> Picture:
    """Return what throughput costs; the explanation must have a front."""
    front = report.explanation.front
    return Picture.of(
        front_figure(report.problem, report.explanation),
        name=FRONT_PICTURE,
        caption="The cheapest plan for each throughput, and what its money is spent on",
        alt=f"A staircase of cost over throughput, from {front[0].cost_usd:.4g} USD at "
        f"{front[0].throughput_samples_per_s:,.0f} to {front[-1].cost_usd:.4g} USD at "
        f"{front[-1].throughput_samples_per_s:,.0f} samples/s, and below it each plan's price by device type.",
    )


def error_picture(nights: Sequence[Night]) -> Picture:
    """Return how far predictions were off, night by night; at least one night is needed."""
    errors = [night.prediction_error for night in nights if night.prediction_error is not None]
    shown = f"from {min(errors):+.1%} to {max(errors):+.1%}" if errors else "on no night"
    return Picture.of(
        error_figure(nights),
        name=ERROR_PICTURE,
        caption="Measured throughput over the predicted one, less 1, night by night",
        alt=f"Two lines over {len(nights)} nights, the cost model alone and as corrected; the corrected one goes "
        f"{shown}.",
    )
