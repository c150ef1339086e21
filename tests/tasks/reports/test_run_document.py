import re
from dataclasses import replace

import pytest

from heterps_core.judging.intervals import Estimate
from heterps_core.planning.calibration import Calibration
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.text_table import Table
from tasks.judging.promotion_gates import GateVerdict, ModelFigures, PromotionDecision
from tasks.reports.document import Facts, Links, html_page, markdown, terminal_text
from tasks.reports.run_document import plan_document, run_document
from tasks.reports.run_report import training_summary
from tasks.running.losses import Loss, Restart
from tasks.scheduling import Searches
from tests.tasks.builders import make_problem, make_result
from tests.tasks.report_builders import (
    ID_TURNOVER,
    make_plan_report,
    make_run_report,
    make_speed,
    make_training,
)

LINKS = Links(pairs=[("This run in MLflow", "http://127.0.0.1:5000/#/x")])
SECTIONS = ["Plan", "Why this plan", "Stages", "Bill", "Speed", "Quality", "Search methods"]


def page_of(*, decision="it is a test", last=None, **changes):
    return run_document(make_run_report(**changes), decision=decision, last=last, links=LINKS)


def tables_of(page):
    return {
        block.caption: block
        for section in page.sections
        for block in section.blocks
        if isinstance(block, Table)
    }


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


def test_a_page_has_every_part_and_the_search_methods_at_its_end():
    page = page_of()

    assert page.title == "2026-11-20 ctrdnn exact"
    assert [section.title for section in page.sections] == SECTIONS
    assert "| exact (chosen) |" in markdown(page)


def test_the_picture_has_layers_over_machines_with_price_time_and_idle_share():
    measured, planned = page_of().picture, plan_document(make_plan_report(), links=LINKS).picture

    assert measured.table.columns.keys() >= {"layers", "machines", "USD/hour", "ms/batch, planned"}
    assert measured.table.cells == [
        ["0 embedding", "1 x c7i.2xlarge (4 x cpu-c7i)", "0.4000", "10.00", "20%"],
        ["1..2 fc1 .. output", "1 x g4dn.xlarge (1 x gpu-t4)", "0.5000", "8.00", "60%"],
    ]
    assert (measured.widths, measured.filled) == ([1, 2], [0.8, 0.4])
    # By hand: 100 samples at 10,000 samples/s are a step of 10 ms, of which the second stage works 8.
    assert [row[-1] for row in planned.table.cells] == ["0%", "20%"]


def test_the_bill_and_its_waste_are_tables_that_add_up():
    tables = tables_of(page_of())

    bill = tables[
        "Launch 20261121-0230-00000001, provider local, list prices of a dry run: nothing is charged: "
        "0.009000 USD"
    ]
    assert sum(float(row[6]) for row in bill.cells) == pytest.approx(0.009)
    waste = tables["Waste, each a part of the bill"]
    # By hand: 29 of 30 s without a step at 1.08 USD/hour; in the other, stages of 0.36 and 0.72 wait 20 and 60 %.
    assert [float(row[1]) for row in waste.cells] == pytest.approx(
        [29 * 1.08 / 3600, (0.2 * 0.36 + 0.6 * 0.72) / 3600], abs=1e-6
    )


def test_the_column_with_most_collisions_is_told_and_where_all_are():
    _, summary, where = page_of().sections[SECTIONS.index("Why this plan")].blocks

    # Of 700 values in 1,023 buckets: 1 - (1 - 1/1,023)^699 = 49.5 %.
    assert summary.startswith(
        "Of the 1 columns C1 has most collisions: 50% of its 700 values share one of 1,024 rows"
    )
    assert where.startswith("heterps explain 20261121-0230-00000001 and explanation.md")


def test_what_became_of_dynamic_ids_is_told_in_the_place_of_collisions():
    text = markdown(page_of(id_turnover=ID_TURNOVER))

    # By hand: 512 + 256 ids in 2 x 1,024 rows.
    assert (
        "ids have 38% of 2,048 rows; this night 140 got a row of their own, and 60 that were not seen for long went"
        in text
    )
    assert "user" in text
    assert "collisions" not in text


