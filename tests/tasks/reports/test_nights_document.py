import pytest

from heterps_core.planning.calibration import Correction
from heterps_core.text_table import Table
from tasks.records.mlflow_names import DAY_TAG, PROMOTED_TAG
from tasks.reports.document import Links
from tasks.reports.nights_document import nights_document
from tests.tasks.report_builders import make_night, make_speed

LINKS = Links(pairs=[("here", "http://127.0.0.1:5000")])
FAILED = {"status": "FAILED", "tags": {}, "metrics": {}}


def page_of(nights):
    return nights_document(nights, current_run_id=nights[-1].run_id, correction=Correction(), links=LINKS)


def rows_of(page):
    [table] = [block for block in page.sections[0].blocks if isinstance(block, Table)]
    return [dict(zip(table.columns, row, strict=True)) for row in table.cells]


def test_a_row_says_what_a_night_cost_how_fast_and_how_good_it_was():
    [first, *_, last] = rows_of(page_of([make_night(index) for index in range(30)]))

    # By hand: 20 ms predicted and 25 ms measured are a throughput that is a fifth lower.
    assert first == {
        "night": "2026-10-01",
        "model": "ctrdnn",
        "scheduler": "exact",
        "plan": "4 x cpu-c7i + 1 x gpu-t4",
        "USD": "0.010000",
        "USD per million": "2.5000",
        "samples/s": "4,000",
        "off by": "-20.0%",
        "AUC": "0.7400",
        "champion": "★ yes",
        "ended": "finished",
        "run": "20261001-0230-00000000",
    }
    assert last["ended"] == "this run"


def test_a_night_that_failed_has_a_row_without_figures():
    [_, failed, _] = rows_of(page_of([make_night(0), make_night(1, **FAILED), make_night(2)]))

    assert failed["ended"] == "failed"
    assert {failed[name] for name in ("USD", "samples/s", "off by", "AUC", "champion")} == {"-"}


@pytest.mark.parametrize(("failed", "named"), [({}, True), (FAILED, False)])
def test_the_best_and_the_cheapest_are_those_that_have_figures(failed, named):
    answers = {name: told for name, *told in page_of([make_night(0, **failed)]).answers}

    assert answers.get("Best AUC") == (["0.7400", "2026-10-01"] if named else None)
    assert answers.get("Cheapest") == (["2.5000 USD per million", "2026-10-01"] if named else None)


def test_a_model_that_was_kept_out_is_neither_the_best_nor_the_cheapest():
    cheap = make_night(1)
    cheap = make_night(
        1,
        tags={**cheap.tags, PROMOTED_TAG: "false"},
        metrics={**cheap.metrics, "cost/billed_usd_per_million_samples": 0.1, "quality/auc": 0.99},
    )

    answers = {name: told for name, *told in page_of([make_night(0), cheap]).answers}

    assert answers["Cheapest"] == ["2.5000 USD per million", "2026-10-01"]
    assert answers["Best AUC"] == ["0.7400", "2026-10-01"]


def test_nights_stand_in_the_order_of_their_days_and_the_newest_champion_is_marked():
    late = make_night(9)
    back_filled = make_night(9, tags={**late.tags, DAY_TAG: "2026-10-02"})

    rows = rows_of(page_of([make_night(0), make_night(2), make_night(3), back_filled]))

    assert [row["night"] for row in rows] == ["2026-10-01", "2026-10-02", "2026-10-03", "2026-10-04"]
    assert [row["champion"] for row in rows] == ["★ yes", "no", "★ newest", "no"]


def test_the_error_is_that_of_what_was_expected():
    speed = make_speed("20261001-0230-00000000")
    corrected = make_night(0, speed=type(speed).from_json({**speed.to_json(), "correction_factor": 1.25}))

    assert rows_of(page_of([corrected]))[0]["off by"] == "+0.0%"
