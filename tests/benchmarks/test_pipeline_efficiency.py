import pytest

from tests.benchmarks import pipeline_efficiency


@pytest.mark.parametrize(
    ("num_cores", "speeds", "limit"),
    [
        # The slower stage: 1 / 4 s a sample against 1 / 10.
        (2, (10.0, 4.0), 4.0),
        # Three stages of 1 / 6, 1 / 6 and 1 / 3 s on two cores: 2 / 3 s of work take 1 / 3 s.
        (2, (6.0, 6.0, 3.0), 3.0),
        # 1 / 4 s each: 3 / 4 s of work on two cores, 3 / 8 s.
        (2, (4.0, 4.0, 4.0), 8 / 3),
        (4, (4.0, 4.0, 4.0), 4.0),
    ],
)
def test_the_limit_is_the_slowest_stage_or_the_cores(monkeypatch, num_cores, speeds, limit):
    monkeypatch.setattr("os.cpu_count", lambda: num_cores)
    ways = {f"stage_{index}": speed for index, speed in enumerate(speeds)} | {"delayed": 1.0}

    assert pipeline_efficiency.own_limit(ways) == pytest.approx(limit)
