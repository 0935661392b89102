"""TensorFlow 1's names: what the originals wrote is sorted as it was recorded, and written under the same names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_files import save

from formats import plain_state
from goldens import bundles
from statekit.arrays.backend import backend
from statekit.cli.main import main
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.registry import detect_layout
from statekit.converters.containers.tf_bundle import CONTAINER
from statekit.converters.layouts.tensorflow.layout import TensorFlow1
from statekit.converters.layouts.tensorflow.mesh_tf import LAYOUT as MESH_TF
from statekit.converters.layouts.tensorflow.mesh_tf_adam import LAYOUT as MESH_TF_ADAM
from statekit.converters.layouts.tensorflow.t2t import LAYOUT as T2T
from statekit.converters.layouts.tensorflow.tf_adam import LAYOUT as TF_ADAM
from statekit.errors import InexactError, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Tensor, in_memory, same_values
from statekit.tensors.tree import tensor_names
from statekit.verify.recording import Recording, open_recording
from statekit.verify.replay import Subject, replay

BUNDLES = [*bundles("t2t"), *bundles("mesh_tf")]
BY_SYSTEM = {"t2t": (T2T,), "mesh_tf": (MESH_TF, MESH_TF_ADAM)}


def named(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def opened(recording: Recording) -> Checkpoint:
    return CONTAINER.open(recording.folder / recording.checkpoint)


def decoded(recording: Recording, checkpoint: Checkpoint, **hints: Any) -> tuple[TensorFlow1, TrainState]:
    (layout,) = (one for one in BY_SYSTEM[recording.system] if one.detect(checkpoint))
    return layout, layout.decode(checkpoint, Hints(**hints))


def bits(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, bytes]]:
    return {name: (t.dtype.name, t.read().tobytes()) for name, t in tensors.items()}


def test_there_are_recordings() -> None:
    assert BUNDLES


@pytest.mark.parametrize("folder", BUNDLES, ids=named)
def test_a_recorded_state_is_sorted_by_its_recording_and_written_again(folder: Path) -> None:
    with open_recording(folder) as recording, opened(recording) as checkpoint:
        step = recording.checkpoint_step
        assert step is not None
        said = recording.state(step, recording.trajectories[0], step + 1)
        layout, state = decoded(recording, checkpoint)
        assert detect_layout(checkpoint)[0].name == layout.name
        assert state.counts == said.counts
        assert state.params.keys() == said.params.keys() and state.slots.keys() == said.slots.keys()
        for path, tensors in said.slots.items():
            assert same_values(state.params[path], said.params[path]), path
            assert state.slots[path].keys() == tensors.keys(), path
            assert all(same_values(state.slots[path][slot], tensors[slot]) for slot in tensors), path
        assert bits(tensor_names(layout.encode(state).tree)) == bits(checkpoint.tensors)


@pytest.mark.parametrize("folder", BUNDLES, ids=named)
def test_training_goes_on_from_the_checkpoint(folder: Path) -> None:
    with open_recording(folder) as recording:
        result = replay(Subject(recording), backend("numpy"))
        assert result.start == "checkpoint" and result.passed


@pytest.mark.sampled(6)
@pytest.mark.parametrize("folder", BUNDLES, ids=named)
def test_exchanged_slots_are_noticed(folder: Path, tmp_path: Path) -> None:
    """Two tensors of one shape, exchanged under their names: the start isn't the recorded state."""
    with open_recording(folder) as recording:
        with opened(recording) as checkpoint:
            layout, state = decoded(recording, checkpoint)
            (path, slot), spoilt_slots = _exchanged(state)
            spoilt = layout.encode(replace(state, slots=spoilt_slots)).tree
            save(spoilt, tmp_path / "run", state.counts.updates)
        result = replay(Subject(replace(recording, checkpoint=str(tmp_path / "run"))), backend("numpy"))
        assert not result.passed and any(line.startswith(f"{path} {slot}") for line in result.decoded)


