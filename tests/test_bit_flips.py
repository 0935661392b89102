"""One bit flipped: refused wherever a manifest or a checksum covers it, and never an error of another kind.

Each format is tried as statekit writes it, with a manifest; as its own system wrote it; and so with a manifest sealed
beside it. Half of the bits are drawn of all bytes, half of a file that is drawn first, so that small files have theirs.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability_table import Row, note
from samples import ROWS, target_name, writable
from samples import Row as Sample

from statekit.conversion.convert import convert, plan
from statekit.conversion.seal import seal
from statekit.errors import StatekitError
from statekit.files.manifest import FILE, is_manifest
from statekit.testing.damage import files_of, within_budget

FLIPS, FEW = 300, 10
MOST_SECONDS = 30.0
THE_RUNS = {
    "tf-bundle": "checkpoint",
    "megatron": "latest_checkpointed_iteration.txt",
    "deepspeed": "latest",
}
"""Container -> the file in a run's folder that is no checkpoint's: every next save writes it anew."""
WRITTEN, BARE, SEALED = "as statekit writes it", "as its own system does", "sealed"
NATIVE = {f"{row.sample.container}, {row.name.split('/')[1]}": row for row in ROWS if row.write is None}
"""Recorded samples, by container and name."""
_FIRST: dict[str, str] = {}
for _name, _row in NATIVE.items():
    _FIRST.setdefault(_row.sample.container, _name)
TRIED = sorted(
    {*_FIRST.values()}
    | {name for name in NATIVE if any(word in name for word in ("legacy", "noocdbt", "lightning", "zero3"))}
)
"""One recorded sample of each container, and of its generations that lie in files otherwise."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose bits are flipped.

    Attributes:
        path: What is converted.
        root: All its files.
        sample: Where it is from.
    """

    path: Path
    root: Path
    sample: Sample

    def files(self) -> list[Path]:
        """Returns the files that are its own, and its manifest."""
        every = files_of(self.root)
        beside = [path for path in self.root.parent.glob("statekit*.json") if self.root.is_file()]
        of_run = THE_RUNS.get(self.sample.sample.container)
        return [path for path in (*every, *beside) if path.stat().st_size and path.name != of_run]


def made(kind: str, name: str, folder: Path) -> Checkpoint:
    """Makes a checkpoint of a kind in a folder."""
    if kind == WRITTEN:
        row = writable()[name]
        source = row.sample_in(folder / "source")
        target = folder / "written" / target_name(name)
        target.parent.mkdir()
        convert(plan(source.path, target, to=name, layout=row.layout, hints=row.hints))
        return Checkpoint(target, target, row)
    row = NATIVE[name]
    root = row.sample.root or row.sample.path
    copy = folder / "copy" / root.name
    copy.parent.mkdir()
    if root.is_dir():
        shutil.copytree(root, copy, copy_function=shutil.copyfile)
        for one in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
            one.chmod(0o755)
    else:
        shutil.copyfile(root, copy)
    path = copy / row.sample.path.relative_to(root)
    if kind == SEALED:
        seal(path)
    return Checkpoint(path, copy, row)


def bits(files: list[Path], count: int, seed: int) -> Iterator[tuple[Path, int]]:
    """Draws bits: half of all bytes alike, half of a file that is drawn first."""
    random = np.random.default_rng(seed)
    sizes = [8 * file.stat().st_size for file in files]
    ends = np.cumsum(sizes)
    for number in range(count):
        if number % 2:
            which = int(random.integers(len(files)))
            yield files[which], int(random.integers(sizes[which]))
        else:
            bit = int(random.integers(ends[-1]))
            which = int(np.searchsorted(ends, bit, side="right"))
            yield files[which], bit - int(ends[which]) + sizes[which]


def result(checkpoint: Checkpoint, target: Path) -> Any:
    """Converts a checkpoint to the neutral folder, and returns what that holds."""
    shutil.rmtree(target, ignore_errors=True)
    convert(plan(checkpoint.path, target, to="statekit", hints=checkpoint.sample.hints))
    manifest = json.loads((target / FILE).read_text())
    return manifest["tensors"], manifest["tree"], manifest["state"], manifest.get("kept")


@dataclass
class Seen:
    """What became of the flips of a checkpoint.

    Attributes:
        counts: How many were `caught`, `harmless`, `silent`, `untyped` or `hung`.
        bad: Those that nobody may pass over: file, bit and what happened.
        silent: Where a flip was silent: the file, relative to the checkpoint, and the bit.
        harmless: Where it was harmless.
        seconds: The longest.
    """

    counts: Counter[str]
    bad: list[str]
    silent: list[str]
    harmless: list[str]
    seconds: float = 0.0


def tried(checkpoint: Checkpoint, count: int, seed: int, work: Path) -> Seen:
    """Flips bits, one after the other, and converts."""
    sound = result(checkpoint, work / "sound.statekit")
    seen = Seen(Counter(), [], [], [])
    for file, bit in bits(checkpoint.files(), count, seed):
        data = file.read_bytes()
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        began = time.monotonic()
        outcome = ""
        try:
            with within_budget():
                outcome = "harmless" if same(result(checkpoint, work / "again.statekit"), sound) else "silent"
        except StatekitError:
            outcome = "caught"
        except Exception as error:
            outcome = "untyped"
            seen.bad.append(f"{file.name} bit {bit}: {type(error).__name__}: {error}"[:300])
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = "hung"
            seen.bad.append(f"{file.name} bit {bit} doesn't end")
        finally:
            file.write_bytes(data)
        seen.seconds = max(seen.seconds, time.monotonic() - began)
        seen.counts[outcome] += 1
        if outcome in ("silent", "harmless"):
            name = file.relative_to(checkpoint.root).as_posix() if checkpoint.root.is_dir() else file.name
            (seen.silent if outcome == "silent" else seen.harmless).append(f"{name} bit {bit}")
    return seen


def same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def may_be_silent(checkpoint: Checkpoint, name: str) -> bool:
    """Tells whether a format has no checksum in a file, or may lack the file."""
    sample = checkpoint.sample.sample
    file = name.partition(" bit ")[0]
    return any(
        fnmatchcase(file, one) or fnmatchcase(file, f"*/{one}")
        for one in (*sample.unchecked, *sample.optional)
    )


CASES = [
    *((WRITTEN, name) for name in writable()),
    *((kind, name) for kind in (BARE, SEALED) for name in TRIED),
]


def judged(kind: str, name: str, count: int, work: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    monkeypatch.setattr(os, "fsync", lambda number: None)  # nobody cuts the power here
    (work / "source").mkdir()
    checkpoint = made(kind, name, work)
    seen = tried(checkpoint, count, len(name) + len(kind), work)
    assert not seen.bad
    if kind == BARE:
        assert not [one for one in seen.silent if not may_be_silent(checkpoint, one)]
    else:
        assert not seen.silent
        in_manifest = [
            one for one in seen.harmless if is_manifest(one.partition(" bit ")[0].rpartition("/")[2])
        ]
        assert seen.harmless == in_manifest  # another way to write the same number or letter
    return seen


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_few_bits(kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(kind, name, FEW, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_many_bits(kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = judged(kind, name, FLIPS, tmp_path, monkeypatch)
    counts = {
        outcome: seen.counts[outcome] for outcome in ("caught", "harmless", "silent", "untyped", "hung")
    }
    files = sorted({one.partition(" bit ")[0].rpartition("/")[2] for one in seen.silent})
    said = f"without a checksum: {', '.join(files[:4])}{' ...' if len(files) > 4 else ''}" if files else ""
    note("flips", Row(f"{name}: {kind}", FLIPS, **counts, seconds=round(seen.seconds, 1), said=said))
