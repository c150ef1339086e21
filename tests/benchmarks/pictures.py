"""Makes the pictures of README and docs from served nights, in a headless browser: what is shown has happened.

Days of synthetic clicks are trained through `make serve`, all but the last by `backfill-ctr`; then its pages are
opened as a person opens them. With `--keep` the workspace stays, and a second call draws its pages again.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from mlflow import MlflowClient
from mlflow.artifacts import load_text

from heterps_core.data.synthetic.click_stream import write_click_days
from heterps_core.errors import ConfigurationError
from tasks.publishing import PREFECT_FLOW_RUN
from tasks.records.mlflow_views import nights_address
from tasks.records.past_runs import past_trainings
from tests.browser import Browser, open_browser
from tests.paths import PROJECT
from tests.served_workspace import ServedWorkspace

TABLE_HAS_ROWS = "document.querySelectorAll('.ag-center-cols-container .ag-row').length >= {rows}"
VIEW_IS_APPLIED = "document.querySelector('[col-id*=\"night/auc\"]') !== null"

PICTURES = PROJECT / "docs" / "pictures"
FIRST_DAY = date(2026, 11, 1)
ROWS_PER_DAY = 20_000
NIGHTS_TIMEOUT_S = 900.0
LESS_AROUND = "".join(
    f"document.querySelector('[data-component-id=\"{each}\"]')?.click();"
    for each in ("mlflow.assistant.chat_panel.close", "mlflow_header.toggle_sidebar_button")
)
"""Closes what MLflow shows beside its tables."""

PAGE_TIMEOUT_S = 60.0


class Page(NamedTuple):
    """What a browser shows for a picture."""

    name: str
    address: str
    condition: str
    """In JavaScript, of a page that is there."""

    width: int
    height: int
    is_dark: bool = False
    then: str = ""
    """In JavaScript, what a person does first."""


def run(*, seed: int = 0, num_cases: int = 5, keep: Path | None = None) -> list[dict[str, Any]]:
    """Train nights, write the pictures, and return their sizes.

    Args:
        seed: Of the clicks.
        num_cases: Nights.
        keep: Where workspace and clicks stay; nights that are done there are not trained again.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = (keep or Path(temporary)).absolute()
        service = ServedWorkspace(folder / "home")
        try:
            service.wait_until_up()
            clicks = folder / "clicks"
            if not clicks.exists():
                write_click_days(
                    clicks, first_day=FIRST_DAY, num_days=num_cases + 1, rows_per_day=ROWS_PER_DAY, seed=seed
                )
                train(service, clicks, num_nights=num_cases)
            with open_browser() as browser:
                browser.call("Network.enable")
                browser.call("Network.setExtraHTTPHeaders", headers={"authorization": service.sign_in})
                return [draw(browser, page) for page in pages_of(service, folder, num_nights=num_cases)]
        finally:
            service.stop()


def train(service: ServedWorkspace, clicks: Path, *, num_nights: int) -> None:
    """Back-fill all days but the last, which a night trains."""
    data = f"data={json.dumps(str(clicks))}"
    last = FIRST_DAY + timedelta(days=num_nights - 2)
    days = ("--param", f'first_day="{FIRST_DAY}"', "--param", f'last_day="{last}"')
    for flow, parameters in (("backfill-ctr", days), ("train-ctr", ())):
        asked = ("deployment", "run", flow, "--watch", "--param", data)
        service.command(*asked, *parameters, timeout_s=NIGHTS_TIMEOUT_S)


def pages_of(service: ServedWorkspace, folder: Path, *, num_nights: int) -> list[Page]:
    """Return the pages of the last night, whose report is written into the folder."""
    tracked = past_trainings(service.workspace, most=1)[0].tracked
    artifacts = MlflowClient(service.workspace.tracking_uri).get_run(tracked.mlflow_run_id).info.artifact_uri
    (folder / "report.html").write_text(load_text(f"{artifacts}/report.html"))
    services = service.workspace.running_services()
    assert services is not None
    done = [each for each in service.flow_runs("train-ctr") if each["state_type"] == "COMPLETED"]
    report = (folder / "report.html").as_uri()
    has_heading = "document.querySelector('h1') !== null"
    has_rows = f"{TABLE_HAS_ROWS.format(rows=num_nights)} && {VIEW_IS_APPLIED}"
    return [
        Page(
            "prefect_run",
            f"{services.prefect_url}/{PREFECT_FLOW_RUN}/{done[-1]['id']}",
            "document.body.innerText.includes('Completed') && document.querySelector('canvas') !== null",
            *(1135, 560),
        ),
        Page(
            "mlflow_nights",
            nights_address(tracked, services.mlflow_url),
            has_rows,
            1300,
            560,
            then=LESS_AROUND,
        ),
        Page("run_page", report, has_heading, 1280, 720),
        Page("run_page_phone", report, has_heading, 390, 844, is_dark=True),
    ]


def draw(browser: Browser, page: Page) -> dict[str, Any]:
    """Write one picture and return its size."""
    scheme = "dark" if page.is_dark else "light"
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.resize(width=page.width, height=page.height)
    browser.seconds_until(page.address, page.condition, timeout_s=PAGE_TIMEOUT_S)
    browser.evaluate(page.then)
    with suppress(ConfigurationError):  # Prefect's page never comes to rest while it asks for news
        browser.wait_until_calm(timeout_s=PAGE_TIMEOUT_S / 4)
    path = PICTURES / f"{page.name}.png"
    browser.save_picture(path)
    kilobytes = path.stat().st_size / 1e3
    print(
        f"{path.relative_to(PROJECT)}: {page.width} x {page.height}, {scheme}, {kilobytes:.0f} kB", flush=True
    )
    return {"name": f"{page.name}_bytes", "value": kilobytes, "unit": "kB", "higher_is_better": False}