def _exchanged(state: TrainState) -> tuple[tuple[str, str], dict[str, dict[str, Tensor]]]:
    """Returns slots of which one has another's values, or its own in another order, and which it is."""
    slots = {path: dict(tensors) for path, tensors in state.slots.items()}
    every = [(path, slot) for path, tensors in slots.items() for slot in tensors]
    for (path, slot), (other, beside) in itertools.combinations(every, 2):
        left, right = slots[path][slot], slots[other][beside]
        if (left.shape, left.dtype) == (right.shape, right.dtype) and not same_values(left, right):
            slots[path][slot], slots[other][beside] = right, left
            return (path, slot), slots
    path, slot = next(key for key in every if slots[key[0]][key[1]].shape)
    slots[path][slot] = in_memory(np.flip(slots[path][slot].read()).copy())
    return (path, slot), slots


def flat(**tensors: Any) -> Checkpoint:
    tree = {name.replace("__", "/"): in_memory(np.asarray(value)) for name, value in tensors.items()}
    return Checkpoint("tf-bundle", Path("x"), tree)


ONES, STEP = np.ones((4, 6), np.float32), np.asarray(3, np.int64)
ROWS, COLUMNS, VECTOR = np.ones(4, np.float32), np.ones(6, np.float32), np.ones(5, np.float32)


def test_numbered_slots_are_told_apart_over_all_variables() -> None:
    plain = flat(
        w=ONES, w__Adafactor=ROWS, w__Adafactor_1=COLUMNS, b=VECTOR, b__Adafactor=VECTOR, global_step=STEP
    )
    state = T2T.decode(plain, Hints())
    assert {path: list(tensors) for path, tensors in state.slots.items()} == {
        "w": ["v_row", "v_col"],
        "b": ["v"],
    }
    assert state.optimizer.variant is None and "t2t_late, t2t_early" in state.assumptions[0]
    named_variant = T2T.decode(plain, Hints(variant="t2t_late")).optimizer
    assert named_variant.variant == "t2t_late" and named_variant.groups[0].hyperparameters["beta1"] == 0.0
    with_m = flat(
        w=ONES, w__Adafactor=ONES, w__Adafactor_1=ROWS, w__Adafactor_2=COLUMNS,
        b=VECTOR, b__Adafactor=VECTOR, b__Adafactor_1=VECTOR, global_step=STEP,
    )  # fmt: skip
    state = T2T.decode(with_m, Hints(variant="t2t_late"))
    assert {path: list(tensors) for path, tensors in state.slots.items()} == {
        "w": ["m", "v_row", "v_col"],
        "b": ["m", "v"],
    }
    assert "beta1" not in state.optimizer.groups[0].hyperparameters
    # A vector's only slot is v, though another variable has momentum: something is missing.
    lost = flat(
        w=ONES, w__Adafactor=ONES, w__Adafactor_1=ROWS, w__Adafactor_2=COLUMNS, b=VECTOR, b__Adafactor=VECTOR
    )
    with pytest.raises(
        StateError, match=r"has 1 slots, expected 2(.|\n)*global_step|global_step(.|\n)*has 1 slots"
    ):
        T2T.decode(lost, Hints())


def test_names_that_make_no_state_are_refused() -> None:
    good = {"w": ONES, "w__Adafactor": ROWS, "w__Adafactor_1": COLUMNS, "global_step": STEP}
    T2T.decode(flat(**good), Hints())
    for change, match in (
        ({"x__Adafactor": ROWS}, "isn't there @ x/Adafactor"),
        ({"w__Adafactor_1": ROWS}, "v_col"),
        ({"global_step": np.asarray(1.5)}, "global_step"),
        ({"v": ONES, "one__v__Adafactor": ROWS, "one__v__Adafactor_1": COLUMNS}, "different scopes"),
    ):
        with pytest.raises(StateError, match=re.escape(match)):
            T2T.decode(flat(**{**good, **change}), Hints())


