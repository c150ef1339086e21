"""The report of a run in a terminal: the screen of 80 columns, and the whole text; figures are worked by hand."""

import re
from dataclasses import replace

import numpy as np
import pytest

from heterps_core.judging.intervals import Estimate
from heterps_core.judging.quality import ClickQuality
from heterps_core.planning.calibration import Calibration
from heterps_core.planning.provisioning.offer_choice import choose_instances
from heterps_core.plans.scheduling_plan import Stage
from tasks.judging.baseline import Baseline
from tasks.judging.promotion_gates import GateVerdict, ModelFigures, PromotionDecision
from tasks.provisioning import find_offers
from tasks.reports.report_text import report_text, screen
from tasks.reports.run_report import training_summary
from tasks.running.losses import Restart, _Loss
from tasks.scheduling import Searches
from tests.heterps_core.profiling.builders import make_profile
from tests.tasks.builders import make_problem, make_result
from tests.tasks.report_builders import (
    ID_TURNOVER,
    RUN_ID,
    make_plan_report,
    make_run_report,
    make_speed,
    make_training,
)


def facts_of(text):
    """Return the facts of a screen by their labels, each in one line."""
    facts, label = {}, ""
    for line in text.splitlines()[5:-2]:
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

    text = screen(make_run_report(planned=own_rows(), baseline=baseline), "no rows were held out")

    assert all(len(line) <= 80 for line in text.splitlines())
    assert len(text.splitlines()) <= 24
    facts = facts_of(text)
    assert facts["rows"].endswith("as people have them: 4,000 to train on, the latest 500 are held out")
    assert facts["proof"] == "optimal: no plan for this problem is cheaper (gap 0)"
    # By hand: half a minute at 0.36 + 0.72 USD/hour; 100 samples in 25 ms.
    assert facts["cost"] == (
        "promised 0.000883 USD (planned machines); billed 0.009 USD (dry run here at list prices, nothing is charged)"
    )
    assert facts["speed"] == (
        "promised 10,000 samples/s (planned machines); measured 4,000 samples/s (dry run here)"
    )
    assert text.count("samples/s") == text.count(" USD") == 2
    assert facts["quality"] == "AUC 0.7432; a logistic regression has 0.7100"
    assert text.endswith(f"heterps explain {RUN_ID}")


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
    facts = facts_of(screen(planned, "nothing was trained"))
    assert facts["plan"] == "fits on one c7i.large: 4 minutes from start to end"
    assert facts["launched"] == "nothing"


def test_a_larger_night_is_called_one():
    planned = make_plan_report()
    assert planned.problem.num_samples != planned.num_train_rows

    plan = facts_of(screen(planned, "nothing was trained"))["plan"]

    assert plan.startswith(f"of a night of {planned.problem.num_samples:,.0f} samples (planned_samples): ")
    assert "your rows are trained with its stages" in plan


def test_a_part_of_the_rows_that_is_trained_as_planned_is_no_larger_night():
    planned = make_plan_report()
    rented = replace(planned, provisioning=replace(planned.provisioning, is_dry_run=False))

    plan = facts_of(screen(rented, "nothing was trained"))["plan"]

    assert plan.endswith(" from start to end")
    assert "planned_samples" not in plan


@pytest.mark.parametrize(
    ("is_promoted", "champion_version", "said"),
    [
        (True, None, "yes: version 2 serves from now on"),
        (False, None, "no: version 2 did not pass every gate; heterps predict --version 2 uses it anyway"),
        (False, "1", "no: version 1 stays; version 2 is not proven better"),
    ],
)
def test_what_became_of_the_model_is_one_line(is_promoted, champion_version, said):
    text = screen(make_run_report(), decision(is_promoted=is_promoted, champion_version=champion_version))

    assert facts_of(text)["champion"] == said


def test_the_screen_says_in_one_line_that_the_machine_was_busy():
    busy = replace(make_profile(), clock_over_processor=4.2).busy_text
    lines = screen(replace(make_plan_report(), busy=busy), "nothing was trained").splitlines()

    assert f"  busy        {busy}" in lines
    assert "busy" not in facts_of(screen(make_plan_report(), "nothing was trained"))


def test_steps_that_were_trained_twice_are_reported():
    lost = replace(make_training(), num_attempts=3, num_repeated_steps=1_200)

    assert "restarted" not in facts_of(screen(make_run_report(), "no rows were held out"))
    reported = facts_of(screen(make_run_report(training=lost), "no rows were held out"))["restarted"]
    assert reported == "2 times; 1,200 steps done again"


LINKS = [("This run in MLflow", "http://127.0.0.1:5000/#/x")]


