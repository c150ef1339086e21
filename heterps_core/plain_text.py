"""Text from nodes, files and data as people see it: what would steer a terminal, or reorder a line, is shown instead.

The one rule for all of it. It is applied where text is shown: to what commands print, and to pages.
"""

from __future__ import annotations

import re
from typing import Any, TextIO

_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1 without tab and line feed (ECMA-48): ESC, CSI, BEL, carriage return
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls (Unicode annex 9)
    "\u2028\u2029\ud800-\udfff]"  # separators of lines and paragraphs, and bytes that were no UTF-8
)


def plain(text: str) -> str:
    r"""Return a text with each character that steers a terminal written as its escape.

    Example:
        >>> plain("day\x1b[2J\tone\n")
        'day\\x1b[2J\tone\n'
    """
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PlainOutput:
    """A text stream that writes to another one, plainly; all but writing is that one's."""

    def __init__(self, unfiltered: TextIO) -> None:
        self.unfiltered = unfiltered
        """For what draws on a terminal itself."""

    def write(self, text: str) -> int:
        """Write a text plainly."""
        self.unfiltered.write(plain(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write texts plainly."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def unfiltered(stream: Any) -> Any:
    """Return the stream below a plain one, for what draws on a terminal; another stream itself."""
    return stream.unfiltered if isinstance(stream, PlainOutput) else stream
