import subprocess
import sys

import pytest

from heterps_core.data.features import FeatureSpec
from heterps_core.errors import ConfigurationError


def test_offsets_are_the_running_sums_of_the_rows_before():
    features = FeatureSpec(num_dense=2, slot_rows=(5, 2, 7))

    assert features.slot_offsets == (0, 5, 7)
    assert features.total_rows == 14
    assert features.num_slots == 3


def test_json_form_returns_the_same_features():
    features = FeatureSpec(num_dense=1, slot_rows=(5, 2), slot_names=("site", "app"), dense_names=("age",))

    assert FeatureSpec.from_json(features.to_json()) == features


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_dense": -1, "slot_rows": (2,)}, "num_dense must be at least 0, got -1"),
        ({"num_dense": 0, "slot_rows": ()}, "at least one categorical slot"),
        ({"num_dense": 0, "slot_rows": (4, 1)}, "at least 2 rows"),
        ({"num_dense": 0, "slot_rows": (2, 2), "slot_names": ("a",)}, "one name per column, 2, got 1"),
        ({"num_dense": 0, "slot_rows": (2, 2), "slot_names": ("a", "a")}, "must differ"),
    ],
)
def test_names_the_rule_that_bad_features_break(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        FeatureSpec(**arguments)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"num_dense": 1, "slot_rows": [2]}, "schema_version: is missing"),
        ({"schema_version": 1, "num_dense": 1}, "slot_rows: is missing"),
    ],
)
def test_refuses_json_of_another_form(document, message):
    with pytest.raises(ConfigurationError, match=message):
        FeatureSpec.from_json(document)


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("heterps_core.data.features", ["torch", "pyarrow", "numpy"]),
        ("heterps_core.data.preparation", ["torch"]),
    ],
)
def test_light_modules_leave_heavy_packages_unloaded(module, unwanted):
    program = f"import sys, {module}; print([name for name in {unwanted} if name in sys.modules])"

    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert output.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "changed",
    [
        {"slot_tables": (0, 0)},
        {"slot_rows": (9, 9), "slot_dimensions": (4, 8)},
        {"slot_rows": (9, 9), "slot_tables": (1, 0)},
    ],
)
def test_slots_of_one_table_must_be_alike_and_name_the_first_of_them(changed):
    with pytest.raises(
        ConfigurationError, match="must have the rows, dimension and number of the first slot"
    ):
        FeatureSpec(**{"num_dense": 0, "slot_rows": (9, 8), "slot_tables": (0, 0)} | changed)
