"""Every promise on the page on security names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

from statekit.testing.containers import LAWS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "security.md"


def test_every_promise_has_a_test() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Not promised")[0]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 8
    for _, promise, holds, _ in rows:
        tests, laws = re.findall(r"\]\((\.\./tests/\S+)\)", holds), re.findall(r"`(\w+)`", holds)
        assert tests or laws, promise
        assert all((PAGE.parent / test).is_file() for test in tests), promise
        assert {*laws} <= LAWS.keys(), promise


def test_links_lead_somewhere() -> None:
    for page in (PAGE, ROOT / "SECURITY.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), link
