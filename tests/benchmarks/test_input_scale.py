from tests.benchmarks.input_scale import counted_rows


def test_replicas_that_change_read_each_real_row_once(tmp_path):
    figures = {entry["name"]: entry["value"] for entry in counted_rows(tmp_path, 20_001, seed=3)}

    assert figures["rows_lost_or_doubled"] == 0
    assert figures["rows_left_out_of_the_epoch"] == 1
