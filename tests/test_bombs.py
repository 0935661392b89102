"""No file makes statekit take more memory than its budget, or more work than its bytes explain.

Every bomb of `bomb_files` is opened in a process of its own; what each took goes into .reliability/bombs.json. The
longest are marked slow.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from bomb_files import BOMBS, flax_tensors, orbax_tensors, safetensors, safetensors_tensors, torch_tensors
from reliability_table import Row, note

from statekit.budget import DEFAULT
from statekit.tensors.tensor import BLOCK_BYTES

OPENING = Path(__file__).with_name("bomb_opening.py")
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


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if b.quick else pytest.mark.slow) for n, b in BOMBS.items()]
)
def test_a_bomb_takes_no_more_than_the_budget(name: str, imports: int) -> None:
    bomb = BOMBS[name]
    with TemporaryDirectory() as folder:  # pytest would keep them
        path = str(bomb.make(Path(folder)))
        took = opened(bomb.verb, path, *(option.format(folder) for option in bomb.options))
    refused = took["code"] != 0
    said = took["error"].strip().partition("\n")[0].removeprefix("Error: ")
    peak = (took["peak"] - imports) / 2**20
    note(
        "bombs",
        Row(
            name,
            1,
            caught=int(refused),
            harmless=int(not refused),
            hung=int(took["cpu"] > MOST_SECONDS),
            seconds=round(took["seconds"], 1),
            peak=max(0, round(peak)),
            said=said if refused else "read",
        ),
    )
    assert took["code"] in ((0,) if bomb.reads else (3,)), took["error"]
    assert "unexpected" not in took["error"].lower()
    assert took["peak"] < imports + DEFAULT + BLOCKS, f"{peak:.0f} MiB"
    assert took["cpu"] < MOST_SECONDS


def test_the_bombs_are_many() -> None:
    assert len(BOMBS) >= 60


def large(what: str, took: dict[str, Any], imports: int) -> None:
    """Notes what something large took."""
    assert took["code"] == 0, took["error"]
    peak = max(0, round((took["peak"] - imports) / 2**20))
    note("scale", Row(what, 1, 0, 1, 0, 0, seconds=round(took["cpu"], 1), peak=peak))


@pytest.mark.slow
@pytest.mark.parametrize("make", [torch_tensors, safetensors_tensors, flax_tensors, orbax_tensors])
def test_100_000_tensors_are_listed_in_a_minute_and_a_gibibyte(
    make: Callable[[Path, int], Path], imports: int
) -> None:
    with TemporaryDirectory() as folder:
        took = opened("inspect", str(make(Path(folder), 100_000)))
    large(f"inspect: 100 000 tensors of {make.__name__.partition('_')[0]}", took, imports)
    assert took["cpu"] < 60
    assert took["peak"] < 2**30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "target"),
    [("stats", ""), ("seal", ""), ("convert", "a.pt"), ("convert", "a.statekit"), ("convert", "a.orbax")],
)
def test_a_tensor_of_8_gib_streams_in_256_mib(verb: str, target: str, imports: int) -> None:
    size = 8 * 2**30
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**31], "data_offsets": [0, size]}}).encode()
    with TemporaryDirectory() as folder:  # nearly all of it lies nowhere
        source = safetensors(Path(folder) / "a.safetensors", header, size)
        took = opened(verb, str(source), *[f"{folder}/{target}"] * bool(target), *TO.get(target, ()))
    large(f"{verb}{f' to {target}' * bool(target)}: a tensor of 8 GiB", took, imports)
    assert took["peak"] - imports < 256 * 2**20


TO = {"a.orbax": ("--to", "orbax")}
"""What a target's name doesn't say."""
