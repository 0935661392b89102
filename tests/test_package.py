"""What is published can be installed: built from a plain checkout, into an environment that holds nothing else."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from installing import (
    FOLDERS,
    IMPORTS,
    RECORDING,
    ROOT,
    build,
    empty_environment,
    install,
    lend,
    site_packages,
    trial,
)

Built = tuple[Path, Path]
SHIPPED = {".py", ".json", ".html", ".css", ".js", ".svg", ".txt"}
"""Ends of names of files that are part of the package: its modules, what they read, and what pages are made of."""

LEFT_OUT = {"trajectory.safetensors", "logits.safetensors"}
"""Of the recording: T5X's own weights and logits, three quarters of its size, which no verb needs."""
LARGEST_WHEEL = 3_000_000
"""Bytes."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("built"))


def test_the_wheel_holds_every_module_and_nothing_at_its_top_but_statekit(built: Built) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    modules = {
        path.relative_to(ROOT).as_posix() if top == "statekit" else f"statekit/{path.relative_to(ROOT)}"
        for top in FOLDERS
        if top != "docs"  # whose JSON files are certificates, to look at
        for path in (ROOT / top).rglob("*")
        if path.suffix in SHIPPED or path.name == "py.typed"
    }
    recording = {
        f"statekit/cli/recording/{path.relative_to(RECORDING)}"
        for path in RECORDING.rglob("*")
        if path.is_file() and "checkpoint_orbax" not in path.parts and path.name not in LEFT_OUT
    }
    assert {name for name in names if ".dist-info/" not in name} == modules | recording
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"statekit"}


def test_the_wheel_stays_small(built: Built) -> None:
    assert built[1].stat().st_size < LARGEST_WHEEL


def test_the_sdist_holds_what_builds_and_no_tests(built: Built) -> None:
    with tarfile.open(built[0]) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "converters/__init__.py"} < set(names)
    assert [
        name for name in names if name.startswith("tests/") and RECORDING.name not in name and "." in name
    ] == []


def test_it_works_with_no_extra(built: Built, tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "environment")
    install(python, built[1])
    lend(python, "")
    assert not {"torch", "jax", "tensorflow"} & {path.name for path in site_packages(python).iterdir()}
    trial(python, "", tmp_path / "trial")


@pytest.mark.slow
@pytest.mark.parametrize("extra", [*IMPORTS, "all"])
def test_it_works_with_each_extra_by_itself(extra: str, built: Built, tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "environment")
    install(python, built[1])
    lend(python, extra)
    trial(python, extra, tmp_path / "trial")


def test_a_need_that_nobody_declared_is_noticed(built: Built, tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "environment")
    install(python, built[1])
    lend(python, "")
    (site_packages(python) / "msgpack").unlink()
    with pytest.raises(AssertionError, match="msgpack"):
        trial(python, "", tmp_path / "trial")
