"""What may not be read is said to be forbidden, by a process that really may not; never that no format fits."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from samples import ROWS

from statekit.cli.main import FAILED

NOBODY = 65534
OPENING = f"""
import contextlib, io, json, os, pathlib, sys
import statekit
from statekit.cli.main import main
from statekit.errors import StatekitError

def said(path, container=None):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["inspect", path, *(["--from", container] if container else [])])
    return code, err.getvalue()

def raised(path):
    try:
        statekit.open(path).close()
    except StatekitError as error:
        return str(error)

readable, shut, passes_over = json.loads(sys.stdin.read())
for path in readable:  # imports what reading takes, which may lie where nobody may look
    assert said(path)[0] == 0, said(path)
if passes_over:  # as Python 3.14
    for name in ("exists", "is_dir", "is_file"):
        setattr(pathlib.Path, name, getattr(os.path, name.replace("_", "")))
os.setgroups([])
os.setegid({NOBODY})
os.seteuid({NOBODY})
print(json.dumps([[*said(*call), raised(call[0])] for call in shut]))
"""
LISTING = {"glob", "rglob", "iterdir", "scandir", "listdir", "walk"}
"""Names of the functions that list a folder."""
TOP = Path(__file__).parents[1]
FIRSTS = {row.sample.container: row for row in reversed(ROWS)}
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")


def _copied(whole: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    copy = folder / whole.name
    return Path(shutil.copytree(whole, copy) if whole.is_dir() else shutil.copy(whole, copy))


def answers(
    readable: list[Path], shut: list[tuple[str, ...]], *, passes_over: bool = False
) -> list[tuple[int, str, str | None]]:
    """Returns the exit code and the error of `inspect`, and the error of `open`, of paths, by a process of nobody.

    With `passes_over` its pathlib takes what may not be looked at for absent.
    """
    command, calls = [sys.executable, "-c", OPENING], json.dumps([[*map(str, readable)], shut, passes_over])
    done = subprocess.run(command, input=calls, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


def wrong(shut: list[tuple[str, ...]], said: list[tuple[int, str, str | None]]) -> str:
    """Returns what is not said to be forbidden."""
    kept = [
        f"{call}: {code} {error} {raised}"
        for call, (code, error, raised) in zip(shut, said, strict=True)
        if code != FAILED or "ermission denied" not in error or call[0] not in error
        or raised is None or "ermission denied" not in raised
    ]  # fmt: skip
    return "\n".join(kept)


@pytest.fixture
def place() -> Iterator[Path]:
    """Gives a folder that anybody may enter; pytest's own let nobody in."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        yield Path(made)


@ROOT
def test_what_may_not_be_read_is_said_to_be_forbidden(place: Path) -> None:
    readable, shut = [], list[tuple[str, ...]]()
    for number, row in enumerate(FIRSTS.values()):
        (folder := place / f"{number}").mkdir()
        whole = row.sample_in(folder).path
        if not whole.exists():  # the prefix of several files
            continue
        readable.append(whole)
        copy = _copied(whole, folder / "shut")
        shut.append((str(copy),))
        os.chmod(copy, 0)
        if whole.is_dir():
            inside = _copied(whole, folder / "inside")
            for file in (path for path in inside.rglob("*") if path.is_file()):
                file.chmod(0)
            shut.append((str(inside),))
    assert len(shut) > 15
    assert not wrong(shut, answers(readable, shut))


@ROOT
@pytest.mark.parametrize(
    ("mode", "passes_over"),
    [(0o311, False), (0o644, False), (0o644, True)],
    ids=["not listed", "not entered", "not entered, by Python 3.14"],
)
def test_a_folder_that_may_not_be_listed_is_said_to_be_forbidden(
    mode: int, passes_over: bool, place: Path
) -> None:
    """Whichever container looks: the one that is named looks alone."""
    readable, shut = [], list[tuple[str, ...]]()
    for number, row in enumerate(FIRSTS.values()):
        (folder := place / f"{number}").mkdir()
        whole = row.sample_in(folder).path
        if whole.is_dir():
            readable.append(whole)
            os.chmod(copy := _copied(whole, folder / "shut"), mode)
            shut += [(str(copy),), (str(copy), row.sample.container)]
    assert len(shut) > 20
    assert not wrong(shut, answers(readable, shut, passes_over=passes_over))


def test_folders_are_listed_in_one_place() -> None:
    """Path.glob and Path.rglob pass over what may not be listed, and os.walk does; others end in the system's error."""
    calls = {
        path.relative_to(TOP).as_posix(): names
        for room in ("statekit/conversion", "statekit/files", "converters", "cli")
        for path in sorted((TOP / room).rglob("*.py"))
        if (names := listing_calls(path.read_text(encoding="utf-8")))
    }
    assert calls == {
        "statekit/conversion/registry.py": ["scandir"],  # a glance, which decides nothing
        "statekit/files/durable.py": ["iterdir", "listdir", "listdir"],
        "statekit/files/source.py": ["listdir", "walk"],
        "statekit/files/homes.py": ["iterdir"],  # of a target, which counts as full then
    }


def listing_calls(text: str) -> list[str]:
    """Returns the names of the calls in a module that list a folder."""
    calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return sorted(call.attr for call in calls if isinstance(call, ast.Attribute) and call.attr in LISTING)


def test_a_call_that_lists_a_folder_is_noticed() -> None:
    assert listing_calls("sorted(folder.glob('*.index')); os.walk(folder); ast.walk") == ["glob", "walk"]
