"""The layout statekit-torch: torch names outside, the canonical state inside, nothing lost between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_models import blank_model, set_grads

from formats import small_state, values
from goldens import GOLDEN, bundles
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.converters.layouts.own.statekit_torch import LAYOUT
from statekit.errors import InexactError, StateError, UsageError
from statekit.files.checkpoint import Checkpoint
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import in_memory
from statekit.tensors.tree import Record
from statekit.torch import load_optimizer, load_params
from statekit.verify.recording import Recording, open_recording

T5X = [pytest.param(path, id=path.name) for path in bundles("t5x")]


def checkpoint(tree: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint("torch", Path("x.pt"), tree)


def decoded(tree: Mapping[str, Any], **hints: Any) -> TrainState:
    assert LAYOUT.detect(checkpoint(tree)) is not None
    return LAYOUT.decode(checkpoint(tree), Hints(hints))


def state_of(bundle: Path, by_recording: bool = True) -> TrainState:
    with open_recording(bundle) as recording:
        step = recording.checkpoint_step or 0
        if by_recording:
            return recording.state(step, recording.trajectories[0], step + 1)
    with open_state(bundle / recording.checkpoint) as opened:
        return opened.state


def without_collision() -> TrainState:
    state = small_state()
    return replace(state, params={path: t for path, t in state.params.items() if path != "dense.kernel"})


@pytest.mark.parametrize("by_recording", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("bundle", T5X)
def test_a_state_comes_back_as_it_was(bundle: Path, by_recording: bool) -> None:
    state = state_of(bundle, by_recording)
    encoded = LAYOUT.encode(state)
    assert decoded(encoded.tree) == state
    assert (encoded.exactness, encoded.dropped, encoded.step) == ({}, {}, state.counts.updates)


def test_extra_and_counts_and_a_rate_come_back() -> None:
    state = without_collision()
    group = replace(
        state.optimizer.groups[0],
        hyperparameters={
            "learning_rate": 0.5,
            "multiply_by_parameter_scale": {"dense/kernel": True, "dense/bias": False},
        },
        known_from={"learning_rate": "given", "multiply_by_parameter_scale": "file"},
    )
    state = replace(
        state, counts=Counts(7, 9), optimizer=replace(state.optimizer, variant=None, groups=(group,))
    )
    tree = LAYOUT.encode(state).tree
    saved = tree["optimizer"]["param_groups"][0]
    assert (saved["lr"], saved["step"]) == (0.5, 7)
    assert saved["multiply_by_parameter_scale"] == {"dense.kernel": True, "dense.bias": False}
    assert saved["param_names"] == ["dense.kernel", "dense.bias"]
    assert saved["frozen"] == ["empty", "mask"]
    assert decoded(tree) == state


def test_names_that_collide_are_refused_on_both_ways() -> None:
    state = small_state()
    with pytest.raises(StateError) as caught:
        LAYOUT.encode(state)
    assert "has the torch name dense.kernel, as has dense/kernel @ dense.kernel" in str(caught.value)
    tree = LAYOUT.encode(without_collision()).tree
    tree["paths"]["mask"] = "empty"
    with pytest.raises(StateError, match="has the path empty, as has empty @ model/mask"):
        decoded(tree)


def test_a_dot_in_a_path_survives() -> None:
    state = without_collision()
    dotted = {path.replace("dense/", "dense.v1/"): tensor for path, tensor in state.params.items()}
    slots = {path.replace("dense/", "dense.v1/"): tensors for path, tensors in state.slots.items()}
    rules = {path.replace("dense/", "dense.v1/"): rule for path, rule in state.rules.items()}
    group = replace(state.optimizer.groups[0], paths=tuple(slots))
    state = replace(
        state, params=dotted, slots=slots, rules=rules, optimizer=replace(state.optimizer, groups=(group,))
    )
    assert decoded(LAYOUT.encode(state).tree) == state


def test_what_a_torch_file_cant_hold_is_named() -> None:
    state = without_collision()
    odd = {"iterator": {"train": Record("tensorflow.Iterator"), "position": 3}, "fine": {"a": (1, [None])}}
    encoded = LAYOUT.encode(replace(state, extra=odd))
    assert set(encoded.dropped) == {"extra/iterator/train", "extra/iterator/position"}
    assert encoded.tree["extra"] == {"fine": {"a": (1, [None])}}


def test_other_rules_are_refused() -> None:
    state = without_collision()
    foreign = Optimizer("lans", "raf", state.optimizer.groups)
    with pytest.raises(InexactError, match="variant raf"):
        LAYOUT.encode(replace(state, slots={}, rules={}, optimizer=foreign))
    group = replace(state.optimizer.groups[0], slots={"x": in_memory(np.zeros(1))})
    with pytest.raises(InexactError, match="slots of its own that its optimizer doesn't know"):
        LAYOUT.encode(replace(state, optimizer=replace(state.optimizer, groups=(group,))))


def test_hints_override() -> None:
    tree = LAYOUT.encode(without_collision()).tree
    group = decoded(tree, decay_rate=0.5).optimizer.groups[0]
    assert (group.hyperparameters["decay_rate"], group.known_from["decay_rate"]) == (0.5, "given")
    with pytest.raises(UsageError, match="beta_one"):
        decoded(tree, beta_one=0.5)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"model": {}, "optimizer": {"state": {}, "param_groups": []}},
        {"model": {}, "optimizer": {"state": {}, "param_groups": [{"params": [], "lr": 0.1}]}},
        {"optimizer": {"param_groups": {"params": 1, "param_names": 1, "rules": 1, "step": 1}}},
        [1, 2],
    ],
    ids=str,
)
def test_other_checkpoints_are_left_to_others(tree: Any) -> None:
    assert LAYOUT.detect(checkpoint(tree)) is None


def test_it_outweighs_a_plain_torch_layout() -> None:
    evidence = LAYOUT.detect(checkpoint(LAYOUT.encode(without_collision()).tree))
    assert evidence is not None
    assert evidence.specificity == 30


SPOILED: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "no model": (("model",), None, "there are no parameters @ model"),
    "no tensor": (("model", "dense.bias"), 3, "is no tensor @ model/dense.bias"),
    "names": (("optimizer", "param_groups", 0, "param_names"), ["dense.kernel"], "lists of one length"),
    "name": (("optimizer", "param_groups", 0, "param_names", 0), "dense.wrong", "isn't in model"),
    "kind of name": (("optimizer", "param_groups", 0, "param_names", 0), [], "aren't numbers and names"),
    "same index": (("optimizer", "param_groups", 0, "params", 1), 0, "numbers that aren't their own"),
    "step": (("optimizer", "param_groups", 0, "step"), -1, "step is -1"),
    "rules": (("optimizer", "param_groups", 0, "rules"), 1, "rules isn't a map"),
    "rule": (
        ("optimizer", "param_groups", 0, "rules", "dense.kernel"),
        {"axes": ["X"]},
        "is 'X', expected 'ROW' or 'COLUMN'",
    ),
    "source": (
        ("optimizer", "param_groups", 0, "known_from", "decay_rate"),
        "guess",
        "known_from is 'guess'",
    ),
    "value": (("optimizer", "param_groups", 0, "decay_rate"), "fast", "'fast', expected number"),
    "scale": (
        ("optimizer", "param_groups", 0, "multiply_by_parameter_scale"),
        {"dense.kernel": 1, "other": True},
        "expected boolean",
    ),
    "lr": (("optimizer", "param_groups", 0, "lr"), [1], "[1], expected number or null"),
    "state": (("optimizer", "state"), [], "isn't a map @ optimizer/state"),
    "stranger": (("optimizer", "state", 9), {}, "belongs to no parameter @ optimizer/state/9"),
    "slots": (("optimizer", "state", 0), 1, "isn't a map of slots"),
    "slot": (("optimizer", "state", 1, "v"), 1, "slot v of dense/bias is no tensor"),
    "paths": (("paths",), [], "has another form @ paths"),
    "schedule": (("schedule",), "late", "has another form @ schedule"),
}


@pytest.mark.parametrize(("place", "value", "message"), SPOILED.values(), ids=SPOILED)
def test_what_doesnt_fit_is_named(place: tuple[Any, ...], value: Any, message: str) -> None:
    tree = LAYOUT.encode(without_collision()).tree
    node = tree
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    with pytest.raises(StateError) as caught:
        decoded(tree)
    assert message in str(caught.value)


def test_all_faults_come_at_once() -> None:
    tree = LAYOUT.encode(without_collision()).tree
    group = tree["optimizer"]["param_groups"][0]
    group["decay_rate"], group["lr"], tree["optimizer"]["state"][0]["v_row"] = "fast", "high", None
    with pytest.raises(StateError, match="3 faults"):
        decoded(tree)


def test_slots_of_another_shape_are_refused() -> None:
    tree = LAYOUT.encode(without_collision()).tree
    tree["optimizer"]["state"][0]["v_row"] = in_memory(np.zeros(5, np.float32))
    with pytest.raises(StateError, match=r"v_row has shape \(5,\), expected \(8,\) @ dense/kernel"):
        decoded(tree)


# --- files ---


@pytest.mark.sampled
@pytest.mark.parametrize("folder", ["checkpoint", "checkpoint_orbax"])
@pytest.mark.parametrize("bundle", T5X)
def test_t5x_to_torch_to_t5x_gives_the_same_tensors(bundle: Path, folder: str, tmp_path: Path) -> None:
    with open_recording(bundle) as recording:
        step = recording.checkpoint_step
    source, there, back = bundle / folder / f"checkpoint_{step}", tmp_path / "there.pt", tmp_path / "back"
    convert(plan(source, there))
    convert(plan(there, back, to="t5x"))
    with open_state(source) as original, open_state(there) as torch_file, open_state(back) as returned:
        assert torch_file.layout == "statekit-torch"
        assert values(returned.checkpoint.tensors) == values(original.checkpoint.tensors)
        assert returned.state.counts == torch_file.state.counts == original.state.counts
        assert torch_file.state.assumptions == original.state.assumptions
        assert torch_file.state.rules == original.state.rules
        assert torch_file.state.optimizer == original.state.optimizer


@pytest.mark.torch
def test_pytorch_itself_reads_the_file(tmp_path: Path) -> None:
    bundle, file = GOLDEN / "t5x" / "momentum_bf16_wd", tmp_path / "run.pt"
    source = bundle / "checkpoint" / "checkpoint_4"
    convert(plan(source, file))
    loaded = torch.load(file, weights_only=True, mmap=True)
    with open_state(source) as opened:
        params = opened.state.params
        assert list(loaded["model"]) == [path.replace("/", ".") for path in params]
        for path, tensor in params.items():
            ours = loaded["model"][path.replace("/", ".")]
            assert np.array_equal(ours.to(torch.float32).numpy(), tensor.read().astype(np.float32))
    assert loaded["optimizer_class"] == "statekit.torch.Adafactor"
    assert loaded["optimizer"]["param_groups"][0]["lr"] is None


def trained_further(recording: Recording, file: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Resumes a T5X run, makes one update, and saves as PyTorch users do."""
    source, update = recording.folder / recording.checkpoint, (recording.checkpoint_step or 0) + 1
    with open_state(source) as opened:
        model = blank_model(opened.state.params)
    model.register_buffer("offsets", torch.arange(3))  # T5X's file has none, so this stays
    load_params(source, model)
    hyperparameters = dict(recording.phase(update).hyperparameters)
    optimizer = load_optimizer(source, model.named_parameters(), lr=0.01, hparams=hyperparameters)
    set_grads(model, recording.gradients(update))
    optimizer.step()
    beside = {"step": 12345, "epoch": 2, "rng": torch.get_rng_state()}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **beside}, file)
    return model, optimizer


