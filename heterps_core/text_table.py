"""Rows as lines with columns of equal width, for tables in a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], *, words: Collection[int]) -> list[str]:
    """Return a line per row; columns with these indices read from the left, all others from the right.

    Example:
        >>> aligned([("stage", "ms"), ("0", "12.5")], words=[0])
        ['stage    ms', '0      12.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
