from dataclasses import replace

import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from tasks.judging.newest_rows import rows_after
from tests.heterps_core.data.synthetic_rows import all_rows

NUM_ROWS = 300


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    folder = tmp_path_factory.mktemp("days")
    for number in (1, 2, 3):
        (folder / f"day=2026-11-{number:02}").mkdir()
        write_click_stream(folder / f"day=2026-11-{number:02}" / "rows.tsv", num_rows=NUM_ROWS, seed=number)
    return folder


def test_all_rows_of_the_next_day_are_there_whatever_the_schema_leaves_out_of_training(days, tmp_path):
    schema = replace(CRITEO_SCHEMA, negative_share=0.5)
    expected = prepare_dataset(
        days / "day=2026-11-03", schema=CRITEO_SCHEMA, eval_fraction=0.0, out_dir=tmp_path / "expected"
    )

    with rows_after("2026-11-02", data=str(days), schema=schema, prepare_sql=None) as rows:
        assert rows.num_eval_rows == 0
        assert all_rows(rows).labels.tolist() == all_rows(expected).labels.tolist()
        folder = rows.directory
    assert not folder.exists()


@pytest.mark.parametrize("source", ["", "day=2026-11-03/rows.tsv"])
def test_there_are_none_after_the_last_day_and_of_data_without_days(days, source):
    with rows_after("2026-11-03", data=str(days / source), schema=CRITEO_SCHEMA, prepare_sql=None) as rows:
        assert rows is None


def test_a_query_makes_them_as_it_makes_those_of_a_night(days, tmp_path):
    query = tmp_path / "rows.sql"
    query.write_text("SELECT * FROM rows WHERE label = '1'")

    with rows_after("2026-11-01", data=str(days), schema=CRITEO_SCHEMA, prepare_sql=str(query)) as rows:
        assert set(all_rows(rows).labels.tolist()) == {1}
