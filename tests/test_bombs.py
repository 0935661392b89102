"""No file makes statekit take more memory than its budget, or more work than its bytes explain.

Every bomb of `bomb_files` is opened in a process of its own; what each took goes into .reliability/bombs.json. The
longest are marked slow.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bomb_files import BOMBS

from statekit.files.budget import DEFAULT
from statekit.tensors.tensor import BLOCK_BYTES

OPENING = Path(__file__).with_name("bomb_opening.py")
FIGURES = Path(__file__).parents[1] / ".reliability" / "bombs.json"
MOST_SECONDS = 30
BLOCKS = 4 * BLOCK_BYTES
"""What streaming holds of values, and the allocator of what was freed."""


def opened(verb: str, *arguments: str) -> dict[str, Any]:
    """Opens a path in a process of its own; returns what it said."""
    command = [sys.executable, str(OPENING), verb, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    record: dict[str, Any] = json.loads(done.stdout)
    return record


@pytest.fixture(scope="module")
def imports() -> int:
    """The peak of a process that has imported what readers import, and has opened nothing. In bytes."""
    return int(opened("imports")["peak"])


@pytest.fixture(scope="module")
def rows() -> Iterator[list[dict[str, Any]]]:
    """Collects a row for each bomb, and puts them among those of earlier runs."""
    new: list[dict[str, Any]] = []
    yield new
    old = json.loads(FIGURES.read_text())["rows"] if FIGURES.exists() else []
    merged = {row["name"]: row for row in [*old, *new] if row["name"] in BOMBS}
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps({"suite": "bombs", "rows": [*merged.values()]}, indent=1) + "\n")


def stored(path: Path) -> int:
    """Returns the bytes that a file, or all files below a folder, take on the disk."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_blocks * 512 for file in files)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if b.quick else pytest.mark.slow) for n, b in BOMBS.items()]
)
def test_a_bomb_takes_no_more_than_the_budget(
    name: str, tmp_path: Path, imports: int, rows: list[dict[str, Any]]
) -> None:
    bomb = BOMBS[name]
    folder = tmp_path / "bomb"
    folder.mkdir()
    path = bomb.make(folder)
    took = opened(bomb.verb, str(path))
    outcome = "read" if took["code"] == 0 else "refused"
    first = took["error"].strip().partition("\n")[0].removeprefix("Error: ")
    rows.append(
        {
            "name": name,
            "verb": bomb.verb,
            "bytes": stored(folder),
            "outcome": outcome,
            "said": first if outcome == "refused" else "",
            "seconds": round(took["seconds"], 2),
            "peak_mib": round((took["peak"] - imports) / 2**20),
        }
    )
    assert took["code"] in ((0,) if bomb.reads else (3,)), took["error"]
    assert "unexpected" not in took["error"].lower()
    assert took["peak"] < imports + DEFAULT + BLOCKS, f"{(took['peak'] - imports) / 2**20:.0f} MiB"
    assert took["cpu"] < MOST_SECONDS


def test_the_bombs_are_many() -> None:
    assert len(BOMBS) >= 5
