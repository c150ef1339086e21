"""What a comparison leaves behind: a table for people and for Markdown, a picture, and a record in MLflow."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from heterps_core.errors import ConfigurationError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.profiling.machine import software_versions, this_machine
from infra.workspace import Workspace
from tasks.comparison import Comparison, MethodSummary
from tasks.planning.compared_problems import ComparedProblem
from tasks.records import tracking
from tasks.records.mlflow_names import RUN_ID_TAG
from tasks.records.retries import REPEATABLE
from tasks.records.tracked_run import RunSettings, TrackedRun
from tasks.reports.comparison_figure import gap_figure
from tasks.reports.tables import aligned_table, markdown_table
from tasks.running.run_lifecycle import close_run, open_compared_search, open_comparison

HEADER = ["method", "USD per run", "gap", "worst gap", "evaluations", "seconds", "plans", "remark"]
TEXT_COLUMNS = {0, 7}
NO_FIGURE = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a comparison comes from, so that it can be made again."""

    run_id: str
    command: str
    finished_at: datetime


def comparison_markdown(comparison: Comparison, origin: Origin) -> str:
    """Return the tables of all problems with what is needed to make them again."""
    lines = [
        "# Comparison of the search methods",
        "",
        f"`{origin.command}`, {origin.finished_at:%Y-%m-%d}, on {this_machine()}; "
        + ", ".join(f"{name} {number}" for name, number in _versions().items())
        + ".",
        "",
        *_terms(comparison),
    ]
    for compared in comparison.problems:
        rows = [_row(summary) for summary in comparison.summaries[compared.name]]
        lines += ["", f"## {compared.name}", "", *_facts(comparison, compared), ""]
        lines += markdown_table(HEADER, rows)
    if comparison.left_out:
        lines += ["", "## Left out", ""]
        lines += [f"- {name}: {reason}" for name, reason in comparison.left_out.items()]
    return "\n".join(lines) + "\n"


def comparison_text(comparison: Comparison) -> str:
    """Return the tables of all problems for a terminal."""
    lines: list[str] = []
    for compared in comparison.problems:
        rows = [_row(summary) for summary in comparison.summaries[compared.name]]
        lines += ["", compared.name, *(f"  {fact}" for fact in _facts(comparison, compared))]
        lines += aligned_table(HEADER, rows, left=TEXT_COLUMNS)
    return "\n".join(lines)


def write_markdown(path: Path, text: str) -> None:
    """Write the Markdown.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write the comparison to {path}: {error.strerror}") from error


@task(name="publish comparison", cache_policy=NO_CACHE, **REPEATABLE)
def publish_comparison(markdown: str) -> None:
    """Show the tables on the flow run's page."""
    create_markdown_artifact(markdown, key="comparison", description="Every search method on every problem")


@task(name="record comparison", cache_policy=NO_CACHE)
def record_comparison(
    workspace: Workspace, comparison: Comparison, origin: Origin, *, markdown: str
) -> TrackedRun:
    """Write a comparison to MLflow: a parent run with tables and picture, a child for each method and problem.

    All of it is written when the searches are over, so that one which is killed leaves no run open.
    """
    parent = open_comparison(workspace, run_id=origin.run_id, tags={"heterps.command": origin.command})
    tracking.record_text(workspace, parent, "comparison.md", markdown)
    tracking.record_figure(workspace, parent, "gap_by_method.png", gap_figure(comparison))
    tracking.record_metrics(
        workspace,
        parent,
        {
            "comparison/seconds": comparison.seconds,
            "comparison/problems": float(len(comparison.problems)),
            "comparison/seeds": float(comparison.num_seeds),
            "comparison/budget_evaluations": float(comparison.budget_evaluations),
        },
    )
    for number, compared in enumerate(comparison.problems):
        tracking.record_document(workspace, parent, f"problems/{number}.json", compared.problem.to_json())
        for summary in comparison.summaries[compared.name]:
            _record_summary(workspace, parent, origin, compared, summary)
    close_run(workspace, parent, status="FINISHED", reason="completed")
    return parent


