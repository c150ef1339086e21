"""The report of a comparison: what every search method found on every problem, and how to make it again."""

from __future__ import annotations

from datetime import datetime
from importlib.metadata import version

from heterps_core.profiling.machine import software_versions, this_machine
from heterps_core.text_table import Table, Value
from tasks.comparison import ComparedProblem, Comparison, MethodSummary
from tasks.reports.document import Document, Facts, Section

COLUMNS = {
    "method": "",
    "USD per run": ".6g",
    **dict.fromkeys(("gap", "worst gap"), "s"),
    "evaluations": ",d",
    "seconds": ".3f",
    "plans": "s",
    "remark": "",
}


def comparison_document(comparison: Comparison, *, command: str, finished_at: datetime) -> Document:
    """Return the tables of all problems with what is needed to make them again."""
    versions = {**software_versions(), "optuna": version("optuna")}
    sections = [
        Section(
            title=compared.name,
            blocks=[
                *_facts(comparison, compared),
                Table(
                    caption="The seed of median cost",
                    columns=COLUMNS,
                    rows=[_row(summary) for summary in comparison.summaries[compared.name]],
                ),
            ],
        )
        for compared in comparison.problems
    ]
    if comparison.left_out:
        sections.append(Section(title="Left out", blocks=[Facts(pairs=list(comparison.left_out.items()))]))
    terms = (
        f"Every method rates at most {comparison.budget_evaluations:,} plans of a problem, with the seeds 0 to "
        f"{comparison.num_seeds - 1}, one search after the other on one core. Cost, gap and evaluations are those of "
        f"the seed of median cost, seconds the median; the worst gap is over all seeds. The gap is to a proven lower "
        f"bound: no plan is cheaper. Seconds are of the search alone, without the proof and without the loading of "
        f"libraries. `exact` constructs its plan and rates only that. All searches took "
        f"{comparison.seconds / 60:.1f} minutes."
    )
    return Document(
        title="Comparison of the search methods",
        summary=f"`{command}`, {finished_at:%Y-%m-%d}, on {this_machine()}; "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + f". {terms}",
        sections=sections,
    )


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
        f"({', '.join(problem.device_types)}), {problem.num_samples * problem.num_epochs:,.0f} samples in batches of "
        f"{problem.batch_size:,}, "
        f"{f'at least {floor:,.0f} samples/s' if floor else 'no floor'}; {bound}."
    ]
    if compared.estimated_device_types:
        facts.append(f"Times are estimated, not measured, for {', '.join(compared.estimated_device_types)}.")
    return facts


def _row(summary: MethodSummary) -> list[Value]:
    plans = f"{len(summary.results)}/{summary.num_seeds}"
    typical = summary.typical
    if typical is None:
        return [summary.method, *[None] * 5, plans, summary.remark]
    return [
        summary.method,
        typical.plan.cost_usd,
        _percent(typical.plan.optimality_gap),
        _percent(summary.largest_gap),
        typical.plan.num_evaluations,
        summary.median_seconds,
        plans,
        summary.remark,
    ]


def _percent(gap: float) -> str:
    return "0" if gap == 0 else f"{gap:.2%}" if gap >= 5e-5 else "< 0.01%"
