"""Counts of real files; those that may not be passed on lie beside the repository where they lie at all."""

import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema
from tests.heterps_core.data.synthetic_rows import all_rows
from tests.paths import PROJECT, TESTS

DATA = PROJECT.parent / "shared" / "data"


def prepare(name, schema, out_dir):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not beside this repository")
    return prepare_dataset(path, schema=schema, buckets_per_slot=1_000, out_dir=out_dir)


@pytest.mark.parametrize(
    ("name", "num_rows", "num_clicks"),
    [
        ("criteo/criteo_kaggle_rows_00001_07076.tsv.gz", 7_076, 1_540),
        ("criteo/deepctr_criteo_sample_194.csv.gz", 194, 44),
    ],
)
def test_criteo_rows_as_published_and_as_csv(tmp_path, name, num_rows, num_clicks):
    dataset = prepare(name, CRITEO_SCHEMA, tmp_path / "out")

    manifest = dataset.manifest
    assert manifest.num_rows == num_rows
    assert int(dataset.targets(0, manifest.num_rows)[0].sum()) == num_clicks


def test_shares_of_missing_values_are_those_that_were_counted_before(tmp_path):
    dataset = prepare("criteo/criteo_kaggle_rows_00001_07076.tsv.gz", CRITEO_SCHEMA, tmp_path / "out")

    missing_percent = (all_rows(dataset).ids == 0).mean(axis=0) * 100

    assert missing_percent[[2, 5, 18, 21]].round(1).tolist() == [3.4, 13.1, 45.6, 81.8]  # C3, C6, C19, C22


def test_the_adult_table_through_its_schema_file(tmp_path):
    schema = DataSchema.load(PROJECT / "docs" / "examples" / "adult.schema.json")

    dataset = prepare_dataset(
        TESTS / "golden" / "adult" / "adult.data.csv.gz",
        schema=schema,
        buckets_per_slot=1_000,
        out_dir=tmp_path / "out",
    )

    manifest = dataset.manifest
    assert manifest.num_rows == 32_561
    assert int(dataset.targets(0, manifest.num_rows)[0].sum()) == 7_841
    assert (all_rows(dataset).ids == 0).any(axis=1).sum() == 2_399
