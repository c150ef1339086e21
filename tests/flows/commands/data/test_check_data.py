"""`heterps check-data` and the same checks as a step of a night."""

import gzip
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.cli import main
from heterps_core.data.schema import DataSchema
from heterps_core.data.synthetic.click_stream import write_click_days
from heterps_core.errors import DataError
from heterps_core.json_file import write_json
from infra.workspace import Workspace
from tasks.data import prepare_data
from tasks.sources import ClickSource


@pytest.fixture
def days(tmp_path):
    write_click_days(tmp_path / "days", first_day=date(2026, 11, 1), num_days=2, rows_per_day=2_000, seed=0)
    return tmp_path / "days"


@pytest.fixture
def damaged_days(days):
    """The column I2 of the later day is a constant, as where a join has failed."""
    path = next((days / "day=2026-11-02").glob("*.gz"))
    rows = [line.split("\t") for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    path.write_bytes(gzip.compress("\n".join("\t".join([*row[:2], "0", *row[3:]]) for row in rows).encode()))
    return days


def test_of_a_folder_of_days_the_latest_is_held_against_the_one_before(days, capsys):
    assert main(["check-data", str(days)]) == 0
    assert "2,000 rows of" in (printed := capsys.readouterr().out)
    assert "day=2026-11-02" in printed
    assert "of those before" in printed


def test_what_is_unusual_is_one_line_and_a_status_that_stops_a_script(damaged_days, capsys):
    assert main(["check-data", str(damaged_days)]) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "has what is unusual beside the rows before: I2 has one value at most" in error


def test_rows_out_of_the_order_of_time_are_refused(tmp_path, capsys):
    pq.write_table(pa.table({"click": [0, 1], "site": ["a", "b"], "at": [2, 1]}), tmp_path / "rows.parquet")
    schema = DataSchema(name="clicks", label_column="click", categorical_columns=("site",), time_column="at")
    write_json(tmp_path / "schema.json", schema.to_json())

    assert (
        main(["check-data", str(tmp_path / "rows.parquet"), "--schema", str(tmp_path / "schema.json")]) == 2
    )

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "rows must be in the order of at" in error


def test_a_night_that_shall_stop_does_and_one_that_shall_tell_goes_on(damaged_days, tmp_path, caplog):
    workspace = Workspace(root=tmp_path / "home").create()
    source = ClickSource(data=str(damaged_days))
    asked = {"source": source, "night": source.night(None)}

    with pytest.raises(
        DataError, match=r"day 2026-11-02.*as data_checks is stop, but I2 has one value at most"
    ):
        prepare_data.fn(workspace, **asked, data_checks="stop")
    assert list(workspace.data_directory.iterdir()) == []
    with caplog.at_level("INFO", logger="tasks.running.progress"):
        assert prepare_data.fn(workspace, **asked, data_checks="tell").open().num_train_rows == 2_000
    assert "I2 has one value at most" in caplog.text
