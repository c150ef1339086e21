import gzip
from dataclasses import replace

import numpy as np
import pytest

from heterps_core.data.reading import text_reader
from heterps_core.data.reading.readers import read_rows
from heterps_core.data.reading.text_reader import read_text
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema, SequenceColumn
from heterps_core.errors import DataError
from tests.heterps_core.data.synthetic_rows import COLUMNS, criteo_fields, criteo_lines, write_lines

PEOPLE = DataSchema(
    name="people",
    label_column="income",
    label_positive=(">50K",),
    label_negative=("<=50K",),
    numeric_columns=("age",),
    categorical_columns=("job", "land"),
    column_names=("age", "job", "land", "income"),
    separator=", ",
    missing_markers=("?",),
)


def read_all(path, schema=CRITEO_SCHEMA):
    batches = list(read_rows([path], schema))
    labels = np.concatenate([batch.labels for batch in batches])
    numbers = np.concatenate([batch.numbers for batch in batches])
    texts = [
        [text for batch in batches for text in batch.texts[slot].to_pylist()]
        for slot in range(len(batches[0].texts))
    ]
    return labels.tolist(), numbers, texts


@pytest.mark.parametrize("name", ["rows.tsv", "rows.tsv.gz", "rows"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_reads_the_published_format_plain_and_compressed(tmp_path, name, end):
    path = write_lines(tmp_path / name, criteo_lines(20), end=end)

    labels, numbers, texts = read_all(path)

    assert labels == [int(number % 3 == 0) for number in range(20)]
    assert numbers.tolist() == [[number * i % 97 for i in range(1, 14)] for number in range(20)]
    assert [column[7] for column in texts] == criteo_fields(7)[14:]


def test_missing_fields_are_nan_and_empty_text(tmp_path):
    path = write_lines(tmp_path / "rows.tsv", ["\t".join(criteo_fields(1, I3="", C5=""))])

    _, numbers, texts = read_all(path)

    assert np.flatnonzero(np.isnan(numbers[0])).tolist() == [2]
    assert [slot for slot in range(26) if not texts[slot][0]] == [4]


def test_a_csv_with_header_is_read_by_name_whatever_the_order(tmp_path):
    order = ["extra", *reversed(COLUMNS)]
    rows = [dict(zip(COLUMNS, criteo_fields(number, I2="260.0"), strict=True)) for number in range(5)]
    lines = [",".join(order), *(",".join([f"x{i}", *reversed(row.values())]) for i, row in enumerate(rows))]
    path = write_lines(tmp_path / "rows.csv", lines)

    labels, numbers, texts = read_all(path)

    assert labels == [1, 0, 0, 1, 0]
    assert numbers[:, 1].tolist() == [260.0] * 5
    assert texts[25] == [row["C26"] for row in rows]


def test_a_header_in_quotes_is_read_by_name_without_them(tmp_path):
    header = ['"extra, of two words"', *(f'"{name}"' for name in COLUMNS)]
    rows = [",".join(['"a ""b"", c"', *criteo_fields(number)]) for number in range(4)]
    path = write_lines(tmp_path / "rows.csv", [",".join(header), *rows])

    labels, numbers, texts = read_all(path)

    assert labels == [1, 0, 0, 1]
    assert numbers[:, 0].tolist() == [0, 1, 2, 3]
    assert texts[25] == [criteo_fields(number)[-1] for number in range(4)]


def test_a_byte_order_mark_before_the_header_is_no_part_of_it(tmp_path):
    lines = [b"\xef\xbb\xbf" + ",".join(COLUMNS).encode(), ",".join(criteo_fields(0))]

    assert read_all(write_lines(tmp_path / "rows.csv", lines))[0] == [1]


def test_blank_lines_are_passed_over(tmp_path):
    path = write_lines(tmp_path / "rows.tsv", ["", criteo_lines(1)[0], "", criteo_lines(1)[0], ""])

    assert read_all(path)[0] == [1, 1]


def test_fields_between_commas_may_stand_in_quotes(tmp_path):
    path = write_lines(tmp_path / "rows.csv", [",".join(criteo_fields(0, C1='"a, b"'))])

    assert read_all(path)[2][0] == ["a, b"]


def test_a_quote_between_tabs_is_a_character(tmp_path):
    path = write_lines(
        tmp_path / "rows.tsv", ["\t".join(criteo_fields(number, C1='"a')) for number in (0, 1)]
    )

    assert read_all(path)[2][0] == ['"a', '"a']


def test_a_header_in_quotes_between_tabs_means_that_fields_stand_in_quotes(tmp_path):
    header = "\t".join(f'"{name}"' for name in COLUMNS)
    rows = ["\t".join(f'"{field}"' for field in criteo_fields(number, C1="a\tb")) for number in range(4)]

    labels, numbers, texts = read_all(write_lines(tmp_path / "rows.tsv", [header, *rows]))

    assert labels == [1, 0, 0, 1]
    assert numbers[:, 0].tolist() == [0, 1, 2, 3]
    assert texts[0] == ["a\tb"] * 4


def test_padded_fields_labels_by_text_and_missing_markers(tmp_path):
    path = write_lines(
        tmp_path / "people", ["39, clerk, ?, <=50K", "?, ?, Peru, >50K", "  50 ,baker,Chad, >50K"]
    )

    labels, numbers, texts = read_all(path, PEOPLE)

    assert labels == [0, 1, 1]
    np.testing.assert_array_equal(numbers[:, 0], [39.0, np.nan, 50.0])
    assert texts == [["clerk", None, "baker"], [None, "Peru", "Chad"]]


def test_labels_are_read_in_any_form(tmp_path):
    schema = DataSchema(name="clicks", label_column="click", categorical_columns=("site",))
    path = write_lines(tmp_path / "rows.csv", ["click,site", "True,a", "0.00,b", "1,c", "false,d"])

    assert read_all(path, schema)[0] == [1, 0, 1, 0]


def test_many_gzip_members_in_one_file_are_one_file(tmp_path):
    path = tmp_path / "rows.tsv.gz"
    path.write_bytes(b"".join(gzip.compress(line.encode() + b"\n") for line in criteo_lines(3)))

    assert read_all(path)[0] == [1, 0, 0]


def line_with(number, **changes):
    return "\t".join(criteo_fields(number, **changes))


@pytest.mark.parametrize("name", ["rows.tsv", "rows.tsv.gz"])
@pytest.mark.parametrize(
    ("bad_line", "message"),
    [
        (
            "\t".join(criteo_fields(0)[:-1]),
            r"expected 40 fields of the criteo schema separated by '\\t', got 39; .*heterps init",
        ),
        (line_with(0) + "\tx", r"expected 40 fields of the criteo schema separated by '\\t', got 41"),
        ("0,1,2", r"expected 40 fields of the criteo schema separated by '\\t', got 1;"),
        (
            line_with(0, label="2"),
            r"column label\) must be 1 or 1.0 for a click and 0 or 0.0 for none, got '2'",
        ),
        (line_with(0, label=""), "column label.* got ''"),
        (line_with(0, label="-1"), "column label.* got '-1'"),
        (line_with(0, I3="abc"), "column I3 must be a finite number or empty, got 'abc'"),
        (line_with(0, I3="1,5"), "column I3 must be .* got '1,5'"),
        (line_with(0, I13="nan"), "column I13 must be .* got 'nan'"),
        (line_with(0, I1="-inf"), "column I1 must be .* got '-inf'"),
        (line_with(0, I1="1e999"), "column I1 must be .* got '1e999'"),
        (line_with(0, I1="0x10"), "column I1 must be .* got '0x10'"),
        (line_with(0, I1="1_000"), "column I1 must be .* got '1_000'"),
        (line_with(0, I1="9" * 50 + "!"), r"column I1 must be .* got '9{40}\.\.\.'"),
        (line_with(0, C2="caf").encode() + b"\xe9", "must be UTF-8 text, got byte 0xe9 at byte"),
    ],
)
def test_names_file_line_and_rule_of_a_bad_row(tmp_path, name, bad_line, message):
    lines = criteo_lines(50)
    lines[30:30] = ["", bad_line]  # the blank line is no row but counts as a line
    path = write_lines(tmp_path / name, lines)

    with pytest.raises(DataError, match=message) as caught:
        read_all(path)

    assert str(caught.value).startswith(f"{path}, line 32: ")
    assert caught.value.line == 32


def test_finds_the_line_far_after_the_first_block(tmp_path):
    lines = criteo_lines(60_000)
    lines[54_321] = line_with(0, label="yes")
    path = write_lines(tmp_path / "rows.tsv", lines)

    with pytest.raises(DataError, match="line 54322: the label"):
        read_all(path)


def test_counts_the_header_as_a_line(tmp_path):
    path = write_lines(tmp_path / "rows.csv", [",".join(COLUMNS), ",".join(criteo_fields(0, I1="x"))])

    with pytest.raises(DataError, match="line 2: column I1"):
        read_all(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (",".join(COLUMNS[:-2]), "must have the columns C25, C26; has label, I1"),
        (",".join([*COLUMNS, "I1"]), "must name each column once, but has 'I1' twice"),
    ],
)
def test_names_what_is_wrong_with_a_header(tmp_path, header, message):
    path = write_lines(tmp_path / "rows.csv", [header, ",".join(criteo_fields(0))])

    with pytest.raises(DataError, match=message):
        read_all(path)


def test_asks_for_column_names_where_neither_file_nor_schema_has_them(tmp_path):
    schema = DataSchema(name="clicks", label_column="click", categorical_columns=("site",))

    with pytest.raises(DataError, match="line 1: expected a header with the columns click, site; got '1,a'"):
        read_all(write_lines(tmp_path / "rows.csv", ["1,a"]), schema)


def test_the_schema_can_say_that_the_first_line_is_a_row(tmp_path):
    schema = DataSchema(
        name="clicks",
        label_column="click",
        categorical_columns=("site",),
        column_names=("click", "site"),
        separator=",",
        has_header=False,
    )

    assert read_all(write_lines(tmp_path / "rows.csv", ["1,site"]), schema)[2] == [["site"]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.tsv", b"", "must hold at least one row of criteo data, got none"),
        ("blank.tsv", b"\n\n", "must hold at least one row of criteo data, got none"),
        (
            "header.csv",
            ",".join(COLUMNS).encode() + b"\n",
            "must hold at least one row of criteo data, got none",
        ),
        ("empty.tsv.gz", gzip.compress(b"", mtime=0), "must hold at least one row of criteo"),
        ("plain.tsv.gz", line_with(0).encode(), "must be a gzip file, as its name ends in .gz"),
    ],
)
def test_a_file_without_rows_is_an_error(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(DataError, match=message) as caught:
        read_all(path)

    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("num_rows", [3, 5_000])
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.999])
def test_a_truncated_gzip_is_an_error(tmp_path, num_rows, kept):
    content = gzip.compress("\n".join(criteo_lines(num_rows)).encode())
    path = tmp_path / "rows.tsv.gz"
    path.write_bytes(content[: max(12, int(len(content) * kept))])

    with pytest.raises(DataError, match=r"rows.tsv.gz: the compressed stream is truncated or damaged"):
        read_all(path)


