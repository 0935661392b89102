"""A real browser with the network cut, and the service behind it: how the tests of screens look at them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    expect,
    sync_playwright,
)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
START_SECONDS = 60
SOON = 30_000
"""Milliseconds after which a job or a scan is taken to hang."""
LINK = re.compile(rb"http://\S+/sign-in\?code=\S+")


@contextmanager
def served(folder: Path, *roots: Path) -> Iterator[str]:
    """Starts `statekit serve` over some folders, and yields the link that signs in once.

    Args:
        folder: For the service's data.
        roots: What to scan.
    """
    command = [
        sys.executable,
        "-m",
        "statekit",
        "serve",
        "--port",
        "0",
        "--doctor-gib",
        "0",
        "--data",
        str(folder),
    ]
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


def data(page: Page) -> Any:
    """Returns what the page shows as data, by the link that it has to that."""
    answer = page.request.get(
        page.url.partition("//")[0]
        + "//"
        + page.url.split("/")[2]
        + str(page.get_by_role("link", name="JSON", exact=True).first.get_attribute("href"))
    )
    assert answer.ok, answer.text()
    return answer.json()


def row(page: Page, name: str) -> Locator:
    """Returns the row of a table that begins with a link of this name."""
    return page.locator("tr[data-row]").filter(has=page.get_by_role("link", name=name, exact=True))


def opened(page: Page, name: str) -> None:
    """Opens a checkpoint from the catalogue, and waits until its parameters are there."""
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.locator(".tree")).to_be_visible(timeout=SOON)


def until(page: Page, again: Callable[[], object], there: Locator) -> None:
    """Looks again until something is there: the service scans by itself after a job that wrote."""
    for _ in range(60):
        again()
        if there.count():
            return
        page.wait_for_timeout(250)
    raise AssertionError("it never came")
