"""Adafactor against Hugging Face, torch.optim, Optax and Keras, and faults that replay must notice."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from goldens import GOLDEN, bundles
from replaying import everywhere, judged, marks, mistaken, outside, present, shortened, swapped
from statekit.arrays.backend import backend
from statekit.arrays.numpy_backend import ORACLE
from statekit.errors import FormatError, NotFoundError, StateError
from statekit.optim import adafactor
from statekit.state.train_state import Axis, Rule
from statekit.tensors.tensor import DTYPES, Array, Tensor, in_memory
from statekit.verify.contract import Phase
from statekit.verify.recorder import Recorder
from statekit.verify.recording import Recording, from_json, open_recording, system, to_json
from statekit.verify.systems.native_slots import canonical_slots

SYSTEMS = ("hf_adafactor", "torch_adafactor", "torch_formats", "optax_adafactor", "keras")
PIECES = ("adafactor_deepspeed_zero1", "adafactor_fsdp1_full")
"""Adafactor on what ranks hold: listed with the reason (tests/test_cli_replay.py), not replayed."""
ALL = [
    f"{name}/{path.name}"
    for name in SYSTEMS
    for path in bundles(name)
    if (path.name.startswith(("ada", "factored")) or name == "hf_adafactor")
    and not path.name.startswith("adamw")
    and path.name not in PIECES
]
WARM, SCHEDULED, LOW, TRAINER = (
    f"hf_adafactor/{case}"
    for case in ("relstep_warmup_scale", "fixedlr_scale_beta1_wd", "fixedlr_bf16_params", "trainer_linear_wd")
)
FORLOOP, FOREACH, BF16 = (f"torch_adafactor/adafactor_{case}" for case in ("forloop", "foreach_eps", "bf16"))
LIGHTNING = "torch_formats/adafactor_lightning"
MICRO, PLAIN, FULL, LINKS = (
    f"optax_adafactor/{case}"
    for case in (
        "adafactor_multisteps_manager_zarr3", "adafactor_orbax_v1", "adafactor_standard_ocdbt",
        "factored_rms_min128_noocdbt",
    )
)  # fmt: skip
KERAS = "keras/adafactor_default"
DIFFERENT = present(
    WARM, SCHEDULED, LOW, TRAINER, FORLOOP, FOREACH, BF16, LIGHTNING, MICRO, PLAIN, FULL, LINKS, KERAS
)
"""One of each rule; the other recordings of PyTorch differ in their containers only."""


def test_there_are_recordings() -> None:
    assert len(ALL) >= 5


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "case"), everywhere(ALL, present(FULL), DIFFERENT))
def test_every_element_of_every_step_lies_in_the_bound(name: str, case: str) -> None:
    with open_recording(GOLDEN / case) as recording:
        result = judged(recording, backend(name))
    assert not result.decoded
    assert [row for each in result.judged for row in each.rows if row.outside] == []
    assert result.passed
    rows = result.judged[0].rows
    assert {row.step for row in rows} == set(range(1, recording.last + 1))
    assert (
        {"param", "v", "v_row", "v_col"}
        <= {row.tensor for row in rows}
        <= {"param", "v", "v_row", "v_col", "m"}
    )
    assert sum(row.size for row in rows) > 1000
    assert np.median([row.width for row in rows]) < (2e-2 if case == BF16 else 2e-4), (
        "a bound this wide is none"
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", [case for case in ALL if case != BF16])
def test_the_float64_oracle_lies_in_the_bound_of_compiled_float32(case: str) -> None:
    recording = open_recording(GOLDEN / case)
    data = to_json(recording)
    data["trajectories"] = [{**data["trajectories"][0], "execution": "compiled"}]
    with from_json(recording.folder, data) as compiled:
        assert judged(compiled, ORACLE).passed


SQUARES = present(SCHEDULED, FORLOOP, BF16, LIGHTNING, PLAIN)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "case"), everywhere(SQUARES, [], SQUARES[:2]))
def test_swapped_rows_and_columns_of_a_square_leave_the_bound(name: str, case: str) -> None:
    xp = backend(name)
    with shortened(GOLDEN / case) as recording, swapped(xp):
        result = judged(recording, xp)
    assert outside(result, "v_row") and outside(result, "v_col") and not outside(result, "v")


LATE = present(WARM, SCHEDULED, FORLOOP, FULL, LINKS, KERAS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "case"), everywhere(LATE, [], LATE[:2]))
def test_a_step_one_off_leaves_the_bound(name: str, case: str) -> None:
    xp = backend(name)
    with shortened(GOLDEN / case) as recording, mistaken(adafactor, xp, late=1):
        result = judged(recording, xp)
    assert outside(result, "v") and outside(result, "v_row") and outside(result, "param")


ADDED = {"epsilon1_place": "added_to_square"}
INSIDE = {"normaliser": "mean", "precondition_form": "estimate_sqrt"}
UNROUNDED = {"compute_dtype": "float32"}
RULES: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "epsilon added to the square": [(FOREACH, ADDED, {}), (BF16, ADDED, {})],
    "no clamp of the estimate": [(FOREACH, INSIDE, {})],
    "no clamp of the mean": [(FOREACH, {"normaliser": "mean"}, {})],
    "epsilon of another dtype": [(BF16, {}, {"epsilon1": 2.0**-23}), (FORLOOP, {}, {"epsilon1": 2.0**-7})],
    "epsilon1 moved": [(SCHEDULED, {}, {"epsilon1": 1e-4}), (KERAS, {}, {"epsilon1": 1e-7})],
    "epsilon2 moved": [(WARM, {}, {"epsilon2": 0.5}), (FORLOOP, {}, {"epsilon2": 0.5}), (KERAS, {}, {"epsilon2": 0.5})],
    "no rounding between operations": [(BF16, UNROUNDED, {})],
    "mean of squares, not square of the norm": [(BF16, {"mean_form": "mean_of_squares"}, {})],
    "exponent moved": [(case, {}, {"decay_rate": 0.79}) for case in (WARM, FOREACH, MICRO, KERAS)],
    "offset one off": [(FULL, {}, {"late": 1})],  # an offset of -1 is refused as a value
    "clipping moved": [
        (case, {}, {"clipping_threshold": 0.3}) for case in (SCHEDULED, FOREACH, BF16, MICRO, LINKS, KERAS)
    ],
    "no clipping of the gradients": [(LINKS, {}, {"global_norm_clip_threshold": None})],
    "no parameter scale": [(case, {}, {"multiply_by_parameter_scale": False}) for case in (WARM, FULL)],
    "parameter scale where there was none": [(TRAINER, {}, {"multiply_by_parameter_scale": True})],
    "scale of the decayed parameter": [(FORLOOP, {"weight_decay_place": "first"}, {})],
    "no cap of the rate": [(FOREACH, {"lr_source": "given"}, {})],
    "no warm-up": [(WARM, {}, {"warmup_init": False})],
    "no decay": [(case, {}, {"weight_decay_rate": None}) for case in (SCHEDULED, TRAINER, FORLOOP, FULL)],
    "decay times the given rate": [(case, {"weight_decay_form": "lr"}, {}) for case in (SCHEDULED, FULL)],
    "decay without the rate": [(FORLOOP, {"weight_decay_form": "none"}, {})],
    "decay of everything": [(FULL, {}, {"exclude_from_weight_decay": None})],
    "momentum moved": [(SCHEDULED, {}, {"beta1": 0.89}), (FULL, {}, {"beta1": 0.89})],
    "no turned sign": [(FOREACH, {}, {"maximize": False})],
}  # fmt: skip
FAULTS = {
    f"{what} {number}": fault
    for what, faults in RULES.items()
    for number, fault in enumerate(faults)
    if present(fault[0])
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ["numpy", pytest.param("torch", marks=marks("torch", slow=True))])
@pytest.mark.parametrize("what", FAULTS)
def test_another_rule_leaves_the_bound(what: str, name: str) -> None:
    case, constants, changes = FAULTS[what]
    xp = backend(name)
    changes, late = {k: v for k, v in changes.items() if k != "late"}, changes.get("late", 0)
    wrong = mistaken(adafactor, xp, constants, late=late) if constants or late else nullcontext()
    # A rate of 0.4 is capped from the seventh update on.
    with shortened(GOLDEN / case, 8 if case == FOREACH else 3) as recording, wrong:
        assert not judged(recording, xp, **changes).passed


@pytest.mark.parametrize("case", ALL)
def test_what_follows_from_a_state_is_written_again(case: str) -> None:
    with open_recording(GOLDEN / case) as recording:
        described, trajectory = system(recording.system), recording.trajectories[0]
        first = recording.state(0, trajectory, 1).extra
        # Optax' tree has a form, which no update changes: that of the first state does for all.
        form = {"optax": first["optax"]} if "optax" in first else {}
        for step in range(recording.last + 1):
            phase = recording.phase(max(step, 1))
            native = _native(recording, step)
            state = replace(recording.state(step, trajectory, max(step, 1)), extra=form)
            again = described.encode(state, phase)
            assert again.keys() == {name for name in native if name.rpartition("/")[2] != "RMS"}  # never read
            for name, tensor in again.items():
                assert (tensor.shape, tensor.dtype) == (native[name].shape, native[name].dtype), name
                ours, theirs = tensor.read().astype(np.float64), native[name].read().astype(np.float64)
                # Keras stores the estimate of the second moment, which four operations make of its factors.
                assert np.allclose(ours, theirs, rtol=2.0**-21 if name.endswith("/v") else 0, atol=0), name


def _native(recording: Recording, step: int) -> dict[str, Tensor]:
    prefix, states = f"{recording.number(step)}/", recording.states(recording.trajectories[0])
    return {name[len(prefix) :]: tensor for name, tensor in states.items() if name.startswith(prefix)}


@pytest.mark.parametrize("case", present(MICRO))
def test_updates_of_several_gradients_take_their_running_mean(case: str) -> None:
    with open_recording(GOLDEN / case) as recording:
        assert (recording.last, recording.gradients_per_update, recording.checkpoint_step) == (4, 2, 2)
        assert json.loads((recording.folder / "meta.json").read_text())["steps"] == 9
        states = {name: t.read() for name, t in recording.states(recording.trajectories[0]).items()}
        grads = {name: t.read() for name, t in recording._tensors("grads.safetensors").items()}
        for update in range(1, recording.last + 1):
            first, second = 2 * update - 1, 2 * update
            for path, mean in recording.gradients(update).items():
                one, two = grads[f"{first}/{path}"], grads[f"{second}/{path}"]
                assert np.array_equal(states[f"{first}/slot/{path}/acc_grads"], one)
                assert np.array_equal(mean.read(), one + (two - one) / np.float32(2))
                # Between updates nothing moves but the mean.
                for name in (
                    n for n in states if n.startswith(f"{first}/") and f"/{path}" in n and "acc" not in n
                ):
                    assert np.array_equal(states[name], states[f"{first - 1}{name[len(str(first)) :]}"])


@pytest.mark.parametrize("case", present(MICRO))
def test_the_last_gradient_alone_isnt_the_mean(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statekit.verify.recording.running_mean", lambda xp, gradients: gradients[-1])
    with open_recording(GOLDEN / case) as recording:
        assert not judged(recording, backend("numpy")).passed


@pytest.mark.parametrize("case", present(MICRO))
def test_a_state_between_updates_is_refused(case: str) -> None:
    with open_recording(GOLDEN / case) as recording:
        prefix, states = "3/", recording.states(recording.trajectories[0])
        between = {name[len(prefix) :]: t for name, t in states.items() if name.startswith(prefix)}
        with pytest.raises(StateError, match="between two updates"):
            system(recording.system).decode(between, 1, recording.phase(1))


@pytest.mark.parametrize("case", present(MICRO))
def test_a_description_that_injected_hyperparameters_contradict_is_refused(case: str) -> None:
    with open_recording(GOLDEN / case) as recording:
        phase = recording.phase(1)
        (group,) = phase.hyperparameters["groups"]
        for wrong in ({"decay_rate": 0.71}, {"clipping_threshold": None}):
            other = Phase(1, 1, {**phase.hyperparameters, "groups": [{**group, **wrong}]})
            with pytest.raises(StateError, match=f"contradict(.|\n)*{next(iter(wrong))}"):
                system(recording.system).decode(_native(recording, 0), 0, other)


@pytest.mark.parametrize("case", present(FULL))
def test_a_link_that_counts_otherwise_is_refused(case: str) -> None:
    with open_recording(GOLDEN / case) as recording:
        native = _native(recording, 2)
        (count,) = (name for name in native if name.endswith("0.count"))
        with pytest.raises(StateError, match="another number of updates"):
            system(recording.system).decode(native, 3, recording.phase(3))
        native[count] = in_memory(np.asarray(1, np.int32))
        with pytest.raises(StateError, match="number of updates"):
            system(recording.system).decode(native, 2, recording.phase(2))


def test_a_slot_that_isnt_in_use_must_be_empty() -> None:
    param, rule = in_memory(np.ones((3, 4), np.float32)), Rule((Axis.ROW, Axis.COLUMN), "file")
    slots = {"v_row": in_memory(np.ones(3, np.float32)), "v_col": in_memory(np.ones(4, np.float32))}
    empty = in_memory(np.zeros(1, np.float32))
    assert canonical_slots("optax", rule, param, {**slots, "v": empty}) == slots
    for full in (in_memory(np.ones(1, np.float32)), in_memory(np.zeros(2, np.float32))):
        with pytest.raises(FormatError, match="doesn't use"):
            canonical_slots("optax", rule, param, {**slots, "v": full})


def test_another_floor_of_the_parameter_scale_is_refused(tmp_path: Path) -> None:
    links = {"scale_by_factored_rms": {"epsilon": 1e-30}, "scale_by_param_block_rms": 0.01}
    meta = {
        "system": "optax_adafactor",
        "optimizer": "optax.chain(scale_by_factored_rms)",
        "hyperparameters": links,
    }
    with pytest.raises(NotFoundError, match="another floor"):
        system("optax_adafactor").describe(tmp_path, meta)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("foreach", [False, True])
def test_pytorch_itself_lies_in_the_bound(dtype: str, foreach: bool, tmp_path: Path) -> None:
    """Sizes around a processor's vector lanes: there low precision rounds otherwise than beside them."""
    folder = torch_run(tmp_path / "run", dtype, foreach)
    with open_recording(folder) as recording:
        result = judged(recording, backend("numpy"))
        assert result.passed, [row for row in result.judged[0].rows if row.outside][:1]
    with open_recording(folder) as recording, mistaken(adafactor, backend("numpy"), late=1):
        assert not judged(recording, backend("numpy")).passed


