"""A day in a lab, in a browser: what tests/test_service_day.py tells through the interface, as people click it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from browsing import SOON, Watched, axe, chromium, needs_chromium, opened, row, served, until

pytest.importorskip("torch")
import lab_day

# What a quick run has of it: each of these tasks by itself, in tests/test_screens.py.
pytestmark = [needs_chromium, pytest.mark.torch, pytest.mark.slow]

LATE = 4 * SOON
"""Milliseconds that a proof may take."""


def test_a_day_in_a_lab(tmp_path: Path) -> None:
    run = tmp_path / "root" / "run"
    lab_day.begin(run)
    with served(tmp_path / "data", run.parent) as link, chromium() as browser:
        context = browser.new_context(reduced_motion="reduce")
        watched = Watched(context, link.partition("/sign-in")[0])
        watched.page.goto(link)
        watched.page.wait_for_url("**/")
        page = watched.page
        until(page, page.reload, row(page, lab_day.FIRST))
        _steps_are_seen_and_examined(page, run)
        opened(page, lab_day.GOOD)
        good = page.url.partition("?")[0]
        _the_good_one_is_moved_proven_and_resumed(page, good, run.parent / "hf.pt")
        _older_ones_are_thinned(page, good, run / lab_day.OLD)
        context.close()
        assert watched.complaints == []


def _home(page: Page) -> str:
    return "/".join(page.url.split("/")[:3]) + "/"


def _steps_are_seen_and_examined(page: Page, run: Path) -> None:
    """A training loop writes steps; doctor finds the one whose moments were saved as zeros."""
    lab_day.train(run)
    page.get_by_role("button", name="Scan again").click()
    until(page, lambda: page.goto(_home(page)), row(page, lab_day.GOOD))
    expect(page.locator("tr.run")).to_contain_text("4 steps, 8 to 11")
    page.locator("#runs").get_by_role("link", name="run", exact=True).click()
    page.get_by_role("button", name="Look for faults over all steps").click()
    between = page.locator("#between")
    expect(between.locator(".verdict.bad")).to_contain_text("in 1 of 4 steps", timeout=SOON)
    expect(between.get_by_role("heading", name=lab_day.BAD)).to_be_visible()
    expect(between.locator(".finding").first).to_contain_text("moments-zero")
    assert axe(page) == []
    page.reload()
    expect(row(page, lab_day.BAD)).to_contain_text("findings")
    expect(row(page, lab_day.GOOD)).to_contain_text("clean")


def _the_good_one_is_moved_proven_and_resumed(page: Page, good: str, target: Path) -> None:
    """It is converted with a map, resumed by the code that its page has, and proven to be the same run."""
    page.get_by_text("Convert it").click()
    form = page.locator("#convert form")
    form.get_by_label("and path below it").fill(target.name)
    form.locator("[name=layout]").select_option("statekit-torch")
    form.get_by_label("Map to another model").select_option("t5x-t5:hf-t5")
    known = "\n".join(f"{name}={value}" for name, value in lab_day.CONFIG.items())
    form.get_by_label("What the map needs to know").fill(known)
    form.get_by_role("button", name="Convert", exact=True).click()
    expect(page.get_by_text("Written, read again and compared")).to_be_visible(timeout=SOON)
    until(page, lambda: page.goto(_home(page)), row(page, target.name))
    opened(page, target.name)
    made = page.url.partition("?")[0].rpartition("/")[2]
    code = page.locator("#code .card").filter(has_text="PyTorch").locator("pre").inner_text()
    assert "statekit.torch.load_optimizer(" in code and str(target) in code
    assert lab_day.resumed(target)
    page.goto(good)
    page.get_by_text("Prove that another").click()
    page.get_by_label("The other checkpoint's number").fill(made)
    page.get_by_role("button", name="Prove", exact=True).click()
    expect(page.locator(".verdict.good")).to_be_visible(timeout=LATE)


def _older_ones_are_thinned(page: Page, good: str, file: Path) -> None:
    """Not before they are sealed, and never the last one; the lineage shows all of it."""
    page.goto(_home(page))
    opened(page, file.name)
    old = page.url.partition("?")[0]
    _thin(page, old, "Thin")
    expect(page.locator(".verdict.bad")).to_contain_text("it is unsealed")
    for step in (old, good):
        page.goto(step)
        page.get_by_role("button", name="Seal it").click()
        expect(page.locator("#verdict .badge").first).to_have_text("sealed", timeout=SOON)
    _thin(page, old, "Say what it would free")
    expect(page.locator(".verdict strong")).to_have_text(re.compile("It would free about"), timeout=SOON)
    assert file.exists()
    _thin(page, old, "Thin")
    expect(page.locator(".verdict strong")).to_have_text(re.compile("are free now"), timeout=SOON)
    assert not file.exists()
    _thin(page, good, "Thin")
    expect(page.locator(".verdict.bad")).to_contain_text("the last step of its run")
    lineage = page.locator("figure svg")
    page.goto(good.replace("/checkpoints/", "/lineage/"))
    for label in ("hf.pt", f"convert and verify of {lab_day.GOOD}"):
        expect(lineage.get_by_text(label, exact=True).first).to_be_visible()
    until(page, lambda: page.goto(old.replace("/checkpoints/", "/lineage/")), lineage.get_by_text("thin"))
    expect(page.locator("svg a").filter(has_text="weights")).to_be_visible()
    assert axe(page) == []


def _thin(page: Page, checkpoint: str, button: str) -> None:
    """Asks for a thinning on a checkpoint's page."""
    page.goto(checkpoint)
    page.get_by_text("Thin it").click()
    page.get_by_role("button", name=button, exact=True).click()
