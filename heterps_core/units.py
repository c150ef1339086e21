"""Named conversions between units, and ratios of amounts that may be nothing."""

from __future__ import annotations

MS_PER_S = 1_000.0
SECONDS_PER_MINUTE = 60.0
SECONDS_PER_HOUR = 3_600.0
BYTES_PER_MIB = 1_048_576
BYTES_PER_GIB = 1_073_741_824
BYTES_PER_S_PER_MBIT_PER_S = 125_000.0
BYTES_PER_FLOAT32 = 4
SAMPLES_PER_MILLION = 1_000_000.0


def ratio(value: float, of: float, *, otherwise: float) -> float:
    """Return value / of, or another number where `of` is 0, as what machines cost may be.

    Example:
        >>> ratio(3.0, 2.0, otherwise=0.0), ratio(3.0, 0.0, otherwise=0.0)
        (1.5, 0.0)
    """
    return value / of if of else otherwise
