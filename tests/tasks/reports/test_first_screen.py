"""The first screen of a run: few lines of 80 columns, whose figures are worked by hand from the small problem."""

from dataclasses import replace

import numpy as np
import pytest

from heterps_core.judging.quality import ClickQuality
from heterps_core.planning.provisioning.offer_choice import choose_instances
from heterps_core.plans.scheduling_plan import Stage
from tasks.judging.baseline import Baseline
from tasks.judging.promotion_gates import PromotionDecision
from tasks.provisioning import find_offers
from tasks.reports.first_screen import plan_screen, run_screen
from tests.tasks.report_builders import RUN_ID, make_plan_report, make_run_report, make_training


def facts_of(screen):
    """Return the facts of a screen by their labels, each in one line."""
    facts, label = {}, ""
    for line in screen.splitlines()[5:-2]:
        label = line[2:14].strip() or label
        facts[label] = f"{facts.get(label, '')} {line[14:]}".strip()
    return facts


def own_rows(**changes):
    """A plan for the rows that are trained."""
    planned = make_plan_report(data="clicks.tsv with a rather long name, as people have them", **changes)
    return replace(planned, problem=replace(planned.problem, num_samples=planned.num_train_rows))


def decision(*, is_promoted, champion_version):
    return PromotionDecision(
        version="2",
        run_id=RUN_ID,
        champion_version=champion_version,
        is_promoted=is_promoted,
        why="made for the test",
        gates=(),
        decided_at="2026-11-21T02:31:00+00:00",
        confidence=0.95,
        num_rows=500,
        num_clicks=130,
        challenger=None,
        champion=None,
        auc_difference=None,
        log_loss_difference=None,
    )


def test_a_run_has_one_cost_one_speed_and_one_proof_in_80_columns():
    quality = ClickQuality(auc=0.71, log_loss=0.51, num_rows=500)
    baseline = Baseline(quality=quality, num_train_rows=4_000, logits=np.zeros(500), rated_runs=())

    screen = run_screen(make_run_report(planned=own_rows(), baseline=baseline), "no rows were held out")

    assert all(len(line) <= 80 for line in screen.splitlines())
    assert len(screen.splitlines()) <= 24
    facts = facts_of(screen)
    assert facts["rows"].endswith("as people have them: 4,000 to train on, the latest 500 are held out")
    assert facts["proof"] == "optimal: no plan for this problem is cheaper (gap 0)"
    # By hand: half a minute at 0.36 + 0.72 USD/hour; 100 samples in 25 ms.
    assert facts["cost"] == (
        "promised 0.000883 USD (planned machines); billed 0.009 USD (dry run here at list prices, nothing is charged)"
    )
    assert facts["speed"] == (
        "promised 10,000 samples/s (planned machines); measured 4,000 samples/s (dry run here)"
    )
    assert screen.count("samples/s") == screen.count(" USD") == 2
    assert facts["quality"] == "AUC 0.7432; a logistic regression has 0.7100"
    assert screen.endswith(f"heterps explain {RUN_ID}")


def test_a_plan_for_the_rows_themselves_says_what_they_fit_on():
    planned = own_rows()
    one = choose_instances([Stage(0, 2, "cpu-c7i", 1)], find_offers.fn(["cpu-c7i"]))
    found = replace(planned.chosen, plan=replace(planned.chosen.plan, cost_usd=0.02, price_usd_per_hour=0.3))
    planned = replace(
        planned,
        provisioning=replace(planned.provisioning, cloud_plan=one, predicted_cost_usd=0.02),
        searches=replace(planned.searches, results={"exact": found}),
    )

    # By hand: 0.02 USD at 0.3 USD/hour are 240 s.
    facts = facts_of(plan_screen(planned))
    assert facts["plan"] == "fits on one c7i.large: 4 minutes from start to end"
    assert facts["launched"] == "nothing"


def test_a_larger_night_is_called_one():
    planned = make_plan_report()
    assert planned.problem.num_samples != planned.num_train_rows

    plan = facts_of(plan_screen(planned))["plan"]

    assert plan.startswith(f"of a night of {planned.problem.num_samples:,.0f} samples (planned_samples): ")
    assert "your rows are trained with its stages" in plan


@pytest.mark.parametrize(
    ("is_promoted", "champion_version", "said"),
    [
        (True, None, "yes: version 2 serves from now on"),
        (False, None, "no: version 2 did not pass every gate; heterps predict --version 2 uses it anyway"),
        (False, "1", "no: version 1 stays; version 2 is not proven better"),
    ],
)
def test_what_became_of_the_model_is_one_line(is_promoted, champion_version, said):
    screen = run_screen(
        make_run_report(), decision(is_promoted=is_promoted, champion_version=champion_version)
    )

    assert facts_of(screen)["champion"] == said


def test_steps_that_were_trained_twice_are_told():
    lost = replace(make_training(), num_attempts=3, num_repeated_steps=1_200)

    assert "restarted" not in facts_of(run_screen(make_run_report(), "no rows were held out"))
    told = facts_of(run_screen(make_run_report(training=lost), "no rows were held out"))["restarted"]
    assert told == "2 times; 1,200 steps done again"
