"""A file of one step in the folder of another is refused or said, where anything in the files can tell.

There is no manifest. What nothing in the files can tell is in `UNTOLD`, by name; `inspect` and `convert` name it too.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from reliability_table import Row, note
from samples import state_writer
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

import statekit.torch
from goldens import GOLDEN
from statekit.attestation.doctor import doctor
from statekit.cli.main import statekit as cli
from statekit.conversion.convert import plan
from statekit.conversion.inspection import inspect
from statekit.conversion.open_state import open_state
from statekit.converters.containers import dcp_safetensors
from statekit.errors import StatekitError
from statekit.files.manifest import is_manifest
from statekit.state.train_state import Counts, TrainState
from statekit.tensors.tensor import in_memory
from statekit.testing.layouts import made_state

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # a single process saves
]

STEPS = (4, 8)
Make = Callable[[Path, int], Path]
"""Writes a checkpoint of a step into a folder of its own, and returns it."""


def run(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Returns a run after some updates."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 8)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def save_model(model: torch.nn.Module, file: Path) -> None:
    from safetensors.torch import save_file

    save_file(model.state_dict(), file, {"format": "pt"})


def hf_trainer(folder: Path, step: int) -> Path:
    model, optimizer, scheduler = run(step)
    place = folder / f"checkpoint-{step}"
    place.mkdir(parents=True)
    save_model(model, place / "model.safetensors")
    torch.save(optimizer.state_dict(), place / "optimizer.pt")
    torch.save(scheduler.state_dict(), place / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, place / "rng_state.pth")
    state = {"global_step": step, "epoch": step / 10, "max_steps": 10, "log_history": []}
    (place / "trainer_state.json").write_text(json.dumps(state))
    return place


def accelerate(folder: Path, step: int) -> Path:
    model, optimizer, scheduler = run(step)
    place = folder / f"checkpoint_{step // 4}"
    place.mkdir(parents=True)
    save_model(model, place / "model.safetensors")
    torch.save(optimizer.state_dict(), place / "optimizer.bin")
    torch.save(scheduler.state_dict(), place / "scheduler.bin")
    torch.save({"step": 0, "torch": torch.get_rng_state()}, place / "random_states_0.pkl")
    torch.save({"step": step}, place / "custom_checkpoint_0.pkl")
    return place


def of_torch_distributed(folder: Path, step: int) -> Path:
    model, optimizer, _ = run(step)
    place = folder / "dcp"
    params, slots = get_state_dict(model, optimizer)
    writer = FileSystemWriter(place, thread_count=2)
    save({"model": params, "optim": slots}, storage_writer=writer, no_dist=True)
    return place


def lightning(folder: Path, step: int) -> Path:
    folder.mkdir(parents=True)
    file = folder / f"epoch=0-step={step}.ckpt"
    recorded = GOLDEN / "torch_formats/adafactor_lightning/checkpoint/epoch=0-step=4.ckpt"
    shutil.copyfile(recorded, file)
    return file


def counted(place: Path, recorded: str, step: int) -> Path:
    """Copies a recording whose counts are 4, in tensors of float32 and in pickles, and makes them another step's."""
    shutil.copytree(GOLDEN / recorded, place, copy_function=shutil.copyfile)
    place.chmod(0o755)
    for file in place.glob("*.pt"):
        with zipfile.ZipFile(file) as archive:
            members = [(one.filename, archive.read(one)) for one in archive.infolist()]
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in members:
                anew = struct.pack("<f", step) if data == struct.pack("<f", 4) else data
                archive.writestr(name, re.sub(rb"(global_steps(?:q.)?K)\x04", rb"\1" + bytes([step]), anew))
    return place


def deepspeed(folder: Path, step: int) -> Path:
    recorded = "torch_formats/adamw_deepspeed_bf16_zero1/checkpoint/global_step4"
    return counted(folder / f"global_step{step}", recorded, step)


def fsdp1(folder: Path, step: int) -> Path:
    return counted(folder / "ranks", "torch_formats/adamw_fsdp1_rank_local_flat/checkpoint", step)


