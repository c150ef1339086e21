"""The report of a comparison: what every search method found on every problem, and how to make it again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.profiling.machine import software_versions, this_machine
from heterps_core.text_table import Table, Value
from tasks.comparison import AS_GIVEN, CAPPED_SHARE, FLOOR_SHARE, Comparison, MethodSummary, ProblemOutcome
from tasks.reports.document import Document, Facts, Section

LSTM, RNN = "reinforce-paper", "reinforce-rnn"

SAME_COST = 1e-6
"""Relative difference of two costs below which they count as equal."""

SIGNIFICANCE = 0.05

STEP_NAMES = {StepModel.PAPERS: "the papers' closed form", StepModel.TRAINER: "the trainer's step"}


def comparison_document(comparison: Comparison, *, command: str, finished_at: datetime) -> Document:
    """Return the tables of all problems with what is needed to make them again."""
    versions = {**software_versions(), "optuna": version("optuna")}
    outcomes = comparison.outcomes
    sections = [
        Section(title="What is compared", blocks=_terms(comparison)),
        Section(
            title="All problems together",
            blocks=[
                *(_overview(of_model, step_model) for step_model, of_model in _by_step_model(outcomes)),
                *_cells_compared(outcomes),
            ],
        ),
    ]
    if any(outcome.compared.conditions != AS_GIVEN for outcome in outcomes):
        sections.append(Section(title="Closed form and trainer's step", blocks=[*_side_by_side(outcomes)]))
    sections.append(Section(title="Each problem", blocks=[*_matrices(outcomes)]))
    if remarks := _remarks(outcomes):
        sections.append(Section(title="Remarks", blocks=[Facts(pairs=remarks)]))
    if comparison.left_out:
        sections.append(Section(title="Left out", blocks=[Facts(pairs=list(comparison.left_out.items()))]))
    return Document(
        title="Comparison of the search methods",
        summary=f"`{command}`, {finished_at:%Y-%m-%d}, on {this_machine()}; "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + f"; {comparison.cpu_seconds / 60:.1f} CPU minutes.",
        sections=sections,
    )


def _terms(comparison: Comparison) -> list[str]:
    problems = [outcome.compared.problem for outcome in comparison.outcomes]
    estimated = {name: None for o in comparison.outcomes for name in o.compared.estimated_device_types}
    types = {name: None for problem in problems for name in problem.device_types}
    terms = [
        f"Each method rates at most {comparison.budget_evaluations:,} plans of a problem with each of the seeds 0 to "
        f"{comparison.num_seeds - 1}; exceptions are under Remarks. `exact` constructs its plan and rates only that. "
        f"**gap**: how far a plan's cost lies above a proven lower bound; no plan is cheaper than the bound. Medians "
        f"and worst are over seeds, and over problems where there are several. **cheapest**: searches that ended at "
        f"the cheapest plan that any method found. **CPU s**: median processor time of a search with its proof.",
        f"The device types are {', '.join(types)}"
        + (
            f"; times are estimated for {', '.join(estimated)}, from what this machine measured of each layer: "
            f"on another machine the same night has another cost."
            if estimated
            else "."
        ),
    ]
    if any(outcome.compared.conditions != AS_GIVEN for outcome in comparison.outcomes):
        terms.append(
            f"Each problem is searched twice: with the papers' closed form of a step, and with the trainer's own "
            f"step, in which stages wait for one another; there the bound is one of the formula, and the plans are "
            f"simulated. With floor and caps, at most {CAPPED_SHARE:.0%} of the units of each type in the cheapest "
            f"plan may be taken, and the floor is {FLOOR_SHARE:.0%} of the highest throughput that this allows."
        )
    return terms


def _by_step_model(outcomes: Sequence[ProblemOutcome]) -> list[tuple[StepModel, list[ProblemOutcome]]]:
    groups = [(each, [o for o in outcomes if o.compared.problem.step_model is each]) for each in StepModel]
    return [(step_model, group) for step_model, group in groups if group]


def _overview(outcomes: Sequence[ProblemOutcome], step_model: StepModel) -> Table:
    """Return one row for each method, over all problems; what ends at the cheapest plan most often comes first."""
    rows = []
    for position, summary in enumerate(outcomes[0].summaries):
        of_method = [outcome.summaries[position] for outcome in outcomes]
        found = [result for each in of_method for result in each.results]
        num_searches = sum(each.num_seeds for each in of_method)
        num_cheapest = sum(
            _is_same(result.plan.cost_usd, outcome.best.plan.cost_usd)
            for each, outcome in zip(of_method, outcomes, strict=True)
            for result in each.results
            if outcome.best is not None
        )
        gaps = [gap for each in of_method for gap in each.gaps]
        row: list[Value] = [
            summary.method,
            f"{len(found)}/{num_searches}",
            f"{num_cheapest}/{num_searches}",
            _percent(statistics.median(gaps)) if gaps else None,
            _percent(max(gaps)) if gaps else None,
            statistics.median_high(result.plan.num_evaluations for result in found) if found else None,
            statistics.median(seconds for each in of_method for seconds in each.cpu_seconds),
        ]
        rows.append((-num_cheapest, -len(found), statistics.median(gaps) if gaps else math.inf, row))
    return Table(
        caption=f"{len(outcomes)} problems by {STEP_NAMES[step_model]}",
        columns={
            "method": "",
            **dict.fromkeys(("with a plan", "cheapest", "median gap", "worst gap"), "s"),
            "plans rated": ",d",
            "CPU s": ".2f",
        },
        rows=[row for *_, row in sorted(rows, key=lambda each: each[:3])],
    )


def _cells_compared(outcomes: Sequence[ProblemOutcome]) -> list[str]:
    """Return whether an LSTM or a plain recurrent cell finds the cheaper plans, by a sign test over all searches."""
    methods = [summary.method for summary in outcomes[0].summaries]
    if LSTM not in methods or RNN not in methods:
        return []
    num_lstm = num_rnn = num_equal = 0
    for outcome in outcomes:
        lstm, rnn = (
            {
                result.plan.seed: result.plan.cost_usd
                for result in outcome.summaries[methods.index(name)].results
            }
            for name in (LSTM, RNN)
        )
        for seed in range(outcome.summaries[0].num_seeds):
            usd = lstm.get(seed, math.inf), rnn.get(seed, math.inf)
            if usd[0] == usd[1] or _is_same(*usd):
                num_equal += 1
            elif usd[0] < usd[1]:
                num_lstm += 1
            else:
                num_rnn += 1
    probability = sign_test(num_lstm, num_rnn)
    better = "the LSTM" if num_lstm > num_rnn else "the plain cell"
    verdict = (
        f"{better} is better (sign test, p = {probability:.2g})"
        if probability < SIGNIFICANCE
        else f"neither is shown to be better (sign test, p = {probability:.2g})"
    )
    return [
        f"**LSTM against RNN**: `{LSTM}` and `{RNN}` differ in the recurrent cell alone. Of "
        f"{num_lstm + num_rnn + num_equal} searches with equal problem and seed the LSTM's plan is the cheaper in "
        f"{num_lstm}, the plain cell's in {num_rnn}, and {num_equal} are equal: {verdict}."
    ]


def sign_test(num_better: int, num_worse: int) -> float:
    """Return the two-sided probability of so uneven a split, or more, of as many fair coins.

    Example:
        >>> sign_test(5, 0), sign_test(2, 2)
        (0.0625, 1.0)
    """
    from scipy.stats import binomtest  # a second, for this alone

    total = num_better + num_worse
    return float(binomtest(num_better, total).pvalue) if total else 1.0


def _side_by_side(outcomes: Sequence[ProblemOutcome]) -> list[str | Table]:
    """Return what the best plan by the closed form costs in the trainer's step, beside the best plan by that."""
    by_key = {(o.compared.name, o.compared.conditions, o.compared.problem.step_model): o for o in outcomes}
    rows: list[list[Value]] = []
    for (name, conditions, step_model), papers in by_key.items():
        trainer = by_key.get((name, conditions, StepModel.TRAINER))
        if (
            step_model is not StepModel.PAPERS
            or trainer is None
            or papers.best is None
            or trainer.best is None
        ):
            continue
        run = evaluate(trainer.compared.problem, papers.best.plan.stages)
        floor = papers.compared.problem.throughput_floor_samples_per_s
        rows.append(
            [
                name if conditions == AS_GIVEN else f"{name}, {conditions}",
                floor or None,
                _bound_usd(papers),
                papers.best.plan.cost_usd,
                f"{run.cost_usd:.4g}{' (misses the floor)' if run.violations else ''}",
                _bound_usd(trainer),
                trainer.best.plan.cost_usd,
            ]
        )
    if not rows:
        return []
    return [
        "USD for a run. A plan that is chosen by the closed form costs what the fifth column says when the trainer "
        "runs it; the last column is the cheapest plan that was found for the trainer's step.",
        Table(
            caption="The cheapest plans found by each step model",
            columns={
                "problem": "",
                "floor, samples/s": ",.0f",
                **dict.fromkeys(("bound, closed form", "cheapest, closed form"), ".4g"),
                "that plan, trainer's step": "s",
                **dict.fromkeys(("bound, trainer's step", "cheapest, trainer's step"), ".4g"),
            },
            rows=rows,
        ),
    ]


