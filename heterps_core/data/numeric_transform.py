"""How numeric columns become dense model input: logarithm of counts, standardisation, missing values.

Statistics come from the training rows alone, so that held-out rows and later requests are treated as these were.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from heterps_core.json_codec import JsonDocument

MIN_STANDARD_DEVIATION = 1e-6
"""A column that varies less than this is constant for float32 input and is only centred."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericTransform(JsonDocument):
    """Mean and standard deviation of each dense column after the logarithm, over the training rows."""

    is_count: tuple[bool, ...]
    """Per column: whether the signed logarithm is taken first."""

    means: tuple[float, ...]
    standard_deviations: tuple[float, ...]

    def apply(self, values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float32]:
        """Return raw values [N, D] (NaN: missing) as dense model input [N, D]."""
        return self.standardise(take_logarithms(values, self.is_count))

    def standardise(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return (value - mean) / standard deviation; a missing value (NaN) becomes 0, the mean.

        Logarithms of the values [N, D] are taken already.
        """
        means = np.asarray(self.means, dtype=np.float32)
        scales = np.asarray(self.standard_deviations, dtype=np.float32)
        standardised: npt.NDArray[np.float32] = (values - means) / scales
        standardised[np.isnan(standardised)] = 0.0
        return standardised


def take_logarithms(
    values: npt.NDArray[np.floating[Any]], is_count: tuple[bool, ...]
) -> npt.NDArray[np.float32]:
    """Return values [N, D] with sign(x) * log(1 + |x|) in the count columns; NaN stays NaN.

    The signed form is defined for negative values too (Criteo's I2 goes down to -2 or -3) and keeps
    their order, where clipping them to 0 would lose it.

    Example:
        >>> take_logarithms(np.array([[0.0, 5.0], [-1.0, -1.0]]), (True, False)).round(3).tolist()
        [[0.0, 5.0], [-0.6930000185966492, -1.0]]
    """
    dense = values.astype(np.float32)
    if all(is_count):
        return np.copysign(np.log1p(np.abs(dense)), dense)
    if any(is_count):
        counts = np.flatnonzero(is_count)
        dense[:, counts] = np.copysign(np.log1p(np.abs(dense[:, counts])), dense[:, counts])
    return dense


def fit_numeric_transform(
    chunks: Iterable[npt.NDArray[np.float32]], is_count: tuple[bool, ...]
) -> NumericTransform:
    """Return mean and population standard deviation of each column, missing values left out.

    Chunks [n, D] have their logarithms taken already, and NaN where missing.

    A column without any value gets mean 0, a constant one standard deviation 1.
    """
    num_columns = len(is_count)
    counts = np.zeros(num_columns)
    means = np.zeros(num_columns)
    # Sums of squared distances from the mean, merged piece by piece (Chan, Golub and LeVeque, 1983): the
    # plain sum of squares would lose all digits of a column with a large mean.
    squares = np.zeros(num_columns)
    for chunk in chunks:
        present = ~np.isnan(chunk)
        n = present.sum(axis=0)
        values = np.where(present, chunk, 0.0).astype(np.float64)
        chunk_means = values.sum(axis=0) / np.maximum(n, 1)
        distances = np.where(present, values - chunk_means, 0.0)
        total = np.maximum(counts + n, 1)
        shift = chunk_means - means
        squares += (distances**2).sum(axis=0) + shift**2 * counts * n / total
        means += shift * n / total
        counts += n
    deviations = np.sqrt(squares / np.maximum(counts, 1))
    deviations[deviations < MIN_STANDARD_DEVIATION] = 1.0
    return NumericTransform(
        is_count=is_count, means=tuple(means.tolist()), standard_deviations=tuple(deviations.tolist())
    )
