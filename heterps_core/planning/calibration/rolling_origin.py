"""Whether a correction is worth using: tried on each night with nothing but the nights before it.

A correction that only fits the past makes the next prediction worse. So every depth of correction is held against the
uncorrected prediction on nights that it had not seen, and is used only where it was better there. What is reported of
the whole procedure is found in the same way: the choice that each night would have had.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from heterps_core.planning.calibration.correction import correction_factor
from heterps_core.planning.calibration.run_speed import AnsweredPrediction

LEAST_UNSEEN_NIGHTS = 5
"""Predictions that must have been answered before any correction is trusted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What predictions of a path are multiplied by, and why."""

    factor: float
    """1 where no correction has proven itself."""

    depth: int
    """How many names of the path it was learnt for; 0 for none."""

    num_answers: int
    """Of past predictions of the same general kind."""

    error_without: float | None
    """Mean |log(measured / predicted)| of these, uncorrected; None where there is none."""

    error_with: float | None
    """The same with the correction that each night would have had, learnt from the nights before it."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class UnseenNight:
    """A past prediction as it was, and as it would have been corrected by what was known before it."""

    answer: AnsweredPrediction
    factor: float

    @property
    def log_error_without(self) -> float:
        """log(measured / predicted) without a correction."""
        return self.answer.log_ratio

    @property
    def log_error_with(self) -> float:
        """log(measured / predicted) with it."""
        return self.answer.log_ratio - math.log(self.factor)


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
    nights = replay(alike)
    depth = _chosen_depth(_unseen_errors(alike, deepest=len(path)))
    return Correction(
        factor=correction_factor(alike, path, depth=depth),
        depth=depth,
        num_answers=len(alike),
        error_without=fmean(abs(night.log_error_without) for night in nights),
        error_with=fmean(abs(night.log_error_with) for night in nights),
    )


def replay(answers: Sequence[AnsweredPrediction]) -> tuple[UnseenNight, ...]:
    """Return past predictions of one kind with the correction that `learn_correction` would have had for each.

    Args:
        answers: With the same first name and equally long paths, the oldest first.
    """
    if not answers:
        return ()
    errors = _unseen_errors(answers, deepest=len(answers[0].path))
    nights = []
    for before, night in _by_run(answers):
        depth = _chosen_depth([of_depth[: len(before)] for of_depth in errors])
        nights += [
            UnseenNight(answer=answer, factor=correction_factor(before, answer.path, depth=depth))
            for answer in night
        ]
    return tuple(nights)


def _unseen_errors(answers: Sequence[AnsweredPrediction], *, deepest: int) -> list[list[float]]:
    """Return by depth the |log error| of each answer, corrected by what earlier runs answered."""
    return [
        [
            abs(answer.log_ratio - math.log(correction_factor(before, answer.path, depth=depth)))
            for before, night in _by_run(answers)
            for answer in night
        ]
        for depth in range(deepest + 1)
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
