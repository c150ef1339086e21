"""Pages are asked for their widths in Chromium; skipped where none is installed."""

import shutil

import pytest

from tasks.reports.page import page
from tests.browser import NAMES, open_browser
from tests.tasks.report_builders import ID_TURNOVER, make_night, make_plan_report, make_run_report
from tests.tasks.reports.test_report_text import LINKS, make_decision

pytestmark = pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="there is no Chromium")

CUT = """[...document.querySelectorAll('body *:not(thead, thead *, svg, svg *)')].filter(each => {
    const box = each.getBoundingClientRect();
    return box.right > document.documentElement.clientWidth + 1 || each.scrollWidth > each.clientWidth + 1
        && getComputedStyle(each).display !== 'inline';
}).map(each => each.outerHTML.slice(0, 80)).join('; ')"""


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    nights = [make_night(index) for index in range(30)]
    run = make_run_report(id_turnover=ID_TURNOVER)
    pages = {
        "run": page(run, make_decision(is_promoted=True), nights, LINKS),
        "plan": page(make_plan_report(data="d" * 200), "nothing was trained", nights, LINKS),
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return {name: (folder / f"{name}.html").as_uri() for name in pages}


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["run", "plan"])
def test_nothing_is_cut_at_the_sides(browser, addresses, name, width):
    browser.resize(width=width, height=900)
    browser.seconds_until(addresses[name], "document.querySelector('h1') !== null", timeout_s=60)

    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(CUT) == ""


def test_the_charts_of_the_nights_fit_on_the_first_screen(browser, addresses):
    browser.resize(width=1280, height=900)
    browser.seconds_until(addresses["run"], "document.querySelector('svg') !== null", timeout_s=60)

    assert browser.evaluate("document.querySelectorAll('figure')[2].getBoundingClientRect().bottom") < 900


def test_a_page_is_dark_where_the_system_is(browser, addresses):
    def lightness(scheme):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("Emulation.setEmulatedMedia", features=features)
        browser.seconds_until(addresses["run"], "document.querySelector('h1') !== null", timeout_s=60)
        colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(",")))

    assert lightness("dark") < 200 < 600 < lightness("light")
