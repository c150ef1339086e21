import json
from dataclasses import replace

import pytest

from heterps_core.data.features import FeatureSpec
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema
from heterps_core.errors import ConfigurationError
from tests.paths import PROJECT

ADULT_SCHEMA_FILE = PROJECT / "docs" / "examples" / "adult.schema.json"

MINIMAL = {"schema_version": 1, "name": "clicks", "label_column": "click", "categorical_columns": ["site"]}
SIZES = {"site": 4, "tags": 8}


def write_schema(folder, document):
    path = folder / "clicks.schema.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_criteo_has_40_columns_of_which_13_are_counts_and_26_categories():
    assert len(CRITEO_SCHEMA.column_names) == 40
    assert CRITEO_SCHEMA.count_columns == tuple(f"I{i}" for i in range(1, 14))
    assert CRITEO_SCHEMA.categorical_columns == tuple(f"C{i}" for i in range(1, 27))


def test_json_form_returns_the_same_schema():
    document = json.loads(json.dumps(CRITEO_SCHEMA.to_json()))

    assert DataSchema.from_json(document) == CRITEO_SCHEMA


def test_a_file_with_the_required_fields_alone_is_enough(tmp_path):
    schema = DataSchema.load(write_schema(tmp_path, MINIMAL))

    assert schema.used_columns == ("click", "site")
    assert schema.label_positive == ("1", "1.0")


def test_lists_alone_are_slots_enough(tmp_path):
    tags = {"name": "tags", "max_length": 7, "pooling": "sum"}
    path = write_schema(tmp_path, MINIMAL | {"categorical_columns": [], "multi_hot_columns": [tags]})

    features = DataSchema.load(path).features([50])

    assert (features.slot_names, features.slot_lengths, features.slot_poolings) == (("tags",), (7,), ("sum",))
    assert (features.num_ids, features.id_columns, features.slot_rows) == (7, (range(7),), (50,))


def test_columns_may_have_rows_and_widths_of_their_own(tmp_path):
    tags = {"name": "tags"}
    sizes = {"table_rows": {"tags": 7}, "dimensions": {"site": 32}}
    schema = DataSchema.load(write_schema(tmp_path, MINIMAL | {"multi_hot_columns": [tags]} | sizes))

    features = schema.features([50, 50])

    assert (features.slot_rows, features.slot_dimensions) == ((50, 7), (32, None))
    assert DataSchema.from_json(json.loads(json.dumps(schema.to_json()))) == schema


def test_columns_of_one_table_share_its_sizes(tmp_path):
    sizes = {"table_rows": {"tags": 70}, "dimensions": {"site": 32}}
    lists = {"multi_hot_columns": [{"name": "tags"}, {"name": "words"}]}
    one_table = {"tables": {"site": "sites", "tags": "sites"}}
    schema = DataSchema.load(write_schema(tmp_path, MINIMAL | lists | sizes | one_table))

    features = schema.features([50, 50, 50])

    assert features.slot_tables == (0, 0, 2)
    assert (features.slot_rows, features.slot_dimensions) == ((70, 70, 50), (32, 32, None))
    assert DataSchema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    # Without a size in the schema the column with most values decides.
    by_values = DataSchema.from_json(MINIMAL | lists | one_table).features([50, 90, 20])
    assert by_values.slot_rows == (90, 90, 20)


def test_the_meaning_of_a_schema_without_shared_tables_is_that_of_registered_models():
    """Written down before schemas had tables."""
    assert CRITEO_SCHEMA.meaning == "ca13c5d5da9c88d2daaf846bf6a571514a46bd5b34f4a56937e7a68423c82d06"
    assert replace(CRITEO_SCHEMA, tables={"C2": "C1"}).meaning != CRITEO_SCHEMA.meaning


def test_dynamic_ids_have_whole_buckets_of_rows(tmp_path):
    document = MINIMAL | {"dynamic_ids": {"min_sightings": 3}, "multi_hot_columns": [{"name": "tags"}]}
    schema = DataSchema.load(write_schema(tmp_path, document | {"table_rows": {"tags": 513}}))

    features = schema.features([50, 50])

    assert features.slot_rows == (512, 1_024)
    assert (features.dynamic_ids.min_sightings, features.dynamic_ids.time_to_live_days) == (3, 7)
    assert DataSchema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    assert FeatureSpec.from_json(json.loads(json.dumps(features.to_json()))) == features


