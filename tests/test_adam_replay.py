"""AdamW and LAMB against PyTorch, Optax, Keras, Mesh-TensorFlow and GPT-Neo, and faults that replay must notice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from goldens import GOLDEN, bundles
from replaying import everywhere, judged, mistaken, outside, present, shortened
from statekit.arrays.backend import backend
from statekit.arrays.numpy_backend import ORACLE
from statekit.errors import FormatError, NotFoundError, StateError
from statekit.optim import adamw, lamb
from statekit.optim.steps import Scene
from statekit.state.schema import load_schema
from statekit.tensors.tensor import Tensor, in_memory
from statekit.verify import replay as verify_replay
from statekit.verify.recorder import Recorder, write_trajectory
from statekit.verify.recording import Recording, from_json, open_recording, system, to_json
from statekit.verify.replay import Subject, free_run, replay

SYSTEMS = ("keras", "mesh_tf", "optax_adafactor", "torch_adafactor", "torch_formats")


def _recorded(word: str) -> list[Path]:
    return [
        path
        for name in SYSTEMS
        for path in bundles(name)
        if word
        in json.loads((path / "meta.json").read_text())["optimizer"].lower().replace("weightdecay", "w")
        and (path / "trajectory.safetensors").is_file()
    ]


ALL = [f"{path.parent.name}/{path.name}" for path in [*_recorded("adamw"), *_recorded("lamb")]]
TORCH, FUSED = "torch_adafactor/adamw_foreach_amsgrad", "torch_adafactor/adamw_fused_named"
TRAINER, ZERO = "torch_formats/adamw_trainer", "torch_formats/adamw_deepspeed_bf16_zero1"
OPTAX, LOW = "optax_adafactor/adamw_flax_msgpack", "optax_adafactor/adamw_bf16mu_manager_multiitem"
KERAS = "keras/adamw_ema_schedule_clip"
MESH, NEO = "mesh_tf/adamw_2device_stacked_sharded", "mesh_tf/gptneo_adam_cosine_clip"
LAMB, KERAS_LAMB = "optax_adafactor/lamb_pytree_noocdbt", "keras/lamb_default"
DIFFERENT = present(TORCH, FUSED, OPTAX, LOW, KERAS, MESH, NEO, LAMB, KERAS_LAMB)
"""One of each rule; the other recordings of PyTorch differ in their containers only."""


def test_there_are_recordings() -> None:
    assert len(ALL) >= 5


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "case"), everywhere(ALL, present(TORCH, LOW, KERAS, NEO, LAMB), DIFFERENT))
def test_every_element_of_every_step_lies_in_the_bound(name: str, case: str) -> None:
    with open_recording(GOLDEN / case) as recording:
        result = judged(recording, backend(name))
        last = recording.last
    assert not result.decoded
    assert [row for each in result.judged for row in each.rows if row.outside] == []
    assert result.passed
    rows = result.judged[0].rows
    assert {row.step for row in rows} == set(range(1, last + 1))
    assert {"param", "m", "v"} <= {row.tensor for row in rows}
    assert sum(row.size for row in rows) > 1000
    assert np.median([row.width for row in rows]) < 2e-4, "a bound this wide proves nothing"


@pytest.mark.parametrize("case", present(TORCH, ZERO, LOW, KERAS, MESH, LAMB))
def test_the_free_run_is_written_under_the_recordings_own_names(case: str, tmp_path: Path) -> None:
    with open_recording(GOLDEN / case) as recording:
        file = tmp_path / "free.safetensors"
        write_trajectory(file, free_run(Subject(recording, "init"), backend("numpy")), recording)
        theirs = {name: t.read() for name, t in recording.states(recording.trajectories[0]).items()}
        free = {"file": file.name, "execution": "compiled"}
        with from_json(tmp_path, {**to_json(recording), "trajectories": [free]}) as written:
            ours = {name: t.read() for name, t in written.states(written.trajectories[0]).items()}
    assert set(ours) == set(theirs)
    largest: dict[str, float] = {}
    for name, array in theirs.items():
        tensor = name.partition("/")[2]
        largest[tensor] = max(largest.get(tensor, 0.0), float(np.max(np.abs(array.astype(np.float64)))))
    for name, array in ours.items():
        assert (array.shape, array.dtype) == (theirs[name].shape, theirs[name].dtype)
        gap = float(np.max(np.abs(array.astype(np.float64) - theirs[name].astype(np.float64))))
        digits = 1e-2 if array.dtype.name == "bfloat16" else 1e-5
        assert gap <= digits * largest[name.partition("/")[2]], name


@pytest.mark.parametrize("case", present(TORCH, OPTAX, KERAS, MESH, NEO, LAMB, KERAS_LAMB))
def test_the_float64_oracle_lies_in_the_bound_of_compiled_float32(case: str) -> None:
    recording = open_recording(GOLDEN / case)
    data = to_json(recording)
    data["trajectories"] = [{**data["trajectories"][0], "execution": "compiled"}]
    with from_json(recording.folder, data) as compiled:
        assert judged(compiled, ORACLE).passed


@pytest.mark.parametrize("case", present(MESH, NEO))
def test_the_roots_of_tensorflow_1_are_not_correctly_rounded(case: str) -> None:
    recording = open_recording(GOLDEN / case)
    data = to_json(recording)
    assert data["trajectories"][0].pop("sqrt_units") == 8
    with from_json(recording.folder, data) as exact:
        assert not judged(exact, backend("numpy")).passed


@pytest.mark.parametrize("case", present(TORCH, TRAINER))
def test_pytorchs_kernels_contract(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = open_recording(GOLDEN / case)
    data = to_json(recording)
    data["trajectories"][0]["execution"] = "op_by_op"
    monkeypatch.setattr(verify_replay, "kernels_contract", lambda state: False)
    with from_json(recording.folder, data) as strict:
        assert not judged(strict, backend("numpy")).passed


def swapped(case: str) -> dict[str, Any]:
    """The betas of a recording, exchanged."""
    hyperparameters = open_recording(GOLDEN / case).phases[0].hyperparameters
    betas = load_schema(hyperparameters["schema"]).canonical(
        hyperparameters["variant"], hyperparameters["groups"][0]
    )
    return {"beta1": betas["beta2"], "beta2": betas["beta1"]}


BETAS = present(TORCH, LAMB, LOW, KERAS, MESH, KERAS_LAMB)


@pytest.mark.parametrize("case", BETAS)
def test_swapped_betas_leave_the_bound(case: str) -> None:
    with shortened(GOLDEN / case) as recording:
        result = judged(recording, backend("numpy"), **swapped(case))
    assert all(outside(result, tensor) for tensor in ("param", "m", "v"))


LATE = present(FUSED, LAMB, OPTAX, KERAS)


@pytest.mark.parametrize("case", LATE)
def test_a_step_one_off_leaves_the_bound(case: str) -> None:
    xp, module = backend("numpy"), lamb if "lamb" in case else adamw
    with shortened(GOLDEN / case) as recording, mistaken(module, xp, late=1):
        result = judged(recording, xp)
    assert outside(result, "param") and not outside(result, "m") and not outside(result, "v")


UNCORRECTED = {"update_form": "reciprocal", "denominator_form": "root"}
CORRECTED = {
    "update_form": "direction",
    "denominator_form": "root_of_quotient",
    "bias_correction_precision": "float32",
}
FOLDED = {"update_form": "scaled_moment", "denominator_form": "root"}
INSIDE = {"denominator_form": "root_of_quotient", "bias_correction_precision": "float32"}
INSIDE_1E6 = {"epsilon": 0.0, "epsilon_root": 1e-6}
LATER = {"amsgrad_of": "corrected"}
RULES: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "correction off": [(case, UNCORRECTED, {}) for case in (TORCH, OPTAX, KERAS)],
    "correction on": [(case, CORRECTED, {}) for case in (MESH, NEO)],
    "epsilon beside the uncorrected root": [(case, FOLDED, {}) for case in (TORCH, LOW)],
    "epsilon inside the root": [
        (TORCH, INSIDE, INSIDE_1E6),
        (KERAS, INSIDE, INSIDE_1E6),
        (LAMB, {}, {"epsilon": 0.0, "epsilon_root": 1e-5}),
    ],
    "epsilon moved": [(case, {}, {"epsilon": 1e-7}) for case in (TORCH, KERAS, LAMB)],
    "decay before the ratio": [(LAMB, {"weight_decay_place": "first"}, {})],
    "no decay": [(case, {}, {"weight_decay_rate": 0.0}) for case in (TORCH, OPTAX, KERAS, MESH, LAMB)],
    "decay of everything": [(case, {}, {"exclude_from_weight_decay": None}) for case in (OPTAX, KERAS, MESH)],
    "maximum of the corrected moment": [(case, LATER, {}) for case in (TORCH, KERAS)],
    "no Nesterov": [(LOW, {}, {"nesterov": False})],
    "no clipping": [
        (LOW, {}, {"clipvalue": None}),
        (KERAS, {}, {"global_norm_clip_threshold": None}),
        (NEO, {}, {"global_norm_clip_threshold": None}),
    ],
    "averages late": [(KERAS, {}, {"ema_momentum": 0.91})],
}
HERE = {what: [fault for fault in faults if present(fault[0])] for what, faults in RULES.items()}
FAULTS = [f"{what} {number}" for what, faults in HERE.items() for number in range(len(faults))]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("fault", FAULTS)
def test_another_rule_leaves_the_bound(fault: str) -> None:
    what, _, number = fault.rpartition(" ")
    case, constants, changes = HERE[what][int(number)]
    xp, module = backend("numpy"), lamb if "lamb" in case else adamw
    with shortened(GOLDEN / case) as recording, mistaken(module, xp, constants):
        assert not judged(recording, xp, **changes).passed


@pytest.mark.parametrize("case", present(FUSED, MESH))
def test_decay_after_the_update_leaves_the_bound(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    xp, update = backend("numpy"), adamw.update

    def late(
        scene: Scene, param: Any, grad: Any, slots: Any, settings: adamw.AdamWHyperparameters, common: None
    ) -> Any:
        if scene.xp is not xp:
            return update(scene, param, grad, slots, settings, common)
        after, new = update(scene, param, grad, slots, replace(settings, weight_decay_rate=None), common)
        return after * np.float32(1.0 - float(scene.rate or 0.0) * (settings.weight_decay_rate or 0.0)), new

    monkeypatch.setattr(adamw, "update", late)
    with open_recording(GOLDEN / case) as recording:
        assert outside(judged(recording, xp), "param")


@pytest.mark.parametrize("wrapper", ["DeepSpeed ZeRO-1 (2 ranks, gloo, CPU)", "FSDP1 (2 ranks, gloo, CPU)"])
def test_adafactor_on_pieces_of_ranks_is_refused_with_the_reason(wrapper: str, tmp_path: Path) -> None:
    meta = {"system": "torch_formats", "optimizer": f"torch.optim.Adafactor under {wrapper}"}
    with pytest.raises(NotFoundError, match="pieces that ranks hold"):
        system("torch_formats").describe(tmp_path, meta)


@pytest.mark.parametrize(("name", "optimizer"), [("keras", "SGD"), ("optax_adafactor", "optax.lion")])
def test_another_optimizer_is_named(name: str, optimizer: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=optimizer):
        system(name).describe(
            tmp_path, {"system": name, "optimizer": optimizer, "extra": {}, "hyperparameters": {}}
        )


def test_a_mask_in_unknown_words_is_refused(tmp_path: Path) -> None:
    meta = {"system": "optax_adafactor", "optimizer": "optax.adamw", "hyperparameters": {"mask": "no biases"}}
    with pytest.raises(NotFoundError, match="no biases"):
        system("optax_adafactor").describe(tmp_path, meta)


@pytest.mark.parametrize("case", present(TORCH, MESH, KERAS))
def test_a_tensor_without_a_place_is_named(case: str) -> None:
    with open_recording(GOLDEN / case) as recording:
        stray = in_memory(np.zeros(2, np.float32))
        for name in (
            "global/loss",
            f"slot/{recording.phase(1).hyperparameters['groups'][0]['params'][0]}/exp_avg_3",
        ):
            with pytest.raises(FormatError, match=name):
                system(recording.system).decode({name: stray, **_state(recording, 1)}, 1, recording.phase(1))
        with pytest.raises(FormatError, match="not recorded"):
            system(recording.system).decode({}, 1, recording.phase(1))


def _state(recording: Recording, step: int) -> dict[str, Tensor]:
    prefix, states = f"{step}/", recording.states(recording.trajectories[0])
    return {name[len(prefix) :]: tensor for name, tensor in states.items() if name.startswith(prefix)}


@pytest.mark.parametrize("case", present(ZERO))
def test_copies_of_ranks_must_agree_with_the_slots(case: str) -> None:
    with open_recording(GOLDEN / case) as recording:
        native = _state(recording, 2)
        name = "global/rank1.group0.exp_avg"
        native[name] = in_memory(native[name].read() + 1, name)
        with pytest.raises(FormatError, match="rank's copy"):
            system(recording.system).decode(native, 2, recording.phase(2))


def recorded_run(folder: Path, counts: tuple[int, int] = (1, 1)) -> Path:
    """Records one update of Keras' rule, its states under PyTorch's names; two parameters with their own counts."""
    arguments = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}
    arguments |= {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
    hyperparameters = {
        "schema": "adamw",
        "variant": "torch",
        "groups": [{**arguments, "params": ["a", "b"]}],
        "counts": {"slots": ["step"], "dtype": "float32"},
    }
    recorder = Recorder(folder, system="torch_adafactor", hyperparameters=hyperparameters)
    params = {path: np.ones(3, np.float32) for path in "ab"}
    slots = {
        path: {"exp_avg": np.zeros(3, np.float32), "exp_avg_sq": np.zeros(3, np.float32)} for path in "ab"
    }
    recorder.start(params, {})
    after = {
        path: {**slots[path], "step": np.asarray(count, np.float32)}
        for path, count in zip("ab", counts, strict=True)
    }
    recorder.update({path: np.zeros(3, np.float32) for path in "ab"}, params, after, 0.1)
    recorder.close()
    return folder


def test_a_run_of_ones_own_is_judged(tmp_path: Path) -> None:
    with open_recording(recorded_run(tmp_path / "mine")) as recording:
        assert replay(Subject(recording, "init"), backend("numpy")).passed


def test_parameters_with_different_counts_are_refused(tmp_path: Path) -> None:
    folder = recorded_run(tmp_path / "mine", (1, 2))
    with open_recording(folder) as recording, pytest.raises(StateError, match="one count"):
        judged(recording, backend("numpy"))
