from dataclasses import replace

import pytest

from heterps_core.planning.explain.explanation import Detail, explain_plan
from heterps_core.planning.explain.reasons import OtherPlan
from heterps_core.planning.explain.text import essential_facts, explanation_text
from heterps_core.planning.problem.extra_costs import InstanceSize
from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.text_table import WIDTH, labelled_lines
from tests.builders import make_problem
from tests.heterps_core.planning.explain.trying_all import tiny_problem
from tests.tasks import builders


def explain(problem, stages=None, detail=Detail.FULL):
    explanation = explain_plan(problem, stages or find_optimum(problem).stages, detail=detail)
    return explanation_text(explanation)


def joined(text):
    """The text without line breaks and indents, to look for sentences in it."""
    return " ".join(text.split())


def test_a_hand_worked_problem_in_words():
    # The embedding on 5 cpu units and the rest on a gpu, 8 ms a batch at 1.0 USD/hour, 360 batches; 8 cpu units alone
    # take 10 ms at 0.8.
    stages = (Stage(0, 0, "cpu-c7i", 5), Stage(1, 2, "gpu-t4", 1))
    text = joined(explain(builders.make_problem(), stages))

    assert "(+USD: what the whole run would cost more than 0.0008 USD)" in text
    assert "cpu-c7i layer 0 on 5 units, 50% of the price; their work costs 10 times as much on gpu-t4" in text
    assert "gpu-t4 layers 1..2 on 1 unit, 50% of the price; one unit is as fast as 5 of cpu-c7i" in text
    # One cpu unit takes 80 ms at 0.1 USD/hour, a gpu unit 88 ms at 0.5.
    assert (
        "without t4 costs the same: all on 8 x cpu-c7i; without sapphire-rapids +0.0036 USD (+450%)" in text
    )
    assert "0.0222 USD for a million samples; proven: no plan is cheaper" in text


def test_a_stage_that_waits_for_its_rows_is_named():
    problem = builders.make_problem(throughput_floor_samples_per_s=0.0)
    # 4 seconds of a core to read 100 rows, beside a card that computes for 88 ms; no cpu is faster.
    read = replace(
        problem.layers[0],
        compute_seconds={"cpu-c7i": 1_000.0, "gpu-t4": 0.080},
        reading_seconds={"gpu-t4": 4.0},
    )
    slow = replace(problem, step_model=StepModel.TRAINER, layers=(read, *problem.layers[1:]))
    stages = (Stage(0, 2, "gpu-t4", 2),)

    explanation = explain_plan(slow, stages, detail=Detail.SHORT)

    limit = "limits layers 0..2 on gpu-t4: the core that reads for each worker reaches 25 rows/s"
    assert explanation.reading_limit == limit
    assert f"reading {limit}" in joined(explanation_text(explanation))
    assert ("reading", limit) in essential_facts(explanation)
    assert explain_plan(problem, stages, detail=Detail.SHORT).reading_limit == ""


@pytest.mark.parametrize("seed", range(3))
def test_a_full_explanation_fits_a_screen_of_100_columns(seed):
    text = explain(make_problem(seed, num_layers=10, num_types=4))

    lines = text.splitlines()
    assert len(lines) <= 32
    assert max(map(len, lines)) <= WIDTH
    for phrase in ("Why this plan", "What would change it", "next best", "10 % more"):
        assert phrase in text


def test_a_short_explanation_says_what_is_left_out():
    text = joined(explain(make_problem(0, num_layers=8, num_types=3), detail=Detail.SHORT))

    assert "Left out" in text
    assert "--explain full" in text
    assert "next best layer" not in text


def test_a_plan_that_is_not_the_cheapest_is_called_so_first():
    text = joined(explain(tiny_problem(0), stages=(Stage(0, 2, "gpu_a", 4),)))

    assert "note the plan above is not the cheapest: +" in text
    assert "--scheduler exact returns it" in text


def test_the_offer_and_its_price_are_named():
    problem = builders.make_problem()
    unit = problem.device_types["cpu-c7i"]
    sizes = (InstanceSize(name="c7i.4xlarge", units=8, price_usd_per_hour=0.8),)
    problem = replace(
        problem, device_types={**problem.device_types, "cpu-c7i": replace(unit, instances=sizes)}
    )

    assert "USD/hour for a c7i.4xlarge (today 0.8, +" in joined(explain(problem))


def test_a_throughput_out_of_reach_is_shown_with_the_most():
    # The embedding takes 5 ms for 100 samples on all 8 cpu units.
    text = joined(explain(builders.make_problem(throughput_floor_samples_per_s=19_000.0)))

    assert "is out of reach, the most is 20,000" in text


def test_a_cheaper_plan_of_machines_without_an_image_has_a_line():
    problem = builders.make_problem()
    stages = find_optimum(problem).stages
    arm = OtherPlan(hardware="", stages=(Stage(0, 2, "cpu-c8g", 3),), extra_usd=-0.0002)

    text = joined(explanation_text(explain_plan(problem, stages, detail=Detail.SHORT, not_rentable=arm)))

    assert "with machines that have no image (heterps doctor names it), -0.0002 USD (-25%)" in text
    assert "all on 3 x cpu-c8g" in text
    assert "nearest without" in text


def test_the_essential_lines_are_few():
    problem = make_problem(0, num_layers=8, num_types=4)
    spread = dict.fromkeys(problem.device_types, 0.2)
    layers = tuple(replace(layer, compute_relative_spread=spread) for layer in problem.layers)
    units = {
        name: replace(unit, times_from="estimated from data sheets")
        for name, unit in problem.device_types.items()
    }
    problem = replace(problem, layers=layers, device_types=units)

    explanation = explain_plan(problem, find_optimum(problem).stages, detail=Detail.FULL)
    facts = essential_facts(explanation)

    labels = [label for label, _ in facts]
    assert [*labels[:2], *labels[3:]] == ["nearest", "next best", "10 % more", "times"]
    used = dict.fromkeys(stage.device_type for stage in explanation.stages)
    shown = [f"computing on {name} (estimated from data sheets)" for name in used]
    assert facts[-1][1] == f"±20% for {', '.join(shown)}"
    assert len(labelled_lines(facts)) <= 10
