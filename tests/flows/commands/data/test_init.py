"""What `heterps init` takes the columns of a table for, and that what it writes can be trained with."""

import gzip
import re
import shutil
from dataclasses import replace
from pathlib import Path

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.cli import main
from flows.command_line import _read_parameters
from flows.parameters import TrainParameters
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import DataSchema, MultiHotColumn
from heterps_core.errors import ConfigurationError
from tests.moto_server import empty_cloud

NUM_ROWS = 2_000


@pytest.fixture
def columns():
    generator = np.random.default_rng(0)
    return {
        "session": [f"s{number}" for number in range(NUM_ROWS)],
        "Click": generator.random(NUM_ROWS) < 0.2,
        "price": generator.lognormal(3, 2, NUM_ROWS),
        "age": generator.normal(40, 10, NUM_ROWS),
        "num_visits": generator.geometric(0.01, NUM_ROWS) ** 2,
        "ad_id": generator.integers(0, 700, NUM_ROWS),
        "weekdays": generator.integers(0, 7, NUM_ROWS),
        "country": [None if number % 4 == 0 else f"c{number % 30}" for number in range(NUM_ROWS)],
        "version": ["1"] * NUM_ROWS,
        "at": pa.array(range(NUM_ROWS), pa.timestamp("s")),
        "tags": [[f"t{tag}" for tag in range(number % 6)] or None for number in range(NUM_ROWS)],
        "place": [{"x": 1}] * NUM_ROWS,
    }


@pytest.fixture
def parquet(tmp_path, columns):
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    return tmp_path / "clicks.parquet"


def test_the_schema_of_a_parquet_file_is_proposed_and_can_be_prepared_with(parquet, tmp_path, capsys):
    written = tmp_path / "schema.json"

    assert main(["init", str(parquet), "--output", str(written)]) == 0

    schema = DataSchema.load(written)
    assert schema == DataSchema(
        name="clicks",
        label_column="Click",
        label_positive=("1",),
        label_negative=("0",),
        numeric_columns=("price", "age", "num_visits"),
        count_columns=("price", "num_visits"),
        time_column="at",
        categorical_columns=("ad_id", "weekdays", "country"),
        multi_hot_columns=(MultiHotColumn(name="tags", max_length=5),),
    )
    assert prepare_dataset(parquet, schema=schema, out_dir=tmp_path / "d").manifest.num_rows == NUM_ROWS
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert lines["country"].split()[1:6] == ["string", "categorical", "25.0%", "30", "1,024"]
    assert "left out" in lines["session"]
    assert "nearly every row has a value of its own" in lines["session"]
    assert "multi-hot      16.7%       5       1,024  values in the order of time" in lines["tags"]
    assert "cannot be read as numbers or texts" in lines["place"]
    assert "a time" in lines["at"]
    assert "has one value at most" in lines["version"]


def test_schema_and_parameters_are_written_into_one_file_that_a_training_takes(
    parquet, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "clicks.parquet", "--output", "schema.json"]) == 0
    assert main(["init", "clicks.parquet"]) == 0

    assert capsys.readouterr().out.endswith("\n  heterps train --parameters heterps.toml\n")
    assert DataSchema.load(Path("heterps.toml")) == DataSchema.load(Path("schema.json"))
    asked = TrainParameters.of(_read_parameters(Path("heterps.toml")))
    assert (asked.data, asked.schema_file) == ("clicks.parquet", "heterps.toml")
    assert main(["check-data", "clicks.parquet", "--schema", "heterps.toml"]) == 0


def test_a_column_name_with_quotes_and_other_scripts_is_read_from_toml_as_it_was(tmp_path):
    name = 'a "b"\\\x7f=[c] ü 広告 😀'
    pq.write_table(
        pa.table({"label": [0, 1] * 50, name: [f"t{row % 7}" for row in range(100)]}), tmp_path / "x.parquet"
    )

    assert main(["init", str(tmp_path / "x.parquet"), "--output", str(tmp_path / "x.toml")]) == 0

    assert DataSchema.load(tmp_path / "x.toml").categorical_columns == (name,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[schema]\nname = \n", "is not valid TOML: .*line 2"),
        ("[rows]\n", r"must hold the tables \[schema\] and \[parameters\], but has rows"),
        ("schema = 1\n", r"must hold the tables .*, but has schema"),
        ("[parameters]\n", r"must hold a table \[schema\]"),
        ("[schema]\nschema_version = 1\nname = 'x'\nlable_column = 'y'\n", "lable_column"),
        ("[schema]\nschema_version = 1\nname = 2026-11-01\n", "name: must be a text, got .*2026"),
    ],
)
def test_a_toml_file_that_is_no_schema_is_reported(tmp_path, text, message):
    (tmp_path / "x.toml").write_text(text)

    with pytest.raises(ConfigurationError, match=rf"x\.toml: .*{message}"):
        DataSchema.load(tmp_path / "x.toml")


