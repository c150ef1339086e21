"""How unevenly the rows of a table are looked up, and what that leaves for those that memory does not hold."""

from __future__ import annotations

from collections.abc import Iterable

from heterps_core.models.model_graph import Layer

ZIPF_EXPONENT = 1.05
"""s, the exponent of Zipf's law: the i-th most used row is looked up in proportion to 1 / i^s. Assumed."""


def _cold_share(num_rows: float, hot_share: float) -> float:
    """Return the share of look-ups that miss the most used rows of a table.

    Example:
        >>> round(_cold_share(3e8, 0.1), 2), _cold_share(3e8, 1.0)
        (0.07, 0.0)
    """
    return 1.0 - _uses(max(hot_share * num_rows, 0.0)) / _uses(num_rows)


def cold_bytes_per_sample(layer: Layer, hot_share: float) -> float:
    """Return the bytes of rows, with their optimizer state, that a sample looks up among those that are not hot.

    Each of the columns of a layer is taken to have its share of the rows.
    """
    rows_per_column = layer.parameter_bytes / layer.looked_up_bytes_per_sample
    looked_up_state_bytes = layer.looked_up_bytes_per_sample * layer.state_bytes / layer.parameter_bytes
    return looked_up_state_bytes * _cold_share(rows_per_column, hot_share)


def changed_share(layers: Iterable[Layer], num_samples: float) -> float:
    """Return the share of the bytes of all tables whose rows some samples look up.

    Of n look-ups of a column the rows that are expected once or more are all met, and each other look-up meets a row
    of its own.
    """
    changed_bytes = all_bytes = 0.0
    for layer in (each for each in layers if each.is_sharded):
        num_rows = layer.parameter_bytes / layer.looked_up_bytes_per_sample
        often = min((num_samples / _uses(num_rows)) ** (1 / ZIPF_EXPONENT), num_rows)
        met = often + num_samples * _cold_share(num_rows, often / num_rows)
        changed_bytes += layer.state_bytes * min(met / num_rows, 1.0)
        all_bytes += layer.state_bytes
    return changed_bytes / all_bytes if all_bytes else 0.0


def _uses(num_rows: float) -> float:
    """Return the sum of 1 / i^s over i = 1..n, by Euler and Maclaurin; between whole numbers it goes on evenly."""
    if num_rows < 1:
        return num_rows
    s = ZIPF_EXPONENT
    whole: float = (1 - num_rows ** (1 - s)) / (s - 1)
    ends: float = (1 + num_rows**-s) / 2 + s * (1 - num_rows ** (-s - 1)) / 12
    return whole + ends