def _bound_usd(outcome: ProblemOutcome) -> float:
    return max(r.plan.cost_lower_bound_usd for summary in outcome.summaries for r in summary.results)


def _matrices(outcomes: Sequence[ProblemOutcome]) -> list[Table]:
    """Return a table for each step model and conditions: the gaps of each method on each problem."""
    tables = []
    for step_model, of_model in _by_step_model(outcomes):
        for conditions in dict.fromkeys(outcome.compared.conditions for outcome in of_model):
            group = [outcome for outcome in of_model if outcome.compared.conditions == conditions]
            tables.append(
                Table(
                    caption=f"Median gap / worst gap by {STEP_NAMES[step_model]}, {conditions}",
                    columns={
                        "method": "",
                        **{f"{o.compared.name} ({o.compared.problem.num_layers} layers)": "s" for o in group},
                    },
                    rows=[
                        [summary.method, *(_gaps(outcome.summaries[position]) for outcome in group)]
                        for position, summary in enumerate(group[0].summaries)
                    ],
                )
            )
    return tables


def _gaps(summary: MethodSummary) -> str | None:
    if not summary.gaps:
        return None
    median, worst = statistics.median(summary.gaps), max(summary.gaps)
    text = _percent(median) if worst == median else f"{_percent(median)} / {_percent(worst)}"
    num_found = len(summary.results)
    return text if num_found == summary.num_seeds else f"{text} ({num_found} of {summary.num_seeds} seeds)"


def _remarks(outcomes: Sequence[ProblemOutcome]) -> list[tuple[str, str]]:
    """Return one remark of each method, with the number of problems on which it has any."""
    pairs = []
    for position, summary in enumerate(outcomes[0].summaries):
        remarks = [o.summaries[position].remark for o in outcomes if o.summaries[position].remark]
        if remarks:
            others = f" (on {len(remarks)} of {len(outcomes)} problems; this is the first)"
            pairs.append((summary.method, remarks[0] + others * (len(outcomes) > 1)))
    return pairs


def _is_same(usd: float, other_usd: float) -> bool:
    return math.isclose(usd, other_usd, rel_tol=SAME_COST)


def _percent(gap: float) -> str:
    return "0" if gap < 1e-9 else f"{gap:.1%}" if gap >= 5e-4 else "< 0.1%"
