"""Tables and labelled lines: declared once, written for a terminal, as Markdown or into the cells of a page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeAlias

WIDTH = 100
"""Columns of a terminal."""

_LABEL_WIDTH = 12
NOT_KNOWN = "-"

Value: TypeAlias = str | float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    r"""A table whose columns know how their values are written.

    Example:
        >>> table = Table(columns={"stage": "", "ms": ".1f"}, rows=[["gpu|0", 12.54], ["cpu", None]])
        >>> table.lines()
        ['  stage    ms', '  gpu|0  12.5', '  cpu       -']
        >>> table.markdown()
        ['| stage | ms |', '| --- | --- |', '| gpu\\|0 | 12.5 |', '| cpu | - |']
    """

    columns: Mapping[str, str]
    """Each heading, with its unit, and the format of its numbers; empty for words, which are aligned to the left."""

    rows: Sequence[Sequence[Value]]
    """A value for each column; the first names the row. None is not known, and a text stands as it is."""

    caption: str = ""

    @property
    def cells(self) -> list[list[str]]:
        """All rows as they are shown."""
        return [
            [_shown(value, form) for value, form in zip(row, self.columns.values(), strict=True)]
            for row in self.rows
        ]

    def lines(self, *, indent: str = "  ") -> list[str]:
        """Return the heading and a line for each row, in columns of equal width."""
        table = [list(self.columns), *self.cells]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        forms = self.columns.values()
        return [
            indent
            + "  ".join(
                cell.rjust(width) if form else cell.ljust(width)
                for cell, width, form in zip(row, widths, forms, strict=True)
            ).rstrip()
            for row in table
        ]

    def captioned_lines(self) -> list[str]:
        """Return the lines below the caption, all indented."""
        return [
            *textwrap.wrap(self.caption, WIDTH, initial_indent="  ", subsequent_indent="  "),
            *self.lines(),
        ]

    def markdown(self) -> list[str]:
        """Return the lines of a Markdown table."""
        table = [list(self.columns), ["---"] * len(self.columns), *self.cells]
        return ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in table]


def table_text(table: Table) -> str:
    """Return caption and lines of a table as one text."""
    return "\n".join([table.caption, *table.lines()])


def labelled_lines(pairs: Iterable[tuple[str, str]], *, indent: str = "  ", width: int = WIDTH) -> list[str]:
    """Return texts beside their labels, wrapped at so many columns.

    Example:
        >>> labelled_lines([("price", "0.5 USD/hour")])
        ['  price       0.5 USD/hour']
    """
    pairs = list(pairs)
    of_labels = max([_LABEL_WIDTH, *(len(label) + 2 for label, _ in pairs)])
    return [
        line
        for label, text in pairs
        for line in textwrap.wrap(
            text,
            width,
            initial_indent=f"{indent}{label:<{of_labels}}",
            subsequent_indent=indent + " " * of_labels,
            break_on_hyphens=False,
            break_long_words=False,
        )
    ]


_LEAST_USD = 1e-6


def usd_text(usd: float) -> str:
    """Return an amount with cents, or where it is small, with three digits that count; below a millionth it is 0.

    Example:
        >>> usd_text(1234.5), usd_text(0.0123), usd_text(0.0000504)
        ('1,234.50 USD', '0.0123 USD', '0.0000504 USD')
    """
    if abs(usd) >= 1:
        return f"{usd:,.2f} USD"
    if abs(usd) < _LEAST_USD:
        return "0.00 USD"
    # Fixed, as exponents are read by few.
    return f"{Decimal(f'{usd:.3g}'):f} USD"


def _shown(value: Value, form: str) -> str:
    if value is None:
        return NOT_KNOWN
    return value if isinstance(value, str) else format(value, form)
