"""What a conversion must carry over, decode or ask for, where taking something for granted makes another run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from goldens import GOLDEN, bundles
from statekit.conversion.contracts import Exactness, Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.rule_change import change_rule
from statekit.errors import StatekitError, UsageError
from statekit.state.stored_params import encoded_paths
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import Array, in_memory

ANY = Exactness.ESTIMATE


def recorded(system: str, case: str) -> Path:
    """Returns the checkpoint of a recording; skips where only the compact choice of them is there."""
    folder = next((one for one in bundles(system) if one.name == case), None)
    if folder is None:
        pytest.skip(f"{system}/{case} is among the full recordings only")
    return next(path for path in sorted(folder.iterdir()) if path.name.startswith("checkpoint"))


def converted(source: Path, target: Path, layout: str, to: str | None = None, **options: Any) -> Path:
    require = options.pop("require", Exactness.ROUNDING)
    return Path(
        convert(plan(source, target, layout=layout, to=to, require=require, hints=Hints(**options))).target
    )


def parameters(path: Path, **options: Any) -> dict[str, Array]:
    with open_state(path, hints=Hints(**options)) as opened:
        return {name: tensor.read() for name, tensor in opened.state.params.items()}


def test_momentum_is_never_switched_off_for_lack_of_its_constant(tmp_path: Path) -> None:
    source = recorded("t5x", "momentum_f32")  # m is in use; T5X stores no beta1
    with pytest.raises(StatekitError, match=r"--hparams beta1=\.\.\."):
        converted(source, tmp_path / "x.pt", "torch-optim", require=Exactness.STATISTICS)
    known: dict[str, Any] = {
        "hyperparameters": {"beta1": 0.9, "learning_rate": 0.01},
        "assume_defaults": True,
    }
    target = converted(source, tmp_path / "y.pt", "torch-optim", require=Exactness.STATISTICS, **known)
    with open_state(target) as opened:
        assert [group.hyperparameters["beta1"] for group in opened.state.optimizer.groups] == [0.9]


def test_where_the_target_asks_for_it_later_momentum_s_constant_stays_unknown(tmp_path: Path) -> None:
    target = converted(recorded("t5x", "momentum_f32"), tmp_path / "x", "optax", "orbax")
    with open_state(target) as opened:
        assert all("beta1" not in group.hyperparameters for group in opened.state.optimizer.groups)
        assert all("m" in tensors for tensors in opened.state.slots.values())


def test_what_slots_show_to_be_on_stays_on_under_another_rule() -> None:
    w = in_memory(np.ones(3, np.float32))
    slots = {"w": {"m": w, "v": w, "v_max": w}}
    optimizer = Optimizer("adamw", "torch", (Group(("w",), {"beta1": 0.9}),))
    state = TrainState({"w": w}, slots, optimizer, Counts(1, 1))
    assert state.switched_on(optimizer.groups[0]) == {"amsgrad": "v_max"}
    moved = change_rule(state, "torch", "optax").state
    assert moved.optimizer.groups[0].hyperparameters["amsgrad"] is True


def test_weight_decay_by_the_learning_rate_s_exponent_alone_is_weight_decay(tmp_path: Path) -> None:
    source = recorded("t5x", "default_heuristics")
    assert plan(source, tmp_path / "x", layout="optax", to="orbax").exactness <= Exactness.ROUNDING
    decayed = Hints({"weight_decay_rate_lr_exponent": 2.0})
    with pytest.raises(StatekitError, match="weight_decay_rate_lr_exponent is 2"):
        plan(source, tmp_path / "x", layout="optax", to="orbax", hints=decayed)


@pytest.mark.parametrize("case", ["zipformer2025_groups_clipping", "pt7_two_groups_eden"])
def test_several_groups_of_icefall_are_written_and_read_again(case: str, tmp_path: Path) -> None:
    folder = recorded("scaled_adam", case)
    source = next(iter(sorted(folder.rglob("*.pt"))))
    meta = json.loads((folder.parent / "meta.json").read_text(encoding="utf-8"))
    index: dict[str, int] = meta["extra"]["state_dict_index"]
    names = tuple(sorted(index, key=index.__getitem__))
    groups = [tuple(group["params"]) for group in meta["extra"]["param_groups"]]
    assert len(groups) > 1
    neutral = converted(source, tmp_path / "neutral", "statekit", "statekit", param_names=names)
    target = converted(neutral, tmp_path / "again.pt", "icefall", "torch")
    with open_state(target) as opened, open_state(neutral) as before:
        assert [group.paths for group in opened.state.optimizer.groups] == groups
        for path, tensors in before.state.slots.items():
            for name, slot in tensors.items():
                np.testing.assert_array_equal(opened.state.slots[path][name].read(), slot.read())


def test_a_scope_of_tensor2tensor_stays_out_of_mesh_tensorflow_s_names(tmp_path: Path) -> None:
    source = recorded("t2t", "late_training_scope_object_graph")
    target = converted(source, tmp_path / "x", "mesh-tf", "tf-bundle", variant="t2t_late", require=ANY)
    with open_state(target) as opened:
        slots = [name for name in opened.checkpoint.tensors if "_slot_" in name]
        assert slots and not [
            name for name in slots if name.partition("_slot_")[0] not in opened.state.params
        ]
    again = converted(source, tmp_path / "y", "t2t", "tf-bundle", variant="t2t_late")
    with open_state(again) as opened:
        assert any(name.startswith("training/") for name in opened.checkpoint.tensors)


ENCODED = "late_bf16_encoded_beta1"


def decoded(stored: Array) -> Array:
    """Returns what Tensor2Tensor's graph computes with: the text of its reference, in double precision."""
    wide = stored.astype(np.float64)
    return np.sign(wide) * np.abs(wide) ** 0.125 / 128


