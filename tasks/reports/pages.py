"""A report as sections of text, tables, pictures and links, and its two forms: an HTML page and Markdown.

What a report says is written once; the forms differ in pictures, which Markdown leaves to the page. The page is one
file without scripts, so that it can be read from an artifact store, on a phone and by a screen reader.
"""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import jinja2

from tasks.reports.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table whose first column names its rows."""

    kind: ClassVar[str] = "table"
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: frozenset[int] = frozenset({0})
    """Aligned to the left; figures stand to the right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Lines that are aligned by blanks, and stay as they are."""

    kind: ClassVar[str] = "lines"
    label: str
    """For those who do not see them."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A figure, drawn once for the record and for the page."""

    kind: ClassVar[str] = "picture"
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
    def width(self) -> int:
        """In pixels."""
        return self._size[0]

    @property
    def height(self) -> int:
        """In pixels."""
        return self._size[1]

    @property
    def _size(self) -> tuple[int, int]:
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

    kind: ClassVar[str] = "links"
    links: Sequence[Link]


Block: TypeAlias = Text | Table | Lines | Picture | Links


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a page under a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A report."""

    title: str
    summary: str
    facts: Sequence[tuple[str, str]]
    """What is asked first, each with its answer."""

    sections: Sequence[Section]


def page_html(page: Page) -> str:
    """Return a page as one HTML file; every text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html").render(page=page)


def page_markdown(page: Page) -> str:
    """Return a page as Markdown, without its pictures."""
    parts = [f"# {page.title}", page.summary]
    if page.facts:
        parts.append("\n".join(f"- **{name.removesuffix('?')}**: {value}" for name, value in page.facts))
    for section in page.sections:
        parts.append(f"## {section.title}")
        parts += [text for text in map(_block_markdown, section.blocks) if text]
    return "\n\n".join(parts) + "\n"


def _block_markdown(block: Block) -> str:
    match block:
        case Text():
            return block.text
        case Table():
            return "\n".join([f"**{block.caption}**", "", *markdown_table(block.header, block.rows)])
        case Lines():
            return f"```\n{block.text}\n```"
        case Links():
            return "\n".join(f"- [{link.text}]({link.address})" for link in block.links)
        case Picture():
            return ""