def written(container: str, layout: str, schema: str, variant: str, name: str) -> Make:
    """Returns a maker of what statekit writes: with other values and counts in each step, and no manifest."""

    def state(step: int) -> TrainState:
        made = made_state(schema, variant)
        params = {path: in_memory(p.read() * step) for path, p in made.params.items()}
        return replace(made, params=params, counts=Counts(step, step))

    def make(folder: Path, step: int) -> Path:
        folder.mkdir(parents=True)
        target = state_writer(container, layout, lambda: state(step))(folder)
        for file in folder.rglob("*"):
            if is_manifest(file.name):
                file.unlink()
        place = target / name.format(step=step)
        return place if place.exists() else target

    return make


def in_shards(folder: Path, step: int) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_safetensors, "SHARD_BYTES", 200)
        return written("dcp-safetensors", "torch-fqn-flat", "adamw", "torch", ".")(folder, step)


MIXES: dict[str, tuple[Make, str]] = {
    "hf-trainer: optimizer.pt": (hf_trainer, "optimizer.pt"),
    "hf-trainer: scheduler.pt": (hf_trainer, "scheduler.pt"),
    "hf-trainer: trainer_state.json": (hf_trainer, "trainer_state.json"),
    "hf-trainer: rng_state.pth": (hf_trainer, "rng_state.pth"),
    "hf-trainer: model.safetensors": (hf_trainer, "model.safetensors"),
    "accelerate: optimizer.bin": (accelerate, "optimizer.bin"),
    "accelerate: scheduler.bin": (accelerate, "scheduler.bin"),
    "accelerate: model.safetensors": (accelerate, "model.safetensors"),
    "accelerate: random_states_0.pkl": (accelerate, "random_states_0.pkl"),
    "accelerate: custom_checkpoint_0.pkl": (accelerate, "custom_checkpoint_0.pkl"),
    "dcp: .metadata": (of_torch_distributed, ".metadata"),
    "dcp: a shard": (of_torch_distributed, "__0_1.distcp"),
    "lightning: the file under another step's name": (lightning, ""),
    "deepspeed: the model's file": (deepspeed, "mp_rank_00_model_states.pt"),
    "deepspeed: a rank's optimizer": (deepspeed, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    "fsdp1-ranks: a rank": (fsdp1, "rank1.pt"),
    "t5x: checkpoint": (written("t5x", "t5x", "adafactor", "t5x", "checkpoint_{step}"), "checkpoint"),
    "t5x: an array": (written("t5x", "t5x", "adafactor", "t5x", "checkpoint_{step}"), "target.*/0*"),
    "mxnet: .params": (written("mxnet", "mxnet-lamb", "lamb", "mxnet_fused", "."), "*.params"),
    "mxnet: .states": (written("mxnet", "mxnet-lamb", "lamb", "mxnet_fused", "."), "*.states"),
    "tf-bundle: the index": (written("tf-bundle", "tf-adam", "adamw", "tf1", "."), "*.index"),
    "tf-bundle: the data": (written("tf-bundle", "tf-adam", "adamw", "tf1", "."), "*.data-*"),
    "dcp-safetensors: a shard of slots": (in_shards, "*-00003-of-*.safetensors"),
    "dcp-safetensors: a shard of weights": (in_shards, "*-00001-of-*.safetensors"),
    "megatron: common.pt": (written("megatron", "megatron", "adamw", "torch", "iter_{step:07}"), "common.pt"),
    "megatron: a rank's file": (
        written("megatron", "megatron", "adamw", "torch", "iter_{step:07}"),
        "__0_0.distcp",
    ),
    "orbax: manifest.ocdbt": (
        written("orbax", "optax", "adamw", "optax", "{step}"),
        "default/manifest.ocdbt",
    ),
    "orbax: the only item": (written("orbax", "optax", "adamw", "optax", "{step}"), "default"),
    "flax: the file under another step's name": (
        written("flax", "optax", "adamw", "optax", "."),
        "checkpoint_*",
    ),
}


def mixed(make: Make, part: str, folder: Path) -> Path:
    """Puts a part of step 4 in its place in step 8; returns that."""
    old, new = (make(folder / f"{step}", step) for step in STEPS)
    if old.is_file():
        shutil.copyfile(old, new)
        return new
    source, there = (next(iter(sorted(place.glob(part)))) for place in (old, new))
    if source.is_dir():
        shutil.rmtree(there)
        shutil.copytree(source, there)
    else:
        shutil.copyfile(source, there)
    return new


def noticed(checkpoint: Path) -> str:
    """Says how a mixed checkpoint was noticed; "" if it wasn't."""
    return looked_at(checkpoint)[0]


def looked_at(checkpoint: Path) -> tuple[str, tuple[str, ...]]:
    """Says how a mixed checkpoint was noticed, and which files were said not to count."""
    try:
        planned = plan(checkpoint, checkpoint.parent / "target.statekit", to="statekit")
        with open_state(checkpoint) as opened:
            for tensor in opened.tensors.values():
                tensor.read()
    except StatekitError as error:
        return f"refused: {error.subject}", ()
    assert inspect(checkpoint).uncounted == planned.uncounted
    return "; ".join(f"{finding.what}" for finding in planned.findings), planned.uncounted


UNTOLD = {
    "hf-trainer: model.safetensors": "weights without a count",
    "hf-trainer: rng_state.pth": "states of random generators, which don't say when",
    "accelerate: model.safetensors": "weights without a count",
    "accelerate: random_states_0.pkl": "states of random generators, which don't say when",
    "accelerate: custom_checkpoint_0.pkl": "an object of the user's own",
    "dcp-safetensors: a shard of weights": "weights without a count",
    "t5x: an array": "weights or a slot without a count",
    "mxnet: .params": "weights without a count; numbers in names may be epochs",
    "mxnet: .states": "slots whose counts nothing beside them has",
    "megatron: a rank's file": "weights and slots; their count is in common.pt",
}
"""What nothing in the files can tell -> why."""
SAME = {"dcp: .metadata": "it says shapes and places, which are those of the other step"}
"""What makes no difference -> why."""


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", MIXES)
def test_a_file_of_another_step_is_noticed(name: str, tmp_path: Path) -> None:
    make, part = MIXES[name]
    seen, uncounted = looked_at(mixed(make, part, tmp_path))
    silent, same = name in UNTOLD, name in SAME
    said = UNTOLD.get(name) or SAME.get(name) or seen.partition(": files of")[0]
    note("mixed", Row(name, 1, caught=int(bool(seen)), harmless=int(same), silent=int(silent), said=said))
    assert bool(seen) != (silent or same), seen
    file = part.partition("/")[0]
    assert any(fnmatchcase(one.rstrip("/"), file) for one in uncounted) == silent, uncounted


@pytest.mark.parametrize("name", SAME)
def test_what_makes_no_difference_makes_none(name: str, tmp_path: Path) -> None:
    make, part = MIXES[name]
    values = []
    for place in (make(tmp_path / "sound", STEPS[1]), mixed(make, part, tmp_path / "mixed")):
        with open_state(place) as opened:
            values.append({path: tensor.read().tobytes() for path, tensor in opened.tensors.items()})
    assert values[0] == values[1]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", [name for name in MIXES if not name.startswith("lightning")])
def test_files_of_one_step_are_passed_without_a_word(name: str, tmp_path: Path) -> None:
    assert noticed(MIXES[name][0](tmp_path / "sound", STEPS[1])) == ""


def test_an_inspection_says_it_too(tmp_path: Path) -> None:
    place = mixed(hf_trainer, "scheduler.pt", tmp_path)
    assert any("the schedule stands at step 4" in finding.what for finding in inspect(place).findings)


@pytest.mark.parametrize("length", [2, 3])
def test_a_schedule_of_epochs_is_no_file_of_another_step(length: int, tmp_path: Path) -> None:
    """Seen red: doctor said "files" of each run of Accelerate whose schedule is stepped once an epoch."""
    place = accelerate(tmp_path, 6)
    _, optimizer, scheduler = run(6 // length)
    saved = torch.load(place / "optimizer.bin")
    saved["param_groups"] = optimizer.state_dict()["param_groups"]
    torch.save(saved, place / "optimizer.bin")
    torch.save(scheduler.state_dict(), place / "scheduler.bin")
    (examined,) = doctor(place)
    assert not examined.findings
    assert any("stepped once an epoch" in note for note in examined.notes)


def test_what_nothing_tells_is_named_until_a_manifest_does(tmp_path: Path) -> None:
    place = hf_trainer(tmp_path, 4)
    for command in (["inspect", place], ["convert", place, tmp_path / "a.statekit", "--dry-run"]):
        shown = " ".join(CliRunner().invoke(cli, [*map(str, command)]).output.split())
        assert "not provable to be of this step: model.safetensors, rng_state.pth; `statekit seal`" in shown
    names = ["model.safetensors", "rng_state.pth"]
    assert inspect(place).to_json()["integrity"]["uncounted"] == names
    made = statekit.convert(statekit.plan(place, tmp_path / "there", to="hf-trainer"))
    assert made.to_json()["uncounted"] == names
    CliRunner().invoke(cli, ["seal", str(place)], catch_exceptions=False)
    assert inspect(place).uncounted == ()


def test_a_load_warns_of_it(tmp_path: Path) -> None:
    place, model = mixed(hf_trainer, "optimizer.pt", tmp_path), run(0)[0]
    with pytest.warns(UserWarning, match="says step 8, the optimizer has done 4 updates") as caught:
        statekit.torch.load_optimizer(place, model.named_parameters())
    assert {warning.filename for warning in caught} == {__file__}


def test_a_schedule_that_each_of_several_processes_moved_is_of_the_same_step(tmp_path: Path) -> None:
    place = accelerate(tmp_path, 4)
    (place / "random_states_1.pkl").write_bytes((place / "random_states_0.pkl").read_bytes())
    torch.save(run(8)[2].state_dict(), place / "scheduler.bin")
    assert noticed(place) == ""


@pytest.mark.parametrize("files", [5, ["random_states_0.pkl"], None])
def test_a_run_that_calls_something_else_files_has_one_process(files: Any, tmp_path: Path) -> None:
    """Seen red: `inspect` had failed of itself where this was no mapping, and where the tree was a list."""
    model, optimizer, _ = run(4)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "files": files}
    torch.save(saved, tmp_path / "run.pt")
    assert noticed(tmp_path / "run.pt") == ""


@pytest.mark.parametrize(
    ("make", "file"),
    [
        (hf_trainer, "optimizer.pt"),
        (hf_trainer, "scheduler.pt"),
        (hf_trainer, "rng_state.pth"),
        (accelerate, "optimizer.bin"),
        (accelerate, "random_states_0.pkl"),
    ],
)
def test_a_file_that_isnt_there_is_named(make: Make, file: str, tmp_path: Path) -> None:
    place = make(tmp_path, 4)
    (place / file).unlink()
    assert any(finding.what.startswith(file[:9]) for finding in inspect(place).findings)


@pytest.mark.parametrize(
    ("pattern", "make"),
    [("optimizer.*", hf_trainer), ("optimizer.bin", accelerate)],
)
def test_a_sharded_optimizer_in_its_place_is_named(pattern: str, make: Make, tmp_path: Path) -> None:
    place = make(tmp_path, 4)
    next(place.glob(pattern)).unlink()
    (place / "optimizer_0").mkdir()
    (sentence,) = [one.what for one in inspect(place).findings if one.what.startswith(pattern)]
    assert "optimizer_0" in sentence and "FSDP" in sentence
    assert "begins with" not in sentence and "finds no" not in sentence


@pytest.mark.parametrize("make", [hf_trainer, accelerate])
def test_a_schedule_of_evaluations_counts_no_updates(make: Make, tmp_path: Path) -> None:
    place, (_, optimizer, _) = make(tmp_path, 8), run(8)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for loss in (2.0, 1.0):
        schedule.step(loss)
    torch.save(schedule.state_dict(), next(place.glob("scheduler.*")))
    assert noticed(place) == ""


def test_a_schedule_of_epochs_may_be_one(tmp_path: Path) -> None:
    place, (_, optimizer, _) = accelerate(tmp_path, 8), run(8)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    schedule.step()
    torch.save(schedule.state_dict(), place / "scheduler.bin")
    assert "or the schedule counts something else" in noticed(place)


@pytest.mark.parametrize(
    ("container", "name", "says"),
    [
        ("orbax", "model_20240101", False),
        ("orbax", "20240101", True),
        ("flax", "model_20240101", False),
        ("flax", "checkpoint_3", True),
    ],
)
def test_a_number_in_a_name_is_a_step_where_the_library_puts_it(
    container: str, name: str, says: bool, tmp_path: Path
) -> None:
    step = "{step}" if container == "orbax" else "checkpoint_{step}"
    place = written(container, "optax", "adamw", "optax", step)(tmp_path / "run", 8)
    said = noticed(place.rename(place.with_name(name)))
    assert ("or the name counts something else" in said) == says and bool(said) == says
