from dataclasses import replace
from datetime import UTC, datetime

import pytest

from heterps_core.errors import ConfigurationError, InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.schedulers import get_scheduler
from tasks.comparison import (
    NO_FLOOR,
    ComparedProblem,
    Comparison,
    MethodSummary,
    ProblemOutcome,
    load_problems,
    reason_in_one_line,
    with_floor_and_caps,
)
from tasks.reports.comparison_document import comparison_document, sign_test
from tasks.reports.document import markdown, terminal_text
from tests.builders import make_problem as make_random_problem
from tests.tasks.builders import make_problem, make_result

PROBLEM = make_problem()
ORIGIN = {
    "command": "python -m flows.compare_schedulers",
    "finished_at": datetime(2026, 11, 21, tzinfo=UTC),
}
COST_USD = make_result(PROBLEM).plan.cost_usd


def found(method, seed, gap):
    """A search that ended at a cost of the bound times 1 + gap, with the bound at the cost of the usual plan."""
    result = make_result(PROBLEM, scheduler=method)
    plan = replace(result.plan, cost_usd=COST_USD * (1 + gap), optimality_gap=gap, seed=seed)
    return replace(result, plan=plan)


def summary(method, *results, num_seeds=2, remark=""):
    return MethodSummary(
        method=method, num_seeds=num_seeds, results=results, cpu_seconds=(1.0, 2.0), remark=remark
    )


def outcome(name, *summaries, problem=PROBLEM, **known):
    compared = ComparedProblem(name=name, problem=problem, **known)
    return ProblemOutcome(compared=compared, summaries=summaries)


@pytest.fixture
def comparison():
    """Three methods on two problems with two seeds."""
    return Comparison(
        outcomes=(
            outcome(
                "tiny",
                summary("genetic", found("genetic", 0, 0.0), found("genetic", 1, 0.0)),
                summary("reinforce-paper", found("reinforce-paper", 0, 0.5), remark="met no | plan"),
                summary("reinforce-rnn", remark="no plan"),
                estimated_device_types=("gpu-t4",),
            ),
            outcome(
                "folder/hard.json",
                summary("genetic", found("genetic", 0, 0.2), found("genetic", 1, 0.1)),
                summary(
                    "reinforce-paper", found("reinforce-paper", 0, 1e-5), found("reinforce-paper", 1, 0.3)
                ),
                summary("reinforce-rnn", found("reinforce-rnn", 0, 0.25), found("reinforce-rnn", 1, 0.3)),
            ),
        ),
        left_out={"broken-model": "cannot be built"},
        num_seeds=2,
        budget_evaluations=1_000,
        cpu_seconds=90.0,
    )


def test_markdown_says_how_to_make_it_again_and_what_is_uncertain(comparison):
    text = markdown(comparison_document(comparison, **ORIGIN))

    assert "`python -m flows.compare_schedulers`, 2026-11-21, on " in text
    assert "torch 2." in text
    assert "; 1.5 CPU minutes." in text
    assert "at most 1,000 plans" in text
    assert "times are estimated for gpu-t4, from" in text
    assert "- **broken-model**: cannot be built" in text
    assert "- **reinforce-paper**: met no | plan (on 1 of 2 problems; this is the first)" in text
    assert "searched twice" not in text  # files are searched with the step model that they name


def test_medians_and_worst_gaps_are_those_of_all_searches_and_of_each_problem(comparison):
    text = markdown(comparison_document(comparison, **ORIGIN))

    # By hand, over 2 problems x 2 seeds: gaps 0, 0, 0.1, 0.2; then 1e-5, 0.3, 0.5; then 0.25, 0.3.
    assert "| genetic | 4/4 | 2/4 | 5.0% | 20.0% | 12 | 1.50 |" in text
    assert "| reinforce-paper | 3/4 | 1/4 | 30.0% | 50.0% | 12 | 1.50 |" in text
    assert "| reinforce-rnn | 2/4 | 0/4 | 27.5% | 30.0% | 12 | 1.50 |" in text
    assert "| method | tiny (3 layers) | folder/hard.json (3 layers) |" in text
    assert "| genetic | 0 | 15.0% / 20.0% |" in text
    assert "| reinforce-paper | 50.0% (1 of 2 seeds) | 15.0% / 30.0% |" in text
    assert "| reinforce-rnn | - | 27.5% / 30.0% |" in text


