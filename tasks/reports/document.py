"""What a report says: a picture, answers, and sections of paragraphs, facts, tables and links.

It is written for a terminal, as an HTML page of one file without scripts, which can be read from an artifact store,
on a phone, in the dark and by a screen reader, and as Markdown.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jinja2

from heterps_core.plain_text import plain
from heterps_core.text_table import WIDTH, Table, labelled_lines

RULE = "-" * 78

MOST_OF_ADDRESS = 2 * WIDTH
"""Characters; a terminal leaves out longer ones, which compare many runs."""

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Short answers beside what they answer."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Layers over machines, side by side."""

    table: Table
    """Says the same in words: layers, the machines below them, then their figures."""

    widths: Sequence[int]
    filled: Sequence[float]
    """Share in [0, 1] of each row's bar."""


class Answer(NamedTuple):
    """What is asked first."""

    question: str
    value: str
    remark: str = ""
    """How it has changed, and a verdict in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Where to go on reading: texts, each with an address."""

    pairs: Sequence[tuple[str, str]]


Block: TypeAlias = str | Facts | Table | Links


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
    picture: Picture | None = None
    answers: Sequence[Answer] = ()
    sections: Sequence[Section]
    links: Links = Links(pairs=())

    @property
    def opening(self) -> Sequence[Block]:
        """What comes before the sections where a page cannot be laid out: text by text."""
        told = [
            (question, f"{value}; {remark}" if remark else value) for question, value, remark in self.answers
        ]
        return [
            self.summary,
            *([] if self.picture is None else [self.picture.table]),
            *([Facts(pairs=told)] if told else []),
        ]


def terminal_text(document: Document) -> str:
    """Return a document for a terminal of 100 columns; only a wide table or an address takes more."""
    parts = [
        ["", RULE, document.title, RULE],
        terminal_lines(document.opening),
    ]
    parts += [[section.title, *terminal_lines(section.blocks)] for section in document.sections]
    parts += [["Links", *links] for links in [terminal_lines([document.links])] if links]
    return "\n\n".join("\n".join(part) for part in parts)


def terminal_lines(blocks: Iterable[Block]) -> list[str]:
    """Return the lines of blocks, indented, with a blank line before each table that is not the first of them."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] if lines and isinstance(block, Table) else []
        lines += _block_lines(block)
    return lines


def html_page(document: Document) -> str:
    """Return a document as one HTML file; every text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        # Not of markup, which is the templates' own.
        finalize=lambda value: plain(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"kind": lambda block: type(block).__name__, "zip": zip}
    return environment.get_template("page.html").render(document=document)


def markdown(document: Document) -> str:
    """Return a document as Markdown."""
    parts = [f"# {document.title}", *map(_block_markdown, document.opening)]
    for section in document.sections:
        parts += [f"## {section.title}", *map(_block_markdown, section.blocks)]
    if document.links.pairs:
        parts += ["## Links", _block_markdown(document.links)]
    return "\n\n".join(parts) + "\n"


def _block_lines(block: Block) -> list[str]:
    match block:
        case str():
            return textwrap.wrap(block, WIDTH, initial_indent="  ", subsequent_indent="  ")
        case Facts():
            return labelled_lines(block.pairs)
        case Table():
            return [f"  {block.caption}", *block.lines()]
        case Links():
            return labelled_lines(pair for pair in block.pairs if len(pair[1]) <= MOST_OF_ADDRESS)


def _block_markdown(block: Block) -> str:
    match block:
        case str():
            return block
        case Facts():
            return "\n".join(f"- **{name.removesuffix('?')}**: {text}" for name, text in block.pairs)
        case Table():
            return "\n".join([f"**{block.caption}**", "", *block.markdown()])
        case Links():
            return "\n".join(f"- [{text}]({address})" for text, address in block.pairs)
