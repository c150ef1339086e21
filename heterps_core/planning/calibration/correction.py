"""By which factor predictions of a kind are stretched, and whether that is worth doing.

The factor is the median of log(measured / predicted), shrunk to 1 by a few synthetic nights on which the prediction
was right, so that one or two disturbed nights do not move it. A correction that only fits the past makes the next
prediction worse: so every depth of correction is held against the uncorrected prediction on nights that it had not
seen, with nothing but the nights before them, and is used only where it was better there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import fmean

from heterps_core.planning.calibration.run_speed import AnsweredPrediction
from heterps_core.planning.problem.estimates import with_scaled_times
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem

PRIOR_NIGHTS = 2.0
"""Weight of "as the more general correction says": the third night that agrees is the first to count."""

LEAST_UNSEEN_NIGHTS = 5
"""Predictions that must have been answered before any correction is trusted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What predictions of a path are multiplied by, and why."""

    factor: float
    """1 where no correction has proven itself."""

    depth: int
    """How many names of the path it was learned for; 0 for none."""

    num_answers: int
    error_without: float | None
    """Mean |log(measured / predicted)| of these, uncorrected; None where there is none."""

    error_with: float | None
    """The same with the correction that each night would have had, learned from the nights before it."""

    @property
    def summary(self) -> str:
        """What was done, in one line."""
        if self.error_without is None or self.error_with is None:
            return "not corrected: no run has answered a prediction of this kind yet"
        if self.num_answers < LEAST_UNSEEN_NIGHTS:
            return (
                f"not corrected: of {LEAST_UNSEEN_NIGHTS} predictions of this kind that must have been answered "
                f"first, {self.num_answers} are"
            )
        errors = (
            f"{as_share(self.error_without):.1%} off without and {as_share(self.error_with):.1%} with "
            f"corrections, over {self.num_answers} predictions, each from the nights before it"
        )
        if self.depth == 0:
            return f"not corrected: no correction has been better on unseen nights ({errors})"
        return f"corrected by {self.factor:.3f} ({errors})"


NO_CORRECTION = Correction(factor=1.0, depth=0, num_answers=0, error_without=None, error_with=None)


def as_share(log_error: float) -> float:
    """Return an error of log(measured / predicted) as a share: 0.1 for a time that was 10 % longer."""
    return math.expm1(log_error)


def learn_correction(answers: Sequence[AnsweredPrediction], path: Sequence[str]) -> Correction:
    """Return the correction for the next prediction of a path.

    The depth is the one with the least mean error on unseen nights, among predictions with the same first name, if it
    was nearer than no correction on more nights than it was farther; otherwise there is none.

    Args:
        answers: Of past runs, the oldest first.
        path: What will be predicted, at least one name; those of answers of the same kind are equally long.
    """
    alike = [answer for answer in answers if answer.path[:1] == tuple(path[:1])]
    if not alike:
        return NO_CORRECTION
    depth = _chosen_depth(_unseen_errors(alike))
    return Correction(
        factor=correction_factor(alike, path, depth=depth),
        depth=depth,
        num_answers=len(alike),
        error_without=fmean(abs(answer.log_ratio) for answer in alike),
        error_with=fmean(
            abs(answer.log_ratio - math.log(factor))
            for answer, factor in zip(alike, replay(alike), strict=True)
        ),
    )


def replay(answers: Sequence[AnsweredPrediction]) -> list[float]:
    """Return the factor that `learn_correction` would have had for each of some past predictions.

    All answers have the same first name and equally long paths, the oldest first.
    """
    errors = _unseen_errors(answers)
    factors = []
    for before, night in _by_run(answers):
        depth = _chosen_depth([of_depth[: len(before)] for of_depth in errors])
        factors += [correction_factor(before, answer.path, depth=depth) for answer in night]
    return factors


def correction_factor(answers: Sequence[AnsweredPrediction], path: Sequence[str], *, depth: int) -> float:
    r"""Return the factor for predictions of a path, learned level by level.

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


def corrected_problem(problem: SchedulingProblem, factors: Mapping[str, float]) -> SchedulingProblem:
    """Return the problem with all times on a device type multiplied by its factor.

    Computing, communication in a stage and across its boundaries are stretched alike, since a run measures how long a
    stage was busy and not with what; so ET of every stage on the type is exactly `factor` times as long.

    Factors are positive; 1 for types that are not named.
    """
    used = {name: factors[name] for name in problem.device_types if factors.get(name, 1.0) != 1.0}
    if not used:
        return problem

    def factor(_: LayerCosts, name: str) -> float:
        return used.get(name, 1.0)

    return with_scaled_times(problem, computing=factor, in_stage=factor, across=used)


def shrunk_median(values: Sequence[float], *, towards: float, weight: float) -> float:
    """Return the m nearest to `towards` among those with the least sum of |value - m| + weight * |m - towards|.

    That is a weighted median of the values, each of weight 1, and `towards`; all points between the lower and the
    upper one are equally good.

    Args:
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


def _unseen_errors(answers: Sequence[AnsweredPrediction]) -> list[list[float]]:
    """Return by depth the |log error| of each answer, corrected by what earlier runs answered."""
    return [
        [
            abs(answer.log_ratio - math.log(correction_factor(before, answer.path, depth=depth)))
            for before, night in _by_run(answers)
            for answer in night
        ]
        for depth in range(len(answers[0].path) + 1)
    ]


def _chosen_depth(errors: Sequence[Sequence[float]]) -> int:
    """Return the depth to use, from the errors that each had on the same unseen nights."""
    without = errors[0]
    if len(without) < LEAST_UNSEEN_NIGHTS:
        return 0
    best = min(range(len(errors)), key=lambda depth: (fmean(errors[depth]), depth))
    nearer = sum(after < before for before, after in zip(without, errors[best], strict=True))
    farther = sum(after > before for before, after in zip(without, errors[best], strict=True))
    return best if nearer > farther else 0


def _by_run(
    answers: Sequence[AnsweredPrediction],
) -> Iterator[tuple[Sequence[AnsweredPrediction], Sequence[AnsweredPrediction]]]:
    """Yield each run's answers behind all that came before them: stages of one night do not teach one another."""
    done = 0
    for _, group in groupby(answers, key=lambda answer: answer.run_id):
        night = list(group)
        yield answers[:done], night
        done += len(night)