def test_what_workers_sent_one_another_in_a_step_is_told_with_its_format():
    training = replace(make_training(), sent_bytes_per_step=3 * 1024**2 / 2)

    for page, is_told in ((page_of(training=training), True), (page_of(), False)):
        error = page.sections[SECTIONS.index("Speed")]
        [facts] = [block for block in error.blocks if isinstance(block, Facts)]
        assert dict(facts.pairs).get("sent") == (
            "1.50 MiB a step between workers, in float32" if is_told else None
        )


def test_each_restart_has_a_line_with_what_was_lost_why_it_went_on_so_and_what_that_cost():
    loss = Loss(
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
    page = run_document(report, decision="no rows were held out", last=None, links=LINKS)

    [section] = [each for each in page.sections if each.title == "Restarts"]
    [table] = section.blocks
    assert list(table.rows) == [
        [
            "2026-11-23T02:10:05",
            "stage0-node1 fell silent",
            10,
            "shrink, of shrink 1 USD and 2.0 min",
            12.0,
            pytest.approx(0.012),
        ]
    ]
    assert report.metrics()["restarts/usd"] == pytest.approx(0.012)
    # Its last steps were trained by another fleet than the plan's: they teach nothing of the plan.
    assert report.speed is None
    assert make_run_report().speed is not None
    assert "Restarts" not in [each.title for each in page_of().sections]


def test_the_correction_of_the_prediction_is_shown():
    speeds = [make_speed(f"202610{day:02d}-0230-00000000") for day in range(1, 13)]
    page = page_of(learning=Calibration(tuple(speeds)))

    error = page.sections[SECTIONS.index("Speed")]
    [facts] = [block for block in error.blocks if isinstance(block, Facts)]
    assert dict(facts.pairs)["calibration"] == "1.250, the median of 12 past runs"
    assert dict(facts.pairs)["off by"].startswith("+0.0%")


def test_the_champion_stands_beside_the_model_with_every_gate():
    page = page_of(decision=make_decision(is_promoted=True))

    tables = tables_of(page)
    assert [row[0] for row in tables["Judged on 500 rows with 120 clicks"].rows] == [
        "challenger, version 8",
        "champion, version 7",
    ]
    gates = tables["Gates, with intervals of 95%"].cells
    assert [row[3] for row in gates] == ["met", "missed"]
    assert gates[1][1] == "-"
    assert "- **Is it the champion**: yes; It keeps every bound." in markdown(page)
    assert "champion**: no; It keeps" in markdown(page_of(decision=make_decision(is_promoted=False)))


def test_a_source_that_looks_like_markup_is_shown_as_it_is():
    html = html_page(page_of())

    assert "clicks &lt;of&gt; a day" in html
    assert "<of>" not in html


def test_a_run_that_ends_with_its_plan_has_a_page_too():
    page = plan_document(make_plan_report(), links=LINKS)

    assert [section.title for section in page.sections] == ["Plan", "Why this plan", "Search methods"]
    assert "Nothing was launched" in markdown(page)


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
    text = terminal_text(page_of(training=one_step))

    assert training_summary(one_step).startswith("1 steps, - samples/s, ")
    assert "measured     - samples/s (dry run here)" in text


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

    text = terminal_text(plan_document(report, links=LINKS))

    extra = asked.plan.cost_usd / exact.plan.cost_usd - 1
    assert f"the plan of genetic, which was asked for, costs {extra:.2%} more" in text
    assert "exact (chosen)" in text
    assert "genetic (asked for)" in text


def test_a_page_has_one_speed_promised_and_one_measured_and_each_says_for_which_machines():
    report = make_run_report()
    page = run_document(report, decision="no rows were held out", last=None, links=LINKS)
    of_other_plans = ("Search methods", "Why this plan")
    page = replace(page, sections=[each for each in page.sections if each.title not in of_other_plans])

    speeds = set(re.findall(r"([\d,]+) samples/s", markdown(page)))

    # By hand: 100 samples in 10 ms by the plan, in 25 ms here.
    assert speeds == {"10,000", "4,000"}
    assert "dry run here" in page.answers[1].remark
    assert "planned machines" in page.answers[1].remark
    # The prediction for this machine, 100 samples in 20 ms, and the simulation are for `explain`.
    assert "5,000 samples/s (dry run here)" in report.tables_text
    assert "simulated step by step" in report.tables_text
