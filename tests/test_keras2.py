"""Files of Keras 2, and whole-model .h5 files of every Keras: read by name and order, and gone on with as Keras did.

The files are Keras 2.15's own, and `expected.npz` holds the weights that it had three updates later: see
tests/cases/keras2/make.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

import statekit.tensorflow
from statekit.cli.main import main
from statekit.conversion.changing.changes import Changes
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Exactness
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.errors import InexactError, StateError
from statekit.state.schedules.called import KEY as CALLED
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array

CASES = Path(__file__).parent / "cases/keras2"
KERAS3 = Path(__file__).parent / "cases/keras3_h5"
FORMS = [
    (case.name, form.name)
    for case in sorted(CASES.iterdir())
    for form in sorted(case.iterdir() if case.is_dir() else ())
    if form.name in ("model.h5", "model.keras", "tfckpt", "weights_ckpt.index")
    and (case.name, form.name) != ("legacy_adam", "model.keras")
]
MOVED = ["hidden/kernel", "hidden/bias", "bn/gamma", "bn/beta", "out/kernel", "out/bias"]
SLOTS = {"amsgrad_clip": {"m", "v", "v_max", "average"}}


def stored(case: str, suffix: str) -> Array:
    """Returns a variable of the optimizer by the end of its name, as h5py reads it."""
    with h5py.File(CASES / case / "model.h5") as file:
        group = file["optimizer_weights"]
        [name] = [name for name in group.attrs["weight_names"] if name.endswith(suffix)]
        return np.asarray(group[name])


@pytest.mark.parametrize(("case", "form"), FORMS)
def test_every_form_of_keras_2_holds_what_its_whole_model_file_names(case: str, form: str) -> None:
    with open_state(CASES / case / form) as opened:
        state = opened.state
        assert state.counts.updates == 5
        assert list(state.slots) == MOVED
        assert {"bn/moving_mean", "bn/moving_variance"} < state.params.keys()
        if case == "adafactor":
            assert {*state.slots["hidden/kernel"]} == {"v_row", "v_col"}
            assert {*state.slots["hidden/bias"]} == {"v"}
            row = state.slots["out/kernel"]["v_row"].read()
            np.testing.assert_array_equal(row, stored(case, "r/out/kernel:0"), strict=True)
            return
        legacy = case.startswith("legacy")
        for path in MOVED:
            assert {*state.slots[path]} == SLOTS.get(case, {"m", "v"})
            for slot in ("m", "v"):
                name = f"{path}/{slot}:0" if legacy else f"{slot}/{path}:0"
                values = state.slots[path][slot].read()
                np.testing.assert_array_equal(values, stored(case, name), strict=True)


def test_keras_2_puts_averages_before_the_moments_and_maxima_behind_them() -> None:
    with open_state(CASES / "amsgrad_clip/model.h5") as opened:
        for path in MOVED:
            slots = opened.slots[path]
            np.testing.assert_array_equal(
                slots["average"].read(), stored("amsgrad_clip", f"average/{path}:0")
            )
            np.testing.assert_array_equal(slots["v_max"].read(), stored("amsgrad_clip", f"vhat/{path}:0"))


def test_the_configs_of_files_leave_no_hyperparameter_to_ask() -> None:
    for form in ("model.h5", "model.keras"):
        with open_state(CASES / "adamw" / form) as opened:
            known = opened.hyperparameters[0]
            assert known["weight_decay_rate"] == (0.05, "file")
            assert known["learning_rate"].value == pytest.approx(0.01)
            assert known["beta1"] == (0.9, "file") and known["epsilon"] == (1e-7, "file")


def test_a_legacy_optimizer_goes_on_with_the_decay_of_its_rate() -> None:
    for form in ("model.h5", "tfckpt"):
        with open_state(CASES / "legacy_adam" / form) as opened:
            call: Any = opened.state.extra[CALLED]
            assert call["function"] == "InverseTimeDecay" and call["arguments"]["decay_steps"] == 1
            assert call["arguments"]["decay_rate"] == pytest.approx(0.001)


def test_a_keras_file_of_a_legacy_optimizer_says_why_it_has_weights_alone() -> None:
    with open_state(CASES / "legacy_adam/model.keras") as opened:
        assert opened.state.optimizer.schema == "weights"
        assert "Keras 2 does not save the variables of a legacy optimizer" in opened.evidence[1].because


def built(case: str) -> Any:
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(6, activation="tanh", name="hidden"),
        keras.layers.BatchNormalization(name="bn"),
        keras.layers.Dense(4, name="out"),
    ]
    return keras.Sequential([keras.Input((8,)), *layers], name=case)


def rate_of(state: TrainState) -> Any:
    call: Any = state.extra.get(CALLED)
    if call is None:
        return None
    schedule = getattr(keras.optimizers.schedules, call["function"])
    return schedule(**{name: value for name, value in call["arguments"].items() if value is not None})


def gone_on(model: Any, optimizer: Any) -> None:
    """Makes updates 6 to 8, as make.py does."""
    for i in range(5, 8):
        random = np.random.RandomState(i)
        x, y = random.randn(16, 8).astype("float32"), random.randn(16, 4).astype("float32")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


@pytest.mark.parametrize(
    ("case", "form"),
    [
        pytest.param(*pair, marks=[] if pair == ("adam", "model.h5") else [pytest.mark.slow])
        for pair in FORMS
        if pair[0] != "loss_scale" and pair not in (("legacy_sched", "tfckpt"), ("adamw", "tfckpt"))
    ],
)
def test_a_run_of_keras_2_goes_on_with_the_weights_that_keras_2_had(case: str, form: str) -> None:
    path = CASES / case / form
    model = built(case)
    with open_state(path) as opened:
        rate = rate_of(opened.state)
    clip: Any = {"global_norm_clip_threshold": 1.0} if (case, form) == ("amsgrad_clip", "tfckpt") else {}
    statekit.tensorflow.load_params(path, model)
    optimizer = statekit.tensorflow.load_optimizer(
        path, model.trainable_variables, learning_rate=rate, **clip
    )
    gone_on(model, optimizer)
    with np.load(CASES / case / "expected.npz") as expected:
        for weight in model.weights:
            right = expected[f"{weight.path.partition('/')[2]}:0"]
            np.testing.assert_allclose(weight.numpy(), right, rtol=0, atol=2e-6 * np.abs(right).max())


@pytest.mark.parametrize("case", ["adam", "legacy_adam", "adafactor", "loss_scale"])
@pytest.mark.parametrize("form", ["model.h5", "model.keras", "tfckpt"])
def test_what_keras_2_saved_is_written_back_to_the_bit(case: str, form: str, tmp_path: Path) -> None:
    source = CASES / case / form
    if not source.exists():
        pytest.skip("this form isn't kept of this case")
    suffix = {"model.h5": ".h5", "model.keras": ".keras"}.get(form, ".ckpt.d")
    target = tmp_path / f"written{suffix}"
    report = convert(plan(source, target))
    assert report.plan.exactness == Exactness.BITWISE and not report.plan.dropped
    with open_state(source) as theirs, open_state(target) as ours:
        assert theirs.layout == ours.layout
        left, right = theirs.checkpoint.tensors, ours.checkpoint.tensors
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            assert tensor.dtype == right[name].dtype, name
            assert tensor.read().tobytes() == right[name].read().tobytes(), name


def test_a_whole_model_file_of_keras_3_is_the_state_of_the_keras_file_beside_it() -> None:
    with open_state(KERAS3 / "model.h5") as listed, open_state(KERAS3 / "model.keras") as numbered:
        assert list(listed.params) == list(numbered.params)
        for path, slots in numbered.slots.items():
            for name, tensor in slots.items():
                np.testing.assert_array_equal(listed.slots[path][name].read(), tensor.read(), strict=True)
        assert listed.state.optimizer.groups[0].hyperparameters == numbered.groups[0].hyperparameters
        assert listed.counts == numbered.counts


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras on NumPy 2
@pytest.mark.parametrize("kind", ["RMSprop", "Nadam", "Muon"])
def test_a_whole_model_file_of_keras_3_is_carried_whatever_its_optimizer(kind: str, tmp_path: Path) -> None:
    """Seen red: of an optimizer that is none of the Adams or Adafactor, the weights came out alone."""
    model, optimizer = built("whole"), getattr(keras.optimizers, kind)(0.01)
    model.compile(optimizer, keras.losses.MeanSquaredError())
    optimizer.build(model.trainable_variables)
    gone_on(model, optimizer)
    source, back = tmp_path / "run.h5", tmp_path / "back.h5"
    model.save(source)
    convert(plan(source, tmp_path / "neutral", to="statekit"))
    assert (
        convert(plan(tmp_path / "neutral", back, layout="keras-model-h5")).plan.exactness == Exactness.BITWISE
    )
    with open_state(source) as state:
        assert state.counts.updates == 3 and len(state.slots) == len(MOVED)
    with h5py.File(back) as file:
        group = file["optimizer_weights"]
        stored = [np.asarray(group[name]) for name in group.attrs["weight_names"]]
    for variable, values in zip(optimizer.variables, stored, strict=True):
        np.testing.assert_array_equal(values, variable.numpy())


def test_a_state_from_elsewhere_is_refused_for_a_whole_model_file(tmp_path: Path) -> None:
    with pytest.raises(InexactError, match=r"whole-model \.h5"):
        plan(KERAS3 / "model.keras", tmp_path / "x.h5", layout="keras-model-h5")


def test_weights_that_name_no_optimizer_are_read_once_somebody_names_it() -> None:
    ref = CheckpointRef(CASES / "adam/only.weights.h5", optimizer="adam")
    with open_state(ref) as opened:
        assert opened.counts.updates == 5
        first = opened.slots["dense/kernel"]["m"].read()
        np.testing.assert_array_equal(first, stored("adam", "m/hidden/kernel:0"), strict=True)


def test_weights_come_out_of_a_file_that_does_not_name_its_optimizer(tmp_path: Path) -> None:
    source = CASES / "adam/only.weights.h5"
    with pytest.raises(StateError, match="which optimizer"):
        plan(source, tmp_path / "refused", to="statekit")
    target = tmp_path / "weights.safetensors"
    convert(plan(source, target, changes=Changes.of({"params_only": True})))
    with open_state(target) as weights, h5py.File(source) as file:
        kernel = np.asarray(file["layers/dense/vars/0"])
        np.testing.assert_array_equal(weights.params["dense/kernel"].read(), kernel)


OTHERS = Path(__file__).parent / "cases/keras2_others"


@pytest.mark.parametrize("name", ["lion", "nadam", "legacy_nadam"])
def test_objects_of_another_optimizer_are_neither_adams_nor_weights_alone(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: a legacy Nadam was converted as Adam, and the slots of Lion and Nadam were called weights."""
    folder, target = str(OTHERS / name / "tfckpt"), str(tmp_path / "x.pt")
    assert main(["convert", folder, target]) == 2
    kind = "Nadam" if "nadam" in name else "Lion"
    assert f"holds the state of {kind}" in capsys.readouterr().err
    assert main(["inspect", folder, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert {parameter["path"] for parameter in seen["parameters"]} == {
        "embed/embeddings", "gru/gru_cell/kernel", "gru/gru_cell/recurrent_kernel", "gru/gru_cell/bias",
        "ln/gamma", "ln/beta", "frozen/kernel", "frozen/bias", "head/kernel", "head/bias",
    }  # fmt: skip
    assert main(["convert", folder, str(tmp_path / "w.safetensors"), "--params-only"]) == 0


BARE = {
    "lion/model.h5": {"m"},
    "lion/model.keras": {"m"},
    "lion/tfckpt": {"m"},
    "nadam/tfckpt": {"m", "v"},
    "legacy_nadam/tfckpt": {"m", "v"},
    "legacy_ftrl/tfckpt": {"accumulator", "linear"},
    "legacy_sgd/model.h5": {"momentum"},
    "rmsprop/model.keras": {"velocity", "momentum", "average_gradient"},
    "sgd_ema/model.h5": {"m", "average"},
}
"""File -> the slots of each parameter, as Keras 2.15 has them; it goes on with what comes back as with its own file."""
LAYOUTS = {"model.h5": "keras-model-h5", "model.keras": "keras", "tfckpt": "tf2-keras2"}


@pytest.mark.parametrize("file", BARE)
def test_an_optimizer_of_keras_2_without_a_schema_is_carried_to_the_bit(file: str, tmp_path: Path) -> None:
    """Seen red: its weights came out, and its state was refused."""
    name, form = file.split("/")
    source, neutral, back = OTHERS / file, tmp_path / "neutral", tmp_path / f"back{Path(form).suffix or '.d'}"
    named = {key.replace("|", "/"): value for key, value in np.load(OTHERS / name / "slots.npz").items()}
    convert(plan(source, neutral, to="statekit"))
    report = convert(plan(neutral, back, layout=LAYOUTS[form], to=None if "." in form else "tf-bundle"))
    assert report.plan.exactness == Exactness.BITWISE and not report.plan.dropped
    with open_state(source) as theirs, open_state(back) as ours:
        assert theirs.counts.updates == ours.counts.updates == 4
        assert len(theirs.slots) == 8 and not any("frozen" in path for path in theirs.slots)
        for path, slots in theirs.slots.items():
            assert {*slots} == BARE[file]
            for slot, tensor in slots.items():
                # A slot's name has its parameter's path, unless a .keras file names layers by other words.
                ends = (f"{slot}/{path}:0", f"{path}/{slot}:0")
                fitting = [value for key, value in named.items() if key.endswith(ends)] or [*named.values()]
                assert any(np.array_equal(tensor.read(), value) for value in fitting), (path, slot)
        left, right = theirs.checkpoint.tensors, ours.checkpoint.tensors
        assert left.keys() == right.keys()
        for key, tensor in left.items():
            assert (tensor.dtype, tensor.read().tobytes()) == (right[key].dtype, right[key].read().tobytes())


@pytest.mark.parametrize("target", ["x.keras", "x.d"])
def test_variables_that_keras_3_numbers_otherwise_are_refused_by_name(target: str, tmp_path: Path) -> None:
    to = "tf-bundle" if target == "x.d" else None
    with pytest.raises(InexactError, match="Keras 2 keeps other variables of its SGD"):
        plan(OTHERS / "sgd_ema/model.h5", tmp_path / target, to=to)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras on NumPy 2
@pytest.mark.parametrize(
    ("case", "form"), [("adamw", "model.h5"), ("adamw", "tfckpt"), ("adafactor", "model.h5")]
)
def test_a_run_of_keras_2_goes_on_in_keras_3_from_a_file_of_weights(
    case: str, form: str, tmp_path: Path
) -> None:
    """Seen red: the variables were numbered as Keras 2 does, and Keras 3 passed over all of them with a warning."""
    model, target = built(case), tmp_path / "run.weights.h5"
    model.save(tmp_path / "model.keras")
    given = ["--hparams", "weight_decay=0.05"] if form == "tfckpt" else []
    like = ["--layout", "keras", "--like", str(tmp_path / "model.keras")]
    assert main(["convert", str(CASES / case / form), str(target), *like, *given]) == 0
    kind = keras.optimizers.AdamW if case == "adamw" else keras.optimizers.Adafactor
    optimizer = kind(0.01, weight_decay=0.05) if case == "adamw" else kind(0.01)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    model.load_weights(target)
    assert int(optimizer.iterations) == 5
    gone_on(model, optimizer)
    with np.load(CASES / case / "expected.npz") as expected:
        for weight in model.weights:
            right = expected[f"{weight.path.partition('/')[2]}:0"]
            np.testing.assert_allclose(weight.numpy(), right, rtol=0, atol=2e-6 * np.abs(right).max())


def test_the_lines_of_a_file_that_keras_2_numbers_are_those_of_keras_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: Keras 3 was to load them, which passes over an optimizer of another number of variables."""
    assert main(["convert", str(OTHERS / "lion/model.keras"), str(tmp_path / "x.weights.h5")]) == 0
    assert "import tf_keras as keras" in capsys.readouterr().out
    assert main(["convert", str(OTHERS / "lion/model.h5"), str(tmp_path / "x.h5")]) == 0
    assert "import tf_keras as keras" in capsys.readouterr().out


def test_a_legacy_optimizer_of_a_name_of_its_own_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adamax keeps m and v and betas too, and its class is in no checkpoint. Seen red: it was called Adam."""
    folder, target = str(OTHERS / "legacy_adamax_named" / "tfckpt"), str(tmp_path / "x.pt")
    assert main(["convert", folder, target]) == 3
    assert "one of adam, adamax" in capsys.readouterr().err
    assert main(["convert", folder, target, "--optimizer", "adamax"]) == 3
    assert main(["convert", folder, str(tmp_path / "neutral"), "--to", "statekit"]) == 0
    assert "if you know which it is (adam or adamax)" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["model.keras", "model.h5"])
def test_a_file_of_another_optimizer_names_it_and_gives_its_weights(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "weights.safetensors"
    assert main(["convert", str(OTHERS / "lion" / form), str(tmp_path / "x.pt")]) == 2
    refusal = capsys.readouterr().err
    assert "holds the state of Lion" in refusal and "--params-only" in refusal
    assert main(["convert", str(OTHERS / "lion" / form), str(target), "--params-only"]) == 0
    expected = [*np.load(OTHERS / "lion" / "now.npz").values()]
    weights = load_file(target).values()
    assert len(weights) == len(expected) == 10
    assert all(any(np.array_equal(weight, value) for value in expected) for weight in weights)


@pytest.mark.parametrize(("name", "form"), [("adamw_cosine_ema", "model.h5"), ("adam_amsgrad", "tfckpt")])
def test_a_model_of_branches_with_a_frozen_layer_has_its_slots_by_name(name: str, form: str) -> None:
    slots = {"m": "m", "v": "v", "v_max": "vhat", "average": "average"}
    variables = {key.replace("|", "/"): value for key, value in np.load(OTHERS / name / "slots.npz").items()}
    with open_state(OTHERS / name / form) as opened:
        assert opened.counts.updates == 4 and len(opened.slots) == 8
        assert not any("frozen" in path for path in opened.slots)
        for path, kept in opened.slots.items():
            assert {*kept} == {"m", "v", "average" if name == "adamw_cosine_ema" else "v_max"}
            for slot, tensor in kept.items():
                [key] = [key for key in variables if key.endswith(f"{slots[slot]}/{path}:0")]
                np.testing.assert_array_equal(tensor.read(), variables[key], strict=True)