@pytest.mark.parametrize("slots", [("v/RMSProp", "v/RMSProp_1"), ("w/Adam_2", "w/Adam_3"), ("a/v/Momentum",)])
def test_slots_of_a_second_optimizer_are_no_parameters(slots: tuple[str, ...]) -> None:
    tree = {"w": ONES, "w/Adam": ONES, "w/Adam_1": ONES, "v": ONES, "global_step": STEP}
    state = TF_ADAM.decode(flat(**tree), Hints())
    assert list(state.params) == ["w", "v"]
    with pytest.raises(StateError, match="slot of another optimizer") as error:
        TF_ADAM.decode(flat(**tree, **dict.fromkeys(slots, ONES)), Hints())
    assert all(slot in str(error.value) for slot in slots)


def test_an_average_below_a_scope_is_no_parameter_and_comes_back() -> None:
    average = {"avg/w/ExponentialMovingAverage": ONES}
    checkpoint = flat(
        w=ONES, w__Adam=ONES, w__Adam_1=ONES, beta1_power=np.float32(0.9), global_step=STEP, **average
    )
    state = TF_ADAM.decode(checkpoint, Hints())
    assert list(state.params) == ["w"]
    assert bits(tensor_names(TF_ADAM.encode(state).tree)) == bits(checkpoint.tensors)


def test_averages_scopes_and_the_rest_come_back() -> None:
    checkpoint = flat(
        w=ONES, opt__w__Adam=ONES, opt__w__Adam_1=ONES, w__ExponentialMovingAverage=ONES,
        opt__beta1_power=np.float32(0.9), opt__global_step=STEP, losses_avg__total=np.float32(2), frozen=ONES,
    )  # fmt: skip
    state = TF_ADAM.decode(checkpoint, Hints())
    assert list(state.slots) == ["w"] and list(state.params) == ["w", "frozen"] and state.counts.updates == 3
    assert bits(tensor_names(TF_ADAM.encode(state).tree)) == bits(checkpoint.tensors)


def test_slots_go_by_the_axes_they_have_averaged() -> None:
    source = plain_state()  # v_row averages axis 0 of 8 x 4, the larger one, as T5X has it
    assert source.rules["dense/kernel"].axes == (Axis.COLUMN, Axis.ROW)
    for layout, first, second in ((T2T, "Adafactor", "Adafactor_1"), (MESH_TF, "vr", "vc")):
        tree = layout.encode(source).tree
        glue = "/" if layout is T2T else "_slot_"
        vr, vc = tree[f"dense/kernel{glue}{first}"], tree[f"dense/kernel{glue}{second}"]
        # Tensor2Tensor's vr averages the last axis; Mesh-TensorFlow's the larger one.
        assert (vr.shape, vc.shape) == (((8,), (4,)) if layout is T2T else ((4,), (8,)))
        averaged = source.slots["dense/kernel"]["v_row"], source.slots["dense/kernel"]["v_col"]
        assert {vr.read().tobytes(), vc.read().tobytes()} == {t.read().tobytes() for t in averaged}
        again = layout.decode(Checkpoint("tf-bundle", Path("x"), tree), Hints())
        for axis in (0, 1):
            assert _averaging(again, axis).read().tobytes() == _averaging(source, axis).read().tobytes()


def _averaging(state: TrainState, axis: int) -> Tensor:
    """Returns the slot of the kernel that has averaged an axis away."""
    rule = state.rules["dense/kernel"]
    return state.slots["dense/kernel"]["v_row" if rule.axes[axis] is Axis.COLUMN else "v_col"]


def adafactor(shape: tuple[int, ...], axes: tuple[Axis, ...]) -> TrainState:
    rule = Rule(axes, "given")
    slots = {n: in_memory(np.ones(rule.slot_shape(n, shape), np.float32)) for n in ("v_row", "v_col")}
    group = Optimizer("adafactor", None, (Group(("w",)),))
    return TrainState(
        {"w": in_memory(np.ones(shape, np.float32))}, {"w": slots}, group, Counts(1, 1), {"w": rule}
    )