def test_shipped_example_for_the_adult_table_uses_all_15_columns():
    schema = DataSchema.load(ADULT_SCHEMA_FILE)

    assert sorted(schema.used_columns) == sorted(schema.column_names)
    assert len(schema.numeric_columns) == 6
    assert (len(schema.categorical_columns), len(schema.text_columns)) == (12, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "schema_version: must be 1, got 2"),
        ({"table_rows": {"click": 5}}, "table_rows must be of categorical, .* columns, but 'click' is none"),
        ({"table_rows": {"site": 1}}, "table_rows must be at least 2, .* got 1 for 'site'"),
        ({"dimensions": {"site": 0}}, r"dimensions.site: must lie in 1..4096, got 0"),
        (
            {"tables": {"age": "sites"}, "numeric_columns": ["age"]},
            "tables must be of .* but 'age' is none; leave",
        ),
        (
            {"tables": {"tags": "site"}, "multi_hot_columns": [{"name": "tags"}], "dimensions": SIZES},
            "dimensions must be equal for all columns of the table 'site', got 4 for 'site' and 8 for 'tags'; keep",
        ),
        (
            {"tables": {"tags": "site"}, "multi_hot_columns": [{"name": "tags"}], "table_rows": SIZES},
            "table_rows must be equal for all columns of the table 'site', got 4 for 'site' and 8 for 'tags'; keep",
        ),
        ({"colour": "red"}, "colour: is not a known field; known are: name, label_column, label_positive"),
        ({"categorical_columns": []}, "sequence_columns must name at least one column"),
        ({"categorical_columns": "site"}, "categorical_columns: must be a list, got 'site'"),
        ({"categorical_columns": ["site", "site"]}, "'site' stands there twice"),
        ({"categorical_columns": ["click"]}, "'click' stands there twice"),
        ({"count_columns": ["age"]}, "count_columns must also be numeric_columns, but 'age' is not"),
        ({"column_names": ["click"]}, "column_names must hold every column in use, but lacks 'site'"),
        ({"label_positive": ["yes"], "label_negative": ["yes"]}, "positive and negative at once"),
        ({"label_positive": ["1"], "label_negative": ["0", "1.0"]}, "at once, but '1' is"),
        ({"label_negative": []}, "label_negative must hold at least one text"),
        ({"separator": "::"}, "separator must be one ASCII character"),
        ({"separator": ""}, "separator must be one ASCII character"),
        ({"separator": 7}, "separator: must be a text or null, got 7"),
        ({"has_header": "no"}, "has_header: must be true or false or null, got 'no'"),
        ({"has_header": False}, "a file without header needs column_names"),
        ({"multi_hot_columns": [{"name": "site"}]}, "'site' stands there twice"),
        ({"multi_hot_columns": ["tags"]}, r"multi_hot_columns\[0\]"),
        (
            {"multi_hot_columns": [{"name": "tags", "max_length": 0}]},
            r"max_length: must lie in 1\.\.8192, got 0",
        ),
        ({"multi_hot_columns": [{"name": "tags", "pooling": "men"}]}, "'men' is not a known pooling"),
        ({"multi_hot_columns": [{"name": "tags", "length": 3}]}, "length: is not a known field"),
        (
            {"multi_hot_columns": [{"name": "tags"}], "sequence_columns": [{"name": "tags"}]},
            "'tags' stands there twice",
        ),
        ({"list_separator": ""}, "list_separator must be a text that is not the separator"),
        (
            {"list_separator": ",", "separator": ",", "multi_hot_columns": [{"name": "tags"}]},
            "list_separator must be a text that is not the separator",
        ),
        ({"label_column": ""}, r"must name its label_column or several label_columns, got '' and \[\]"),
        (
            {"label_columns": ["click", "buy"]},
            "must name its label_column or several label_columns, got 'click'",
        ),
        ({"weight_column": "site"}, "'site' stands there twice"),
        ({"name": None}, "name: must be a text, got None"),
        (
            {"dynamic_ids": {"time_to_live_days": 0}},
            r"dynamic_ids.time_to_live_days: must lie in 1..3650, got 0",
        ),
        ({"dynamic_ids": {"min_sightings": 0}}, r"dynamic_ids.min_sightings: must lie in 1..1000, got 0"),
        ({"dynamic_ids": {"ttl": 3}}, "ttl"),
    ],
)
def test_names_file_and_rule_of_a_bad_schema(tmp_path, changes, message):
    path = write_schema(tmp_path, MINIMAL | changes)

    with pytest.raises(ConfigurationError, match=message) as caught:
        DataSchema.load(path)

    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", r"must be a JSON object, got \[1\]"),
        ("{}", "schema_version: is missing"),
    ],
)
def test_refuses_a_file_that_holds_no_schema(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message):
        DataSchema.load(write_schema(tmp_path, text))


def test_names_a_missing_schema_file(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none.json: No such file"):
        DataSchema.load(tmp_path / "none.json")


def test_names_the_missing_fields():
    with pytest.raises(ConfigurationError, match="name: is missing"):
        DataSchema.from_json({"schema_version": 1, "label_column": "click"})
