"""seal writes a manifest beside a checkpoint of any system, and check proves it; neither touches the checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from limit import LAYOUTS, made_state
from samples import ROWS, Row
from synthetic import write_neutral

import statekit
from goldens import GOLDEN
from statekit.cli.main import DONE, FAILED, WANTING, main
from statekit.conversion import registry
from statekit.conversion.check import CheckReport, check
from statekit.conversion.contracts import NO_HINTS
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.seal import seal
from statekit.errors import CorruptError, NotFoundError, StatekitError, TargetExistsError, UsageError
from statekit.files import durable, file_changes, integrity
from statekit.files.manifest import FILE, is_manifest
from statekit.files.source import File, Files
from statekit.testing.container_trials import WrittenContents

TRAINER = GOLDEN / "torch_formats/adamw_trainer/checkpoint/checkpoint-4"
T5X = GOLDEN / "t5x/momentum_f32/checkpoint"
RUN = GOLDEN / "torch_adafactor/adafactor_foreach_eps/checkpoint/checkpoint.pt"
FLIPPED = 5
"""Files of each checkpoint in which a bit is flipped."""


def copied(source: Path, target: Path) -> Path:
    """Copies a recording, which may lie read-only."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        shutil.copyfile(source, target)
        return target
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
    return target


def at(row: Row, folder: Path) -> Path:
    """Returns a copy of a sample's checkpoint."""
    sample = row.sample_in(folder)
    root = sample.root or sample.path
    copy = copied(root, folder / "copy" / root.name)
    return copy / sample.path.relative_to(root) if sample.path != root else copy


def state_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Returns the bytes and times of all files below a folder but manifests."""
    files = [path for path in folder.rglob("*") if path.is_file() and not is_manifest(path.name)]
    return {f"{path}": (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def contents(path: Path) -> WrittenContents:
    with registry.opened(registry.detect_container(path)[0], path, None, NO_HINTS) as opened:
        return WrittenContents.of(opened)


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def faults(report: CheckReport) -> list[tuple[str, str]]:
    return [fault for one in report.checkpoints for fault in one.faults]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.sample.container}-{row.name.replace('/', '-')}")
def test_every_format_is_sealed_as_it_is_and_every_flipped_bit_noticed(row: Row, tmp_path: Path) -> None:
    path = at(row, tmp_path)
    for old in [file for file in tmp_path.rglob("*") if file.is_file() and is_manifest(file.name)]:
        if row.sample.container == "statekit":
            return  # its manifest is a part of it
        old.unlink()  # as if its own system had written it
    before, sound = state_of(tmp_path), contents(path)
    assert faults(check(path)) == []
    (one,) = seal(path).checkpoints
    inside = one.manifest == one.path
    assert one.done == ("proven" if inside else "sealed")
    assert state_of(tmp_path) == before
    after = contents(path)
    assert (after.values, after.view, after.findings) == (sound.values, sound.view, sound.findings)
    report = check(path)
    assert report.passed and (inside or {*report.checkpoints[0].proven_by} == {"manifest"})
    assert seal(path).checkpoints[0].done == "proven"
    if inside:
        return
    named = [one.manifest.parent / name for name in json.loads(one.manifest.read_text())["files"]]
    random = np.random.default_rng(0)
    victims = [file for file in named if file.stat().st_size]
    for i in random.choice(len(victims), min(FLIPPED, len(victims)), replace=False):
        data, facts = victims[i].read_bytes(), victims[i].stat()
        flip(victims[i], int(random.integers(8 * len(data))))
        assert not check(path).passed, victims[i]
        with pytest.raises(StatekitError):
            contents(path)
        victims[i].write_bytes(data)
        os.utime(victims[i], ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert check(path).passed


def run_of(folder: Path) -> Path:
    """Makes a Trainer's run with three steps."""
    for step in (2, 3, 4):
        target = copied(TRAINER, folder / f"checkpoint-{step}")
        state = json.loads((target / "trainer_state.json").read_text())
        (target / "trainer_state.json").write_text(json.dumps({**state, "global_step": step}))
        for name in ("optimizer.pt", "scheduler.pt"):
            kept = torch.load(target / name)
            for slots in kept.get("state", {}).values():
                slots["step"] = torch.tensor(float(step))
            if "last_epoch" in kept:
                kept |= {"last_epoch": step, "_step_count": step + 1}
            torch.save(kept, target / name)
    return folder


