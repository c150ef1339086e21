"""`heterps init` and `heterps check-data` on tables, as on files."""

import json

from flows.cli import main
from heterps_core.json_file import write_json
from tests.heterps_core.data.reading.tables.table_makers import (
    DAYS,
    SCHEMA,
    Iceberg,
    clicks,
    delete_by_position,
)


def two_days(num_rows):
    days = [str(DAYS[2 * row >= num_rows]) for row in range(num_rows)]
    return clicks(0, num_rows).set_column(3, "day", [days])


def test_a_schema_is_proposed_and_the_latest_day_checked_beside_the_one_before(
    table, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    table.append(two_days(600), by=["day"])

    assert main(["init", table.data, "--label", "clicked", "--output", "clicks.json"]) == 0
    assert main(["check-data", table.data, "--schema", "clicks.json"]) == 2

    said = capsys.readouterr()
    assert said.out.count("300 rows of ") == 2
    assert "day=2026-11-02" in said.out
    # Its rows have numbers that the day before had not.
    assert "row is distributed otherwise than before" in said.err


def test_renamed_columns_and_deleted_rows_are_as_the_table_shows_them(tmp_path, catalog, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    iceberg = Iceberg(tmp_path)
    iceberg.append(clicks(0, 400))
    with iceberg.catalog.load_table("shop.clicks").update_schema() as update:
        update.rename_column("town", "city")
    delete_by_position(iceberg, [3, 4])

    assert main(["init", iceberg.data, "--label", "clicked", "--output", "clicks.json"]) == 0
    assert json.loads((tmp_path / "clicks.json").read_text())["categorical_columns"] == ["city"]
    write_json(tmp_path / "older.json", SCHEMA.to_json())
    assert main(["check-data", iceberg.data, "--schema", "older.json"]) == 2

    said = capsys.readouterr()
    assert "398 rows of " in said.out
    assert "must have the columns town; has row, clicked, city, day" in said.err
