import json
import sys

import pytest

from heterps_core.planning.search.optimum import find_optimum
from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import planner_quality
from tests.benchmarks.planner_proofs import draw_tight
from tests.benchmarks.planner_quality import Night
from tests.builders import make_problem


def test_the_record_holds_every_figure_that_is_asked_for(tmp_path, monkeypatch, capsys):
    path = tmp_path / "quality.json"
    monkeypatch.setattr(planner_quality, "SIZES_OF_NIGHTS", ())
    monkeypatch.setattr(sys, "argv", ["benchmarks", "planner_quality", "--cases", "1", "--json", str(path)])

    assert benchmarks.main() == 0

    record = json.loads(path.read_text())
    assert {"benchmark", "command", "hardware", "versions", "seed", "figures"} <= set(record)
    names = {figure["name"] for figure in record["figures"]}
    assert names >= {
        "exact_seconds_32x4",
        "exact_seconds_100x10",
        "replan_seconds_32x4",
        "evaluation_microseconds",
    }
    assert all(figure["value"] > 0 for figure in record["figures"])
    assert "exact_seconds_32x4" in capsys.readouterr().out


def test_quality_is_measured_against_the_proven_optimum():
    problems = [make_problem(seed, num_layers=4, num_types=2) for seed in range(2)]
    nights = [Night(problem, find_optimum(problem).cost_usd) for problem in problems]

    figures = {
        figure["name"]: figure["value"] for figure in planner_quality.quality("brute-force", nights, "4x2")
    }

    assert figures["brute_force_share_within_0.1_percent_4x2_2000"] == 1
    assert figures["brute_force_median_gap_4x2_4000"] == pytest.approx(0, abs=1e-12)


def test_a_method_that_finds_no_plan_has_no_gap():
    problem = make_problem(0, num_layers=4, num_types=2, floor_samples_per_s=1e12)

    figures = {
        figure["name"]: figure["value"]
        for figure in planner_quality.quality("greedy", [Night(problem, 1.0)], "4x2")
    }

    assert figures["greedy_share_with_a_plan_4x2_2000"] == 0
    assert "greedy_median_gap_4x2_2000" not in figures


@pytest.mark.weekly
def test_a_search_goes_on_where_the_stages_that_its_bound_found_have_left_the_chain():
    problem = next(each for each in draw_tight(32, 4, seed=0) if each.model == "random-1000017")

    found = find_optimum(problem, seconds=60.0)

    assert found.cost_usd <= 1.01 * found.cost_lower_bound_usd