@pytest.mark.torch
def test_all_steps_of_a_run_are_sealed_and_checked(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    assert [one.step for one in seal(run).checkpoints] == [2, 3, 4]
    assert sorted(path.parent.name for path in run.rglob(FILE)) == [f"checkpoint-{n}" for n in (2, 3, 4)]
    assert check(run).passed
    flip(run / "checkpoint-3" / "model.safetensors", -1)
    report = check(run)
    assert [one.step for one in report.checkpoints if one.faults] == [3]
    assert [one.step for one in check(run, step=4).checkpoints] == [4]
    for step, path in ((7, run), (7, run / "checkpoint-4")):  # which isn't damage
        with pytest.raises(NotFoundError, match="step"):
            check(path, step=step)
    (run / "checkpoint-4" / "optimizer.pt").write_bytes(b"")  # the newest can't be opened any more
    report = check(run)
    assert [one.path.name for one in report.checkpoints] == [f"checkpoint-{n}" for n in (2, 3, 4)]
    assert [bool(one.faults) for one in report.checkpoints] == [False, True, True]


STEPS_IN = {
    "accelerate": ("checkpoint_0", "checkpoint_1"),
    "dcp": ("step-4", "step-8"),
    "dcp-safetensors": ("step-4", "step-8"),
    "deepspeed": ("global_step4", "global_step8"),
    "flax": ("checkpoint_4", "checkpoint_8"),
    "fsdp1-ranks": ("step_4", "step_8"),
    "keras": ("step-4.keras", "step-8.keras"),
    "keras-h5": ("step-4.weights.h5", "step-8.weights.h5"),
    "megatron": ("iter_0000004", "iter_0000008"),
    "mxnet": ("net-0004", "net-0008"),
    "orbax": ("4", "8"),
    "safetensors": ("step-4", "step-8"),
    "statekit": ("step_4", "step_8"),
    "t5x": ("checkpoint_4", "checkpoint_8"),
    "tf-bundle": ("model.ckpt-4", "model.ckpt-8"),
    "torch": ("step-4.pt", "step-8.pt"),
}
"""Container -> what two steps of a run are called; `hf-trainer` has its test above, as its records say the step too."""


def laid_out(row: Row, names: tuple[str, str], folder: Path) -> Path:
    """Makes a run's folder with a sample as each of two steps."""
    path, run = row.sample_in(folder).path, folder / "run"
    parts = {"flax": r"checkpoint_\d+", "mxnet": r"\w+(?=\.(params|states))", "tf-bundle": r"model\.ckpt-\d+"}
    for name in names:
        if pattern := parts.get(row.sample.container):  # several files of each step in one folder
            for file in path.iterdir():
                if match := re.match(pattern, file.name):
                    copied(file, run / f"{name}{file.name[match.end() :]}")
        else:
            copied(path, run / name)
    return run


@pytest.mark.parametrize("container", STEPS_IN)
def test_the_steps_of_every_container_are_sealed_and_checked(container: str, tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.sample.container == container)
    run = laid_out(row, STEPS_IN[container], tmp_path)
    assert len(seal(run).checkpoints) == 2
    assert check(run).passed
    files = [
        file
        for file in run.rglob("*")
        if f"{file.relative_to(run)}".startswith(STEPS_IN[container][1])
        and file.is_file()
        and not is_manifest(file.name)
    ]
    largest = max(files, key=lambda file: file.stat().st_size)
    flip(largest, 4 * largest.stat().st_size)
    assert [bool(one.faults) for one in check(run).checkpoints] == [False, True]


def test_files_of_a_folder_each_have_their_own(tmp_path: Path) -> None:
    for step in (1000, 2000):
        copied(RUN, tmp_path / f"checkpoint-{step}.pt")
    seal(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-1000.pt",
        "checkpoint-2000.pt",
        "statekit.checkpoint-1000.pt.json",
        "statekit.checkpoint-2000.pt.json",
    ]
    flip(tmp_path / "checkpoint-2000.pt", 200)
    assert [bool(one.faults) for one in check(tmp_path).checkpoints] == [False, True]
    with pytest.raises(CorruptError, match="changed since"):
        open_state(tmp_path / "checkpoint-2000.pt")


def test_what_was_written_to_since_is_renewed_and_damage_is_not_covered_up(tmp_path: Path) -> None:
    step = copied(TRAINER, tmp_path / "checkpoint-4")
    manifest = seal(step).checkpoints[0].manifest
    old = manifest.stat().st_mtime_ns
    state = step / "trainer_state.json"
    state.write_text(state.read_text() + "\n")
    with pytest.raises(CorruptError, match=r"changed since it was written; it has \d+ bytes") as caught:
        open_state(step)
    assert "statekit seal" in caught.value.remedy
    (step / "more.txt").write_text("a consumer's own")
    (one,) = seal(step).checkpoints
    assert one.done == "renewed" and set(one.changed) == {"trainer_state.json", "more.txt"}
    assert check(step).passed and manifest.stat().st_mtime_ns > old
    model = step / "model.safetensors"
    before, facts = model.read_bytes(), model.stat()
    flip(model, -1)
    os.utime(model, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # as a disk does
    with pytest.raises(CorruptError, match="cover up") as caught:
        seal(step)
    assert caught.value.faults[0][1] == f"{model}" and "--renew" in caught.value.remedy
    with pytest.raises(CorruptError, match="cover up"):
        seal(step, renew=["optimizer.pt"])
    with pytest.raises(UsageError, match="is no file of the checkpoint"):
        seal(step, renew=["model.safetensors", "model.safetensor"])  # it was passed over
    from_here = os.path.relpath(model)
    assert seal(step, renew=[from_here]).checkpoints[0].changed == ("model.safetensors",)
    assert check(step).passed
    model.write_bytes(before)


def test_a_changed_manifest_is_not_written_over_unless_named(tmp_path: Path) -> None:
    step = copied(TRAINER, tmp_path / "checkpoint-4")
    manifest = seal(step).checkpoints[0].manifest
    manifest.write_text(manifest.read_text().replace('"sealed"', '"sealed?"'))
    with pytest.raises(CorruptError, match="cover up"):
        seal(step)
    assert seal(step, renew=[FILE]).checkpoints[0].done == "sealed"
    assert check(step).passed


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_file_with_two_names_is_proven_under_both(
    link: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity, "SMALL_BYTES", 0)
    monkeypatch.setattr(file_changes, "SMALL_BYTES", 0)
    folder = tmp_path / "model"
    folder.mkdir()
    weights = folder / "model.safetensors"
    weights.write_bytes(safetensors.numpy.save({"w": np.ones(4, np.float32)}))
    link(weights, folder / "again.safetensors")
    seal(folder)
    assert check(folder).passed
    flip(weights, 8 * weights.stat().st_size - 1)
    assert {Path(place).name for _, place in faults(check(folder))} >= {weights.name, "again.safetensors"}


def test_what_the_formats_own_checksum_contradicts_is_not_sealed(tmp_path: Path) -> None:
    path = copied(RUN, tmp_path / "checkpoint.pt")
    with open_state(path) as opened:
        value = max((param.read().tobytes() for param in opened.params.values()), key=len)
    flip(path, 8 * path.read_bytes().index(value))
    with pytest.raises(CorruptError, match="checksum"):
        seal(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert "CRC" in check(path).checkpoints[0].faults[0][0]


def test_a_target_of_ours_that_a_trainer_went_on_in_keeps_its_lineage(tmp_path: Path) -> None:
    run = tmp_path / "run"
    convert(plan(TRAINER, run, to="orbax"))
    written = json.loads((run / FILE).read_text())
    step = next(path for path in run.iterdir() if path.is_dir())
    (step / "added").write_text("by a trainer")
    metadata = step / "_CHECKPOINT_METADATA"
    metadata.write_text(f"{metadata.read_text()}\n")
    (one,) = seal(run).checkpoints
    assert one.manifest == run / FILE and one.done == "renewed"
    renewed = json.loads((run / FILE).read_text())
    assert {*written["files"]} < {*renewed["files"]} and renewed["sealed"] == sorted(one.changed)
    assert (renewed["kept"], renewed["source"], renewed["state"]) == (
        written["kept"],
        written["source"],
        written["state"],
    )
    with pytest.raises(TargetExistsError, match="didn't write"):
        convert(plan(TRAINER, run, to="orbax"), replace=True)


def test_a_sealed_folder_is_still_somebody_elses(tmp_path: Path) -> None:
    step = copied(TRAINER, tmp_path / "checkpoint-4")
    seal(step)
    with pytest.raises(TargetExistsError, match="didn't write"):
        convert(plan(RUN, step, to="statekit"), replace=True)
    path = copied(RUN, tmp_path / "one" / "checkpoint.pt")
    seal(path)
    with pytest.raises(TargetExistsError, match="didn't write"):
        convert(plan(step, path), replace=True)


@pytest.mark.torch
def test_a_file_of_ours_that_was_saved_again_with_its_manifest_is_sealed_over_it(tmp_path: Path) -> None:
    path = statekit.convert(RUN, tmp_path / "run.pt").target
    assert seal(path).checkpoints[0].done == "proven"
    kept = torch.load(path)
    kept["model"] = {name: value + 1 for name, value in kept["model"].items()}
    torch.save(kept, path)
    with pytest.raises(CorruptError):
        statekit.convert(path, tmp_path / "again.pt")
    assert not check(path).passed
    (one,) = seal(path).checkpoints
    assert one.manifest.name == "statekit.run.pt.json" and one.done == "renewed"
    assert check(path).passed
    statekit.convert(path, tmp_path / "again.pt")


@pytest.mark.parametrize("limit", [0, file_changes.SMALL_BYTES], ids=["large", "small"])
def test_a_file_of_ours_in_which_no_tensor_changed_is_sealed_over(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity, "SMALL_BYTES", limit)
    path = statekit.convert(RUN, tmp_path / "run.pt").target
    kept = torch.load(path)
    kept["note"] = "saved again"
    torch.save(kept, path)
    assert not check(path).passed
    assert seal(path).checkpoints[0].done == "renewed"
    assert check(path).passed


def test_a_neutral_folder_cannot_be_made_anew(tmp_path: Path) -> None:
    target = statekit.convert(RUN, tmp_path / "run.statekit").target
    assert seal(target).checkpoints[0].done == "proven"
    Path(target / "README").write_text("mine")
    with pytest.raises(CorruptError, match="cover up"):
        seal(target, renew=["README"])


@pytest.mark.torch
@pytest.mark.parametrize("container", ["safetensors", "dcp"])
def test_a_byte_is_read_once_for_its_tensor_and_its_file(
    container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_neutral(tmp_path / "neutral", made_state((container, "statekit"), 0, 600))
    target = tmp_path / "sealed"
    statekit.convert(tmp_path / "neutral", target, to=container, layout=LAYOUTS[container])
    (target / "statekit.json").unlink()
    size, read, fill = sum(file.stat().st_size for file in target.rglob("*")), [0], Files.fill

    def counted(files: Files, file: File, start: int, into: memoryview) -> None:
        read[0] += len(into)
        fill(files, file, start, into)

    monkeypatch.setattr(Files, "fill", counted)
    statekit.seal(target)
    assert size <= read[0] + size // 100 and read[0] < 1.1 * size
    monkeypatch.undo()
    assert statekit.check(target).passed


def test_the_command_line_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(T5X, tmp_path / "run")
    assert main(["inspect", str(path)]) == DONE
    assert "`statekit seal` adds a manifest" in capsys.readouterr().out
    assert main(["check", str(path)]) == DONE
    said = capsys.readouterr().out
    assert "the format's CRC-32 of gzip" in said and "state/step" in said
    assert main(["seal", str(path), "--json"]) == DONE
    (one,) = json.loads(capsys.readouterr().out)["seals"][0]["checkpoints"]
    assert one["done"] == "sealed" and one["files"] == 29
    assert main(["check", str(path)]) == DONE
    assert "the manifest" in capsys.readouterr().out
    flip(path / "checkpoint_4" / "checkpoint", 400)
    assert main(["check", "--json", str(path)]) == WANTING
    document = json.loads(capsys.readouterr().out)
    assert not document["passed"]
    assert document["checks"][0]["checkpoints"][0]["faults"][0]["place"].endswith("checkpoint_4/checkpoint")
    assert main(["check", str(tmp_path / "nowhere")]) == FAILED
    assert main(["seal", str(tmp_path / "nowhere")]) == FAILED


# The systems' own libraries go on in a folder that was sealed


@pytest.mark.jax
@pytest.mark.filterwarnings("ignore:Flax Checkpointing will soon be deprecated")
def test_flax_finds_restores_and_removes_its_steps(tmp_path: Path) -> None:
    import flax
    from flax.training import checkpoints

    flax.config.update("flax_use_orbax_checkpointing", False)
    values = np.arange(6.0, dtype=np.float32)
    state = {"params": {"w": values}, "opt_state": {"count": np.int32(3)}}
    for step in (3, 4):
        checkpoints.save_checkpoint(tmp_path, state, step, keep=2)
    seal(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("checkpoint_3", "checkpoint_4"),
        *("statekit.checkpoint_3.json", "statekit.checkpoint_4.json"),
    }
    assert checkpoints.latest_checkpoint(tmp_path) == f"{tmp_path}/checkpoint_4"
    back = checkpoints.restore_checkpoint(tmp_path, None)
    assert back["params"]["w"].tolist() == values.tolist()
    checkpoints.save_checkpoint(tmp_path, state, 5, keep=2)
    assert checkpoints.latest_checkpoint(tmp_path) == f"{tmp_path}/checkpoint_5"
    assert not (tmp_path / "checkpoint_3").exists() and (tmp_path / "checkpoint_4").exists()
    assert check(tmp_path).passed
    assert [one.done for one in seal(tmp_path).checkpoints] == ["proven", "sealed"]


@pytest.mark.jax
def test_orbax_finds_restores_and_removes_its_steps(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    run, values = tmp_path / "run", np.arange(6.0, dtype=np.float32)
    state = {"w": values}
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(run, options=options) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(state))
    assert [one.step for one in seal(run).checkpoints] == [1, 2]
    with ocp.CheckpointManager(run, options=options) as manager:
        assert sorted(manager.all_steps()) == [1, 2] and manager.latest_step() == 2
        back = manager.restore(2, args=ocp.args.StandardRestore(state))
        assert back["w"].tolist() == values.tolist()
        manager.save(3, args=ocp.args.StandardSave(state))
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == ["2", "3"]
    assert check(run).passed
    assert [one.done for one in seal(run).checkpoints] == ["proven", "sealed"]


@pytest.mark.torch
def test_hugging_faces_trainer_finds_and_removes_its_steps(tmp_path: Path) -> None:
    from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints, sort_checkpoints

    run = run_of(tmp_path / "run")
    seal(run)
    assert get_last_checkpoint(str(run)) == f"{run}/checkpoint-4"
    assert [Path(one).name for one in sort_checkpoints(output_dir=str(run))] == [
        f"checkpoint-{step}" for step in (2, 3, 4)
    ]
    rotate_checkpoints(output_dir=str(run), save_total_limit=2)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-3", "checkpoint-4"]
    assert check(run).passed


@pytest.mark.torch
@pytest.mark.parametrize("name", ["adafactor_dcp_single", "adafactor_dcp_hf_safetensors"])
def test_torch_distributed_reads_a_sealed_folder(name: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    folder = (
        next((GOLDEN / "torch_formats" / name / "checkpoint").iterdir(), None)
        if (GOLDEN / "torch_formats" / name).exists()
        else None
    )
    if folder is None:
        pytest.skip("the compact recordings lack it")
    copy = copied(folder, tmp_path / "copy")
    reader = HuggingFaceStorageReader if "hf" in name else FileSystemReader
    before = reader(f"{copy}").read_metadata().state_dict_metadata.keys()
    seal(copy)
    assert reader(f"{copy}").read_metadata().state_dict_metadata.keys() == before


def test_parameters_of_mxnet_beside_each_other_are_sealed_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"net-{epoch:04d}.params" for epoch in (1, 2, 3)]
    source = GOLDEN / "mxnet_lans/fused_bounds_clip_rescale/checkpoint/net.params"
    for name in names:
        copied(source, tmp_path / name)
    assert [one.path.name for one in seal(tmp_path).checkpoints] == names
    assert check(tmp_path).to_json()["checkpoints"] and faults(check(tmp_path)) == []
    flip(tmp_path / names[1], 8 * source.stat().st_size - 1)
    assert [place for _, place in faults(check(tmp_path))] == [f"{tmp_path / names[1]}"]
    assert main(["inspect", f"{tmp_path}"]) == FAILED  # which of them isn't told
    assert names[2] in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "2026-11-28T08:00.pt",
        "loss:0.3.pt",
        "C:x.pt",
        "a\\b.pt",
        "\udcff.pt",
        " a.pt",
        "a\nb.pt",
        "a\u202e.pt",
        "a*.pt",
    ],
    ids=ascii,
)
@pytest.mark.parametrize("whole", [False, True], ids=["a file", "a folder"])
def test_what_seal_writes_is_read_whatever_a_file_is_called(name: str, whole: bool, tmp_path: Path) -> None:
    """Seen red: a colon or a backslash was sealed, and every verb refused the checkpoint from then on."""
    path = tmp_path / name
    path.write_bytes((GOLDEN / "torch_formats/adamw_legacy/checkpoint/checkpoint.pt").read_bytes())
    if whole:
        safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    subject = str(tmp_path if whole else path)
    before = {entry.name for entry in tmp_path.iterdir()}
    is_sealed = main(["seal", subject]) == 0
    assert main(["check", subject]) == 0
    assert is_sealed or {entry.name for entry in tmp_path.iterdir()} == before


def test_a_file_whose_manifest_could_have_no_name_is_read_and_not_sealed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{'x' * 250}.pt"
    shutil.copy(GOLDEN / "torch_formats" / "adamw_legacy" / "checkpoint" / "checkpoint.pt", path)
    for verb in ("inspect", "check", "doctor"):
        assert main([verb, f"{path}"]) == DONE, verb
    assert main(["seal", f"{path}"]) == FAILED
    assert "name too long" in capsys.readouterr().err and [*tmp_path.iterdir()] == [path]


def test_who_removes_a_folder_while_it_is_sealed_meets_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: `shutil.rmtree` of a trainer raised, of a temporary folder of ours or of the manifest."""
    folder = copied(TRAINER, tmp_path / "checkpoint-4")
    make = durable.make_temporary

    def made(parent: Path) -> Path:
        temporary = make(parent)
        shutil.rmtree(folder)
        return temporary

    monkeypatch.setattr(durable, "make_temporary", made)
    with pytest.raises(NotFoundError):
        seal(folder)
    assert not any(tmp_path.iterdir())
    monkeypatch.undo()
    copied(TRAINER, folder)
    if os.getuid():
        tmp_path.chmod(0o555)
    else:  # who is root may write everywhere
        monkeypatch.setattr(
            durable, "make_temporary", lambda parent: make(parent / ("x" * (parent == tmp_path)))
        )
    assert Path(f"{seal(folder).checkpoints[0].manifest}").is_file()
    tmp_path.chmod(0o755)


def test_who_keeps_a_files_time_while_it_is_sealed_is_noticed(tmp_path: Path) -> None:
    """Seen red: `rsync --inplace --times` in the middle of its writing was sealed."""
    file = copied(RUN, tmp_path / "a.pt")
    facts = file.stat()

    def touched(*_: object) -> None:
        with file.open("r+b") as opened:
            opened.seek(facts.st_size // 2)
            opened.write(b"x")
        os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))

    with pytest.raises(StatekitError):
        seal(file, on_progress=touched)
    assert not list(tmp_path.glob("statekit.*"))


@pytest.mark.parametrize("moment", ["make_temporary", "sync_folder"])
def test_what_is_written_over_while_its_manifest_is_made_is_never_called_damaged(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: a trainer's last.ckpt was called damaged for good, as the manifest of the save before was younger."""
    file = copied(RUN, tmp_path / "last.pt")
    other = GOLDEN / "torch_formats/adamw_legacy/checkpoint/checkpoint.pt"
    before = getattr(durable, moment)
    over = list[Path]()

    def written(path: Path) -> object:
        if not over and (moment == "make_temporary" or path == tmp_path):
            shutil.copyfile(other, file)
            over.append(path)
            time.sleep(0.02)
        return before(path)

    monkeypatch.setattr(durable, moment, written)
    with suppress(CorruptError):
        seal(file)
    monkeypatch.undo()
    assert over and seal(file).checkpoints[0].done in ("sealed", "renewed")
