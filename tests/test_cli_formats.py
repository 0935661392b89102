"""`statekit formats`: the registry, for people and for programs."""

from __future__ import annotations

import json

import pytest

from statekit.cli.main import DONE, main
from statekit.conversion import registry


def test_every_container_and_layout_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats"]) == DONE
    shown = capsys.readouterr().out
    first_words = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert first_words == ["container", *registry.container_names(), "layout", *registry.layout_names()]


def test_the_envelope_is_stable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "--json"]) == DONE
    data = json.loads(capsys.readouterr().out)
    assert list(data) == ["format", "containers", "layouts"]
    assert data["format"] == "statekit.formats/1"
    containers = {row["name"]: row for row in data["containers"]}
    assert containers["t5x"] == {
        "name": "t5x",
        "title": registry.container("t5x").title,
        "reads": True,
        "writes": "folder",
        "suffixes": [],
    }
    assert {row["name"]: row["containers"] for row in data["layouts"]}["t5x"] == ["t5x", "orbax"]