@pytest.mark.parametrize("layout", ["mesh-tf", "statekit-torch", "statekit-jax", "t5x"])
def test_encoded_weights_of_tensor2tensor_are_decoded_on_the_way_out(layout: str, tmp_path: Path) -> None:
    source = recorded("t2t", ENCODED)
    stored = parameters(source, variant="t2t_late")
    container = {"mesh-tf": "tf-bundle", "statekit-torch": "torch"}.get(layout, "orbax")
    target = tmp_path / ("x.pt" if container == "torch" else "x")
    planned = plan(source, target, layout=layout, to=container, require=ANY, hints=Hints(variant="t2t_late"))
    assert any(entry.exactness >= Exactness.ROUNDING for entry in planned.entries if "kernel" in entry.name)
    weights = parameters(Path(convert(planned).target))
    encoded = [path for path, values in stored.items() if values.dtype.name == "bfloat16"]
    assert encoded and max(np.abs(stored[path].astype(np.float64)).max() for path in encoded) > 1e9
    for path in encoded:
        assert weights[path].dtype == np.float32
        np.testing.assert_allclose(weights[path], decoded(stored[path]), rtol=1e-6)


def test_decoded_weights_are_encoded_again_to_the_bit(tmp_path: Path) -> None:
    source = recorded("t2t", ENCODED)
    there = converted(source, tmp_path / "x.pt", "statekit-torch", variant="t2t_late")
    back = converted(there, tmp_path / "back", "t2t", "tf-bundle")
    stored, weights = parameters(source, variant="t2t_late"), parameters(back)
    assert {path: values.tobytes() for path, values in weights.items()} == {
        path: values.tobytes() for path, values in stored.items()
    }
    onwards = converted(back, tmp_path / "onwards.pt", "statekit-torch")  # the manifest says no otherwise
    assert parameters(onwards)["net/k/kernel"].dtype == np.float32


def test_neutral_folders_from_before_are_known_to_be_encoded(tmp_path: Path) -> None:
    source = recorded("t2t", ENCODED)
    neutral = converted(source, tmp_path / "neutral", "statekit", "statekit", variant="t2t_late")
    with open_state(neutral) as opened:  # version 0.1 said the variant's default, without having looked
        groups = opened.state.optimizer.groups
        assert groups[0].hyperparameters["parameter_encoding"] == "eighth_power"
        said = replace(
            groups[0],
            hyperparameters={**groups[0].hyperparameters, "parameter_encoding": None},
            known_from={**groups[0].known_from, "parameter_encoding": "assumed"},
        )
        old = replace(opened.state, optimizer=replace(opened.state.optimizer, groups=(said,)))
        assert set(encoded_paths(old)) == {p for p, t in old.params.items() if t.dtype.name == "bfloat16"}
    target = converted(neutral, tmp_path / "x.pt", "statekit-torch")
    assert all(values.dtype == np.float32 for values in parameters(target).values())