def torch_run(folder: Path, dtype: str, foreach: bool) -> Path:
    """Records three updates of torch.optim.Adafactor."""
    import torch

    random = torch.Generator().manual_seed(7)
    shapes = {"a": (33, 40), "b": (3, 5, 7), "c": (100,), "d": (), "e": (64, 1), "f": (9,)}
    kind = getattr(torch, dtype)
    params = {
        path: torch.randn(shape, generator=random).to(kind).requires_grad_() for path, shape in shapes.items()
    }
    settings: dict[str, Any] = {"lr": 0.05, "beta2_decay": -0.8, "d": 1.0, "weight_decay": 0.1}
    optimizer: Any = torch.optim.Adafactor(params.values(), **settings, eps=(None, 1e-3), foreach=foreach)
    group = {**settings, "eps": [None, 1e-3], "maximize": False, "params": list(params)}

    def array_of(value: torch.Tensor) -> Array:
        wide = value.detach().to(torch.float32).clone().numpy()
        return wide.astype(DTYPES[str(value.dtype).removeprefix("torch.")])

    recorder = Recorder(
        folder,
        system="torch_adafactor",
        hyperparameters={
            "schema": "adafactor",
            "variant": "torch",
            "groups": [group],
            "counts": {"slots": ["step"], "dtype": "float32"},
        },
    )
    recorder.start({path: array_of(param) for path, param in params.items()}, {})
    for _ in range(3):
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=random).to(kind)
        optimizer.step()
        slots = {
            path: {name: array_of(value) for name, value in optimizer.state[param].items()}
            for path, param in params.items()
        }
        grads = {path: array_of(param.grad) for path, param in params.items() if param.grad is not None}
        recorder.update(grads, {path: array_of(param) for path, param in params.items()}, slots, 0.05)
    recorder.close()
    return folder
