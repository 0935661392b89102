"""Every family of optimizers, loaded by name from statekit folders and torch files, and written back bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_driving import RECORDED, Run, Tensors, differing, read, recorded_state, resume
from torch_models import blank_model

from formats import save
from goldens import COMPACT, GOLDEN
from replaying import present
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.converters.layouts.own.statekit_torch import CLASSES, LAYOUT
from statekit.errors import StateError, UsageError
from statekit.files.checkpoint import Checkpoint
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, TrainState
from statekit.torch import load_optimizer, load_params
from statekit.verify.recording import open_recording

pytestmark = pytest.mark.torch

FAMILIES = [pytest.param(name, id=name) for name in RECORDED]


def decoded(tree: Mapping[str, Any], **hints: Any) -> TrainState:
    checkpoint = Checkpoint("torch", Path("x.pt"), tree)
    assert LAYOUT.detect(checkpoint) is not None
    return LAYOUT.decode(checkpoint, Hints(hints))


def loaded(path: Path, **options: Any) -> Run:
    """Loads a checkpoint into a blank model of another order."""
    with open_state(path) as opened:
        model = blank_model(opened.state.params)
    load_params(path, model)
    optimizer = load_optimizer(path, model.named_parameters(), **options)
    return Run({name.replace(".", "/"): param for name, param in model.named_parameters()}, optimizer)


def test_every_family_has_a_class() -> None:
    others = {"muon"} | ({"lamb"} if GOLDEN == COMPACT else set())  # Muon's recordings are test_muon_dropin's
    assert set(RECORDED.values()) == set(CLASSES) - others


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layout_gives_a_state_back_as_it_was(name: str) -> None:
    state = recorded_state(name)
    assert decoded(LAYOUT.encode(state).tree) == state
    updates, paths = state.counts.updates, [path for g in state.optimizer.groups for path in g.paths]
    behind = replace(state, counts=Counts(updates, updates, {paths[0]: updates - 1}))
    assert decoded(LAYOUT.encode(behind).tree) == behind


@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_is_loaded_from_every_file_and_written_back(name: str, tmp_path: Path) -> None:
    state = recorded_state(name)
    folder = save(replace(state, extra={}), tmp_path / "folder")
    convert(plan(folder, tmp_path / "run.pt", layout="statekit-torch"))
    for source in (folder, tmp_path / "run.pt"):
        run = loaded(source)
        assert type(run.optimizer).__name__ == CLASSES[state.optimizer.schema].rpartition(".")[2]
        assert run.optimizer.param_groups[0]["variant"] == state.optimizer.variant
        assert run.optimizer.param_groups[0]["step"] == state.counts.updates
        assert differing(run.tensors(), read(state)) == []
    names = {name.replace("/", "."): param for name, param in run.params.items()}
    saved = {"model": names, "optimizer": run.optimizer.state_dict(), "step": state.counts.updates}
    torch.save(saved, tmp_path / "again.pt")
    convert(plan(tmp_path / "again.pt", tmp_path / "statekit-back"))
    with open_state(tmp_path / "statekit-back") as opened:
        assert differing(read(opened.state), read(state)) == []
        assert opened.state.counts.updates == state.counts.updates
        assert opened.state.optimizer.variant == state.optimizer.variant
        for group, other in zip(opened.state.optimizer.groups, state.optimizer.groups, strict=True):
            assert set(group.paths) == set(other.paths)
            said = {key: value for key, value in other.hyperparameters.items() if value is not None}
            assert {key: group.hyperparameters.get(key) for key in said} == said


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_file_cant_tell_is_asked_for(name: str, tmp_path: Path) -> None:
    state = recorded_state(name)
    variant, schema = state.optimizer.variant, state.optimizer.schema
    unsaid = replace(state, optimizer=replace(state.optimizer, variant=None), extra={})
    folder = save(unsaid, tmp_path / "folder")
    with pytest.raises(UsageError) as caught:
        loaded(folder)
    for candidate in load_schema(schema).stepped:
        assert candidate in str(caught.value)
    run = loaded(folder, variant=variant)
    assert run.optimizer.param_groups[0]["variant"] == variant
    assert differing(run.tensors(), read(state)) == []
    with pytest.raises(UsageError, match=r"no variant of that name(.|\n)*found: nowhere"):
        loaded(folder, variant="nowhere")


def test_overrides_are_those_of_the_family(tmp_path: Path) -> None:
    name = next(name for name, schema in RECORDED.items() if schema == "scaled_adam")
    folder = save(replace(recorded_state(name), extra={}), tmp_path / "folder")
    run = loaded(folder, lr=0.5, betas=[0.8, 0.9])
    assert (run.optimizer.param_groups[0]["lr"], run.optimizer.param_groups[0]["betas"]) == (0.5, [0.8, 0.9])
    with pytest.raises(UsageError) as caught:
        loaded(folder, size_update_period=2, beta1=0.5, step_offset="reset")
    for part in ("which slots there are @ size_update_period=2", "@ beta1=0.5", "@ step_offset='reset'"):
        assert part in str(caught.value)


SPOILED: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "schema": (("optimizer", "param_groups", 0, "schema"), "sgd", "is of 'sgd'"),
    "variant": (("optimizer", "param_groups", 0, "variant"), "nowhere", "variant 'nowhere'"),
    "behind": (("optimizer", "param_groups", 0, "behind"), [1], "behind isn't a map"),
    "count": (("optimizer", "param_groups", 0, "behind"), {"*": -1}, "expected a count"),
    "slots": (("optimizer", "param_groups", 0, "slots"), [1], "slots isn't a map"),
    "slot": (("optimizer", "param_groups", 0, "slots"), {"model_norms": 3}, "slot model_norms of the group"),
    "by name": (("optimizer", "param_groups", 0, "lr_mult"), {"other": 1.0}, "for a parameter of model"),
}


@pytest.mark.parametrize(("place", "value", "message"), SPOILED.values(), ids=SPOILED)
def test_what_doesnt_fit_is_named(place: tuple[Any, ...], value: Any, message: str) -> None:
    name = next(name for name, schema in RECORDED.items() if schema == "lans")
    tree = LAYOUT.encode(recorded_state(name)).tree
    node = tree
    for key in place[:-1]:
        node = node[key]
    if value == {"*": -1}:
        value = {node["param_names"][0]: -1}
    node[place[-1]] = value
    with pytest.raises(StateError) as caught:
        decoded(tree)
    assert message in str(caught.value)


def test_groups_of_two_optimizers_are_no_state() -> None:
    name = next(name for name, schema in RECORDED.items() if schema == "scaled_adam")
    tree = LAYOUT.encode(recorded_state(name)).tree
    groups = tree["optimizer"]["param_groups"]
    groups.append({**groups[0], "params": [], "param_names": [], "variant": "pt7"})
    with pytest.raises(StateError, match="variant pt7, unlike the file"):
        decoded(tree)


NATIVE = {
    "torch_formats/adamw_legacy": None,
    "torch_adafactor/adamw_fused_named": None,
    "torch_adafactor/adafactor_bf16": None,
    "scaled_adam/gptsovits_basic": "gptsovits",
    "scaled_adam/zipformer202407_clipping": "zip202407",
    "scaled_adam/zipformer2025_basic": "zip2025",
    "optax_adafactor/adafactor_orbax_v1": None,
    "optax_adafactor/lamb_pytree_noocdbt": None,
    "mesh_tf/adafactor_bf16_master_t5": None,
    "mesh_tf/adamw_2device_stacked_sharded": "mesh_tf",
    "t2t/late_beta1_scaled_extlr": "t2t_late",
    "t2t/late_bf16_encoded_beta1": "t2t_late",
}
"""Recordings of systems whose own files are readable -> the variant, where these can't tell it."""
TELLING = ("torch_formats", "torch_adafactor", "scaled_adam")
"""Systems whose files hold the hyperparameters."""


@pytest.mark.parametrize("name", present(*NATIVE))
def test_originals_go_on_from_their_own_files(name: str) -> None:
    with open_recording(GOLDEN / name) as recording:
        step = recording.checkpoint_step or 0
        there = recording.state(step, recording.trajectories[0], min(step + 1, recording.last))
        run = loaded(recording.folder / recording.checkpoint, variant=NATIVE[name])
        group = run.optimizer.param_groups[0]
        assert (group["variant"], group["step"]) == (there.optimizer.variant, step)
        assert differing(slots(run.tensors()), slots(read(there))) == []
        if name.partition("/")[0] in TELLING:
            other = resume(there)
            assert differing(run.tensors(), other.tensors()) == []
            for update in range(step + 1, recording.last + 1):
                run.update(recording, update)
                other.update(recording, update)
            assert differing(run.tensors(), other.tensors()) == []


def slots(tensors: Tensors) -> Tensors:
    """Leaves parameters out: some systems save them in less than they are recorded in."""
    return {key: value for key, value in tensors.items() if key[1] != "param"}
