"""How often a spot pool takes an instance back: counted in what was seen, with the range that the count leaves.

Interruptions of a pool are taken for a Poisson process per instance-hour: with n of them in T instance-hours the
rate is n / T, and its exact interval comes from the tails of the Poisson distribution (F. Garwood, Biometrika
28(3/4), 1936; the same as chi-squared or Gamma quantiles). A few interruptions leave a wide interval, none leave
an upper end only; pools are moody besides, so a rate of last month is a guess about the next hour.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from heterps_core.errors import ConfigurationError
from heterps_core.planning.provisioning.spot_trace import TICK_SECONDS, SpotTrace
from heterps_core.units import SECONDS_PER_HOUR

BISECTIONS = 80
"""Halvings of an interval; 53 use up the bits of a float."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InterruptionRate:
    """Interruptions of one instance, with a confidence interval."""

    num_interruptions: int
    instance_hours: float
    per_hour: float
    low_per_hour: float
    high_per_hour: float
    confidence: float
    """Share of such intervals that hold the true rate, at least."""

    def __str__(self) -> str:
        return (
            f"{self.per_hour:.3g} per instance-hour ({self.low_per_hour:.3g} to {self.high_per_hour:.3g} with "
            f"{self.confidence:.0%} confidence: {self.num_interruptions} in {self.instance_hours:,.0f} "
            "instance-hours)"
        )


def interruption_rate(
    num_interruptions: int, instance_hours: float, *, confidence: float = 0.9
) -> InterruptionRate:
    """Return the rate for a count of interruptions and the time in which they were counted.

    Args:
        num_interruptions: 0 or more.
        instance_hours: Hours of all instances together, above 0.
        confidence: In (0, 1).

    Raises:
        ConfigurationError: An argument is out of its range.

    Example:
        >>> print(interruption_rate(3, 100.0))
        0.03 per instance-hour (0.00818 to 0.0775 with 90% confidence: 3 in 100 instance-hours)
    """
    if num_interruptions < 0 or not 0 < instance_hours < math.inf or not 0 < confidence < 1:
        raise ConfigurationError(
            f"a rate needs 0 or more interruptions in more than 0 instance-hours at a confidence between 0 and 1, "
            f"got {num_interruptions} in {instance_hours} at {confidence}"
        )
    tail = (1 - confidence) / 2
    low, high = _poisson_interval(num_interruptions, tail)
    return InterruptionRate(
        num_interruptions=num_interruptions,
        instance_hours=instance_hours,
        per_hour=num_interruptions / instance_hours,
        low_per_hour=low / instance_hours,
        high_per_hour=high / instance_hours,
        confidence=confidence,
    )


def rate_of_counts(times_s: Sequence[float], counts: Sequence[int]) -> InterruptionRate:
    """Return the rate from how many instances ran, or could be had, at each time: a step curve.

    Each instance that a step falls by is one interruption. What an owner gave back by himself is counted too, and
    one that was replaced between two readings is not.

    Args:
        times_s: Never falling; shape (N,), at least 2.
        counts: From its time on until the next; shape (N,). The last one ends the curve.

    Raises:
        ConfigurationError: The curve is too short, goes back in time, or had no instance at all.
    """
    if len(times_s) != len(counts) or len(times_s) < 2 or sorted(times_s) != list(times_s):
        raise ConfigurationError(
            f"a curve of counts needs at least 2 times in order with a count each, got {len(times_s)} times and "
            f"{len(counts)} counts"
        )
    steps = list(zip(times_s, times_s[1:], counts, strict=False))
    instance_seconds = sum((end - start) * count for start, end, count in steps)
    if instance_seconds <= 0:
        raise ConfigurationError(
            "a rate needs instances that ran for some time, and the curve is 0 throughout; use another pool"
        )
    falls = sum(max(0, before - after) for before, after in itertools.pairwise(counts))
    return interruption_rate(falls, instance_seconds / SECONDS_PER_HOUR)


def rate_of_trace(trace: SpotTrace, *, ceiling_usd_per_hour: float | None = None) -> InterruptionRate:
    """Return the rate that a trace of counts or of prices shows, minute by minute.

    A pool of prices counts as one instance that is lost whenever the price rises above the ceiling. Until 2017 that
    is what ended instances; since then AWS moves prices slowly and takes instances back at any price, so that a count
    of 0 says little.

    Args:
        trace: Of one pool; a spell shorter than a tick may be missing.
        ceiling_usd_per_hour: For a trace of prices, for instance the on-demand price.

    Raises:
        ConfigurationError: The trace has prices and there is no ceiling, or it had no instance at any time.
    """
    if trace.price_usd_per_hour is not None:
        if ceiling_usd_per_hour is None:
            raise ConfigurationError(
                f"the trace {trace.name} has prices, and a rate needs the one that is too high; give the on-demand "
                "price"
            )
        counts = [int(price <= ceiling_usd_per_hour) for price in trace.price_usd_per_hour.tolist()]
    else:
        assert trace.instance_counts is not None
        counts = trace.instance_counts.tolist()
    times_s = [tick * float(TICK_SECONDS) for tick in range(len(counts))]
    return rate_of_counts(times_s, counts)


def pooled_rate(rates: Iterable[InterruptionRate]) -> InterruptionRate:
    """Return the rate of several pools taken for one, at the first one's confidence.

    Raises:
        ConfigurationError: There is none.
    """
    rates = tuple(rates)
    if not rates:
        raise ConfigurationError("a pooled rate needs at least one pool, got none")
    return interruption_rate(
        sum(rate.num_interruptions for rate in rates),
        sum(rate.instance_hours for rate in rates),
        confidence=rates[0].confidence,
    )


def _poisson_interval(count: int, tail: float) -> tuple[float, float]:
    """Return the means at which `count` or more, and `count` or fewer, come with the probability `tail`."""
    most = count + 20 + 20 * math.sqrt(count + 1)
    while _poisson_cdf(count, most) > tail:
        most *= 2
    high = _bisect(lambda mean: _poisson_cdf(count, mean) > tail, most)
    low = _bisect(lambda mean: 1 - _poisson_cdf(count - 1, mean) < tail, most) if count else 0.0
    return low, high


def _bisect(is_below: Callable[[float], bool], most: float) -> float:
    low, high = 0.0, most
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2


def _poisson_cdf(count: int, mean: float) -> float:
    """Return the probability of `count` or fewer events."""
    if mean == 0:
        return 1.0
    return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))
