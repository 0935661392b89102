"""Signs spare loading formats that can't fit; they never change which one is found."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from samples import ROWS, Row

from statekit.conversion import registry
from statekit.conversion.contracts import Container, Evidence, Layout


def _data() -> Any:
    text = resources.files("statekit.converters").joinpath("signs.json").read_text(encoding="utf-8")
    return json.loads(text)


def _ask_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "containers_for", lambda path: lambda name: True)
    monkeypatch.setattr(registry, "layouts_for", lambda checkpoint: lambda name: True)


def _found(path: Path) -> tuple[tuple[Container, Evidence], tuple[Layout, Evidence]]:
    container, evidence = registry.detect_container(path)
    with container.open(path) as checkpoint:
        return (container, evidence), registry.detect_layout(checkpoint)


@pytest.mark.sampled
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.sample.container}-{row.layout}-{row.name}")
def test_what_is_found_is_what_all_together_find(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = row.sample_in(tmp_path).path
    assert registry.containers_for(path)(row.sample.container)
    with registry.container(row.sample.container).open(path) as checkpoint:
        assert registry.layouts_for(checkpoint)(row.layout)
    choice = _found(path)
    _ask_all(monkeypatch)
    assert choice == _found(path)


def test_signs_are_of_formats_that_there_are() -> None:
    data = _data()
    assert data["containers"].keys() <= {*registry.container_names()}
    assert data["layouts"].keys() <= {*registry.layout_names()}


def test_a_format_that_shows_no_sign_is_asked_where_no_other_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_signs", lambda kind: {name: {} for name in registry.container_names()})
    (tmp_path / "statekit.json").write_text("{}", encoding="utf-8")
    (tmp_path / "tensors-00001-of-00001.safetensors").touch()
    assert registry.detect_container(tmp_path)[0].name == "statekit"


def test_what_cant_be_read_shows_no_sign(tmp_path: Path) -> None:
    assert not registry.containers_for(tmp_path / "nosuch" / "model.ckpt")("tf-bundle")