def test_what_the_optimizer_would_not_do_is_refused() -> None:
    B, N, R, C = Axis.BATCH, Axis.NONE, Axis.ROW, Axis.COLUMN
    T2T.encode(adafactor((2, 4, 6), (N, R, C)))
    for axes in ((B, R, C), (R, N, C)):
        with pytest.raises(InexactError, match="is factored by"):
            T2T.encode(adafactor((2, 4, 6), axes))
    assert "w_slot_vr" in MESH_TF.encode(adafactor((2, 4, 6), (B, R, C))).tree
    with pytest.raises(InexactError, match="state of adamw only"):
        TF_ADAM.encode(adafactor((4, 6), (R, C)))
    odd = adafactor((4, 6), (R, C))
    with pytest.raises(InexactError, match="has slot average"):
        T2T.encode(replace(odd, slots={"w": {**odd.slots["w"], "average": odd.params["w"]}}))


@pytest.mark.parametrize("case", ["late_default_ref", "early157_default_beta1"])
def test_t5x_gets_the_slots_by_the_axes_they_have_averaged(case: str, tmp_path: Path) -> None:
    """Tensor2Tensor's vr averages the last axis, T5X's v_row the larger one: of a tall matrix they are exchanged."""
    folder = next((one for one in BUNDLES if one.name == case), None)
    if folder is None:  # not in the compact choice
        return
    target = tmp_path / "t5x"
    convert(plan(folder / "checkpoint", target, to="t5x"))
    with open_state(folder / "checkpoint") as source, open_state(target) as written:
        tall = 0
        for path, tensors in source.state.slots.items():
            there, rule = written.state.slots[path], written.state.rules[path]
            before = source.state.rules[path]
            for slot, tensor in tensors.items():
                other = {"v_row": "v_col", "v_col": "v_row"}.get(slot, slot)
                name = slot if rule.axes == before.axes else other
                assert there[name].read().tobytes() == tensor.read().tobytes(), (path, slot)
            tall += rule.axes != before.axes
        assert tall


def test_a_matrix_of_equal_axes_keeps_its_rows(tmp_path: Path) -> None:
    square = adafactor((4, 4), (Axis.ROW, Axis.COLUMN))
    rows = in_memory(np.arange(4, dtype=np.float32))
    square = replace(square, slots={"w": {**square.slots["w"], "v_row": rows}})
    for layout in (T2T, MESH_TF):
        tree = layout.encode(square).tree
        vr = tree["w/Adafactor"] if layout is T2T else tree["w_slot_vr"]
        # Of equal axes Mesh-TensorFlow's vr averages the first, so that it is our v_col.
        assert np.array_equal(vr.read(), rows.read()) == (layout is T2T)


@pytest.mark.torch
def test_a_first_moment_that_t2t_would_make_in_the_variables_dtype_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tensor2Tensor's Saver refuses a float32 m beside a bfloat16 variable."""
    torch: Any = pytest.importorskip("torch")
    adafactor: Any = pytest.importorskip("transformers.optimization").Adafactor
    model = torch.nn.Linear(5, 3).bfloat16()
    options = {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "beta1": 0.9}
    optimizer = adafactor(model.parameters(), **options)
    model(torch.ones(2, 5).bfloat16()).float().sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    for slots in state["state"].values():
        slots["exp_avg"] = slots["exp_avg"].float()
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "hf.pt")
    command = [
        "convert",
        f"{tmp_path / 'hf.pt'}",
        f"{tmp_path / 'out'}",
        "--to",
        "tf-bundle",
        "--layout",
        "t2t",
    ]
    assert main(command) == 3
    assert "slot m is float32 beside a variable of bfloat16" in capsys.readouterr().err
    assert main([*command, "--slot-dtype", "m=bfloat16", "--require", "lossy"]) == 0