def test_bfloat16_weights_from_elsewhere_are_encoded_on_the_way_in(tmp_path: Path) -> None:
    source = recorded("t5x", "bf16_params")
    given = parameters(source)
    target = converted(source, tmp_path / "x", "t2t", "tf-bundle", require=ANY)
    weights = parameters(target)
    stored = [path for path, values in given.items() if values.dtype.name == "bfloat16"]
    assert stored
    for path in stored:
        assert weights[path].dtype == given[path].dtype
        np.testing.assert_allclose(decoded(weights[path]), given[path].astype(np.float64), rtol=2**-10)


def test_weights_that_may_be_encoded_or_not_are_asked_about(tmp_path: Path) -> None:
    source = recorded("t2t", ENCODED)
    with pytest.raises(StatekitError, match="--variant t2t_late"):
        plan(source, tmp_path / "x", layout="mesh-tf", to="tf-bundle", require=ANY)
    assert plan(source, tmp_path / "y", to="statekit").exactness == Exactness.BITWISE  # the bits stay
    said = Hints({"parameter_encoding": "eighth_power"})
    with open_state(source, hints=said) as opened:
        assert opened.state.optimizer.variant == "t2t_late"
        hyperparameters = opened.state.optimizer.groups[0].hyperparameters
        assert hyperparameters["parameter_encoding"] == "eighth_power"


@pytest.mark.torch
def test_encoded_weights_are_decoded_into_a_model_that_does_not_hold_them_so() -> None:
    import torch

    import statekit.torch

    source = recorded("t2t", ENCODED)
    stored = parameters(source, variant="t2t_late")

    def model(dtype: torch.dtype) -> torch.nn.Module:
        tree = torch.nn.Module()
        for path, values in stored.items():
            *above, last = path.split("/")
            node = tree
            for name in above:
                if not hasattr(node, name):
                    node.add_module(name, torch.nn.Module())
                node = getattr(node, name)
            wide = values.dtype == np.float32
            blank = torch.zeros(values.shape, dtype=torch.float32 if wide else dtype)
            node.register_parameter(last, torch.nn.Parameter(blank))
        return tree

    said = {"parameter_encoding": "eighth_power"}
    wide, same = model(torch.float32), model(torch.bfloat16)
    statekit.torch.load_params(source, wide, hparams=said)
    statekit.torch.load_params(
        source, same, hparams=said
    )  # the drop-in steps bfloat16 as Tensor2Tensor stores it
    with pytest.raises(StatekitError, match="parameter_encoding"):
        statekit.torch.load_params(source, model(torch.float32))
    for path, values in stored.items():
        name = path.replace("/", ".")
        if values.dtype == np.float32:
            continue
        weights = wide.get_parameter(name).detach().numpy()
        np.testing.assert_allclose(weights, decoded(values), rtol=1e-6)
        bits = same.get_parameter(name).detach().view(torch.int16).numpy()
        assert bits.tobytes() == values.tobytes()


def test_weights_that_were_never_encoded_are_left_alone(tmp_path: Path) -> None:
    source = recorded("t2t", "early157_bf16_quant")
    stored = parameters(source, variant="t2t_early")
    target = converted(source, tmp_path / "x", "mesh-tf", "tf-bundle", variant="t2t_early", require=ANY)
    weights = parameters(target)
    assert {p: v.tobytes() for p, v in weights.items()} == {p: v.tobytes() for p, v in stored.items()}


def test_a_variant_that_the_file_speaks_against_is_refused_with_the_evidence(tmp_path: Path) -> None:
    source = recorded("t5x", "default_heuristics")
    with pytest.raises(UsageError, match="state/param_states") as caught:
        plan(source, tmp_path / "x", layout="t5x", to="t5x", hints=Hints(variant="hf"))
    assert caught.value.expected == "t5x"
    with open_state(source, hints=Hints(variant="t5x")) as opened:
        assert opened.state.optimizer.variant == "t5x"


def test_there_are_recordings() -> None:
    assert GOLDEN.is_dir()
