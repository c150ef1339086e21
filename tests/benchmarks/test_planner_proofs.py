import math
from dataclasses import replace

import pytest

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from tests.benchmarks import planner_proofs
from tests.benchmarks.planner_proofs import draw_capped, examine
from tests.builders import make_problem
from tests.independent_planner import CandidateStages, CheaperPlanSearch
from tests.paths import TESTS

PROBLEMS = TESTS / "golden" / "problems"


@pytest.mark.weekly
def test_no_proof_is_contradicted_by_any_method_on_twenty_four_capped_problems():
    figures = {entry["name"]: entry["value"] for entry in planner_proofs.run(seed=0, num_cases=24)}

    assert figures["false_proofs"] == 0
    assert figures["wrongly_infeasible"] == 0
    assert figures["problems_bound_by_caps"] > 5
    assert figures["checks"] > 200


@pytest.mark.weekly
@pytest.mark.parametrize("seed", [14, 194])
def test_the_bound_holds_where_the_ascent_met_a_plan_above_the_cutoff(seed):
    verdict = examine(draw_capped(seed=seed), seed=0)

    assert verdict.outcome == "optimal"
    assert verdict.false_proofs == ()


def test_a_bound_that_is_too_high_is_noticed(monkeypatch):
    truthful = planner_proofs.find_optimum

    def too_high(problem):
        found = truthful(problem)
        return replace(found, cost_lower_bound_usd=found.cost_lower_bound_usd * (1 + 1e-6))

    monkeypatch.setattr(planner_proofs, "find_optimum", too_high)

    verdict = examine(make_problem(1, num_layers=4, num_types=3, scarce=True), seed=0)

    assert {"MILP", "all plans", "brute-force"} <= set(verdict.false_proofs)


@pytest.mark.parametrize("step_model", StepModel)
@pytest.mark.parametrize("seed", range(6))
def test_the_milp_finds_what_trying_all_plans_finds(seed, step_model):
    problem = replace(make_problem(seed, num_layers=4, num_types=3, scarce=True), step_model=step_model)
    for lengths, stages in CandidateStages.of_every_length(problem).items():
        expected = stages.brute_force_usd()

        assert CheaperPlanSearch(stages, lengths).optimum_usd() == pytest.approx(expected, rel=1e-9)


def test_the_milp_walks_from_a_known_plan_of_the_contracts_problem_to_its_optimum():
    problem = SchedulingProblem.load(PROBLEMS / "capped_14x5.json")
    search = CheaperPlanSearch(CandidateStages.of(problem))

    optimum_usd = search.cheapest_below(4.371)  # the contract knows a plan of 4.370626 USD

    assert optimum_usd == pytest.approx(4.370625541771701, rel=1e-9)
    assert search.cheapest_below(optimum_usd * (1 - 1e-9)) == math.inf


def test_a_proof_holds_where_extra_costs_are_charged_and_nothing_is_on_spot():
    problem = draw_capped(seed=1_000_025)
    assert problem.extra_costs.startup_seconds > 0
    assert not any(unit.interruptions_per_hour for unit in problem.device_types.values())

    verdict = examine(problem, seed=25)

    assert (verdict.outcome, verdict.false_proofs, verdict.wrongly_infeasible) == ("optimal", (), ())
