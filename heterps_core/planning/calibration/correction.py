"""By which factor predictions of a kind are stretched: a robust centre of what past runs answered, shrunk to 1.

The centre is the median of log(measured / predicted), so one disturbed night does not move it; shrinkage is a few
synthetic nights on which the prediction was right, so that one or two real ones do not move it either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from heterps_core.planning.calibration.run_speed import AnsweredPrediction

PRIOR_NIGHTS = 2.0
"""Weight of "as the more general correction says": the third night that agrees is the first to count."""


def correction_factor(answers: Sequence[AnsweredPrediction], path: Sequence[str], *, depth: int) -> float:
    r"""Return the factor for predictions of a path, learnt level by level.

    .. math:: c_0 = 0, \quad c_l = \arg\min_c \sum_{i \in l} |r_i - c| + w |c - c_{l-1}|, \quad f = \exp(c_d)

    with r_i = log(measured / predicted) of the answers whose first l names are those of the path, w = `PRIOR_NIGHTS`
    and d the depth: least absolute deviations, each level shrunk to the one above it and the first to a factor of 1.

    Args:
        answers: Of past runs, in any order.
        path: What is predicted, from the general to the special.
        depth: How many names of the path tell predictions apart; 0 for no correction.

    Example:
        >>> nights = [
        ...     AnsweredPrediction(run_id=run, path=("here",), predicted_seconds=1.0, measured_seconds=1.25)
        ...     for run in ("a", "b", "c")
        ... ]
        >>> [round(correction_factor(nights[:n], ("here",), depth=1), 4) for n in (2, 3)]
        [1.0, 1.25]
    """
    log_factor = 0.0
    for length in range(1, depth + 1):
        known = tuple(path[:length])
        ratios = [answer.log_ratio for answer in answers if answer.path[:length] == known]
        log_factor = shrunk_median(ratios, towards=log_factor, weight=PRIOR_NIGHTS)
    return math.exp(log_factor)


def shrunk_median(values: Sequence[float], *, towards: float, weight: float) -> float:
    """Return the m nearest to `towards` among those with the least sum of |value - m| + weight * |m - towards|.

    That is a weighted median of the values, each of weight 1, and `towards`; all points between the lower and the
    upper one are equally good.

    Args:
        values: Any number of them, also none.
        towards: Where the median is drawn to.
        weight: How many values that is worth, positive.

    Example:
        >>> shrunk_median([4.0, 5.0, 9.0], towards=0.0, weight=1.0), shrunk_median([4.0], towards=0.0, weight=2.0)
        (4.0, 0.0)
    """
    points = sorted([*((value, 1.0) for value in values), (towards, weight)])
    half = (len(values) + weight) / 2
    reached = list(accumulate(point_weight for _, point_weight in points))
    lower = next(value for (value, _), sum_ in zip(points, reached, strict=True) if sum_ >= half)
    upper = next(value for (value, _), sum_ in zip(points, reached, strict=True) if sum_ > half)
    return min(max(towards, lower), upper)
