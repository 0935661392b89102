"""A manifest that exists and disagrees is an error, whatever the container; other files are none of its business."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import statekit
from goldens import GOLDEN
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Exactness, Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.inspection import inspect
from statekit.conversion.open_state import open_state
from statekit.errors import CorruptError, StatekitError
from statekit.files import file_changes, integrity, manifest, stage

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
FLIPS = 6
"""Flipped bits of each file in the quick run."""


def written(to: str, folder: Path) -> Path:
    """Returns a conversion's target in a folder of its own."""
    folder.mkdir()
    target = folder / f"target{FILES.get(to, '')}"
    convert(plan(ADAMW, target, to=to, require=Exactness.LOSSY))
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


@pytest.mark.sampled(6)
@pytest.mark.parametrize("large", [False, True], ids=["small files", "large files"])
@pytest.mark.parametrize("to", FOLDERS)
def test_a_flipped_bit_in_any_file_stops_a_conversion(
    to: str, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = written(to, tmp_path / "written")
    if large:  # as if every file were too large to be digested when it is opened
        monkeypatch.setattr(file_changes, "SMALL_BYTES", 0)
        monkeypatch.setattr(integrity, "SMALL_BYTES", 0)
    unnoticed = []
    for file in (f for f in files_of(target) if f.stat().st_size):
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


def refuses(target: Path) -> list[str]:
    """Returns the verbs that pass over what is wrong with a target."""
    verbs: dict[str, Callable[[], bool]] = {
        "check": lambda: statekit.check(target).passed,
        "inspect": lambda: bool(inspect(target)),
        "convert": lambda: bool(plan(target, target.with_name("again.pt"), require=Exactness.LOSSY)),
    }
    passing = []
    for verb, passes in verbs.items():
        with suppress(StatekitError):
            passing += [verb] if passes() else []
    return passing


@pytest.mark.parametrize("to", [*FOLDERS, "mxnet-adam-mxnet"])
def test_every_file_that_a_manifest_names_counts(to: str, tmp_path: Path) -> None:
    """Lost, emptied or exchanged: what is left may be another container's, or look like weights alone."""
    target, passed = written(to, tmp_path / "written"), []
    files = [file for file in files_of(target) if file.name != manifest.FILE]
    for number, file in enumerate(files):
        data, other = file.read_bytes(), files[number - 1]
        file.unlink()
        passed += [f"{file.name} is lost: {verb}" for verb in refuses(target)]
        file.write_bytes(b"")
        passed += [f"{file.name} is empty: {verb}" for verb in refuses(target) if data]
        if other == file:
            file.write_bytes(data)
            continue
        swapped = other.read_bytes()
        file.write_bytes(swapped)
        other.write_bytes(data)
        passed += [f"{file.name} and {other.name}: {verb}" for verb in refuses(target) if data != swapped]
        file.write_bytes(data)
        other.write_bytes(swapped)
    assert not passed
    assert statekit.check(target).passed


@pytest.mark.parametrize("to", ["tf2-statekit-tf-bundle", "megatron"])
def test_a_run_goes_on_in_the_folder_of_a_target(to: str, tmp_path: Path) -> None:
    """The next save writes the tracker anew beside the manifest's step, which stays whole."""
    target = written(to, tmp_path / "written")
    tracker = next(
        file for file in files_of(target) if file.name in ("checkpoint", "latest_checkpointed_iteration.txt")
    )
    step = max(
        (path for path in target.iterdir() if any(c.isdigit() for c in path.name)), key=lambda p: p.name
    )
    digits = "".join(filter(str.isdigit, step.stem))
    for path in [*target.iterdir()]:
        if digits in path.name:
            later = path.with_name(path.name.replace(digits, f"{int(digits) + 1:0{len(digits)}}", 1))
            shutil.copytree(path, later) if path.is_dir() else shutil.copy(path, later)
    tracker.write_text(tracker.read_text().replace(f"{int(digits)}", f"{int(digits) + 1}"))
    with open_state(target, step=int(digits)):
        pass


@pytest.mark.parametrize("to", ["orbax", "flax", "dcp-safetensors", "hf-trainer", "safetensors", "statekit"])
def test_damage_is_accepted_when_asked_for_and_stands_in_the_lineage(to: str, tmp_path: Path) -> None:
    """Of formats without checksums; the others refuse the bytes themselves."""
    target = written(to, tmp_path / "written")
    file = changed_value(target)
    with pytest.raises(CorruptError, match="was changed") as caught:
        inspect(target)
    assert str(target) in str(caught.value) and "--accept-damaged" in caught.value.remedy
    with pytest.raises(CorruptError):
        open_state(target)
    seen = inspect(CheckpointRef(target, accept_damaged=True))
    assert [finding.place for finding in seen.findings if finding.damage] == [str(file)]
    report = statekit.convert(target, tmp_path / "again.statekit", accept_damaged=True)
    damage = json.loads(Path(report.target / manifest.FILE).read_text())["damage"]
    assert len(damage) == 2 and damage[0].endswith(f" @ {file.relative_to(target)}")
    with open_state(ADAMW) as opened:  # whose value it was: the last of the longest, as they lie
        name = max(opened.params, key=lambda path: len(opened.params[path].read().tobytes()))
    assert damage[1].startswith("has other values") and damage[1].endswith(name.rpartition("/")[2])


@pytest.mark.parametrize("large", [False, True], ids=["small file", "large file"])
@pytest.mark.parametrize("to", FILES)
def test_a_flipped_bit_anywhere_in_a_file_with_its_manifest_inside_stops_a_conversion(
    to: str, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In headers, padding and bytes that no reader looks at, too."""
    target = written(to, tmp_path / "written")
    if large:
        monkeypatch.setattr(integrity, "SMALL_BYTES", 0)
    data, unnoticed = target.read_bytes(), []
    for bit in bits(target, 40):
        flip(target, bit)
        try:
            convert(plan(target, tmp_path / "again.statekit"))
            unnoticed.append(bit)
            shutil.rmtree(tmp_path / "again.statekit")
        except StatekitError:
            pass
        target.write_bytes(data)
    assert not unnoticed
    convert(plan(target, tmp_path / "again.statekit"))


@pytest.mark.parametrize("to", FILES)
def test_values_that_changed_in_a_file_with_its_manifest_inside(to: str, tmp_path: Path) -> None:
    target = written(to, tmp_path / "written")
    changed_value(target)
    with pytest.raises(CorruptError):
        convert(plan(target, tmp_path / "again.statekit"))
    assert not (tmp_path / "again.statekit").exists()


def test_a_large_file_of_another_size_than_the_manifest_in_it_says_is_seen_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (integrity, stage):
        monkeypatch.setattr(module, "SMALL_BYTES", 0)
    target = written("torch", tmp_path / "written")
    assert statekit.check(target).passed
    saved = torch.load(target)
    saved["note"] = "saved again, with the manifest"
    torch.save(saved, target)
    with pytest.raises(CorruptError, match=r"has \d+ bytes, expected \d+"):
        statekit.open(target)
    [fault] = statekit.check(target).checkpoints[0].faults
    assert "bytes, expected" in fault[0]


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


@pytest.mark.parametrize("to", ["accelerate", "hf-trainer", "safetensors"])
def test_a_file_that_came_later_is_said_and_no_damage(to: str, tmp_path: Path) -> None:
    target = written(to, tmp_path / "written")
    shards = [file.parent for file in files_of(target) if file.suffix == ".safetensors"]
    (shards[0] / "config.json").write_text('{"d_model": 4}')  # as from_pretrained needs it
    with open_state(target) as opened:
        assert opened.checkpoint.manifest is not None
        said = [finding.what for finding in opened.checkpoint.findings if "config.json" in finding.place]
        assert said == ["the manifest doesn't name this file"]
    convert(plan(target, tmp_path / "again.statekit"))


def test_a_changed_record_of_the_neutral_folder_is_refused_and_accepted_when_asked_for(
    tmp_path: Path,
) -> None:
    target = written("statekit", tmp_path / "written")
    place = target / manifest.FILE
    text = place.read_text()
    place.write_text(text.replace('"updates": 4', '"updates": 6'))
    assert place.read_text() != text
    with pytest.raises(CorruptError, match="changed after it was written"):
        open_state(target)
    with open_state(target, hints=Hints(accept_damaged=True)) as opened:
        assert opened.counts.updates == 6
    report = statekit.convert(target, tmp_path / "again.pt", accept_damaged=True)
    with open_state(report.target) as opened:
        assert opened.checkpoint.manifest is not None
        assert "its digest doesn't fit" in opened.checkpoint.manifest["damage"][0]


def test_a_file_of_what_a_manifest_is_about_is_held_to_its_own_entry(tmp_path: Path) -> None:
    target = written("safetensors", tmp_path / "written")
    model = target / "model.safetensors"
    with open_state(model) as opened:
        assert not opened.checkpoint.findings and opened.checkpoint.manifest is None
    flip(model, 8 * model.stat().st_size - 1)
    with pytest.raises(CorruptError, match="was changed"):
        open_state(model)


def test_what_befell_a_file_is_told_by_its_time_where_that_tells(tmp_path: Path) -> None:
    target = written("orbax", tmp_path / "written")
    file = changed_value(target)
    with pytest.raises(CorruptError, match="changed since it was written @"):
        open_state(target)
    old = (target / manifest.FILE).stat().st_mtime - 60
    os.utime(file, (old, old))
    with pytest.raises(CorruptError, match=r"is damaged: .* nobody wrote to it since"):
        open_state(target)
    copy = tmp_path / "copy"
    shutil.copytree(target, copy, copy_function=shutil.copyfile)
    late = (copy / manifest.FILE).stat().st_mtime + 60
    for path in copy.rglob("*"):
        os.utime(path, (late, late))
    os.utime(copy / manifest.FILE, (late - 1, late - 1))
    with pytest.raises(CorruptError, match="was changed since it was written, or is damaged"):
        open_state(copy)


@pytest.mark.parametrize("kind", ["folder", "FIFO", "a link to nothing"])
@pytest.mark.parametrize("name", ["statekit.checkpoint.pt.json", "checkpoint-4/statekit.json"])
def test_a_manifest_that_is_no_file_is_damage(name: str, kind: str, tmp_path: Path) -> None:
    """Seen red: the checkpoint passed for one that was never sealed."""
    shutil.copytree(TRAINER, tmp_path / TRAINER.name)
    shutil.copyfile(ADAMW, tmp_path / ADAMW.name)
    if kind == "a link to nothing":
        (tmp_path / name).symlink_to("nowhere")
    else:
        (os.mkfifo if kind == "FIFO" else os.mkdir)(tmp_path / name)
    checkpoint = tmp_path / (TRAINER.name if name.startswith(TRAINER.name) else ADAMW.name)
    with pytest.raises(CorruptError, match="the manifest is no file"):
        statekit.open(checkpoint)
    assert not statekit.check(checkpoint).passed


def test_the_manifests_of_other_files_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = written("torch", tmp_path / "run")
    statekit.seal(target)
    parsed: list[str] = []

    def parse(data: bytes, place: Path, account: Any) -> dict[str, Any]:
        parsed.append(place.name)
        return manifest.parse(data, place, account)

    monkeypatch.setattr(integrity, "parse", parse)
    others = [target.with_name(f"other{number}.pt") for number in range(3)]
    for other in others:
        other.write_bytes(ADAMW.read_bytes())
        statekit.seal(other)
    unsealed = target.with_name("unsealed.pt")
    unsealed.write_bytes(ADAMW.read_bytes())
    parsed.clear()
    with open_state(unsealed) as opened:
        assert opened.checkpoint.proof is None
    assert parsed == []
    with open_state(others[0]) as opened:
        assert opened.checkpoint.proof is not None
    assert {*parsed} == {"statekit.other0.pt.json"}
