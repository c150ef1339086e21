import pytest

from tests.benchmarks.input_scale import counted_rows, fleet_bytes


def test_replicas_that_change_read_each_real_row_once(tmp_path):
    figures = {entry["name"]: entry["value"] for entry in counted_rows(tmp_path, 20_001, seed=3)}

    assert figures["rows_lost_or_doubled"] == 0
    assert figures["rows_left_out_of_the_epoch"] == 1


@pytest.mark.slow
def test_of_few_row_groups_a_fleet_reads_each_little_more_than_once(tmp_path):
    """Twenty row groups among 31 workers: at most thirty are read by a second one."""
    figures = {entry["name"]: entry["value"] for entry in fleet_bytes(tmp_path, 0, num_files=1)}

    assert 1 <= figures["fleet_bytes_over_used"] - figures["fleet_footers_over_used"] <= 1 + 30 / 20
    assert figures["fleet_footers_over_used"] < 0.2
