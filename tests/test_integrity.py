"""A manifest that exists and disagrees is an error, whatever the container; other files are none of its business."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import statekit
from goldens import GOLDEN
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.inspection import Request, inspect
from statekit.conversion.open_state import open_state
from statekit.errors import CorruptError, StatekitError
from statekit.files import integrity, manifest

ADAMW = GOLDEN / "torch_formats/adamw_legacy/checkpoint/checkpoint.pt"
TRAINER = GOLDEN / "torch_formats/adamw_trainer/checkpoint/checkpoint-4"
FOLDERS = (
    "statekit",
    "orbax",
    "flax",
    "dcp",
    "dcp-safetensors",
    "hf-trainer",
    "accelerate",
    "safetensors",
    "tf2-statekit-tf-bundle",
    "megatron",
)
FILES = {"torch": ".pt", "statekit-keras-keras-h5": ".weights.h5"}
THE_RUNS = ("checkpoint", "latest_checkpointed_iteration.txt")
"""Files of TensorFlow and Megatron that are no checkpoint's: every next save writes them anew."""
FLIPS = 6
"""Flipped bits of each file in the quick run."""


def written(to: str, folder: Path) -> Path:
    """Returns a conversion's target in a folder of its own."""
    folder.mkdir()
    target = folder / f"target{FILES.get(to, '')}"
    convert(plan(ADAMW, target, to=to))
    return target


def files_of(target: Path) -> list[Path]:
    return sorted(p for p in target.rglob("*") if p.is_file()) if target.is_dir() else [target]


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def changed_value(target: Path) -> Path:
    """Flips a bit of a parameter where it lies in a file, and returns the file."""
    with open_state(target) as opened:
        value = max((param.read().tobytes() for param in opened.params.values()), key=len)
    file = next(file for file in files_of(target) if value in file.read_bytes())
    flip(file, 8 * file.read_bytes().index(value))
    return file


def bits(file: Path, count: int) -> list[int]:
    return [
        int(bit) for bit in np.random.default_rng(len(file.name)).integers(0, 8 * file.stat().st_size, count)
    ]


@pytest.mark.parametrize("large", [False, True], ids=["small files", "large files"])
@pytest.mark.parametrize("to", FOLDERS)
def test_a_flipped_bit_in_any_file_stops_a_conversion(
    to: str, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = written(to, tmp_path / "written")
    if large:  # as if every file were too large to be digested when it is opened
        monkeypatch.setattr(manifest, "SMALL_BYTES", 0)
        monkeypatch.setattr(integrity, "SMALL_BYTES", 0)
    unnoticed = []
    for file in (f for f in files_of(target) if f.stat().st_size and f.name not in THE_RUNS):
        data = file.read_bytes()
        for bit in bits(file, FLIPS):
            flip(file, bit)
            try:
                convert(plan(target, tmp_path / "again.statekit"))
                unnoticed.append(f"{file.relative_to(target)} bit {bit}")
                shutil.rmtree(tmp_path / "again.statekit")
            except StatekitError:
                assert not (tmp_path / "again.statekit").exists()
            file.write_bytes(data)
    assert not unnoticed
    convert(plan(target, tmp_path / "again.statekit"))


@pytest.mark.parametrize("to", ["orbax", "flax", "dcp-safetensors", "hf-trainer", "safetensors"])
def test_damage_is_accepted_when_asked_for_and_stands_in_the_lineage(to: str, tmp_path: Path) -> None:
    """Of formats without checksums; the others refuse the bytes themselves."""
    target = written(to, tmp_path / "written")
    file = changed_value(target)
    with pytest.raises(CorruptError, match="was changed") as caught:
        inspect(target)
    assert str(target) in str(caught.value) and "--accept-damaged" in caught.value.remedy
    with pytest.raises(CorruptError):
        open_state(target)
    seen = inspect(target, Request(hints=Hints(accept_damaged=True)))
    assert [finding.place for finding in seen.findings if finding.damage] == [str(file)]
    report = statekit.convert(target, tmp_path / "again.statekit", accept_damaged=True)
    damage = json.loads((report.target / manifest.FILE).read_text())["damage"]
    assert len(damage) == 1 and damage[0].endswith(f" @ {file.relative_to(target)}")


@pytest.mark.parametrize("to", FILES)
def test_values_that_changed_in_a_file_with_its_manifest_inside(to: str, tmp_path: Path) -> None:
    target = written(to, tmp_path / "written")
    changed_value(target)
    with pytest.raises(CorruptError):
        convert(plan(target, tmp_path / "again.statekit"))
    assert not (tmp_path / "again.statekit").exists()


def test_a_consumers_next_step_beside_ours_is_none_of_the_manifests_business(tmp_path: Path) -> None:
    run = tmp_path / "run"
    convert(plan(TRAINER, run, to="hf-trainer"))
    ours = next(run.glob("checkpoint-*"))
    theirs = run / "checkpoint-4000"
    shutil.copytree(TRAINER, theirs)
    state = json.loads((theirs / "trainer_state.json").read_text())
    (theirs / "trainer_state.json").write_text(json.dumps({**state, "global_step": 4000}))
    with open_state(theirs) as opened:
        assert opened.checkpoint.manifest is None
        assert not [finding for finding in opened.checkpoint.findings if finding.damage]
    with open_state(ours) as opened:
        assert opened.checkpoint.manifest is not None
    shutil.rmtree(ours)  # the trainer's rotation
    with open_state(theirs) as opened:
        assert not [finding for finding in opened.checkpoint.findings if finding.damage]