def test_the_cells_are_compared_by_problem_and_seed(comparison):
    text = markdown(comparison_document(comparison, **ORIGIN))

    # By hand: only the LSTM has a plan, neither has one, the LSTM is cheaper, both are equal; 1/2 + 1/4 twice is 1/2.
    assert (
        "Of 4 searches with equal problem and seed the LSTM's plan is the cheaper in 2, the plain cell's in 0"
        in text
    )
    assert "and 2 are equal: neither is shown to be better (sign test, p = 0.5)." in text


def test_a_split_of_ten_to_one_is_no_chance():
    # By hand: (1 + 11) / 2^11 on each side.
    assert sign_test(10, 1) == pytest.approx(2 * 12 / 2048)
    assert sign_test(0, 0) == 1


def test_a_plan_of_the_closed_form_stands_beside_the_best_one_by_the_trainers_step():
    by_step = {each: replace(PROBLEM, step_model=each) for each in StepModel}
    one_stage = get_scheduler("gpu-only").search(PROBLEM, budget_evaluations=10, seed=0)
    best = get_scheduler("exact").search(by_step[StepModel.TRAINER], budget_evaluations=10, seed=0)
    plans = {StepModel.PAPERS: one_stage, StepModel.TRAINER: best}
    outcomes = tuple(
        outcome("tiny", summary("exact", plans[each]), problem=by_step[each], conditions=NO_FLOOR)
        for each in StepModel
    )

    text = markdown(
        comparison_document(
            Comparison(outcomes=outcomes, left_out={}, num_seeds=1, budget_evaluations=10, cpu_seconds=1.0),
            **ORIGIN,
        )
    )

    [row] = [line.split(" | ") for line in text.splitlines() if line.startswith("| tiny, no floor |")]
    ran = evaluate(by_step[StepModel.TRAINER], one_stage.plan.stages)
    assert float(row[3]) == pytest.approx(one_stage.plan.cost_usd, rel=1e-3)
    assert float(row[4].split(" ")[0]) == pytest.approx(ran.cost_usd, rel=1e-3)
    assert float(row[6].removesuffix(" |")) == pytest.approx(best.plan.cost_usd, rel=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_with_floor_and_caps_the_cheapest_plan_is_forbidden_and_others_are_left(seed):
    problem = make_random_problem(seed, num_layers=6, num_types=3)
    cheapest = find_optimum(problem)

    bound = with_floor_and_caps(problem)

    assert evaluate(bound, cheapest.stages).violations
    throughput = evaluate(bound, find_optimum(bound).stages).throughput_samples_per_s
    assert throughput >= bound.throughput_floor_samples_per_s * (1 - 1e-9)


def test_the_terminal_shows_a_line_for_each_method_over_all_problems(comparison):
    lines = terminal_text(comparison_document(comparison, **ORIGIN)).splitlines()

    assert [line.split()[0] for line in lines if line.endswith(" 1.50")] == [
        *("genetic", "reinforce-paper", "reinforce-rnn")
    ]


def test_reasons_are_one_line_without_the_way_out():
    missed_floor = InfeasiblePlanError("throughput floor", "10 samples/s, 99% below; raise max_units")

    assert reason_in_one_line(missed_floor) == "no plan meets the throughput floor: 10 samples/s, 99% below"
    assert reason_in_one_line(ValueError("a\nb")) == "failed: ValueError: a b"


def test_a_problem_file_that_cannot_be_used_is_named(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text("{}")

    with pytest.raises(ConfigurationError, match=r"problem\.json: schema_version: is missing"):
        load_problems([str(path)])
    with pytest.raises(ConfigurationError, match=r"cannot read .*none\.json"):
        load_problems([str(tmp_path / "none.json")])
