"""Folders of Trainer, Accelerate and plain safetensors: read as recorded, written so that the libraries load them."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_files import save, torch_zip

import statekit
from goldens import GOLDEN, bundles
from replaying import BACKENDS, marks
from statekit.arrays.backend import backend
from statekit.attestation.doctor import doctor
from statekit.budget import Limits
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.converters.containers.huggingface import folder as hf_folder
from statekit.converters.containers.huggingface import hf_trainer, safetensors
from statekit.converters.containers.torch_file import CONTAINER as TORCH
from statekit.errors import (
    CorruptError,
    FormatError,
    NotFoundError,
    RefusedError,
    StateError,
    StatekitError,
    UsageError,
)
from statekit.files.safetensors import save_safetensors
from statekit.tensors.tensor import in_memory, same_values
from statekit.verify.recording import Recording, open_recording
from statekit.verify.replay import Subject, replay
from statekit.verify.start_state import native_state

CONTAINERS = ("hf-trainer", "accelerate", "safetensors", "dcp-safetensors", "fsdp1-ranks")
WRITTEN = ("hf-trainer", "accelerate", "safetensors")
LAYOUT = {"dcp-safetensors": "torch-fqn-flat"}


def container_of(path: Path) -> str:
    try:
        return registry.detect_container(path)[0].name
    except StatekitError:
        return ""


def _recorded() -> dict[str, Path]:
    """Bundles whose checkpoint is a folder of these, by name."""
    folders = {}
    for folder in (one for system in ("torch_formats", "hf_adafactor") for one in bundles(system)):
        try:
            with open_recording(folder) as recording:
                if container_of(folder / recording.checkpoint) in CONTAINERS:
                    folders[f"{folder.parent.name}/{folder.name}"] = folder
        except NotFoundError:
            continue
    return folders


RECORDED = _recorded()
by_recording = pytest.mark.parametrize("folder", RECORDED.values(), ids=RECORDED)


def source_of(folder: Path) -> Path:
    with open_recording(folder) as recording:
        return folder / recording.checkpoint


def assert_state(recording: Recording, path: Path) -> None:
    """Holds a checkpoint to the recorded state."""
    step = recording.checkpoint_step
    assert step is not None
    said = recording.state(step, recording.trajectories[0], step + 1)
    with native_state(path, said) as ours:
        assert ours.counts == said.counts and ours.params.keys() == said.params.keys()
        for param, tensors in said.slots.items():
            assert same_values(ours.params[param], said.params[param]), param
            assert ours.slots[param].keys() == tensors.keys(), param
            assert all(same_values(ours.slots[param][slot], tensors[slot]) for slot in tensors), param


def test_there_are_recordings() -> None:
    kinds = {container_of(source_of(folder)) for folder in RECORDED.values()}
    assert kinds == (set(CONTAINERS) if "shared" in GOLDEN.parts else {"hf-trainer", "safetensors"})


@by_recording
def test_a_recorded_folder_is_the_recorded_state_there_and_back(folder: Path, tmp_path: Path) -> None:
    with open_recording(folder) as recording:
        source = folder / recording.checkpoint
        assert_state(recording, source)
        name = container_of(source)
        convert(plan(source, tmp_path / "neutral", to="statekit"))
        origins = () if name == "fsdp1-ranks" else (source, tmp_path / "neutral")
        for i, origin in enumerate(origins):
            target = tmp_path / f"again{i}"
            convert(plan(origin, target, to=name, layout=LAYOUT.get(name, "torch-optim")))
            assert_state(recording, target)
            written = next(target.rglob("optimizer*")).parent
            for (
                file
            ) in source.iterdir():  # torch files are other archives of the same; shards may be one file
                if file.name == "optimizer_hyperparameters.json":
                    assert json.loads((written / file.name).read_bytes()) == json.loads(file.read_bytes())
                elif (
                    file.suffix not in (".pt", ".safetensors")
                    and ".index" not in file.name
                    and file.stem not in ("optimizer", "scheduler")
                ):
                    assert (written / file.name).read_bytes() == file.read_bytes(), file.name
            if (source / "model.safetensors").is_file():
                model = (written / "model.safetensors").read_bytes()
                assert model == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        pytest.param(n, f, id=f"{n}-{case}", marks=marks(n, n != "numpy"))
        for n in BACKENDS
        for case, f in RECORDED.items()
    ],
)
def test_training_goes_on_from_the_folder(name: str, folder: Path) -> None:
    with open_recording(folder) as recording:
        result = replay(Subject(recording), backend(name))
        assert result.start == "checkpoint" and result.passed


def test_a_slot_that_changed_is_noticed(tmp_path: Path) -> None:
    folder = RECORDED["torch_formats/adamw_trainer"]
    with open_recording(folder) as recording:
        shutil.copytree(folder / recording.checkpoint, tmp_path / "spoilt")
        with TORCH.open(tmp_path / "spoilt" / "optimizer.pt") as opened:
            tree = dict(opened.tree)
            slots = tree["state"][3]
            turned = in_memory(slots["exp_avg"].read().T.copy())
            tree["state"] = {**tree["state"], 3: {**slots, "exp_avg": turned}}
            (tmp_path / "spoilt" / "optimizer.pt").unlink()
            save(tmp_path / "spoilt" / "optimizer.pt", tree)
        with pytest.raises(AssertionError):
            assert_state(recording, tmp_path / "spoilt")


def arrays(**shapes: tuple[int, ...]) -> dict[str, Any]:
    random = np.random.default_rng(3)
    return {n: in_memory(random.normal(size=s).astype(np.float32)) for n, s in shapes.items()}


def made(
    names: Mapping[str, tuple[int, ...]], groups: tuple[tuple[str, ...], ...] = (), **more: Any
) -> dict[str, Any]:
    """Returns the tree of a run with AdamW; a state has the values of its parameter, so that a swap is seen."""
    model = arrays(**names)
    order = [name for group in (groups or (tuple(names),)) for name in group]
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    at = iter(range(len(order)))
    listed = [
        {**options, "maximize": False, "params": [next(at) for _ in group]}
        for group in (groups or (tuple(names),))
    ]
    step = in_memory(np.asarray(5, np.float32))
    state = {
        i: {"step": step, "exp_avg": model[name], "exp_avg_sq": model[name]} for i, name in enumerate(order)
    }
    return {"model": model, "optimizer": {"state": state, "param_groups": listed}, **more}


def assert_paired(path: Path, hints: CheckpointRef | None = None) -> tuple[str, ...]:
    """Checks that every slot is its own parameter's; returns what was assumed."""
    with open_state(path, hints=hints or Hints()) as opened:
        state = opened.state
        assert state.params
        assert all(same_values(state.slots[p]["m"], tensor) for p, tensor in state.params.items())
        return state.assumptions


