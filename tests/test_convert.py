"""Plans and conversions: what is said beforehand is what happens, or nothing does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats import Packed, Renamed, arrays, plain_state, register, save, small_state, snapshot, values
from statekit.budget import Budget
from statekit.conversion import prepared
from statekit.conversion.contracts import Exactness, Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.converters.containers.statekit_dir import CONTAINER
from statekit.errors import (
    CommitError,
    CorruptError,
    InexactError,
    NotFoundError,
    TargetExistsError,
    UnknownFormatError,
    UsageError,
)
from statekit.files import file_changes, manifest
from statekit.files.checkpoint import Checkpoint
from statekit.files.stage import Progress
from statekit.files.tree import Place
from statekit.tensors.tensor import Array, Cast, Filled, Index, Stored, Tensor

SHARD = "tensors-00001-of-00001.safetensors"
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def formats(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Packed(), Renamed())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(small_state(), tmp_path / "source")


# The plan


def test_a_plan_is_made_without_reading_a_value(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reads: list[str] = []
    real = Stored.read

    def counting(self: Stored, index: Index | None = None) -> Array:
        reads.append(self.name)
        return real(self, index)

    monkeypatch.setattr(Stored, "read", counting)
    work = plan(source, tmp_path / "x.packed", step_offset="reset")
    work.to_json(), work.digest, work.bytes
    assert reads == []
    convert(work)
    assert len(reads) >= 2 * len(work.entries) - 2  # the counter counts


def test_a_plan_says_what_becomes_of_every_tensor(source: Path, tmp_path: Path) -> None:
    work = plan(source, tmp_path / "x.packed")
    with open_state(source) as opened:
        assert {entry.name for entry in work.entries} == {
            name.replace("params/", "model/", 1) for name in opened.checkpoint.tensors
        }
    entry = next(entry for entry in work.entries if entry.name == "model/dense/kernel")
    assert entry.expression["op"] == "stored" and entry.expression["name"] == "params/dense/kernel"
    assert (entry.shape, entry.dtype, entry.bytes) == ((8, 4), "float32", 128)
    assert (entry.exactness, entry.reason, entry.origin) == (Exactness.BITWISE, "", "kept")
    assert work.source.to_json() == {"container": "statekit", "layout": "statekit", "step": 7}
    assert work.target.to_json() == {"container": "packed", "layout": "renamed", "step": 7}
    assert work.bytes == sum(entry.bytes for entry in work.entries) == 209
    assert work.assumptions == ("decay_rate is T5X's default",)


def test_a_plan_tells_kept_from_derived_from_synthesised(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(path: str, tensor: Tensor) -> Tensor:
        if path == "dense/bias":
            return Cast(tensor, np.dtype(np.float32))
        return (
            Filled((0, 3), np.dtype(np.float32), float("nan"), "nobody has it") if path == "empty" else tensor
        )

    register(monkeypatch, Packed(), Renamed(change=change))
    work = plan(source, tmp_path / "x.packed")
    origins = {entry.name: entry.origin for entry in work.entries}
    assert origins["model/dense/bias"] == "derived" and origins["model/empty"] == "synthesised"
    assert origins["model/mask"] == "kept"


def test_a_plan_has_the_same_digest_on_every_machine(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "elsewhere/deeper/copy")
    (tmp_path / "out").mkdir()
    first = plan(source, tmp_path / "a.packed")
    second = plan(tmp_path / "elsewhere/deeper/copy", tmp_path / "out/b.packed")
    assert first.digest == second.digest and len(first.digest) == 64
    text = json.dumps(first.to_json())
    assert str(tmp_path) not in text and text == json.dumps(second.to_json())


@pytest.mark.parametrize(
    "options",
    [{"step_offset": 3}, {"hints": Hints({"decay_rate": 0.9})}, {"layout": "statekit"}, {"to": "statekit"}],
    ids=str,
)
def test_a_plan_has_another_digest_for_another_result(
    source: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    assert plan(source, tmp_path / "x.packed").digest != plan(source, tmp_path / "x.packed", **options).digest


def test_a_plan_for_a_source_that_changed_isnt_carried_out(source: Path, tmp_path: Path) -> None:
    work = plan(source, tmp_path / "x.packed")
    shutil.rmtree(source)
    save(small_state(updates=8), source)
    with pytest.raises(UsageError, match="make a new plan"):
        convert(work)
    assert not (tmp_path / "x.packed").exists()


# Exactness


def inexact(*worst: tuple[str, Exactness]) -> Renamed:
    return Renamed(exactness={name: (how, f"because of {name}") for name, how in worst})


def test_less_exact_than_required_is_refused_with_every_tensor(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(
        monkeypatch,
        Packed(),
        inexact(
            ("model/mask", Exactness.STATISTICS),
            ("model/empty", Exactness.LOSSY),
            ("model/dense/bias", Exactness.ROUNDING),
        ),
    )
    target = tmp_path / "x.packed"
    with pytest.raises(InexactError) as caught:
        plan(source, target)
    text = str(caught.value)
    assert (
        "statistics: because of model/mask @ model/mask" in text
        and "lossy" in text
        and "dense/bias" not in text
    )
    assert "--require lossy" in text
    with pytest.raises(InexactError, match="less exact than required: 3 faults"):
        plan(source, target, require=Exactness.BITWISE)
    work = plan(source, target, require=Exactness.LOSSY)
    assert work.exactness is Exactness.LOSSY
    convert(work)
    with open_state(target) as opened:
        stated = opened.checkpoint.manifest or {}
        assert stated["inexact"]["model/empty"] == {"exactness": "lossy", "reason": "because of model/empty"}


def test_dropping_a_slot_is_lossy_dropping_an_extra_is_recorded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(
        monkeypatch, Packed(), Renamed(dropped={"slots/dense/bias/v": "no place", "extra/rng": "no place"})
    )
    with pytest.raises(InexactError, match="dropped: no place @ slots/dense/bias/v") as caught:
        plan(source, tmp_path / "x.packed")
    assert "extra/rng" not in str(caught.value)
    register(monkeypatch, Packed(), Renamed(dropped={"extra/rng": "no place"}))
    work = plan(source, tmp_path / "x.packed")
    assert work.exactness is Exactness.BITWISE and work.to_json()["dropped"] == {"extra/rng": "no place"}


# Converting


def test_there_and_back_gives_the_same_state(source: Path, tmp_path: Path) -> None:
    convert(plan(source, tmp_path / "x.packed"))
    report = convert(plan(tmp_path / "x.packed", tmp_path / "back-statekit"))
    with open_state(source) as first, open_state(tmp_path / "back-statekit") as last:
        assert values(first.checkpoint.tensors) == values(last.checkpoint.tensors)
        assert first.state.to_json() == last.state.to_json()
        assert first.state.extra["sampler"] == last.state.extra["sampler"]
        assert report.verified == report.source_proven == len(first.checkpoint.tensors)
    assert (source / SHARD).read_bytes() == (tmp_path / "back-statekit" / SHARD).read_bytes()


def test_two_conversions_give_identical_bytes(source: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        convert(plan(source, tmp_path / name / "x.packed"))
        convert(plan(source, tmp_path / name / "x.statekit"))
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_the_report_says_what_was_done(source: Path, tmp_path: Path) -> None:
    work = plan(source, tmp_path / "x.statekit")
    report = convert(work)
    assert report.target == tmp_path / "x.statekit" and report.plan is work and report.seconds > 0
    assert report.files.keys() == {SHARD, manifest.FILE}
    assert report.bytes == sum(path.stat().st_size for path in (tmp_path / "x.statekit").iterdir())
    stated = manifest.require_manifest(tmp_path / "x.statekit")
    assert stated["plan"] == work.digest == report.to_json()["plan"]
    assert stated["source"] == {**work.source.to_json(), "digest": report.source_digest}
    json.dumps(report.to_json(), allow_nan=False)


def test_the_source_digest_is_that_of_its_values_wherever_they_lie(source: Path, tmp_path: Path) -> None:
    first = convert(plan(source, tmp_path / "a.statekit"))
    second = convert(plan(tmp_path / "a.statekit", tmp_path / "b.statekit"))
    assert first.source_digest == second.source_digest
    other = convert(plan(save(small_state(seed=1), tmp_path / "other"), tmp_path / "c.statekit"))
    assert other.source_digest != first.source_digest


def test_progress_is_told_of_every_phase(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, Packed(), Renamed(change=lambda _, tensor: Cast(tensor, tensor.dtype)))
    seen: list[Progress] = []
    convert(plan(source, tmp_path / "x.packed"), on_progress=seen.append)
    for phase in ("check", "write", "verify"):
        reports = [progress for progress in seen if progress.phase == phase]
        assert reports[-1].done == reports[-1].total > 0
        assert [p.done for p in reports] == sorted(p.done for p in reports)


# The step offset


@pytest.mark.parametrize(("asked", "value"), [("reset", 7), (3, 3), (7, 7), (0, 0)])
def test_a_step_offset_is_set_and_recorded(source: Path, tmp_path: Path, asked: Any, value: int) -> None:
    convert(plan(source, tmp_path / "x.packed", step_offset=asked))
    with open_state(tmp_path / "x.packed") as opened:
        group = opened.state.optimizer.groups[0]
        assert group.hyperparameters["step_offset"] == value and group.known_from["step_offset"] == "given"
        assert opened.state.counts.updates == 7
        assert (opened.checkpoint.manifest or {})["options"]["step_offset"] == {
            "asked": asked,
            "value": value,
        }


def test_a_step_offset_is_kept(tmp_path: Path) -> None:
    source = save(small_state(step_offset=5), tmp_path / "source")
    convert(plan(source, tmp_path / "x.packed"))
    with open_state(tmp_path / "x.packed") as opened:
        assert opened.state.optimizer.groups[0].hyperparameters["step_offset"] == 5


@pytest.mark.parametrize("asked", [8, -1, "later", True, 1.5])
def test_a_step_offset_beyond_the_step_is_refused(source: Path, tmp_path: Path, asked: Any) -> None:
    with pytest.raises(UsageError, match="NaN"):
        plan(source, tmp_path / "x.packed", step_offset=asked)


# Which container, which layout


def choices(monkeypatch: pytest.MonkeyPatch) -> None:
    register(
        monkeypatch,
        Packed("torch", (".pt", ".pth")),
        Packed("t5x", (), "folder"),
        Packed("orbax", (), "folder"),
        Packed("tf-bundle", (".index",), None),
        Renamed("statekit-torch", ("torch",), {"adafactor": ("t5x",), "adamw": ("torch",)}),
        Renamed("t5x", ("t5x", "orbax")),
        Renamed("optax", ("orbax",), {"adamw": ("torch",)}),
    )


@pytest.mark.parametrize(
    ("name", "to", "container", "layout"),
    [
        ("x.pt", None, "torch", "statekit-torch"),
        ("X.PT", None, "torch", "statekit-torch"),
        ("t5x.pt", None, "torch", "statekit-torch"),
        ("torch-ckpt", None, "torch", "statekit-torch"),
        ("t5x-ckpt", None, "t5x", "t5x"),
        ("my_T5X_checkpoint_1000", None, "t5x", "t5x"),
        ("t5x", None, "t5x", "t5x"),
        ("my-t5x-orbax", None, "orbax", "t5x"),
        ("orbax.ckpt", None, "orbax", "t5x"),
        ("statekit-ckpt", None, "statekit", "statekit"),
        ("x.statekit", None, "statekit", "statekit"),
        ("anything", "torch", "torch", "statekit-torch"),
        ("x.pt", "t5x-orbax", "orbax", "t5x"),
        ("x.pt", "statekit", "statekit", "statekit"),
    ],
)
def test_the_target_is_chosen_by_option_then_suffix_then_name(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    to: str | None,
    container: str,
    layout: str,
) -> None:
    choices(monkeypatch)
    work = plan(source, tmp_path / name, to=to)
    assert (work.target.container, work.target.layout) == (container, layout)


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("anything", {}, "doesn't say what to write"),
        ("torchckpt", {}, "doesn't say what to write"),
        ("torch-from-t5x", {}, "t5x and torch|torch and t5x"),
        ("x", {"to": "tourch"}, "No container has that name"),
        ("x", {"to": "tf-bundle"}, "only be read"),
        ("my-tf-bundle", {}, "only be read"),
        ("x.pt", {"layout": "nope"}, "no layout of that name"),
        ("x.pt", {"layout": "optax"}, "can't hold the state of adafactor"),
    ],
)
def test_a_target_that_isnt_clear_is_a_usage_error_with_the_choices(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
    what: str,
) -> None:
    choices(monkeypatch)
    with pytest.raises(UsageError, match=what) as caught:
        plan(source, tmp_path / name, **options)
    assert "expected:" in str(caught.value)


def test_a_container_without_a_layout_for_the_optimizer_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, Packed("torch"), Renamed("adam", ("torch",), {"adamw": ("torch",)}))
    with pytest.raises(UsageError, match="No layout of the container torch holds the state of adafactor"):
        plan(source, tmp_path / "torch-ckpt")


def test_a_source_can_be_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_state(source, container="statekit", layout="statekit", step=7) as opened:
        assert {evidence.because for evidence in opened.evidence} == {"it was named"}
    with pytest.raises(UsageError, match="--from"):
        open_state(source, container="nope")
    with pytest.raises(NotFoundError):
        plan(tmp_path / "nothing", tmp_path / "x.packed")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UnknownFormatError):
        plan(tmp_path / "text", tmp_path / "x.packed")


def test_a_source_that_cant_be_decoded_is_closed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    real = type(CONTAINER).open

    def watching(self: Any, path: Path, step: int | None = None, budget: Any = None) -> Any:
        checkpoint = real(self, path, step, budget)

        def close() -> None:
            checkpoint.close()
            closed.append(True)

        return replace(checkpoint, on_close=close)

    monkeypatch.setattr(type(CONTAINER), "open", watching)
    with pytest.raises(UsageError):
        open_state(source, hints=Hints({"nope": 1}))
    assert closed == [True]


# Source and target


def linked(tmp_path: Path, source: Path) -> dict[str, Path]:
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "parent").symlink_to(tmp_path)
    return {
        "the same": source,
        "the same by a link": tmp_path / "link",
        "the same by a linked parent": tmp_path / "parent/source",
        "the same by dots": source / "../source",
        "inside": source / "x.statekit",
        "inside by a link": tmp_path / "link/x.statekit",
        "around": tmp_path,
        "around by a link": tmp_path / "parent",
    }


@pytest.mark.parametrize("case", ["the same", "the same by a link", "the same by a linked parent", "the same by dots",
                                  "inside", "inside by a link", "around", "around by a link"])  # fmt: skip
def test_a_target_that_is_inside_or_around_the_source_is_refused(
    tmp_path: Path, source: Path, case: str
) -> None:
    target, before = linked(tmp_path, source)[case], snapshot(source)
    with pytest.raises(UsageError, match="choose another target"):
        plan(source, target, to="statekit")
    assert snapshot(source) == before


def test_a_target_that_is_the_same_file_is_refused(source: Path, tmp_path: Path) -> None:
    convert(plan(source, tmp_path / "a.packed"))
    os.link(tmp_path / "a.packed", tmp_path / "b.packed")
    with pytest.raises(UsageError, match="the source itself"):
        plan(tmp_path / "a.packed", tmp_path / "b.packed")


def test_an_existing_target_is_kept_unless_replaced(source: Path, tmp_path: Path) -> None:
    target = save(small_state(seed=1, updates=3), tmp_path / "target.statekit")
    before, work = snapshot(target), plan(source, target)
    with pytest.raises(TargetExistsError, match="--replace"):
        convert(work, on_progress=lambda progress: pytest.fail("work was done"))
    assert snapshot(target) == before
    convert(work, replace=True)
    with open_state(target) as opened:
        assert opened.state.counts.updates == 7
    assert sorted(os.listdir(tmp_path)) == ["source", "target.statekit"]


def test_a_link_to_the_source_isnt_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "x.statekit").symlink_to(source)
    with pytest.raises(UsageError):
        plan(source, tmp_path / "x.statekit")


# Damage


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("change", ["kept", "derived"])
def test_a_damaged_source_is_noticed_as_it_streams(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    if change == "derived":
        register(monkeypatch, Packed(), Renamed(change=lambda _, tensor: Cast(tensor, tensor.dtype)))
    monkeypatch.setattr(file_changes, "SMALL_BYTES", 0)  # else its file's digest tells when it is opened
    path = source / SHARD
    flip(path, path.read_bytes().index(arrays()["dense/kernel"].tobytes()) + 5)
    with pytest.raises(CorruptError, match="params/dense/kernel") as caught:
        convert(plan(source, tmp_path / "x.packed"))
    assert "slots" not in str(caught.value)
    assert os.listdir(tmp_path) == ["source"]


def test_a_manifest_that_doesnt_fit_its_tensors_is_corrupt(tmp_path: Path, source: Path) -> None:
    class Liar(Packed):
        def open(self, path: Place, step: int | None = None, budget: Any = None) -> Any:
            checkpoint = super().open(path, step)
            return replace(checkpoint, tree={**checkpoint.tree, "more": Filled((1,), np.dtype(np.float32))})

    convert(plan(source, tmp_path / "x.packed"))
    with pytest.MonkeyPatch().context() as patch:
        register(patch, Liar(), Renamed())
        with pytest.raises(CorruptError, match="doesn't name this tensor @ more"):
            open_state(tmp_path / "x.packed")


SPOILERS: dict[str, Packed] = {
    "wrong values": Packed(spoil=lambda name, block: bytes(len(block))),
    "wrong order": Packed(spoil=lambda name, block: block[::-1]),
    "too short": Packed(spoil=lambda name, block: block[:-1]),
    "forgotten": Packed(skip=("model/dense/kernel",)),
}


@pytest.mark.parametrize("case", SPOILERS)
def test_a_container_that_writes_something_else_is_caught(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    register(monkeypatch, SPOILERS[case], Renamed())
    work = plan(source, tmp_path / "x.packed")
    with pytest.raises(CommitError):
        convert(work)
    assert os.listdir(tmp_path) == ["source"]


def test_a_layout_that_doesnt_find_its_state_again_is_caught(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, Packed(), Renamed(lost_steps=1))
    with pytest.raises(CommitError, match="step"):
        convert(plan(source, tmp_path / "x.packed"))
    assert os.listdir(tmp_path) == ["source"]


# Accidents

SWEEPS = {
    "kill": ["kill", "x.statekit", "sample=0"],
    "kill while writing a large torch file": ["kill", "x.pt", "large"],
    "kill while writing a T5X folder": ["kill", "t5x-ckpt", "sample=1"],
    "kill while writing an Orbax folder": ["kill", "t5x-orbax", "sample=1"],
    "kill while replacing": ["kill", "x.statekit", "replace", "sample=1"],
    "kill over an empty folder": ["kill", "x.statekit", "empty", "sample=2"],
    "kill without renameat2": ["kill", "x.statekit", "plain", "sample=3"],
    "disk error": ["EIO", "x.statekit", "sample=4"],
    "disk error while writing a large torch file": ["EIO", "x.pt", "large"],
    "disk error while replacing": ["EIO", "x.statekit", "replace", "sample=5"],
    "disk error over an empty folder": ["EIO", "x.statekit", "empty", "sample=1"],
    "disk full": ["ENOSPC", "x.statekit", "sample=2"],
    "disk full for good": ["ENOSPC", "x.pt", "persistent"],
    "too many files": ["EMFILE", "x.statekit", "persistent", "sample=3"],
    "read-only for good while replacing": ["EROFS", "x.statekit", "replace", "persistent", "sample=4"],
}
"""Of most every fifth call, each from another one on; `make test-all` takes every call."""


@pytest.fixture
def in_memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder where a sync costs nothing, if there is one: a sweep makes thousands."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="statekit-test-", dir=memory or tmp_path) as folder:
        yield Path(folder)


def swept(folder: Path, how: str, *options: str) -> dict[str, Any]:
    source = save(plain_state(), folder / "source")
    (folder / "sweep").mkdir()
    before = snapshot(source)
    script = str(ROOT / "tests/fault_sweep.py")
    command = [sys.executable, script, how, str(source), str(folder / "sweep"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert snapshot(source) == before
    summary: dict[str, Any] = json.loads(done.stdout)
    print(done.stderr)  # what a child that ended otherwise had to say
    return summary


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", SWEEPS)
def test_an_accident_at_any_call_leaves_all_or_nothing(in_memory_folder: Path, case: str) -> None:
    summary = swept(in_memory_folder, *SWEEPS[case])
    assert summary["bad"] == []
    assert summary["points"] >= 8 and len(summary["outcomes"]) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in SWEEPS if "x.statekit" in SWEEPS[case]])
def test_an_accident_at_every_call_leaves_all_or_nothing(in_memory_folder: Path, case: str) -> None:
    options = [option for option in SWEEPS[case] if not option.startswith("sample=")]
    assert swept(in_memory_folder, *options)["bad"] == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "EIO", "ENOSPC"])
@pytest.mark.parametrize("name", ["x.pt", "t5x-ckpt", "t5x-orbax"])
def test_an_accident_at_every_call_of_every_format(in_memory_folder: Path, name: str, how: str) -> None:
    assert swept(in_memory_folder, how, name)["bad"] == []


@pytest.mark.parametrize("there", [["sample=1"], ["empty"]])
def test_a_writer_that_takes_no_care_is_noticed(in_memory_folder: Path, there: list[str]) -> None:
    (fault,) = swept(in_memory_folder, "kill", "x.statekit", "careless", *there)["bad"]
    assert "target torn" in fault


KILLED = """
import os, signal, sys
import pytest
from formats import register
from statekit.conversion.convert import convert, plan
register(pytest.MonkeyPatch())
left = [int(sys.argv[3])]
def progress(told):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
from pathlib import Path
convert(plan(Path(sys.argv[1]), Path(sys.argv[2])), on_progress=progress)
"""


@pytest.mark.parametrize("after", [0, 3, 9])  # the first tensor, in the middle, while verifying
def test_a_killed_process_leaves_only_what_the_next_one_sweeps(
    source: Path, tmp_path: Path, after: int
) -> None:
    target = tmp_path / "x.statekit"
    command = [sys.executable, "-c", KILLED, str(source), str(target), str(after)]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")}, check=False)
    assert killed.returncode == -9
    left = [name for name in os.listdir(tmp_path) if name != "source"]
    assert len(left) == 1 and left[0].startswith(".statekit-tmp-")
    convert(plan(source, target))
    assert sorted(os.listdir(tmp_path)) == ["source", "x.statekit"]


def test_the_interpreter_can_convert_without_a_framework(source: Path, tmp_path: Path) -> None:
    code = KILLED + "\nassert not {'torch', 'jax', 'tensorflow', 'tensorstore'} & set(sys.modules)"
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "x.statekit"), "1000"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")}, check=True)


def test_callers_may_give_text_paths(source: Path, tmp_path: Path) -> None:
    work: Callable[..., Any] = plan
    assert work(str(source), str(tmp_path / "x.packed")).request.target == tmp_path / "x.packed"


# A plan and its execution


def _counting_opens(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    opened: list[Path] = []
    real = CONTAINER.open

    def count(self: object, path: Path, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        opened.append(path)
        return real(path, step, budget)

    monkeypatch.setattr(type(CONTAINER), "open", count)
    return opened


def test_a_plan_that_is_carried_out_opens_the_source_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = _counting_opens(monkeypatch)
    work = plan(source, tmp_path / "x.statekit")
    convert(work)
    assert opened.count(source) == 1
    convert(work, replace=True)  # what the plan was made from is used up
    assert opened.count(source) == 2


def test_a_source_that_was_rewritten_since_is_opened_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = _counting_opens(monkeypatch)
    work = plan(source, tmp_path / "x.statekit")
    shard = source / SHARD
    shard.write_bytes(shard.read_bytes())
    convert(work)
    assert opened.count(source) == 2


def test_a_plan_that_nobody_carries_out_closes_its_source(source: Path, tmp_path: Path) -> None:
    closed: list[bool] = []
    work = plan(source, tmp_path / "x.statekit")
    opened = prepared._WAITING[id(work)].opened.checkpoint
    close = opened.on_close
    object.__setattr__(opened, "on_close", lambda: closed.append(close() is None))
    del work
    assert closed == [True]