@pytest.mark.torch
@pytest.mark.parametrize("case", ["momentum_f32", "multi_optimizer", "scale_map_maxscale_gnorm"])
def test_what_users_save_after_training_on_is_read(case: str, tmp_path: Path) -> None:
    file = tmp_path / "further.pt"
    with open_recording(GOLDEN / "t5x" / case) as recording:
        model, optimizer = trained_further(recording, file)
        update = (recording.checkpoint_step or 0) + 1
        recorded = recording.state(update, recording.trajectories[0], update)
    with open_state(file) as opened:
        state = opened.state
        assert opened.layout == "statekit-torch"
        assert opened.checkpoint.manifest is None
        assert state.counts == Counts(update, update)
        assert state.extra["torch"].keys() == {"step", "epoch", "rng"}
        assert list(state.extra["buffers"]) == ["offsets"]
        assert any("taken for buffers: offsets" in note for note in state.assumptions)
        assert state.params.keys() == recorded.params.keys()
        assert {p: set(s) for p, s in state.slots.items()} == {p: set(s) for p, s in recorded.slots.items()}
        assert {p: r.axes for p, r in state.rules.items()} == {p: r.axes for p, r in recorded.rules.items()}
        assert {g.paths for g in state.optimizer.groups} == {g.paths for g in recorded.optimizer.groups}
        for name, param in model.named_parameters():
            assert np.array_equal(state.params[name.replace(".", "/")].read(), param.detach().numpy())
            for slot, value in optimizer.state[param].items():
                assert np.array_equal(state.slots[name.replace(".", "/")][slot].read(), value.numpy())
        again = LAYOUT.encode(state)
        assert again.tree["step"] == 12345
        assert LAYOUT.decode(checkpoint(again.tree), Hints()) == state