def test_a_label_that_another_column_gives_away_and_rows_out_of_order_are_reported(tmp_path, columns, capsys):
    times = pa.array(np.random.default_rng(0).permutation(NUM_ROWS), pa.timestamp("s"))
    table = {**columns, "dwell": np.where(columns["Click"], 7.5, 0.0), "at": times}
    pq.write_table(pa.table(table), tmp_path / "clicks.parquet")

    assert main(["init", str(tmp_path / "clicks.parquet"), "--output", str(tmp_path / "schema.json")]) == 0

    out = capsys.readouterr().out
    assert f"Click is '1', a click, in {np.mean(columns['Click']):.2%} of them" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert "tells the label alone (AUC 1.000)" in lines["dwell"]
    assert "left out" in lines["dwell"]
    assert "if it is known before the click, name it in numeric_columns" in lines["dwell"]
    assert "dwell" not in DataSchema.load(tmp_path / "schema.json").used_columns
    assert "rows are not in its order (50% are before their neighbour)" in lines["at"]


def test_text_with_a_header_is_looked_at_too_and_the_label_may_be_named(tmp_path, columns, capsys):
    names = ["bought", "price", "country"]
    rows = zip(np.where(columns["Click"], "yes", "no"), columns["price"], columns["country"], strict=True)
    text = "\n".join([",".join(names), *(f"{a},{b:.2f},{c or '?'}" for a, b, c in rows), "no,\\N,c1"])
    (tmp_path / "day").mkdir()
    (tmp_path / "day" / "clicks.csv.gz").write_bytes(gzip.compress(text.encode()))
    output = tmp_path / "schema.json"

    assert main(["init", str(tmp_path / "day"), "--label", "bought", "--output", str(output)]) == 0

    schema = DataSchema.load(output)
    assert (schema.label_positive, schema.label_negative) == (("yes",), ("no",))
    assert (schema.count_columns, schema.categorical_columns) == (("price",), ("country",))
    assert schema.missing_markers == ("\\N", "?")
    assert "25.0%" in next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("country")
    )


def test_padded_fields_are_reported_from_blanks_that_belong_to_them(tmp_path):
    names = "label, age, town, workclass"
    rows = [
        f"{row % 2}, {20 + row % 51}, {'?' if row % 5 == 0 else 'Bad Ems'}, w{row % 9}" for row in range(500)
    ]
    path, output = tmp_path / "adult.csv", tmp_path / "schema.json"
    path.write_text("\n".join([names, *rows]) + "\n")

    assert main(["init", str(path), "--output", str(output)]) == 0

    schema = DataSchema.load(output)
    assert (schema.separator, schema.missing_markers) == (", ", ("?",))
    assert (schema.numeric_columns, schema.categorical_columns) == (("age",), ("workclass",))
    manifest = prepare_dataset(path, schema=schema, out_dir=tmp_path / "out").manifest
    assert manifest.columns[0].num_values == 9
    path.write_text(path.read_text().replace(", ", ","))
    output.unlink()
    assert main(["init", str(path), "--output", str(output)]) == 0
    assert DataSchema.load(output).separator is None


def test_of_days_the_latest_is_looked_at_here_and_in_a_bucket(parquet, tmp_path, capsys, monkeypatch):
    for day in ("2026-11-01", "2026-11-02"):
        (tmp_path / "days" / f"dt={day}" / "hour=00").mkdir(parents=True)
    shutil.copy(parquet, tmp_path / "days" / "dt=2026-11-02" / "hour=00" / "part.parquet")
    (tmp_path / "days" / "dt=2026-11-01" / "hour=00" / "part.parquet").write_text("an earlier format")
    with empty_cloud() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="ads")
        for path in (tmp_path / "days").rglob("*.parquet"):
            client.upload_file(str(path), "ads", f"clicks/{path.relative_to(tmp_path / 'days')}")

        for number, source in enumerate([str(tmp_path / "days"), "s3://ads/clicks"]):
            assert main(["init", source, "--output", str(tmp_path / f"{number}.json")]) == 0
            place = f"{source}/dt=2026-11-02/hour=00/part.parquet"
            assert f"2,000 rows of {place}" in capsys.readouterr().out
        assert main(["init", "s3://ads/none", "--output", str(tmp_path / "none.json")]) == 2

    schemas = [DataSchema.load(tmp_path / f"{number}.json") for number in (0, 1)]
    assert [schema.name for schema in schemas] == ["days", "clicks"]
    assert replace(schemas[0], name="clicks") == schemas[1]
    assert schemas[0].label_column == "Click"
    assert "s3://ads/none: there is no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--label", "clicked"],
            "the label must be a column of .*, which has session, Click, .*; got clicked",
        ),
        (["--label", "country"], "of two, but column country has 31: "),
        (["--label", "tags"], "the label must hold texts or numbers, but column tags holds list<"),
        (["--output", "{parquet}"], "must not be there yet, but .*clicks.parquet is"),
    ],
)
def test_what_cannot_be_proposed_is_reported(parquet, tmp_path, capsys, arguments, message):
    output = [] if "--output" in arguments else ["--output", str(tmp_path / "s.json")]
    arguments = [each.format(parquet=parquet) for each in arguments]

    assert main(["init", str(parquet), *arguments, *output]) == 2

    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "s.json").exists()