def test_a_gzip_with_a_flipped_byte_is_an_error(tmp_path):
    content = bytearray(gzip.compress("\n".join(criteo_lines(1_000)).encode()))
    content[-6] ^= 0xFF  # inside the checksum
    path = tmp_path / "rows.tsv.gz"
    path.write_bytes(content)

    with pytest.raises(DataError, match="truncated or damaged"):
        read_all(path)


def test_random_damage_never_gives_anything_but_rows_or_a_data_error(tmp_path):
    generator = np.random.default_rng(11)
    good = "\n".join(criteo_lines(30)).encode()
    outcomes = set()
    for round_number in range(150):
        content = bytearray(good)
        for position in generator.integers(0, len(content), size=int(generator.integers(1, 4))):
            content[position] = int(generator.integers(0, 256))
        path = tmp_path / f"{round_number}.tsv"
        path.write_bytes(content)
        try:
            outcomes.add(len(read_all(path)[0]) > 0)
        except DataError:
            outcomes.add("refused")

    assert outcomes == {True, "refused"}


TITLES = ("label", "price", "title")
TITLED = DataSchema(
    name="titles", label_column="label", numeric_columns=("price",), categorical_columns=("title",)
)


def title_lines(num_rows):
    """Rows that have line breaks in the quotes of two of three titles."""
    broken = '{},{},"first line {}\n\nand a second, of it"'
    return [broken.format(row % 2, row / 4, row) if row % 3 else f"0,1,t{row}" for row in range(num_rows)]


