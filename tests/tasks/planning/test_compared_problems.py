import pytest

from heterps_core.errors import ConfigurationError, InfeasiblePlanError
from tasks.planning.compared_problems import load_problems, reason_in_one_line


def test_reasons_are_one_line_without_the_way_out():
    missed_floor = InfeasiblePlanError("throughput floor", "10 samples/s, 99% below; raise max_units")

    assert reason_in_one_line(missed_floor) == "no plan meets the throughput floor: 10 samples/s, 99% below"
    assert reason_in_one_line(ValueError("a\nb")) == "failed: ValueError: a b"


def test_a_problem_file_that_cannot_be_used_is_named(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text("{}")

    with pytest.raises(ConfigurationError, match=r"problem\.json: schema_version: is missing"):
        load_problems([str(path)])
    with pytest.raises(ConfigurationError, match=r"cannot read .*none\.json"):
        load_problems([str(tmp_path / "none.json")])