def test_a_table_without_a_label_by_name_says_how_to_name_it(tmp_path, capsys):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")

    assert main(["init", str(tmp_path / "x.csv"), "--output", str(tmp_path / "s.json")]) == 2

    assert "name it by --label, of a, b" in capsys.readouterr().err


def test_text_without_a_header_is_refused(tmp_path, capsys):
    (tmp_path / "x.csv").write_text("1,a\n0,b\n")

    assert main(["init", str(tmp_path / "x.csv"), "--output", str(tmp_path / "s.json")]) == 2

    assert "must have a header that names its columns, got 1, a" in capsys.readouterr().err


def test_text_without_a_header_is_given_its_names_and_can_be_prepared(tmp_path, capsys):
    rows = "".join(f"{30 + row % 40}, t{row % 5}, {'yes' if row % 4 == 0 else 'no'}\n" for row in range(200))
    (tmp_path / "people.csv").write_text(rows)
    output = tmp_path / "s.json"

    assert (
        main(["init", str(tmp_path / "people.csv"), "--columns", "age,town,label", "--output", str(output)])
        == 0
    )

    schema = DataSchema.load(output)
    assert schema.column_names == ("age", "town", "label")
    assert (schema.separator, schema.label_positive) == (", ", ("yes",))
    dataset = prepare_dataset(str(tmp_path / "people.csv"), schema=schema, out_dir=tmp_path / "prepared")
    assert dataset.manifest.num_rows == 200


def test_names_for_a_file_that_has_its_own_are_refused(parquet, tmp_path, capsys):
    assert main(["init", str(parquet), "--columns", "a,b", "--output", str(tmp_path / "s.json")]) == 2

    assert "names its columns itself, as it is Parquet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("separator", "asked"),
    [(";", []), ("\x01", []), ("~", ["--separator", "~"]), ("\x02", ["--separator", r"\x02"])],
)
def test_fields_between_other_separators_are_reported_apart_and_can_be_prepared(tmp_path, separator, asked):
    (tmp_path / "000000_0").write_text("1;a\n0;\\N\n0;b\n".replace(";", separator) * 20)
    output = tmp_path / "s.toml"

    assert (
        main(["init", str(tmp_path / "000000_0"), "--columns", "label,town", "--output", str(output), *asked])
        == 0
    )

    schema = DataSchema.load(output)
    assert (schema.separator, schema.categorical_columns) == (separator, ("town",))
    assert schema.missing_markers == ("\\N",)
    dataset = prepare_dataset(str(tmp_path / "000000_0"), schema=schema, out_dir=tmp_path / "prepared")
    assert dataset.manifest.num_rows == 60


@pytest.mark.parametrize("text", ["::", "", "é", "\\n"])
def test_a_separator_is_one_character(tmp_path, capsys, text):
    with pytest.raises(SystemExit):
        main(["init", "x.csv", "--separator", text])

    assert "must be one ASCII character" in capsys.readouterr().err


def test_parts_without_rows_are_not_looked_at(tmp_path):
    for part, text in enumerate(["", "label,town\n", "label,town\n" + "1,a\n0,b\n0,b\n" * 20]):
        (tmp_path / f"part-{part}.csv").write_text(text)

    assert main(["init", str(tmp_path), "--output", str(tmp_path / "_s.json")]) == 0

    assert DataSchema.load(tmp_path / "_s.json").categorical_columns == ("town",)


def test_few_numbers_that_occur_often_are_categories_too_and_a_schema_needs_no_others(tmp_path, capsys):
    rows = "".join(f"{row % 2},{20 + row % 7 * row % 41},{row * 1.5}\n" for row in range(4_200))
    (tmp_path / "x.csv").write_text(f"label,age,price\n{rows}")

    assert main(["init", str(tmp_path / "x.csv"), "--output", str(tmp_path / "s.json")]) == 0

    schema = DataSchema.load(tmp_path / "s.json")
    assert schema.numeric_columns == ("age", "price")
    assert schema.categorical_columns == ("age",)
    assert "numeric, categorical" in capsys.readouterr().out
    assert (
        prepare_dataset(tmp_path / "x.csv", schema=schema, out_dir=tmp_path / "d").manifest.num_rows == 4_200
    )


def test_a_number_that_names_each_row_is_left_out(tmp_path):
    rows = "".join(f"{row},{row % 2},s{row % 3}\n" for row in range(100))
    (tmp_path / "x.csv").write_text(f"row_id,label,site\n{rows}")

    assert main(["init", str(tmp_path / "x.csv"), "--output", str(tmp_path / "s.json")]) == 0

    assert DataSchema.load(tmp_path / "s.json").categorical_columns == ("site",)


def test_a_table_whose_only_category_tells_the_label_alone_is_refused_with_its_name(tmp_path, capsys):
    rows = "".join(f"{row % 3 // 2},p{row % 3 // 2}\n" for row in range(200))
    (tmp_path / "x.csv").write_text(f"label,page\n{rows}")

    assert main(["init", str(tmp_path / "x.csv"), "--output", str(tmp_path / "s.json")]) == 2

    assert "but none looks like one; page tells the label alone (AUC 1.000)" in capsys.readouterr().err