@pytest.mark.torch
def test_groups_that_began_at_different_times_make_the_same_updates(tmp_path: Path) -> None:
    from statekit.torch import Adafactor

    def run(named: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        for param in named.values():
            param.grad = torch.linspace(-1, 1, param.numel()).reshape(param.shape)
        optimizer.step()

    old, new = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(3))
    optimizer = Adafactor([("old", old)], lr=0.1)
    run({"old": old}, optimizer)
    run({"old": old}, optimizer)
    optimizer.add_param_group({"params": [("new", new)]})
    run({"old": old, "new": new}, optimizer)
    model = torch.nn.Module()
    model.register_parameter("old", old)
    model.register_parameter("new", new)
    file = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    with open_state(file) as opened:
        assert opened.state.counts.updates == 3
        assert [g.hyperparameters["step_offset"] for g in opened.state.optimizer.groups] == [0, 2]
        assert any("group 1 has made 1 of 3" in note for note in opened.state.assumptions)
    copies = {name: torch.nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
    resumed = load_optimizer(file, copies.items())
    run(copies, resumed)
    run({"old": old, "new": new}, optimizer)
    assert torch.equal(copies["old"], old)
    assert torch.equal(copies["new"], new)


def test_a_group_without_parameters_is_kept() -> None:
    state = without_collision()
    groups = (*state.optimizer.groups, Group((), {"decay_rate": 0.5}, {"decay_rate": "file"}))
    state = replace(state, optimizer=replace(state.optimizer, groups=groups))
    assert decoded(LAYOUT.encode(state).tree) == state


def test_counts_and_rates_may_be_tensors() -> None:
    state = without_collision()
    tree = LAYOUT.encode(state).tree
    group = tree["optimizer"]["param_groups"][0]
    group["step"], group["lr"] = in_memory(np.asarray(7, np.int64)), in_memory(np.asarray(0.5, np.float32))
    state_read = decoded(tree)
    assert state_read.counts == state.counts
    assert state_read.optimizer.groups[0].hyperparameters["learning_rate"] == 0.5
    assert state_read.optimizer.groups[0].known_from["learning_rate"] == "file"
