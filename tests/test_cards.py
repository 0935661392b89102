"""Cards say of each format what the format says of itself, and spare loading it."""

from __future__ import annotations

import subprocess
import sys

import cards_table
import pytest

from formats import register
from statekit.conversion import registry
from statekit.conversion.registry import of_container, of_layout
from statekit.errors import UsageError


def test_the_cards_are_those_of_the_formats() -> None:
    assert cards_table.TARGET.read_text(encoding="utf-8") == cards_table.page(), "run `make tables`"
    for name in registry.container_names():
        assert registry.container_card(name) == of_container(registry.container(name))
    for name in registry.layout_names():
        assert registry.layout_card(name) == of_layout(registry.layout(name))


def test_cards_of_ours_load_no_format() -> None:
    code = (
        "import sys; from statekit.conversion import registry;"
        "[registry.container_card(n) for n in registry.container_names()];"
        "[registry.layout_card(n) for n in registry.layout_names()];"
        "print([m for m in sys.modules if m.startswith('statekit.converters.')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_format_of_another_package_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    container = registry.container("statekit")
    register(monkeypatch)
    assert registry.container_card("statekit") == of_container(container)
    with pytest.raises(UsageError):
        registry.container_card("nosuch")
