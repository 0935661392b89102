"""A T5X run goes on in PyTorch: from its own folder, by name, with the updates that T5X made.

How far apart float32 results may be: T5X under XLA and PyTorch round the same arithmetic, but sum in another order.
A mean of n squares is off by at most log2(n)/2 ulps when summed in pairs (n <= 20480 here: 7), its operands, the
decay and the weighted sum by 3 more, on either side: 20 ulps. Second moments and momentum are weighted averages of
such terms, so this doesn't grow with the steps, and a parameter moves by less than its own size.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_models import blank_model, module_of, set_grads

from formats import save, small_state
from goldens import GOLDEN, bundles
from statekit.arrays.backend import backend
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.registry import layout
from statekit.errors import NotFoundError, StateError, UnknownRuleError, UsageError
from statekit.files.safetensors import open_safetensors
from statekit.state.train_state import Axis, Optimizer, TrainState
from statekit.tensors.tensor import Array, Tensor
from statekit.torch import Adafactor, load_optimizer, load_params
from statekit.verify.recording import Recording, open_recording
from statekit.verify.replay import Subject, free_run

pytestmark = pytest.mark.torch

T5X = [pytest.param(path, id=path.name) for path in bundles("t5x")]
FLOAT32 = [param for param in T5X if not str(param.id).startswith(("bf16", "momentum_bf16"))]
ABSENT = pytest.mark.skip(reason="the compact copy of the recordings has no whole networks")
TRAINED = [
    pytest.param(path, id=path.name)
    for path in bundles("t5x_train")
    if (path / "grads.safetensors").is_file()
] or [pytest.param(Path(), id="absent", marks=ABSENT)]
NEAR = 20 * 2.0**-23
"""How far float32 results may be apart, relative to a tensor's largest element."""


def numpy(value: torch.Tensor) -> Array:
    return backend("torch").numpy(value)


def first_update(recording: Recording) -> int:
    return (recording.checkpoint_step or 0) + 1


