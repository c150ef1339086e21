"""Values that are counted in bounded memory against sets, and the tables that are made for them."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from heterps_core.data import distinct_values, training_rows
from heterps_core.data.distinct_values import ColumnValues, ValueCounter, outgrown_tables, tables_table
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from tests.heterps_core.data.synthetic_rows import prepare, rows_of_texts


def counted(texts):
    counter = ValueCounter()
    counter.add(pa.array(texts, pa.string()))
    return counter


def zipf_texts(num_rows, *, num_values=400_000, seed=0):
    """Values of which the r-th has weight 1 / r."""
    ranks = np.floor(num_values ** np.random.default_rng(seed).random(num_rows))
    return [f"v{rank:.0f}" for rank in ranks]


def column(num_values, *, missing_share=0.0, name="C1"):
    return ColumnValues(name=name, missing_share=missing_share, num_values=num_values)


def test_few_values_are_counted_exactly_whatever_stands_for_missing_ones():
    counter = counted(["a", None, "b", "", "a"])
    counter.add(pa.array(["c", None, "a"], pa.string()).dictionary_encode())

    assert (counter.num_values, counter.num_rows, counter.num_missing) == (3, 8, 3)


def test_values_of_lists_are_counted_and_lists_without_any_are_missing():
    counter = ValueCounter()
    counter.add(pa.array([["a", "b"], None, [], ["b", None, "c", "d"]]))
    counter.add(pa.array([["e"], ["a"], ["f", "g"]]).slice(1, 1))

    assert (counter.num_values, counter.num_rows, counter.num_missing) == (4, 5, 2)
    found = counter.column("tags", num_rows=5)
    assert found == ColumnValues(name="tags", missing_share=0.4, num_values=4, mean_length=2.0)


def test_lists_fill_a_table_with_as_many_values_as_they_hold():
    # Of 200,000 rows half have a list of 8: 800,000 values, of which 8 are wanted for each of 65,536 rows.
    user = column(40_000, missing_share=0.5)

    assert (user.table_rows(200_000), replace(user, mean_length=8.0).table_rows(200_000)) == (8_192, 65_536)


def test_many_values_are_estimated_within_two_percent_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(distinct_values, "MOST_KEPT", 8_192)
    texts = zipf_texts(200_000)

    counter = counted(texts)

    # The mean error is 1.2 / sqrt(kept), of 4,096 to 8,192 values: 1.3 to 1.9 %.
    assert counter.num_values == pytest.approx(len(set(texts)), rel=0.04)
    assert len(counter._hashes) <= 8_192


def test_a_sample_foretells_the_values_of_ten_times_the_rows():
    texts = [f"v{number}" for number in np.random.default_rng(0).integers(0, 20_000, 100_000)]
    counter = counted(texts[:10_000])

    assert counter.expected_values(10_000) == counter.num_values == len(set(texts[:10_000]))
    # Of 20,000 values 10,000 rows show 7,870, and 100,000 rows 19,870.
    assert counter.expected_values(100_000) == pytest.approx(len(set(texts)), rel=0.03)


def test_of_values_of_unlike_frequency_a_sample_foretells_no_more_than_there_are():
    texts = zipf_texts(100_000, num_values=20_000)
    counter = counted(texts[:10_000])

    assert counter.num_values < counter.expected_values(100_000) < len(set(texts))


@pytest.mark.parametrize(
    ("num_values", "missing_share", "num_rows", "table_rows"),
    [
        (0, 1.0, 10**9, 1_024),
        (3, 0.0, 10**9, 1_024),
        (1_024, 0.0, 10**9, 4_096),
        (1_025, 0.0, 10**9, 8_192),
        (10**6, 0.0, 10**9, 131_072),
        (10**6, 0.0, 200_000, 16_384),  # 200,000 / 8 = 25,000
        (10**6, 0.75, 200_000, 4_096),  # 50,000 / 8 = 6,250
    ],
)
def test_a_table_has_four_rows_for_each_value_as_far_as_eight_occurrences_fill_each(
    num_values, missing_share, num_rows, table_rows
):
    assert column(num_values, missing_share=missing_share).table_rows(num_rows) == table_rows


def test_collisions_and_rows_in_use_are_those_of_the_hash():
    texts = pa.array([f"value {number}" for number in range(3_000)])
    rows = rows_of_texts(texts, slot=4, num_rows=4_096)
    _, sizes = np.unique(rows, return_counts=True)

    values = column(3_000)

    assert values.used_share(4_096) == pytest.approx(len(sizes) / 4_095, abs=0.01)
    assert values.sharing_share(4_096) == pytest.approx(1 - (sizes == 1).sum() / 3_000, abs=0.02)
    assert column(1).sharing_share(4_096) == column(0).used_share(2) == 0.0


def test_a_person_sees_which_column_collides():
    table = tables_table(
        [column(50, name="country"), column(9_000, name="ad", missing_share=0.25)], [1_024, 4_096]
    )

    assert table.lines(indent="") == [
        "column   values  missing  table rows  rows in use  values that share a row",
        "country      50     0.0%       1,024           5%                       5%",
        "ad        9,000    25.0%       4,096          89%                      89%",
    ]


def test_columns_that_have_outgrown_the_tables_of_the_champion_are_named():
    columns = [column(100, name="country"), column(60_000, name="ad"), column(60_000, name="page")]

    assert outgrown_tables(columns, (1_024, 65_536, 131_072), num_rows=10**7) is None
    reported = outgrown_tables(columns, (1_024, 32_768, 65_536), num_rows=10**7)
    assert reported == (
        "the champion's tables are kept, but 1 of 3 columns have outgrown theirs: ad has 32,768 rows and would get "
        "131,072; start_from=scratch trains a model with new ones, which have fewer collisions"
    )


def test_the_same_rows_get_the_same_tables_as_text_and_as_parquet(tmp_path, monkeypatch):
    """Also where only a part of the rows is looked at, and row groups are of other sizes."""
    import pyarrow.csv as pa_csv
    import pyarrow.parquet as pq

    monkeypatch.setattr(training_rows, "SAMPLED_ROWS", 8_000)
    stream = write_click_stream(tmp_path / "clicks.tsv", num_rows=60_000, seed=1)
    options = pa_csv.ReadOptions(column_names=list(CRITEO_SCHEMA.column_names))
    texts = pa_csv.ConvertOptions(column_types=dict.fromkeys(CRITEO_SCHEMA.categorical_columns, pa.string()))
    table = pa_csv.read_csv(stream.path, options, pa_csv.ParseOptions(delimiter="\t"), texts)
    pq.write_table(table, tmp_path / "clicks.parquet", compression="zstd", row_group_size=23_000)

    as_text, as_parquet = (
        prepare(tmp_path / name, tmp_path / f"{name}.d", buckets_per_slot=None).manifest
        for name in ("clicks.tsv", "clicks.parquet")
    )

    assert as_text.columns == as_parquet.columns
    assert as_text.features == as_parquet.features
    assert (as_text.num_sampled_rows, as_parquet.num_sampled_rows) == (8_000, 8_000)
    assert len(set(as_text.features.slot_rows)) > 1


def test_all_rows_are_counted_where_they_are_few(tmp_path):
    stream = write_click_stream(tmp_path / "clicks.tsv", num_rows=3_000, seed=1)
    rows = [line.split("\t") for line in stream.path.read_text().splitlines()][:2_400]

    manifest = prepare_dataset(stream.path, schema=CRITEO_SCHEMA, out_dir=tmp_path / "d").manifest

    for number, found in enumerate(manifest.columns, start=14):
        values = [row[number] for row in rows]
        assert found.num_values == len(set(values) - {""})
        assert found.missing_share == pytest.approx(values.count("") / 2_400)
