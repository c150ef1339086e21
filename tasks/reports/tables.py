"""Tables of text: aligned for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int]
) -> list[str]:
    """Return a line for each row, indented, the columns in `left` aligned to the left and all others to the right."""
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table.

    Example:
        >>> markdown_table(["a", "b"], [["1", "x|y"]])
        ['| a | b |', '| --- | --- |', '| 1 | x\\\\|y |']
    """
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |" for cells in lines]
