import re
from html.parser import HTMLParser

import pytest

from heterps_core.text_table import Table
from tasks.reports.document import (
    Answer,
    Document,
    Facts,
    Links,
    Picture,
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
        picture=Picture(
            table=Table(
                caption="The plan",
                columns={"layers": "", "machines": "", "ms": ".1f", "idle": ".0%"},
                rows=[["0 embedding", "2 x cpu", 5, 0.25], ["1..2 fc", "1 x gpu", 7.5, 0.0]],
            ),
            widths=[1, 2],
            filled=[0.75, 1.0],
        ),
        answers=[Answer("What did it cost?", "1 USD", "cheaper")],
        sections=[
            Section(
                title="Plan",
                blocks=[
                    "<script>alert(1)</script>",
                    Facts(pairs=[("price", "0.5 USD/hour")]),
                    Table(caption="Stages", columns={"stage": "d", "a|b": ".1f"}, rows=[[0, 1], [1, None]]),
                ],
            ),
            Section(title="Why", blocks=["a"]),
        ],
        links=Links(pairs=[("here", "http://127.0.0.1:5000/#/x?a=1&b=2")]),
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


def test_a_page_opens_with_the_picture_and_says_it_in_words(page):
    html = html_page(page)
    outline = Outline(html)

    # Three squares for three layers, and bars for three quarters of a step and a whole one, all for eyes alone.
    assert html.count("<i></i>") == 3
    assert [bar["style"] for bar in outline.all("i") if "style" in bar] == ["width: 75.0%", "width: 100.0%"]
    hidden = [part["class"] for part in outline.all("div") if part.get("aria-hidden") == "true"]
    assert hidden == ["squares", "bar"] * 2
    words = [
        "The plan",
        "0 embedding",
        "2 x cpu",
        "5.0",
        "25%",
        "What did it cost?",
        "1 USD",
        "cheaper",
        "Plan",
    ]
    places = [html.index(word, html.index("<figure>")) for word in words]
    assert places == sorted(places)


def test_a_phone_gets_its_own_width_and_a_card_for_each_row_of_a_table(page):
    outline = Outline(html_page(page))

    [viewport] = [meta for meta in outline.all("meta") if meta.get("name") == "viewport"]
    assert viewport["content"] == "width=device-width, initial-scale=1"
    # A card is laid out without the table's head; roles keep it a table for a screen reader.
    assert [cell["data-column"] for cell in outline.all("td")] == ["a|b", "a|b"]
    roles = [attributes["role"] for _, attributes in outline.elements if "role" in attributes]
    assert roles.count("row") == 3
    assert {"table", "rowgroup", "columnheader", "rowheader", "cell"} <= set(roles)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(page, scheme):
    light, dark = html_page(page).split("@media (prefers-color-scheme: dark)")
    style = {"light": light, "dark": dark.partition("body {")[0]}[scheme]
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})", style))

    # WCAG 2.1: at least 4.5 to 1 for text (1.4.3), 3 to 1 for bars and borders (1.4.11).
    for behind in ("page", "box"):
        texts = [contrast(colours[name], colours[behind]) for name in ("text", "faint", "link")]
        assert min(texts) >= 4.5
        assert contrast(colours["line"], colours[behind]) >= 3


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

    assert text.startswith("# Run <1>\n\na & b\n\n**The plan**\n\n| layers | machines |")
    assert "| stage | a\\|b |\n| --- | --- |\n| 0 | 1.0 |\n| 1 | - |" in text
    assert "- **price**: 0.5 USD/hour" in text
    assert "- **What did it cost**: 1 USD; cheaper\n\n## Plan\n" in text
    assert "- [here](http://127.0.0.1:5000/#/x?a=1&b=2)" in text
    assert "base64" not in text


def test_a_terminal_shows_the_same_in_aligned_lines(page):
    lines = terminal_text(page).splitlines()

    assert lines[2] == "Run <1>"
    assert "  What did it cost?  1 USD; cheaper" in lines
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
