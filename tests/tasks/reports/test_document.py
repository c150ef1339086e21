import re
from html.parser import HTMLParser

import pytest

from heterps_core.text_table import Table
from tasks.reports.document import (
    Document,
    Facts,
    Lines,
    Links,
    Section,
    html_page,
    markdown,
    terminal_text,
)


class Outline(HTMLParser):
    """Elements, attributes and balance of a page."""

    VOID = frozenset({"meta", "img", "br", "link", "input"})

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def page():
    return Document(
        title="Run <1>",
        summary="a & b",
        facts=[("What did it cost?", "1 USD")],
        sections=[
            Section(
                title="Plan",
                blocks=[
                    "<script>alert(1)</script>",
                    Facts(pairs=[("price", "0.5 USD/hour")]),
                    Table(caption="Stages", columns={"stage": "d", "a|b": ".1f"}, rows=[[0, 1], [1, None]]),
                ],
            ),
            Section(
                title="Links",
                blocks=[
                    Lines(label="Why", text="a   b\nc   d"),
                    Links(pairs=[("here", "http://127.0.0.1:5000/#/x?a=1&b=2")]),
                ],
            ),
        ],
    )


def test_a_page_needs_nothing_else_and_no_script(page):
    outline = Outline(html_page(page))

    assert not outline.all("script")
    assert not outline.all("link")
    assert not outline.all("img")


def test_what_is_written_is_shown_and_never_run(page):
    html = html_page(page)

    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<title>Run &lt;1&gt;</title>" in html


def test_a_screen_reader_finds_language_headings_and_table_heads(page):
    outline = Outline(html_page(page))

    assert outline.open == []
    assert outline.all("html") == [{"lang": "en"}]
    assert len(outline.all("h1")) == 1
    assert [heading["id"] for heading in outline.all("h2")] == ["section-1", "section-2"]
    scopes = [head["scope"] for head in outline.all("th")]
    assert scopes == ["col", "col", "row", "row"]
    assert len(outline.all("caption")) == len(outline.all("table")) == 1


def test_a_phone_gets_its_own_width_and_wide_things_scroll_alone(page):
    outline = Outline(html_page(page))

    [viewport] = [meta for meta in outline.all("meta") if meta.get("name") == "viewport"]
    assert viewport["content"] == "width=device-width, initial-scale=1"
    scrolling = [part for part in outline.all("div") if part.get("class") == "scroll"]
    # Table and lines; each can be reached and scrolled with a keyboard.
    assert len(scrolling) == 2
    assert all(part["tabindex"] == "0" and part["aria-label"] for part in scrolling)


def test_every_text_stands_out_from_what_is_behind_it(page):
    html = html_page(page)

    # WCAG 2.1, 1.4.3: at least 4.5 to 1; backgrounds are white or #f0f0f0.
    colours = set(re.findall(r"[^-]color: (#[0-9a-f]{3,6})", html))
    assert colours
    assert min(contrast(colour, "#f0f0f0") for colour in colours) >= 4.5


def contrast(first, second):
    lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_markdown_says_the_same(page):
    text = markdown(page)

    assert text.startswith("# Run <1>\n\na & b\n\n- **What did it cost**: 1 USD\n\n## Plan\n")
    assert "| stage | a\\|b |\n| --- | --- |\n| 0 | 1.0 |\n| 1 | - |" in text
    assert "- **price**: 0.5 USD/hour" in text
    assert "```\na   b\nc   d\n```" in text
    assert "- [here](http://127.0.0.1:5000/#/x?a=1&b=2)" in text
    assert "base64" not in text


def test_a_terminal_shows_the_same_in_aligned_lines_without_long_explanations(page):
    lines = terminal_text(page).splitlines()

    assert lines[2] == "Run <1>"
    assert "  What did it cost?  1 USD" in lines
    plan = lines.index("Plan")
    assert lines[plan + 1 : plan + 8] == [
        "  <script>alert(1)</script>",
        "  price       0.5 USD/hour",
        "",
        "  Stages",
        "  stage  a|b",
        "      0  1.0",
        "      1    -",
    ]
    assert lines[-1] == "  here        http://127.0.0.1:5000/#/x?a=1&b=2"