DIFFERENT = {"w.a": (2, 3), "w.b": (4,), "c": (5, 1)}


def test_a_folder_of_accelerate_without_its_model_is_none(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", made(DIFFERENT))
    convert(plan(source, tmp_path / "run", to="accelerate"))
    (tmp_path / "run/statekit.json").unlink()
    assert registry.container("accelerate").detect(tmp_path / "run")
    (tmp_path / "run/model.safetensors").unlink()
    assert not registry.container("accelerate").detect(tmp_path / "run")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_torch_file_becomes_a_folder_and_again_a_torch_file(name: str, tmp_path: Path) -> None:
    files = {"notes.txt": in_memory(np.frombuffer(b"hello", np.uint8).copy())}
    more: dict[str, Any] = {"epoch": 3, "scheduler": {"last_epoch": 5}, "files": files, "ema": arrays(e=(3,))}
    source = save(tmp_path / "a.pt", made(DIFFERENT, **more))
    target = tmp_path / "folder"
    convert(plan(source, target, to=name))
    assert container_of(target) == name
    assert_paired(target)
    assert next(target.rglob("notes.txt")).read_bytes() == b"hello"
    convert(plan(target, tmp_path / "b.pt"))
    with TORCH.open(source) as before, TORCH.open(tmp_path / "b.pt") as after:
        assert before.tree.keys() <= after.tree.keys()
        assert after.tree["epoch"] == 3 and after.tree["scheduler"] == {"last_epoch": 5}
        for one in ("ema/e", "files/notes.txt", "model/c"):
            assert same_values(before.tensors[one], after.tensors[one])
    again = tmp_path / "again"
    convert(plan(source, again, to=name))
    for file in (one for one in target.rglob("*") if one.is_file()):
        assert (again / file.relative_to(target)).read_bytes() == file.read_bytes(), file


def test_trainer_gets_the_files_without_which_it_ignores_an_optimizer(tmp_path: Path) -> None:
    convert(plan(save(tmp_path / "a.pt", made(DIFFERENT)), tmp_path / "run", to="hf-trainer"))
    folder = tmp_path / "run" / "checkpoint-5"
    with TORCH.open(folder / "scheduler.pt") as opened:
        assert opened.tree == {"last_epoch": 5, "_step_count": 6, "lr_lambdas": [None], "_last_lr": [0.1]}
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == 5 and state["train_batch_size"] == 0
    convert(plan(tmp_path / "a.pt", tmp_path / "checkpoint-5", to="hf-trainer"))
    assert (tmp_path / "checkpoint-5" / "optimizer.pt").is_file()
    with pytest.raises(UsageError, match="named for another step"):
        convert(plan(tmp_path / "a.pt", tmp_path / "checkpoint-6", to="hf-trainer"))


def test_parts_that_lie_elsewhere_are_brought_to_their_files(tmp_path: Path) -> None:
    tree = made(DIFFERENT)
    lightning = {
        "state_dict": tree["model"],
        "optimizer_states": [tree["optimizer"]],
        "lr_schedulers": [{"last_epoch": 4}],
        "epoch": 1,
    }
    source = save(tmp_path / "a.ckpt", lightning)
    convert(plan(source, tmp_path / "run", to="accelerate"))
    assert_paired(tmp_path / "run")
    with TORCH.open(tmp_path / "run" / "scheduler.bin") as opened:
        assert opened.tree == {"last_epoch": 4}
    loose = save(tmp_path / "b.pt", {**tree["model"], "optimizer": tree["optimizer"], "epoch": 1})
    convert(plan(loose, tmp_path / "plain", to="safetensors", layout="torch-optim"))
    assert_paired(tmp_path / "plain")


def test_large_models_are_cut_where_the_library_reads_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "a.pt", made(DIFFERENT))
    for name, limit in (("safetensors", 40), ("accelerate", None)):
        kind = registry.container(name)
        assert kind.shard_bytes == (5 * 10**9 if limit else None)  # type: ignore[attr-defined]  # a field of this kind alone
    small = hf_folder.HuggingFaceFolder(
        "safetensors", "", safetensors.CONTAINER.parts, safetensors.CONTAINER.fits, shard_bytes=40
    )
    monkeypatch.setattr(
        registry, "container", lambda n, real=registry.container: small if n == small.name else real(n)
    )
    convert(plan(source, tmp_path / "cut", to="safetensors"))
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 60}
    assert list(index["weight_map"]) == list(DIFFERENT)
    assert sorted(set(index["weight_map"].values())) == [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    assert_paired(tmp_path / "cut")


def test_models_in_torch_files_are_read_too(tmp_path: Path) -> None:
    tree = made(DIFFERENT)
    halves = {"w.a": tree["model"]["w.a"]}, {n: tree["model"][n] for n in ("w.b", "c")}
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        save(folder / "optimizer.pt", tree["optimizer"])
        (folder / "trainer_state.json").write_text('{"global_step": 5, "log_history": [{"loss": NaN}]}')
    save(tmp_path / "one" / "pytorch_model.bin", tree["model"])
    for i, half in enumerate(halves):
        save(tmp_path / "two" / f"pytorch_model-{i}.bin", half)
    where = {name: f"pytorch_model-{i}.bin" for i, half in enumerate(halves) for name in half}
    (tmp_path / "two" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    for name in ("one", "two"):
        assert container_of(tmp_path / name) == "hf-trainer"
        assert_paired(tmp_path / name)


def test_what_has_no_place_in_the_tree_is_said_of_every_part(tmp_path: Path) -> None:
    tree = made(DIFFERENT)
    save(tmp_path / "pytorch_model.bin", tree["model"])
    save(tmp_path / "optimizer.pt", tree["optimizer"])
    (tmp_path / "trainer_state.json").write_text('{"global_step": 5}')
    schedule = OrderedDict(last_epoch=5)
    schedule.version = 2  # type: ignore[attr-defined]
    torch_zip(tmp_path / "scheduler.pt", pickle.dumps(schedule, 2))
    with registry.opened(hf_trainer.CONTAINER, tmp_path, None, Hints()) as opened:
        said = [(finding.what, Path(finding.place).name) for finding in opened.findings]
    assert ("attribute version of a dict has no place in the tree", "scheduler.pt") in said


def test_of_a_run_the_newest_step_is_taken(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    source = save(tmp_path / "a.pt", made(DIFFERENT))
    convert(plan(source, run / "checkpoint-5", to="hf-trainer"))
    shutil.copytree(run / "checkpoint-5", run / "checkpoint-40")
    state = run / "checkpoint-40" / "trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 5', '"global_step": 40'))
    (run / "checkpoint-41").mkdir()
    trainer = registry.container("hf-trainer")
    with trainer.open(run) as newest, trainer.open(run, 5) as given:
        assert (newest.step, newest.meta["steps"]) == (40, [5, 40])
        assert any("passed over" in finding.what for finding in newest.findings)
        assert given.path.name == "checkpoint-5"
    for path in (run, run / "checkpoint-40"):
        with pytest.raises(NotFoundError, match="step"):
            trainer.open(path, 7)


ALIKE = {"layers.2.q": (3, 3), "layers.2.k": (3, 3), "out": (3,)}
NUMBERED = {"layers.2.w": (3, 3), "layers.10.w": (3, 3), "out": (3,)}


def test_a_sorted_file_names_nobody_of_equal_shape(tmp_path: Path) -> None:
    tree = made(ALIKE)
    for name in ("sorted", "kept"):
        (tmp_path / name).mkdir()
        save(tmp_path / name / "optimizer.pt", tree["optimizer"])
    for name, order in (("sorted", sorted(ALIKE)), ("kept", list(ALIKE))):
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            save_safetensors(
                {n: tree["model"][n] for n in order},
                file,
                lambda _, one: [memoryview(one.read().tobytes())],
                {"format": "pt"},
            )
    with pytest.raises(StateError, match=r"sorts them by name(.|\n)*--param-names"):
        open_state(tmp_path / "sorted")
    assert any("order of the model part" in note for note in assert_paired(tmp_path / "kept"))
    assert assert_paired(tmp_path / "sorted", Hints(param_names=tuple(ALIKE))) == ()


def test_layers_of_a_sorted_file_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    tree = made(NUMBERED)
    save(tmp_path / "optimizer.pt", tree["optimizer"])
    with (tmp_path / "model.safetensors").open("wb") as file:
        save_safetensors(
            {name: tree["model"][name] for name in sorted(NUMBERED)},
            file,
            lambda _, one: [memoryview(one.read().tobytes())],
            {"format": "pt"},
        )
    assert any("order of their layers" in note for note in assert_paired(tmp_path))


def test_all_names_in_the_models_order_do_where_shapes_tell_groups_apart(tmp_path: Path) -> None:
    names = {"a.w": (3, 3), "a.bias": (3,), "z.w": (3, 3), "b.bias": (3,)}
    tree = made(names, (("a.w", "z.w"), ("a.bias", "b.bias")))
    source = save(tmp_path / "a.pt", {**tree, "model": dict(sorted(tree["model"].items()))})
    for given in (tuple(names), ("a.w", "z.w", "a.bias", "b.bias")):
        assert_paired(source, Hints(param_names=given))
    with pytest.raises(StateError, match="hasn't"):
        open_state(source, hints=Hints(param_names=("a.w", "nobody")))
    with pytest.raises(StateError, match="another number"):
        open_state(source, hints=Hints(param_names=("a.w",)))


def test_tied_weights_count_once_and_stay_tied(tmp_path: Path) -> None:
    tree = made({"embed": (4, 2), "b": (2,)})
    tree["model"]["head"] = tree["model"]["embed"]
    source = save(tmp_path / "a.pt", tree)
    assert_paired(source)
    convert(plan(source, tmp_path / "b.pt", layout="torch-optim"))
    assert_paired(tmp_path / "b.pt")
    with TORCH.open(tmp_path / "b.pt") as opened:
        assert opened.meta["storages"] == 4  # moments share their parameter's
        assert same_values(opened.tensors["model/head"], opened.tensors["model/embed"])


def test_slots_without_options_tell_their_optimizer(tmp_path: Path) -> None:
    """PyTorch's own writer saves tensors only."""
    names = {"adamw": ("exp_avg", "exp_avg_sq"), "hf": ("exp_avg_sq", "RMS"), "torch": ("variance",)}
    for variant, slots in names.items():
        model = arrays(a=(3,), b=(2,))
        step = in_memory(np.asarray(4, np.float32))
        model_and_slots = {f"optim.state.{n}.{slot}": one for n, one in model.items() for slot in slots}
        steps = {f"optim.state.{n}.step": step for n in model}
        folder = tmp_path / variant
        folder.mkdir()
        with (folder / "model.safetensors").open("wb") as file:
            save_safetensors(
                {**model, **model_and_slots, **steps},
                file,
                lambda _, one: [memoryview(one.read().tobytes())],
                {},
            )
        assert container_of(folder) == "dcp-safetensors"
        with open_state(folder) as opened:
            state = opened.state
            assert state.optimizer.schema == ("adamw" if variant == "adamw" else "adafactor")
            assert state.optimizer.variant == ("torch" if variant == "adamw" else variant)
            assert any("Only tensors were saved" in note for note in state.assumptions)
            assert not state.optimizer.groups[0].hyperparameters and state.counts.updates == 4
        hints = Hints({"learning_rate": 0.5})
        convert(plan(folder, tmp_path / f"{variant}.pt", layout="torch-optim", hints=hints))
        with open_state(tmp_path / f"{variant}.pt") as opened:
            assert dict(opened.state.optimizer.groups[0].hyperparameters) == {"learning_rate": 0.5}


# What a hostile or damaged folder can't do.


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = save(tmp_path / "a.pt", made(DIFFERENT))
    convert(plan(source, tmp_path / "checkpoint-5", to="hf-trainer"))
    (tmp_path / "checkpoint-5" / "statekit.json").unlink()
    return tmp_path / "checkpoint-5"


def test_code_is_never_run_and_never_carried(folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    evil = pickle.dumps(Canary(canary), 2)
    torch_zip(folder / "training_args.bin", evil)
    (folder / "random_states_0.pkl").write_bytes(evil)
    (folder / "custom.pkl").write_bytes(b"no pickle")
    with open_state(folder) as opened:
        assert hf_folder.FILES not in opened.checkpoint.tree
        carried = [finding for finding in opened.checkpoint.findings if "isn't carried" in finding.what]
        assert len(carried) == 3
    convert(plan(folder, tmp_path / "out", to="hf-trainer", layout="torch-optim"))
    assert not list((tmp_path / "out").rglob("training_args.bin"))
    for name in ("optimizer.pt", "scheduler.pt"):
        (folder / name).unlink()
        torch_zip(folder / name, evil)
        with pytest.raises(RefusedError):
            open_state(folder)
    assert not canary.exists()


def test_what_isnt_a_small_regular_file_isnt_carried(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_bytes(b"elsewhere")
    (folder / "link.txt").symlink_to(tmp_path / "secret")
    (folder / "sub").mkdir()
    (folder / "large.txt").write_bytes(b"12345")
    monkeypatch.setattr(Limits, "carried", 4)
    shutil.copy(folder / "optimizer.pt", folder / "optimizer.bin")
    shutil.copy(folder / "model.safetensors", folder / "pytorch_model.bin")
    with registry.container("hf-trainer").open(folder) as opened:
        assert hf_folder.FILES not in opened.tree
        assert sum("isn't carried" in finding.what for finding in opened.findings) == 5


def test_a_scheduler_that_is_an_object_is_carried_as_it_is(folder: Path, tmp_path: Path) -> None:
    torch_zip(folder / "scheduler.pt", b"\x80\x02cmine\nSchedule\n)\x81.")
    convert(plan(folder, tmp_path / "out", to="hf-trainer", layout="torch-optim"))
    written = next((tmp_path / "out").rglob("scheduler.pt"))
    assert written.read_bytes() == (folder / "scheduler.pt").read_bytes()


def test_a_state_that_is_no_json_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", made(DIFFERENT, trainer_state={"global_step": 5, "raw": b"x"}))
    with pytest.raises(UsageError, match="JSON"):
        convert(plan(source, tmp_path / "run", to="hf-trainer"))


def damaged(folder: Path, what: str) -> None:
    model = folder / "model.safetensors"
    if what == "truncated model":
        model.write_bytes(model.read_bytes()[:-3])
    elif what == "truncated optimizer":
        file = folder / "optimizer.pt"
        file.write_bytes(file.read_bytes()[:-30])
    elif what == "state no JSON":
        (folder / "trainer_state.json").write_text("{")
    elif what == "state no object":
        (folder / "trainer_state.json").write_text("[1]")
    elif what == "several models":
        shutil.copy(model, folder / "model_1.safetensors")
    else:
        names = {"shard elsewhere": "../model.safetensors", "shard missing": "gone.safetensors",
                 "shard a lie": "x.safetensors"}  # fmt: skip
        model.rename(folder / "x.safetensors")
        weights = dict.fromkeys(DIFFERENT, "x.safetensors")
        weights["nobody" if what == "shard a lie" else "c"] = names[what]
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("truncated model", FormatError),
        ("truncated optimizer", FormatError),
        ("state no JSON", FormatError),
        ("state no object", FormatError),
        ("several models", FormatError),
        ("shard elsewhere", FormatError),
        ("shard missing", NotFoundError),
        ("shard a lie", CorruptError),
    ],
)
def test_damage_is_an_error(folder: Path, what: str, error: type[StatekitError]) -> None:
    assert_paired(folder)
    damaged(folder, what)
    with pytest.raises(error):
        open_state(folder, container="hf-trainer")


def test_a_single_file_is_read_and_not_written(folder: Path, tmp_path: Path) -> None:
    with registry.container("safetensors").open(folder / "model.safetensors") as opened:
        assert list(opened.tree) == ["model"] and opened.tree["model"].keys() == DIFFERENT.keys()
    with pytest.raises(UsageError, match="single safetensors file"):
        convert(plan(folder, tmp_path / "x.safetensors", to="safetensors"))
    with pytest.raises(UsageError, match="holds a model"):
        convert(plan(folder, tmp_path / "x", to="safetensors", layout="statekit"))


@pytest.mark.torch
@pytest.mark.parametrize("case", ["torch_formats/adamw_trainer", "torch_formats/adamw_accelerate"])
def test_pytorch_goes_on_from_ours_as_from_the_original(case: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    if case not in RECORDED:
        pytest.skip("the compact recordings have Trainer's only")
    source = source_of(RECORDED[case])
    convert(plan(source, tmp_path / "ours", to=container_of(source)))
    ours = next((tmp_path / "ours").rglob("model.safetensors")).parent

    def moved(folder: Path) -> list[Any]:
        file = next(folder.glob("optimizer.*"))
        saved = torch.load(file, weights_only=True)
        weights = load_file(folder / "model.safetensors")
        order = [p for group in torch.load(ours / file.name)["param_groups"] for p in group["param_names"]]
        params = [torch.nn.Parameter(weights[name]) for name in order]
        sizes = iter([len(group["params"]) for group in saved["param_groups"]])
        left = iter(params)
        groups = [{"params": [next(left) for _ in range(n)]} for n in sizes]
        optimizer = torch.optim.AdamW(groups)
        optimizer.load_state_dict(saved)
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return params

    for theirs, param in zip(moved(source), moved(ours), strict=True):
        assert torch.equal(theirs, param)


def test_encoding_for_a_container_that_has_all_in_place_changes_nothing() -> None:
    tree = made(DIFFERENT, scheduler={"last_epoch": 1}, trainer_state={"global_step": 9})
    encoded = Encoded(tree, 5)
    assert hf_trainer.CONTAINER.fitted(encoded).tree == tree


@pytest.mark.torch
def test_one_optimizer_may_move_several_models_of_accelerate(tmp_path: Path) -> None:
    """As a real Accelerator saves two models. Seen red: refused, and doctor called the folder damaged."""
    import torch
    from safetensors.torch import save_file

    models = [torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)]
    optimizer: Any = torch.optim.AdamW([param for model in models for param in model.parameters()])
    models[1](models[0](torch.ones(3, 4))).square().sum().backward()
    optimizer.step()
    (folder := tmp_path / "run").mkdir()
    for model, name in zip(models, ("model.safetensors", "model_1.safetensors"), strict=True):
        save_file(model.state_dict(), folder / name)
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    with statekit.open(folder) as opened:
        assert {*opened.params} == {f"model{end}/{name}" for end in ("", "_1") for name in ("weight", "bias")}
        slot = opened.state.slots["model_1/weight"]["m"].read()
    assert np.array_equal(slot, optimizer.state[models[1].weight]["exp_avg"])
    (examined,) = doctor(folder)
    assert examined.findings == ()
