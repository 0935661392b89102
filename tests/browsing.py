"""A real browser with the network cut, and the service behind it: how the tests of screens look at them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
START_SECONDS = 60
LINK = re.compile(rb"http://\S+/sign-in\?code=\S+")


@contextmanager
def served(folder: Path, *roots: Path) -> Iterator[str]:
    """Starts `statekit serve` over some folders, and yields the link that signs in once.

    Args:
        folder: For the service's data.
        roots: What to scan.
    """
    command = [sys.executable, "-m", "statekit", "serve", "--port", "0", "--data", str(folder)]
    for root in roots:
        command += ["--root", str(root)]
    log = folder.with_suffix(".log")
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, env=os.environ | {"NO_COLOR": "1"}
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                link = LINK.search(line)
                if link:
                    yield link[0].decode()
                    return
            raise AssertionError(f"the service ended: {log.read_text(errors='replace')[-2000:]}")
        finally:
            process.terminate()
            process.stdout.close()
            process.wait(20)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts the browser; names of hosts lead nowhere."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                "--disable-gpu",
            ],
        )
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page that fails its test when it asks for anything but its own server, or a script or a policy complains.

    Attributes:
        page: The page.
        complaints: What was wrong so far.
    """

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.page: Page = context.new_page()
        self.page.set_default_timeout(15_000)
        self.complaints: list[str] = []
        self._origin = origin
        self.page.on("request", self._asked)
        self.page.on("pageerror", lambda error: self.complaints.append(f"script: {error}"))
        self.page.on("console", self._said)

    def _asked(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in {"data", "blob"} and f"{parts.scheme}://{parts.netloc}" != self._origin:
            self.complaints.append(f"left its server: {request.method} {request.url}")

    def _said(self, message: ConsoleMessage) -> None:
        refused = "status of 422" in message.text  # a form that asks for what can't be: its answer is a page
        if message.type == "error" and not refused:
            self.complaints.append(f"console: {message.text}")


def axe(page: Page) -> list[str]:
    """Returns what axe finds on a page that is serious or worse, a line each."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{one['id']}: {node['html'][:200]}: {node['failureSummary'][:300]}"
        for one in violations
        if one["impact"] in {"serious", "critical"}
        for node in one["nodes"]
    ]
