import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import pytest

from tasks.records.mlflow_names import Tag
from tasks.reports.charts import loss_chart, pipeline_chart
from tasks.reports.page import page
from tasks.reports.report_text import facts
from tests.tasks.report_builders import make_night, make_plan_report, make_run_report
from tests.tasks.reports.test_report_text import make_decision


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


NIGHTS = [make_night(index) for index in range(12)]
FAILED = make_night(20, status="FAILED", metrics={})
LINKS = [("here", "http://127.0.0.1:5000/#/x?a=1&b=2")]
NIGHT_CAPTIONS = [
    "USD of each night",
    "AUC on held-out rows (filled = champion)",
    "Samples/s of each night",
]


@pytest.fixture(scope="module")
def html():
    return page(make_run_report(), make_decision(is_promoted=True), NIGHTS, LINKS)


def figures_of(text):
    return [figure["aria-label"].partition(": ") for figure in Outline(text).all("figure")]


def test_a_page_needs_nothing_else_and_no_script(html):
    outline = Outline(html)

    assert outline.open == []
    assert not [tag for tag in ("script", "link", "img", "image", "metadata") if outline.all(tag)]
    addresses = re.findall(r"https?://[^\"\s]+", html)
    assert addresses == ["http://127.0.0.1:5000/#/x?a=1&amp;b=2"]


def test_a_source_that_looks_like_markup_is_shown_and_never_run(html):
    assert "clicks &lt;of&gt; a day" in html
    assert "<of>" not in html


def test_a_page_has_five_charts_four_tables_and_the_facts_of_the_screen(html):
    captions = [caption for caption, *_ in figures_of(html)]
    assert captions[:3] == NIGHT_CAPTIONS
    pipeline = "First batch in the pipeline by the plan, 1 x micro-batch"
    assert captions[3:] == ["Log-loss of the training steps", pipeline]
    outline = Outline(html)
    assert (len(outline.all("svg")), len(outline.all("table"))) == (5, 4)
    for label, text in facts(make_run_report(), make_decision(is_promoted=True)):
        assert f"<dt>{label}</dt><dd>{escape(text)}</dd>" in html


def test_the_last_point_is_this_run_and_points_stand_in_the_order_of_their_days():
    nights = [replace(NIGHTS[1], tags={**NIGHTS[1].tags, Tag.DAY: "2026-10-20"}), *NIGHTS[2:4], FAILED]
    text = page(make_run_report(), "it is a test", nights, LINKS)

    words = {caption: words for caption, _, words in figures_of(text)}
    # By hand: AUC 0.74 + 0.0001 for each night; this run's is 0.7432. A night that failed has no point.
    assert (
        words[NIGHT_CAPTIONS[1]]
        == "2026-10-03: 0.7402, 2026-10-04: 0.7403, 2026-10-20: 0.7401, 2026-11-20: 0.7432"
    )
    assert words["Log-loss of the training steps"] == "40 steps, from 0.7000 to 0.0175"


def test_the_first_night_and_a_plan_have_no_charts_of_nights():
    first = page(make_run_report(), "it is a test", [FAILED], LINKS)
    plan = page(make_plan_report(), "nothing was trained", NIGHTS, LINKS)

    assert [caption.split()[0] for caption, *_ in figures_of(first)] == ["Log-loss", "First"]
    assert [caption.split()[0] for caption, *_ in figures_of(plan)] == ["First"]
    assert "<dd>nothing</dd>" in plan


def test_a_long_curve_is_drawn_by_the_means_of_its_parts():
    chart = loss_chart([0.5, 0.7] * 50_000)

    assert chart.words == "100,000 steps, from 0.6000 to 0.6000"
    assert len(chart.svg) < 30_000


def test_a_pass_waits_for_its_stage_and_for_the_rows_of_its_neighbour():
    chart = pipeline_chart(make_run_report().simulation.load)

    # One micro-batch: forward in both stages, then backward in both, each after the other.
    assert chart.words == "2 stages, forward and backward passes; gaps are waits"
    assert chart.svg.count('id="FillBetweenPolyCollection') + chart.svg.count('id="PolyCollection') == 4


def test_a_screen_reader_finds_language_heading_charts_and_table_heads(html):
    outline = Outline(html)

    assert outline.all("html") == [{"lang": "en"}]
    assert len(outline.all("h1")) == 1
    assert {figure["role"] for figure in outline.all("figure")} == {"img"}
    assert {head["scope"] for head in outline.all("th")} == {"col", "row"}
    assert len(outline.all("caption")) == len(outline.all("table"))


def test_a_phone_gets_its_own_width_and_a_card_for_each_row_of_a_table(html):
    outline = Outline(html)

    [viewport] = [meta for meta in outline.all("meta") if meta.get("name") == "viewport"]
    assert viewport["content"] == "width=device-width, initial-scale=1"
    # A card is laid out without the table's head; roles keep it a table for a screen reader.
    assert all("data-column" in cell for cell in outline.all("td"))
    roles = {attributes["role"] for _, attributes in outline.elements if "role" in attributes}
    assert {"table", "row", "rowgroup", "columnheader", "rowheader", "cell"} <= roles


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_background(html, scheme):
    light, dark = html.split("@media (prefers-color-scheme: dark)")
    style = {"light": light, "dark": dark.partition("body {")[0]}[scheme]
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})", style))

    # WCAG 2.1: at least 4.5 to 1 for text (1.4.3), 3 to 1 for bars and borders (1.4.11).
    for background in ("page", "box"):
        texts = [contrast(colours[name], colours[background]) for name in ("text", "faint", "link")]
        assert min(texts) >= 4.5
        assert contrast(colours["line"], colours[background]) >= 3


def contrast(first, second):
    lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
