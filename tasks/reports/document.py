"""What a report says: sections of paragraphs, facts, tables, pictures and links.

A document is built once from what it is about; `tasks/reports/renderers.py` writes it for a terminal, as an HTML
page and as Markdown.
"""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from heterps_core.text_table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Short answers beside what they answer."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Many lines that are aligned by blanks; a terminal leaves them out, as a command of its own prints them."""

    label: str
    """For those who do not see them."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A figure, drawn once for the record and for the page."""

    name: str
    """File name."""

    png: bytes
    caption: str
    alt: str
    """What it shows, in words."""

    @classmethod
    def of(cls, figure: Figure, *, name: str, caption: str, alt: str) -> Picture:
        """Draw a figure."""
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
        return cls(name=name, png=drawn.getvalue(), caption=caption, alt=alt)

    @property
    def base64(self) -> str:
        """Its bytes, for a page that has no other file."""
        return base64.b64encode(self.png).decode("ascii")

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        # The header chunk of a PNG comes first: 8 bytes of signature, 8 of length and type, then width and height.
        width, height = struct.unpack(">II", self.png[16:24])
        return width, height


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Where to go on reading."""

    text: str
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """A list of links."""

    links: Sequence[Link]


Block: TypeAlias = str | Facts | Table | Lines | Picture | Links
"""A text is a paragraph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a document under a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A report."""

    title: str
    summary: str
    facts: Sequence[tuple[str, str]] = ()
    """What is asked first, each with its answer."""

    sections: Sequence[Section]