def resumed(
    recording: Recording, folder: str = "", **options: Any
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Loads a recording's native checkpoint into a model of another order, and its optimizer."""
    source = recording.folder / (folder or recording.checkpoint)
    with open_state(source) as opened:
        model = blank_model(opened.state.params)
    load_params(source, model)
    hyperparameters = options.pop("hparams", recording.hints(first_update(recording)).hyperparameters)
    return model, load_optimizer(source, model.named_parameters(), hparams=hyperparameters, **options)


def go_on(recording: Recording, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes the rest of the recorded updates."""
    for update in range(first_update(recording), recording.last + 1):
        set_grads(model, recording.gradients(update))
        for group in optimizer.param_groups:
            group["lr"] = recording.rate(update)
        optimizer.step()


def results(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Array]:
    arrays = {}
    for name, param in model.named_parameters():
        path = name.replace(".", "/")
        arrays[path] = numpy(param)
        arrays |= {f"{path} {slot}": numpy(value) for slot, value in optimizer.state[param].items()}
    return arrays


def tensors(state: TrainState) -> dict[str, Tensor]:
    slots = {f"{path} {slot}": t for path, tensors in state.slots.items() for slot, t in tensors.items()}
    return {**state.params, **slots}


def faraway(ours: Mapping[str, Array], recorded: TrainState) -> list[str]:
    """Names what is farther from the recording than rounding explains."""
    theirs = {name: tensor.read() for name, tensor in tensors(recorded).items()}
    assert ours.keys() == theirs.keys()
    return [name for name, want in theirs.items() if not near(ours[name], want)]


def near(got: Array, want: Array) -> bool:
    """Tells whether rounding explains a difference; where results are bfloat16, a tie may give the neighbour."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if want.dtype.itemsize == 2:
        return bool(np.max(np.abs(got.view(np.int16).astype(int) - want.view(np.int16))) <= 1)
    finite = np.isfinite(want)
    largest = float(np.max(np.abs(want[finite]), initial=0.0))
    gap = float(np.max(np.abs(got[finite] - want[finite]), initial=0.0))
    return gap <= NEAR * largest and np.array_equal(got[~finite], want[~finite], equal_nan=True)


@pytest.mark.parametrize("folder", ["checkpoint", "checkpoint_orbax"])
@pytest.mark.parametrize("path", FLOAT32)
def test_training_goes_on_as_t5x_recorded_it(path: Path, folder: str) -> None:
    with open_recording(path) as recording:
        model, optimizer = resumed(recording, folder)
        assert isinstance(optimizer, Adafactor)
        start = recording.state(first_update(recording) - 1, recording.trajectories[0], recording.last)
        for name, tensor in tensors(start).items():
            assert np.array_equal(results(model, optimizer)[name], tensor.read(), equal_nan=True), name
        go_on(recording, model, optimizer)
        end = recording.state(recording.last, recording.trajectories[0], recording.last)
        assert faraway(results(model, optimizer), end) == []
        assert {group["step"] for group in optimizer.param_groups} == {recording.last}


@pytest.mark.parametrize("path", FLOAT32)
def test_moved_one_by_one_it_steps_exactly_as_replay_does(path: Path) -> None:
    with open_recording(path) as recording:
        model, optimizer = resumed(recording)
        for group in optimizer.param_groups:
            group["foreach"] = False
        go_on(recording, model, optimizer)
        (replayed,) = deque(free_run(Subject(recording), backend("torch")), maxlen=1)
        ours = results(model, optimizer)
        assert {name: t.read().tobytes() for name, t in tensors(replayed).items()} == {
            name: array.tobytes() for name, array in ours.items()
        }


@pytest.mark.parametrize("case", ["bf16_params", "momentum_bf16_wd"])
def test_low_precision_goes_on_as_compiled_t5x_recorded_it(case: str) -> None:
    with open_recording(GOLDEN / "t5x" / case) as recording:
        compiled = recording.trajectories[1]
        assert compiled.execution == "compiled"
        model, optimizer = resumed(recording)
        # The checkpoint is the op-by-op run's; the compiled run stood elsewhere then.
        update = first_update(recording)
        there = recording.state(update - 1, compiled, update)
        model = module_of(
            {p: backend("torch").asarray(t.read()) for p, t in there.params.items()}, there.params
        )
        saved = layout("statekit-torch").encode(there).tree["optimizer"]
        optimizer = Adafactor(model.named_parameters(), **unlike(optimizer))
        optimizer.load_state_dict(saved)
        go_on(recording, model, optimizer)
        end = recording.state(recording.last, compiled, recording.last)
        assert faraway(results(model, optimizer), end) == []
        eager = recording.state(recording.last, recording.trajectories[0], recording.last)
        assert faraway(results(model, optimizer), eager) != []


def unlike(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns options that a loaded state has to outweigh."""
    return {"decay_rate": 0.5, "epsilon2": optimizer.param_groups[0]["epsilon2"] * 2}


@pytest.mark.parametrize("path", TRAINED)
def test_a_whole_network_goes_on(path: Path) -> None:
    meta = json.loads((path / "meta.json").read_text())
    source, hyperparameters = path / "checkpoint" / "checkpoint_8", dict(meta["hyperparameters"])
    hyperparameters["logical_axes"] = meta["extra"]["axes"]
    with open_state(source, hints=Hints(hyperparameters)) as opened:
        model = blank_model(opened.state.params)
    load_params(source, model)
    optimizer = load_optimizer(source, model.named_parameters(), hparams=hyperparameters)
    with (
        closing(open_safetensors(path / "grads.safetensors")) as grads,
        closing(open_safetensors(path / "trajectory.safetensors")) as recorded,
    ):
        for update in (9, 10):
            prefix = f"{update}/"
            set_grads(
                model, {n.removeprefix(prefix): t for n, t in grads.tensors.items() if n.startswith(prefix)}
            )
            optimizer.param_groups[0]["lr"] = meta["learning_rate"][update - 1]
            optimizer.step()
        for name, array in results(model, optimizer).items():
            param, _, slot = name.partition(" ")
            want = recorded.tensors[f"10/slot/{param}/{slot}" if slot else f"10/param/{param}"]
            assert near(array, want.read()), name


def test_finetuning_restarts_the_decay() -> None:
    with open_recording(GOLDEN / "t5x" / "finetune_step_offset") as recording:
        pretraining = recording.phases[0].hyperparameters
        assert (recording.checkpoint_step, pretraining["step_offset"]) == (4, 0)
        end = recording.state(recording.last, recording.trajectories[0], recording.last)
        for offset, fits in (("reset", True), (4, True), ("keep", False), (3, False)):
            model, optimizer = resumed(recording, hparams=pretraining, step_offset=offset)
            go_on(recording, model, optimizer)
            assert (faraway(results(model, optimizer), end) == []) == fits, offset
        with pytest.raises(UsageError, match="isn't usable"):
            resumed(recording, hparams=pretraining, step_offset=5)


def test_slots_in_each_others_place_are_noticed() -> None:
    def exchanged(left: str, left_slot: str, right: str, right_slot: str) -> list[str]:
        with open_recording(GOLDEN / "t5x" / "momentum_f32") as recording:
            model, optimizer = resumed(recording)
            one, other = (optimizer.state[model.get_parameter(name)] for name in (left, right))
            one[left_slot], other[right_slot] = other[right_slot], one[left_slot]
            go_on(recording, model, optimizer)
            end = recording.state(recording.last, recording.trajectories[0], recording.last)
            return faraway(results(model, optimizer), end)

    with open_recording(GOLDEN / "t5x" / "momentum_f32") as recording:
        shapes = {name: tuple(p.shape) for name, p in resumed(recording)[0].named_parameters()}
    square = next(name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == shape[1])
    wide, tall = next(
        (a, b)
        for a in shapes
        for b in shapes
        if a != b and shapes[a] == shapes[b][::-1] and shapes[a][0] >= 8
    )
    assert exchanged(square, "v_row", square, "v_row") == []
    assert square.replace(".", "/") in exchanged(square, "v_row", square, "v_col")
    assert {wide.replace(".", "/"), tall.replace(".", "/")} <= set(exchanged(wide, "v_row", tall, "v_row"))


def test_every_system_of_files_gives_the_same_optimizer(tmp_path: Path) -> None:
    with open_recording(GOLDEN / "t5x" / "scale_map_maxscale_gnorm") as recording:
        hints = recording.hints(first_update(recording))
        source = recording.folder / recording.checkpoint
        model, optimizer = resumed(recording)
        before = results(model, optimizer)
        for target in (tmp_path / "run.pt", tmp_path / "statekit-run"):
            convert(plan(source, target, hints=hints))
            again = blank_like(source)
            load_params(target, again)
            loaded = load_optimizer(target, again.named_parameters())
            assert {n: a.tobytes() for n, a in results(again, loaded).items()} == {
                n: a.tobytes() for n, a in before.items()
            }
            keys = ("step", "decay_rate", "max_parameter_scale", "global_norm_clip_threshold")
            for key in keys:
                assert loaded.param_groups[0][key] == optimizer.param_groups[0][key]
            go_on(recording, again, loaded)
        go_on(recording, model, optimizer)
        assert {n: a.tobytes() for n, a in results(again, loaded).items()} == {
            n: a.tobytes() for n, a in results(model, optimizer).items()
        }


def test_a_run_folder_and_its_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with open_recording(GOLDEN / "t5x" / "momentum_f32") as recording:
        convert(plan(recording.folder / recording.checkpoint, run, to="t5x"))
        model, _ = resumed(recording)
        load_params(run, model, step=4)
        assert load_optimizer(run, model.named_parameters()).param_groups[0]["step"] == 4
        with pytest.raises(NotFoundError, match="5"):
            load_params(run, model, step=5)
        with pytest.raises(NotFoundError, match="5"):
            load_optimizer(run, model.named_parameters(), step=5)


def test_a_schedule_goes_on_where_the_run_stood() -> None:
    with open_recording(GOLDEN / "t5x" / "default_heuristics") as recording:
        model, optimizer = resumed(recording, lr=1.0)
        done = optimizer.param_groups[0]["step"]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, float, last_epoch=done - 1)
        rates = []
        for update in range(first_update(recording), recording.last + 1):
            rates.append(optimizer.param_groups[0]["lr"])
            set_grads(model, recording.gradients(update))
            optimizer.step()
            schedule.step()
        assert rates == [float(step) for step in range(done, recording.last)]


def test_what_nobody_said_stops_the_step_and_not_the_loading() -> None:
    with open_recording(GOLDEN / "t5x" / "momentum_f32") as recording:
        model, optimizer = resumed(recording, hparams={})
        set_grads(model, recording.gradients(5))
        assert "beta1" not in optimizer.param_groups[0]
        with pytest.raises(UnknownRuleError) as caught:
            optimizer.step()
        assert "no learning rate: set lr @ group 0" in str(caught.value)
        assert re.search(r"unknown: beta1 @ \d+ places: encoder", str(caught.value))
        kept = optimizer.state_dict()
        assert "m" in kept["state"][0]
        _, other = resumed(recording, hparams={}, beta1=0.9, lr=torch.tensor(0.01))
        assert other.param_groups[0]["lr"] == torch.tensor(0.01)
        set_grads(model, {})
        other.step()


def test_an_unknown_rule_stops_the_step_and_not_the_loading() -> None:
    with open_recording(GOLDEN / "t5x" / "factor_map_rank34") as recording:
        model, optimizer = resumed(recording, hparams={}, lr=0.1)
        set_grads(model, recording.gradients(first_update(recording)))
        with pytest.raises(UnknownRuleError) as caught:
            optimizer.step()
        assert "decoder.conv.kernel" in str(caught.value)
        assert "decoder.logits_dense.kernel" not in str(caught.value)


def test_parameters_of_a_frozen_part_are_left_out() -> None:
    with open_recording(GOLDEN / "t5x" / "multi_optimizer") as recording:
        model, optimizer = resumed(recording)
        moved = {name for group in optimizer.param_groups for name in group["param_names"]}
        frozen = {name for name, _ in model.named_parameters()} - moved
        assert frozen
        assert optimizer.param_groups[0]["frozen"] == sorted(
            frozen, key=list(dict(model.named_parameters())).index
        )
        named = [(name, param) for name, param in model.named_parameters() if name in moved]
        hyperparameters = recording.hints(first_update(recording)).hyperparameters
        again = load_optimizer(recording.folder / recording.checkpoint, named, hparams=hyperparameters)
        assert [g["param_names"] for g in again.param_groups] == [
            g["param_names"] for g in optimizer.param_groups
        ]


def test_every_parameter_that_doesnt_fit_is_named() -> None:
    with open_recording(GOLDEN / "t5x" / "momentum_f32") as recording:
        source = recording.folder / recording.checkpoint
        model, _ = resumed(recording)
    named = dict(model.named_parameters())
    lost, bent, *_ = named
    changed = {name: param for name, param in named.items() if name != lost}
    changed[bent] = torch.nn.Parameter(torch.zeros(3, 5))
    changed["head.new"] = torch.nn.Parameter(torch.zeros(2))
    changed["head.frozen"] = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    with pytest.raises(StateError) as caught:
        load_optimizer(source, changed.items())
    text = str(caught.value)
    assert "3 faults" in text
    assert f"is in the checkpoint, but not among the parameters @ {lost.replace('.', '/')}" in text
    assert f"has shape (3, 5), in the checkpoint {tuple(named[bent].shape)} @ {bent}" in text
    assert "isn't in the checkpoint @ head.new" in text
    twice = [*named.items(), (bent.replace(".", "/"), torch.nn.Parameter(torch.zeros(2)))]
    with pytest.raises(StateError, match=f"stands twice among the parameters @ {bent}"):
        load_optimizer(source, twice)
    with pytest.raises(UsageError, match="learning rate"):
        load_optimizer(source, named.items(), lr=-1.0)
    with pytest.raises(UsageError, match="names"):
        load_optimizer(source, model.parameters())  # type: ignore[arg-type]  # the fault
    wrapped = [(f"net.{name}", param) for name, param in named.items()]
    assert load_optimizer(source, wrapped).param_groups
    slashes = [(name.replace(".", "/"), param) for name, param in named.items()]
    assert load_optimizer(source, slashes).param_groups[0]["param_names"][0].count("/") > 0


def test_weights_are_checked_before_one_is_copied() -> None:
    with open_recording(GOLDEN / "t5x" / "momentum_f32") as recording:
        source = recording.folder / recording.checkpoint
        model, _ = resumed(recording)
    first, second, third, *_ = dict(model.named_parameters())

    def put(name: str, param: torch.nn.Parameter) -> None:
        folder, _, last = name.rpartition(".")
        setattr(model.get_submodule(folder), last, param)

    put(second, torch.nn.Parameter(torch.zeros(3, 5)))
    put(third, torch.nn.Parameter(model.get_parameter(third).detach().to(torch.bfloat16)))
    folder, _, last = first.rpartition(".")
    delattr(model.get_submodule(folder), last)
    model.register_parameter("head", torch.nn.Parameter(torch.zeros(2)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StateError) as caught:
        load_params(source, model)
    text = str(caught.value)
    assert "4 faults" in text
    for fault, name in (
        ("isn't in the model", first.replace(".", "/")),
        ("in the model (3, 5)", second.replace(".", "/")),
        ("is float32 and would be narrowed to the model's bfloat16", third.replace(".", "/")),
        ("isn't in the checkpoint", "head"),
    ):
        assert fault in text
        assert f"@ {name}" in text
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(StateError, match="meta device"):
        load_params(source, blank_like(source).to("meta"))


def blank_like(source: Path) -> torch.nn.Module:
    with open_state(source) as opened:
        return blank_model(opened.state.params)


def test_weights_are_widened_in_place_and_shared_ones_stay_shared() -> None:
    with open_recording(GOLDEN / "t5x" / "bf16_params") as recording:
        source = recording.folder / recording.checkpoint
        model = blank_like(source).to(torch.float64)
        addresses = {name: param.data_ptr() for name, param in model.named_parameters()}
        model.get_submodule("decoder").register_parameter("tied", model.get_parameter(next(iter(addresses))))
        load_params(source, model)
        assert addresses == {name: model.get_parameter(name).data_ptr() for name in addresses}
        start = recording.state(4, recording.trajectories[0], 5)
        for path, tensor in start.params.items():
            wide = model.get_parameter(path.replace("/", ".")).detach().numpy()
            assert np.array_equal(wide, tensor.read().astype(np.float64))


def test_buffers_are_loaded_where_the_file_has_them(tmp_path: Path) -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    model, other = build(), build()
    optimizer = Adafactor(model.named_parameters(), lr=0.1)
    model(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    file = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    load_params(file, other)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
    resumed_optimizer = load_optimizer(file, other.named_parameters())
    assert resumed_optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(StateError, match=r"isn't in the model @ 1.running_mean"):
        load_params(file, torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)))


def test_overrides_are_canonical_and_checked() -> None:
    with open_recording(GOLDEN / "t5x" / "momentum_f32") as recording:
        _, optimizer = resumed(
            recording, clipping_threshold=None, multiply_by_parameter_scale=[("mlp", False), (".*", True)]
        )
        group = optimizer.param_groups[0]
        assert group["clipping_threshold"] is None
        assert set(group["multiply_by_parameter_scale"]) == set(group["param_names"])
        assert not any(flag for name, flag in group["multiply_by_parameter_scale"].items() if "mlp" in name)
        with pytest.raises(UsageError) as caught:
            resumed(recording, factored=False, decay_rate="x", beta_one=0.9, learning_rate=0.1)
        for part in (
            "which slots there are @ factored=False",
            "expected number @ decay_rate='x'",
            "@ beta_one=0.9",
        ):
            assert part in str(caught.value)
        assert "@ learning_rate=0.1" in str(caught.value)
        with pytest.raises(UsageError, match="no true or false"):
            resumed(recording, multiply_by_parameter_scale={"encoder/nowhere": True})


def test_momentum_is_switched_as_asked() -> None:
    with open_recording(GOLDEN / "t5x" / "momentum_f32") as recording:
        _, off = resumed(recording, beta1=None)
        assert not any("m" in slots for slots in off.state.values())
        model, narrow = resumed(recording, dtype_momentum="bfloat16")
        _, full = resumed(recording)
        for wide, slots in zip(full.state.values(), narrow.state.values(), strict=True):
            assert torch.equal(wide["m"].to(torch.bfloat16), slots["m"])
    with open_recording(GOLDEN / "t5x" / "default_heuristics") as recording:
        model, on = resumed(recording, beta1=0.5)
        assert all(not slots["m"].any() for slots in on.state.values())
        go_on(recording, model, on)
        assert all(slots["m"].any() for slots in on.state.values())


def test_other_optimizers_states_are_refused(tmp_path: Path) -> None:
    state = small_state()
    foreign = replace(state, slots={}, rules={}, optimizer=Optimizer("lans", "raf", state.optimizer.groups))
    with pytest.raises(StateError, match=r"no optimizer that continues(.|\n)*lans, variant raf"):
        load_optimizer(save(foreign, tmp_path / "statekit"), [])


def test_a_rule_that_was_given_reaches_the_optimizer() -> None:
    with open_recording(GOLDEN / "t5x" / "factor_map_rank34") as recording:
        _, optimizer = resumed(recording)
        rule = optimizer.param_groups[0]["rules"]["encoder.attention.query.kernel"]
        assert rule == {"axes": [Axis.ROW.value, Axis.COLUMN.value, Axis.COLUMN.value], "known_from": "given"}


def test_names_that_torch_cant_tell_apart_are_refused(tmp_path: Path) -> None:
    source = save(small_state(), tmp_path / "statekit")
    with pytest.raises(StateError) as caught:
        load_params(source, torch.nn.Module())
    assert "has the torch name of another parameter @ dense/kernel" in str(caught.value)


def test_weights_alone_are_no_state_to_go_on_with(tmp_path: Path) -> None:
    state = small_state()
    bare = replace(state, slots={}, rules={})
    with pytest.raises(StateError, match="no optimizer state"):
        load_optimizer(save(bare, tmp_path / "statekit"), [])


def test_tensors_of_different_values_dont_go_into_one_that_the_model_ties(tmp_path: Path) -> None:
    embed, head = (torch.nn.Linear(2, 3, bias=False) for _ in range(2))
    model = torch.nn.ModuleDict({"embed": embed, "head": head})
    torch.save(model.state_dict(), tmp_path / "apart.pt")
    head.weight = embed.weight
    before = embed.weight.detach().clone()
    with pytest.raises(StateError, match="one tensor with embed"):
        load_params(tmp_path / "apart.pt", model)
    assert torch.equal(embed.weight, before)
    torch.save({name: torch.ones(3, 2) for name in ("embed.weight", "head.weight")}, tmp_path / "alike.pt")
    load_params(tmp_path / "alike.pt", model)
    assert torch.equal(embed.weight, torch.ones(3, 2))
