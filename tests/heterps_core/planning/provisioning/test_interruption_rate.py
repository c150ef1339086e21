import gzip
import json
import math

import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.provisioning.interruption_rate import (
    interruption_rate,
    pooled_rate,
    rate_of_counts,
    rate_of_trace,
)
from heterps_core.planning.provisioning.spot_trace import SpotTrace
from tests.paths import PROJECT

TRACES = PROJECT.parent / "shared" / "data" / "spot_traces" / "skypilot"


@pytest.mark.parametrize("count", [0, 1, 3, 40, 900])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_the_interval_is_that_of_chi_squared_quantiles(count, confidence):
    from scipy.stats import chi2

    rate = interruption_rate(count, 50.0, confidence=confidence)

    tail = (1 - confidence) / 2
    low = chi2.ppf(tail, 2 * count) / 2 if count else 0.0
    assert rate.low_per_hour * 50 == pytest.approx(low, rel=1e-9)
    assert rate.high_per_hour * 50 == pytest.approx(chi2.ppf(1 - tail, 2 * count + 2) / 2, rel=1e-9)
    assert rate.low_per_hour <= rate.per_hour <= rate.high_per_hour


def test_the_interval_holds_the_true_rate_as_often_as_it_says():
    generator = np.random.default_rng(3)
    counts = generator.poisson(0.2 * 30, size=400)
    intervals = {int(n): interruption_rate(int(n), 30.0) for n in set(counts.tolist())}

    held = sum(intervals[n].low_per_hour <= 0.2 <= intervals[n].high_per_hour for n in counts.tolist())

    assert held / 400 >= 0.9


def test_every_instance_that_a_step_falls_by_is_an_interruption():
    # By hand: 4 instances for an hour, 1 for an hour, 2 for an hour; 3 lost, then 1 got, then 2 lost.
    rate = rate_of_counts([0.0, 3_600.0, 7_200.0, 10_800.0], [4, 1, 2, 0])

    assert rate.num_interruptions == 5
    assert rate.instance_hours == pytest.approx(7.0)


def test_nothing_lost_leaves_an_upper_end_alone():
    rate = rate_of_counts([0.0, 36_000.0], [1, 1])

    assert (rate.per_hour, rate.low_per_hour) == (0.0, 0.0)
    assert rate.high_per_hour == pytest.approx(-math.log(0.05) / 10)


def test_a_price_above_the_ceiling_is_a_loss():
    trace = SpotTrace(name="m4", price_usd_per_hour=np.array([0.1, 0.1, 0.9, 0.9, 0.1, 0.9]))

    rate = rate_of_trace(trace, ceiling_usd_per_hour=0.5)

    assert rate.num_interruptions == 2
    assert rate.instance_hours == pytest.approx(3 / 60)
    with pytest.raises(ConfigurationError, match="give the on-demand price"):
        rate_of_trace(trace)


def test_pools_taken_for_one_have_the_sums():
    pooled = pooled_rate([interruption_rate(3, 10.0), interruption_rate(1, 30.0)])

    assert (pooled.num_interruptions, pooled.instance_hours) == (4, 40.0)
    with pytest.raises(ConfigurationError, match="at least one pool"):
        pooled_rate([])


@pytest.mark.parametrize(
    ("times_s", "counts", "complaint"),
    [
        ([0.0], [1], "at least 2 times"),
        ([0.0, 1.0], [1], "at least 2 times"),
        ([1.0, 0.0], [1, 1], "at least 2 times"),
        ([0.0, 1.0], [0, 5], "0 throughout"),
    ],
)
def test_refuses_curves_that_show_no_rate(times_s, counts, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        rate_of_counts(times_s, counts)


@pytest.mark.parametrize(("count", "hours", "confidence"), [(-1, 1.0, 0.9), (1, 0.0, 0.9), (1, 1.0, 1.0)])
def test_refuses_numbers_out_of_range(count, hours, confidence):
    with pytest.raises(ConfigurationError, match="a rate needs"):
        interruption_rate(count, hours, confidence=confidence)


@pytest.mark.skipif(not TRACES.exists(), reason="the recorded traces are not on this machine")
def test_a_recorded_trace_gives_the_falls_that_a_second_count_finds():
    path = TRACES / "preemption" / "4-node" / "aws-08-03-2023" / "us-east-2a_v100_1.json.gz"
    document = json.loads(gzip.decompress(path.read_bytes()))
    counts, gap_s = np.array(document["data"]), document["metadata"]["gap_seconds"]

    rate = rate_of_counts((np.arange(len(counts)) * float(gap_s)).tolist(), counts.tolist())

    assert rate.num_interruptions == -np.minimum(np.diff(counts), 0).sum()
    assert rate.instance_hours == pytest.approx(counts[:-1].sum() * gap_s / 3_600)