def text_of(report=None, *, decision="it is a test", **changes):
    """Return a whole report with single spaces, as columns are as wide as their widest cell."""
    return " ".join(report_text(report or make_run_report(**changes), decision, LINKS).split())


def make_decision(*, is_promoted):
    figures = ModelFigures(auc=0.7432, log_loss=0.5012, calibration_ratio=1.02, usd_per_million_samples=2.25)
    return PromotionDecision(
        version="8",
        run_id="20261121-0230-00000001",
        champion_version="7",
        is_promoted=is_promoted,
        why="It keeps every bound.",
        gates=(
            GateVerdict(
                name="AUC difference, lower end", value=0.001, bound=-0.0005, rule="at least", is_met=True
            ),
            GateVerdict(name="cost over the champion's", value=None, bound=1.5, rule="at most", is_met=False),
        ),
        decided_at="2026-11-21T02:40:00+00:00",
        confidence=0.95,
        num_rows=500,
        num_clicks=120,
        challenger=figures,
        champion=figures,
        auc_difference=Estimate(value=0.002, low=0.001, high=0.003),
        log_loss_difference=None,
    )


def test_a_report_has_every_part_and_the_search_methods_before_its_links():
    lines = report_text(make_run_report(), "it is a test", LINKS).splitlines()

    sections = ["Plan", "Why this plan", "Stages", "Bill", "Speed", "Quality", "Search methods", "Links"]
    assert [line for line in lines if line in sections] == sections
    assert max(map(len, lines[: lines.index("Stages")])) <= 102
    assert lines[-1] == "  This run in MLflow  http://127.0.0.1:5000/#/x"


def test_a_run_that_ends_with_its_plan_has_a_report_too():
    lines = report_text(make_plan_report(), "nothing was trained", LINKS).splitlines()

    sections = ["Plan", "Why this plan", "Stages", "Search methods", "Links"]
    assert [line for line in lines if line in [*sections, "Bill", "Speed", "Quality"]] == sections
    assert "  launched    nothing" in lines


def test_a_stage_has_its_layers_machines_price_and_times():
    # By hand: 100 samples at 10,000 samples/s are a step of 10 ms, of which the second stage works 8.
    assert "0 0 embedding 1 x c7i.2xlarge (4 x cpu-c7i) 0.4000 10.00 0% 1 1..2" in text_of(make_plan_report())
    text = text_of()
    assert "0 0 embedding 1 x c7i.2xlarge (4 x cpu-c7i) 0.4000 10.00 10.00 20.00 20%" in text
    assert "1 1..2 fc1 .. output 1 x g4dn.xlarge (1 x gpu-t4) 0.5000 8.00 8.00 10.00 60%" in text
    assert "Workers here: 1 + 1 for the plan's 4 + 1, batches of 100" in text


def test_the_bill_and_its_waste_add_up():
    text = text_of()

    assert (
        f"Launch {RUN_ID}, provider local, list prices of a dry run: nothing is charged: 0.009000 USD" in text
    )
    # By hand: 29 of 30 s without a step at 1.08 USD/hour; in the other, stages of 0.36 and 0.72 wait 20 and 60 %.
    assert f"start-up, evaluation and teardown {29 * 1.08 / 3600:.6f}" in text
    assert f"workers that waited for others {(0.2 * 0.36 + 0.6 * 0.72) / 3600:.6f}" in text


def test_the_column_with_most_collisions_is_named():
    # Of 700 values in 1,023 buckets: 1 - (1 - 1/1,023)^699 = 49.5 %.
    assert "Column C1 has most collisions of 1: 50% of its 700 values share one of 1,024 rows" in text_of()


def test_the_fate_of_dynamic_ids_stands_in_the_place_of_collisions():
    text = text_of(id_turnover=ID_TURNOVER)

    # By hand: 512 + 256 ids in 2 x 1,024 rows.
    assert (
        "ids have 38% of 2,048 rows; this night 140 got a row of their own, and 60 that were not seen" in text
    )
    assert "collisions" not in text


def test_the_bytes_that_workers_send_in_a_step_are_named_with_their_format():
    training = replace(make_training(), sent_bytes_per_step=3 * 1024**2 / 2)

    assert "sent 1.50 MiB a step between workers, in float32" in text_of(training=training)
    assert " sent " not in text_of()


def test_the_shares_of_replicas_are_named_where_they_differ():
    training = replace(make_training(), shares={0: (0.75, 0.25)})

    assert "of each batch, by the speeds of replicas: stage 0 75.0% 25.0%" in text_of(training=training)
    assert "shares" not in text_of()