def _record_summary(
    workspace: Workspace,
    parent: TrackedRun,
    origin: Origin,
    compared: ComparedProblem,
    summary: MethodSummary,
) -> None:
    """Write one method on one problem: the search of median cost under the stable names, all seeds as series."""
    typical = summary.typical
    settings = RunSettings.of_plan(
        () if typical is None else typical.plan.stages,
        method=summary.method,
        model=compared.name,
        market=compared.market,
        batch_size=compared.problem.batch_size,
        seed=0 if typical is None else typical.plan.seed,
    )
    child = open_compared_search(workspace, parent, settings, tags={RUN_ID_TAG: origin.run_id})
    seeds = len(summary.searches)
    tracking.record_metrics(
        workspace, child, {"search/plans_found": float(len(summary.results)), "search/seeds": float(seeds)}
    )
    if typical is not None:
        tracking.record_metrics(workspace, child, tracking.plan_metrics(typical))
        tracking.record_metrics(workspace, child, {"search/largest_gap": summary.largest_gap})
        found = [(search.seed, search.result) for search in summary.searches if search.result is not None]
        tracking.record_series(
            workspace,
            child,
            {
                "search/cost_usd_by_seed": [(seed, result.plan.cost_usd) for seed, result in found],
                "search/gap_by_seed": [(seed, result.plan.optimality_gap) for seed, result in found],
                "search/seconds_by_seed": [(seed, result.search_seconds) for seed, result in found],
            },
        )
        tracking.record_document(workspace, child, "plan.json", typical.plan.to_json())
    # A method without a plan has done its work too: the comparison wants to know.
    close_run(workspace, child, status="FINISHED", reason=summary.remark or "completed")


def _terms(comparison: Comparison) -> list[str]:
    return [
        f"Every method rates at most {comparison.budget_evaluations:,} plans of a problem, with the seeds 0 to "
        f"{comparison.num_seeds - 1}, one search after the other on one core. Cost, gap and evaluations are those of "
        f"the seed of median cost, seconds the median; the worst gap is over all seeds. The gap is to a proven lower "
        f"bound: no plan is cheaper. Seconds are of the search alone, without the proof and without the loading of "
        f"libraries. `exact` constructs its plan and rates only that. All searches took "
        f"{comparison.seconds / 60:.1f} minutes.",
    ]


def _facts(comparison: Comparison, compared: ComparedProblem) -> list[str]:
    """Return what a problem is, in one line, and what is uncertain about it in another."""
    problem = compared.problem
    floor = problem.throughput_floor_samples_per_s
    bounds = [
        result.plan.cost_lower_bound_usd
        for summary in comparison.summaries[compared.name]
        for result in summary.results
    ]
    bound = f"no plan costs less than {max(bounds):.6g} USD" if bounds else "no method found a plan"
    facts = [
        f"{problem.num_layers} layers on {len(problem.device_types)} device types "
        f"({', '.join(problem.device_types)}), {_num_samples(problem):,.0f} samples in batches of "
        f"{problem.batch_size:,}, "
        f"{f'at least {floor:,.0f} samples/s' if floor else 'no floor'}; {bound}."
    ]
    if compared.estimated_device_types:
        facts.append(f"Times are estimated, not measured, for {', '.join(compared.estimated_device_types)}.")
    return facts


def _row(summary: MethodSummary) -> list[str]:
    plans = f"{len(summary.results)}/{len(summary.searches)}"
    typical = summary.typical
    if typical is None:
        return [summary.method, *[NO_FIGURE] * 5, plans, summary.remark]
    return [
        summary.method,
        f"{typical.plan.cost_usd:.6g}",
        _percent(typical.plan.optimality_gap),
        _percent(summary.largest_gap),
        f"{typical.plan.num_evaluations:,}",
        f"{summary.median_seconds:.3f}",
        plans,
        summary.remark,
    ]


def _percent(gap: float) -> str:
    return "0" if gap == 0 else f"{gap:.2%}" if gap >= 5e-5 else "< 0.01%"


def _num_samples(problem: SchedulingProblem) -> float:
    return problem.num_samples * problem.num_epochs


def _versions() -> dict[str, str]:
    return {**software_versions(), "optuna": version("optuna")}
