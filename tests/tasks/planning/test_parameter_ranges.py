"""Numbers out of range are told under the name that the user gave them."""

import pytest

from heterps_core.errors import ConfigurationError
from tasks.planning.parameter_ranges import check_numbers


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("seed", -1, "seed must be a number of at least 0, got -1"),
        ("seed", 10**22, "seed must be at most 4294967295"),
        ("epochs", 0, "epochs must be a number of at least 1, got 0"),
        ("batch_size", 0, "batch_size must be a number of at least 4, got 0"),
        ("planned_samples", 0, "planned_samples must be a number of at least 1"),
        ("throughput_floor_samples_per_s", float("nan"), "throughput_floor_samples_per_s must be a number"),
        ("max_usd_per_hour", -2.0, "max_usd_per_hour must be a positive number of USD, got -2.0"),
        ("max_usd_per_run", float("inf"), "leave it out for no cap"),
    ],
)
def test_a_number_out_of_range_is_refused(name, number, message):
    with pytest.raises(ConfigurationError, match=message):
        check_numbers({name: number})


def test_defaults_and_numbers_in_range_pass():
    check_numbers({"seed": 2**32 - 1, "epochs": 1, "batch_size": None, "max_usd_per_hour": 0.5})