@pytest.mark.parametrize("is_headed", [True, False])
def test_line_breaks_in_quotes_are_read_at_any_size(tmp_path, monkeypatch, is_headed):
    monkeypatch.setattr(text_reader, "_BLOCK_BYTES", 200)
    schema = replace(TITLED, column_names=() if is_headed else TITLES)
    lines = [",".join(TITLES)] * is_headed + title_lines(500)
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")

    batches = list(read_text(tmp_path / "rows.csv", schema))

    titles = [title for batch in batches for title in batch.texts[0].to_pylist()]
    assert titles[:3] == ["t0", "first line 1\n\nand a second, of it", "first line 2\n\nand a second, of it"]
    assert len(titles) == 500
    assert len(batches) > 10


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("2,1,t", "line 24: the label"),
        ("1,1", "line 24: expected 3 fields of the .* separated by ',', got 2"),
    ],
)
def test_a_bad_row_after_line_breaks_in_quotes_is_named_by_its_own_line(tmp_path, bad, message):
    lines = [",".join(TITLES), *title_lines(10), bad, *title_lines(10)]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")

    with pytest.raises(DataError, match=message):
        list(read_text(tmp_path / "rows.csv", TITLED))


@pytest.mark.parametrize("separator", [None, "\t"])
def test_a_blank_may_stand_between_the_values_of_a_list(tmp_path, separator):
    schema = DataSchema(
        name="news",
        label_column="label",
        sequence_columns=(SequenceColumn(name="history"),),
        list_separator=" ",
        separator=separator,
    )
    write_lines(tmp_path / "behaviors.tsv", ["label\thistory", "1\tN1 N2 N3", "0\tN4"])

    [batch] = read_rows([tmp_path / "behaviors.tsv"], schema)

    assert batch.texts[0].to_pylist() == [["N1", "N2", "N3"], ["N4"]]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_as_on_every_system(tmp_path, end):
    path = tmp_path / "rows.csv"
    lines = [",".join(TITLES), "0,1,a", "", "1,2,b"]

    path.write_bytes(end.join(lines).encode())
    [batch] = read_rows([path], TITLED)
    path.write_bytes(end.join([*lines, "1,2"]).encode())
    with pytest.raises(DataError, match="line 5: expected 3 fields"):
        list(read_rows([path], TITLED))

    assert batch.texts[0].to_pylist() == ["a", "b"]


def test_a_first_line_with_an_endless_field_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text('label,"' + "x" * 200_000)

    with pytest.raises(DataError, match="line 1: cannot be split into fields: field larger than"):
        list(read_rows([tmp_path / "rows.csv"], TITLED))


def test_fields_may_stand_between_bars_where_no_column_has_lists(tmp_path):
    write_lines(tmp_path / "rows.psv", ["label|price|title", "0|1|a", "1|2|b"])

    [batch] = read_rows([tmp_path / "rows.psv"], replace(TITLED, separator="|"))

    assert batch.labels.tolist() == [0, 1]
