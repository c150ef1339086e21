"""A headless Chromium that is driven through its DevTools protocol, for what only a browser can tell.

Chrome DevTools Protocol (https://chromedevtools.github.io/devtools-protocol/): JSON over a WebSocket, an answer for
each numbered call, events in between.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from websockets.sync.client import ClientConnection, connect

from heterps_core.errors import ConfigurationError

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_TIMEOUT_S = 30.0
POLL_S = 0.02
CALM_S = 0.5
"""A page that shows the same for so long has drawn what it draws; MLflow's next answer to a page takes less."""


class Browser:
    """One tab. Made by `open_browser`."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._num_calls = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a call of the protocol."""
        self._num_calls += 1
        self._connection.send(json.dumps({"id": self._num_calls, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv())
            if message.get("id") == self._num_calls:
                if "error" in message:
                    raise ConfigurationError(f"the browser refuses {method}: {message['error']['message']}")
                return dict(message["result"])

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page; None where it fails, or no page is there yet."""
        try:
            answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        except ConfigurationError:
            return None
        return answer["result"].get("value")

    def resize(self, *, width: int, height: int) -> None:
        """Set the size of the window in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def seconds_until(self, address: str, condition: str, *, timeout_s: float) -> float:
        """Open an address and return after how long a condition in JavaScript holds.

        Raises:
            ConfigurationError: It did not within the time.
        """
        # From an empty page, or the change of a fragment alone would load nothing.
        self.call("Page.navigate", url="about:blank")
        started_s = time.perf_counter()
        self.call("Page.navigate", url=address)
        while time.perf_counter() - started_s < timeout_s:
            if self.evaluate(condition):
                return time.perf_counter() - started_s
            time.sleep(POLL_S)
        shown = str(self.evaluate("document.body.innerText"))[:300]
        raise ConfigurationError(f"{address} did not show {condition} in {timeout_s:.0f} s, but: {shown!r}")

    def wait_until_calm(self, *, timeout_s: float) -> None:
        """Return once the page has loaded and shows the same for a while, so nothing is being drawn any more.

        Raises:
            ConfigurationError: It was still changing after the time.
        """
        deadline_s = time.monotonic() + timeout_s
        shown, since_s = b"", time.monotonic()
        while time.monotonic() - since_s < CALM_S or not self.evaluate("document.readyState === 'complete'"):
            if time.monotonic() > deadline_s:
                raise ConfigurationError(
                    f"a page must come to rest within {timeout_s:.0f} s, but it still changes"
                )
            time.sleep(POLL_S)
            if (now := self._picture()) != shown:
                shown, since_s = now, time.monotonic()

    def save_picture(self, path: Path, *, is_whole_page: bool = False) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(self._picture(is_whole_page=is_whole_page))

    def _picture(self, *, is_whole_page: bool = False) -> bytes:
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole_page)
        return base64.b64decode(answer["data"])


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser that knows nothing yet, yield its tab, and end it.

    Raises:
        ConfigurationError: No browser is installed, or it does not start.
    """
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        raise ConfigurationError(f"a browser must be installed, found none of {', '.join(NAMES)}")
    with TemporaryDirectory(prefix="heterps-browser-", ignore_cleanup_errors=True) as profile:
        options = [
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "--no-first-run",
        ]
        if os.geteuid() == 0:
            options.append("--no-sandbox")
        process = subprocess.Popen(
            [program, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            with connect(_tab_address(Path(profile)), max_size=None) as connection:
                browser = Browser(connection)
                browser.call("Page.enable")
                browser.resize(width=1600, height=1000)
                yield browser
        finally:
            process.terminate()
            process.wait()


def _tab_address(profile: Path) -> str:
    """Wait until the browser has written its port, and return the address of its tab."""
    port_file = profile / "DevToolsActivePort"
    deadline_s = time.monotonic() + START_TIMEOUT_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline_s:
        lines = port_file.read_text().splitlines() if port_file.exists() else []
        if lines:
            with opener.open(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if tabs:
                return str(tabs[0]["webSocketDebuggerUrl"])
        time.sleep(POLL_S)
    raise ConfigurationError(f"the browser did not start within {START_TIMEOUT_S:.0f} s")