def test_each_restart_has_a_line_with_the_loss_the_decision_and_its_cost():
    loss = _Loss(
        launch_id="r1",
        at="2026-11-23T02:10:05.123456+00:00",
        message="stage0-node1 fell silent; its log is x\nmore",
        signature=None,
        last_step=30,
        checkpoint_step=20,
        usd_per_hour=3.6,
        decision="shrink, of shrink 1 USD and 2.0 min",
        is_of_other_size=True,
    )
    report = make_run_report(restarts=[Restart(loss=loss, seconds=12.0)])

    # By hand: 12 s at 3.6 USD/hour.
    row = "2026-11-23T02:10:05 stage0-node1 fell silent 10 shrink, of shrink 1 USD and 2.0 min 12.0 0.012000"
    assert row in text_of(report)
    assert report.metrics()["restarts/usd"] == pytest.approx(0.012)
    # Its last steps were trained by another fleet than the plan's: they teach nothing of the plan.
    assert report.speed is None
    assert make_run_report().speed is not None
    assert "Restarts" not in text_of()


def test_the_correction_of_the_prediction_is_shown():
    speeds = [make_speed(f"202610{day:02d}-0230-00000000") for day in range(1, 13)]
    text = text_of(learning=Calibration(tuple(speeds)))

    assert "calibration 1.250, the median of 12 past runs" in text
    assert "off by +0.0% against" in text


def test_the_prediction_of_a_step_of_one_millisecond_says_how_much_such_steps_vary():
    short, long = (make_plan_report(predicted_step_seconds=seconds) for seconds in (0.001, 0.003))

    caution = "steps of less than 2 ms vary by a third between runs"
    assert f"(dry run here); {caution}" in short.other_speeds
    assert caution in text_of(planned=short)
    assert caution not in text_of(planned=long)


def test_the_champion_stands_beside_the_model_with_every_gate():
    text = text_of(decision=make_decision(is_promoted=True))

    assert "It keeps every bound. Judged on 500 rows with 120 clicks" in text
    assert "challenger, version 8 0.7432 0.5012 1.0200 2.2500 - champion, version 7 0.7432" in text
    assert "AUC difference, lower end 0.001 at least -0.0005 met" in text
    assert "cost over the champion's - at most 1.5 missed" in text


def test_the_figures_of_a_decision_have_stable_names():
    found = {
        name: value for name, value in make_decision(is_promoted=True).metrics().items() if value is not None
    }
    assert found == {
        "promotion/auc_difference": 0.002,
        "promotion/auc_difference_low": 0.001,
        "promotion/auc_difference_high": 0.003,
        "champion/auc": 0.7432,
        "champion/log_loss": 0.5012,
    }
    first = replace(make_decision(is_promoted=True), auc_difference=None, champion=None)
    assert set(first.metrics().values()) == {None}


@pytest.fixture
def one_step():
    """A run of a single step, which measures no speed."""
    training = make_training()
    return replace(
        training,
        steps=training.steps[:1],
        throughput_samples_per_s=None,
        undisturbed_throughput_samples_per_s=None,
    )


def test_a_speed_that_was_not_measured_is_a_dash_in_every_text(one_step):
    assert training_summary(one_step).startswith("1 steps, - samples/s, ")
    assert "measured - samples/s (dry run here)" in text_of(training=one_step)


def test_a_speed_that_was_not_measured_has_no_figure(one_step):
    metrics = make_run_report(training=one_step).metrics()

    speeds = (
        "night/samples_per_s",
        "night/off_by",
        "measured/step_seconds",
    )
    assert {name: metrics[name] for name in speeds} == dict.fromkeys(speeds)


def test_a_plan_that_is_not_of_the_method_that_was_asked_for_says_so():
    problem = make_problem()
    exact, asked = (
        make_result(problem),
        make_result(problem, stages=(Stage(0, 2, "gpu-t4", 8),), scheduler="genetic"),
    )
    searches = Searches(results={"exact": exact, "genetic": asked}, without_plan={}, taken="exact")
    report = replace(make_plan_report(), searches=searches, scheduler="genetic")

    text = text_of(report)

    extra = asked.plan.cost_usd / exact.plan.cost_usd - 1
    assert f"the plan of genetic, which was asked for, costs {extra:.2%} more" in text
    assert "exact (chosen)" in text
    assert "genetic (asked for)" in text


def test_the_screen_has_one_speed_promised_and_one_measured_and_each_says_for_which_machines():
    report = make_run_report()
    speeds = set(re.findall(r"([\d,]+) samples/s", screen(report, "no rows were held out")))

    # By hand: 100 samples in 10 ms by the plan, in 25 ms here.
    assert speeds == {"10,000", "4,000"}
    # The prediction for this machine, 100 samples in 20 ms, and the simulation are for `explain`.
    assert "5,000 samples/s (dry run here)" in report.tables_text
    assert "simulated step by step" in report.tables_text
