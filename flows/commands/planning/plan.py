"""Search the cheapest plan for a planning problem and print it with its proof and why it is as it is.

examples:
  heterps plan problem.json --scheduler exact --seconds 10
  heterps plan problem.json --scheduler reinforce --seed 7 --budget-evaluations 100000 --output plan.json
  heterps plan problem.json --scheduler exact --output plan.json

exit status: 0 with a plan; 2 where the problem or an argument is malformed; 3 where no plan exists.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from heterps_core.errors import ConfigurationError
from heterps_core.json_file import write_json
from heterps_core.planning.search.optimum import MAX_SECONDS
from heterps_core.planning.search.schedulers import SCHEDULERS, get_scheduler
from heterps_core.text_table import Table, labelled_lines

if TYPE_CHECKING:
    from heterps_core.planning.explain.explanation import PlanExplanation
    from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
    from heterps_core.planning.search.search_result import SearchResult


STAGE_COLUMNS = {
    "stage": "d",
    "layers": "",
    "device type": "",
    "replicas": "d",
    **dict.fromkeys(("compute ms", "comm. ms", "memory GB"), ".3f"),
    "USD/hour": ".4f",
    "": "",
}
_LEAST_SHOWN_USD = 5e-7
"""Least cost of a printed line of the bill, which has six decimals."""

EXPLAIN_CHOICES = ("none", "short", "full")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("problem", type=Path, metavar="PROBLEM.json", help="the planning problem")
    parser.add_argument(
        "--scheduler", required=True, metavar="NAME", help=f"one of: {', '.join(sorted(SCHEDULERS))}"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all random choices (default: 0)")
    parser.add_argument(
        "--budget-evaluations",
        type=int,
        metavar="N",
        help="most plans to rate (default: the scheduler's own)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=MAX_SECONDS,
        metavar="S",
        help="processor time of the proof, which then ends with a gap (default: %(default)g)",
    )
    parser.add_argument(
        "--explain",
        choices=EXPLAIN_CHOICES,
        help="how much to say about the plan (default: full, or short where full would take many seconds)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="PLAN.json", help="write plan and explanation here too"
    )


def run(options: argparse.Namespace) -> None:
    """Search, print the plan and its explanation, and write both if asked."""
    from heterps_core.planning.problem.scheduling_problem import SchedulingProblem

    scheduler = get_scheduler(options.scheduler)
    if options.seed < 0:
        raise ConfigurationError(f"--seed must not be negative, got {options.seed}")
    if not options.seconds > 0:
        raise ConfigurationError(f"--seconds must be above 0, got {options.seconds:g}")
    problem = SchedulingProblem.load(options.problem)
    budget = options.budget_evaluations
    result = scheduler.search(
        problem,
        budget_evaluations=scheduler.default_budget_evaluations if budget is None else budget,
        seed=options.seed,
        max_seconds=options.seconds,
    )
    explanation = _explain(problem, result, asked=options.explain)
    if options.output is not None:
        added = {} if explanation is None else {"explanation": explanation.to_json()}
        write_json(options.output, {**result.plan.to_json(), **added})
    print(plan_table(problem, result))
    if explanation is not None:
        from heterps_core.planning.explain.text import explanation_text

        print(f"\n{explanation_text(explanation)}")


def plan_table(problem: SchedulingProblem, result: SearchResult, *more: tuple[str, str]) -> str:
    """Return a plan as text for people: a row per stage, then the totals with the proof, and more labelled lines."""
    plan, evaluation = result.plan, result.evaluation
    slowest = evaluation.bottleneck
    rows = [
        (
            index,
            f"{part.stage.first_layer}..{part.stage.last_layer}",
            part.stage.units if part.stage.second_device_type else part.stage.device_type,
            part.stage.num_replicas,
            part.compute_seconds * 1e3,
            part.communication_seconds * 1e3,
            part.memory_bytes / 1e9,
            part.price_usd_per_hour,
            f"<- slowest{': reading' * part.is_limited_by_reading}" if part is slowest else "",
        )
        for index, part in enumerate(evaluation.stages)
    ]
    floor = problem.throughput_floor_samples_per_s
    totals = [
        ("throughput", f"{plan.throughput_samples_per_s:,.1f} samples/s (floor {floor:,.1f})"),
        ("price", f"{plan.price_usd_per_hour:,.4f} USD/hour for {evaluation.run_seconds / 3600:,.3f} hours"),
        ("cost", f"{plan.cost_usd:,.6f} USD"),
        *_cost_lines(result),
        *((f"disk of stage {index}", str(sweep)) for index, sweep in evaluation.sweeps.items()),
        ("lower bound", f"{plan.cost_lower_bound_usd:,.6f} USD (proven: no plan is cheaper)"),
        ("gap", "0 (proven optimal)" if plan.optimality_gap == 0 else f"{plan.optimality_gap:.4%}"),
        ("search", f"plans rated {plan.num_evaluations:,}, in {plan.search_seconds:.3f} s"),
        *more,
    ]
    return "\n".join(
        [
            f"Plan for {problem.model} ({problem.num_layers} layers) by {plan.scheduler}, seed {plan.seed}",
            "",
            *Table(columns=STAGE_COLUMNS, rows=rows).lines(indent=""),
            "",
            *labelled_lines(totals, indent=""),
        ]
    )


def _explain(
    problem: SchedulingProblem, result: SearchResult, *, asked: str | None
) -> PlanExplanation | None:
    from heterps_core.planning.explain.explanation import Detail, default_detail, explain_plan

    if asked == "none":
        return None
    detail = default_detail(problem) if asked is None else Detail(asked)
    proven_usd = result.plan.cost_lower_bound_usd
    return explain_plan(problem, result.plan.stages, detail=detail, proven_usd=proven_usd)


def _cost_lines(result: SearchResult) -> list[tuple[str, str]]:
    """Return what the cost is made of, where that is more than one thing."""
    # What rounds to nothing in print is the last digit of a sum, not a cost.
    lines = [line for line in result.evaluation.cost_lines if abs(line.cost_usd) >= _LEAST_SHOWN_USD]
    if len(lines) <= 1:
        return []
    return [("", f"{line.cost_usd:,.6f} USD {line.name}") for line in lines]
