"""Optimizers of Keras that no schema describes: their state goes there and back, and the original goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statekit
from statekit.attestation.doctor import doctor
from statekit.conversion.open_state import open_state
from statekit.errors import StatekitError, UnknownRuleError
from statekit.verify.cold_start import cold_start

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
FAST: tuple[str, ...] = ()
OTHERS = (
    "SGD",
    "plain SGD",
    "Lion",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Muon",
    "Muon averaged",
    "averaged",
    "scheduled",
    "own",
)


def originals() -> dict[str, Callable[[], Any]]:
    """Returns optimizers of Keras by name."""
    import keras

    class Own(keras.optimizers.Optimizer):  # type: ignore[misc]
        def build(self, variables: Any) -> None:
            if not self.built:
                super().build(variables)
                self.first, self.second = self.add_optimizer_variables(variables, ["first", "second"])

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            first, second = (one[self._get_variable_index(variable)] for one in (self.first, self.second))
            self.assign(first, 0.9 * first + gradient)
            self.assign(second, 0.5 * second - gradient)
            self.assign_sub(variable, 0.01 * (first + second))

    optimizers = keras.optimizers
    decay = optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    return {
        "SGD": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        "plain SGD": lambda: optimizers.SGD(0.05),
        "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.8, centered=True),
        "Lion": lambda: optimizers.Lion(0.002, weight_decay=0.05),
        "Adagrad": optimizers.Adagrad,
        "Adadelta": optimizers.Adadelta,
        "Adamax": optimizers.Adamax,
        "Nadam": optimizers.Nadam,
        "Ftrl": optimizers.Ftrl,
        "Muon": lambda: optimizers.Muon(0.02, exclude_layers=["b"]),
        "Muon averaged": lambda: optimizers.Muon(0.02, use_ema=True),
        "averaged": lambda: optimizers.SGD(0.05, momentum=0.9, use_ema=True),
        "scheduled": lambda: optimizers.Lion(decay),
        "own": lambda: Own(0.1),
    }


def run(name: str) -> Any:
    """Returns a compiled model after three updates."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(5, name="a"), keras.layers.Dense(2, name="b")]
    )
    model.compile(optimizer=originals()[name](), loss="mse")
    updated(model, 0, 3)
    return model


def updated(model: Any, first: int, last: int) -> list[np.ndarray[Any, Any]]:
    """Returns all variables after more updates."""
    import tensorflow as tf

    model.optimizer.build(model.trainable_variables)
    for number in range(first, last):
        random = np.random.default_rng(number)
        grads = [tf.constant(random.normal(size=one.shape), tf.float32) for one in model.trainable_variables]
        model.optimizer.apply(grads, model.trainable_variables)
    return values(model)


def values(model: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(one) for one in (*model.trainable_variables, *model.optimizer.variables)]


def same(left: list[Any], right: list[Any]) -> bool:
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_the_original_goes_on_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    import keras
    import tensorflow as tf

    model = run(name)
    model.save(tmp_path / "model.keras")
    assert doctor(tmp_path / "model.keras")[0].findings == ()  # Muon's matrices have no second moment
    statekit.convert(tmp_path / "model.keras", tmp_path / "neutral", to="statekit")
    statekit.convert(tmp_path / "neutral", tmp_path / "next.keras")
    statekit.convert(tmp_path / "neutral", tmp_path / "next.weights.h5")
    statekit.convert(tmp_path / "next.weights.h5", tmp_path / "bundle", to="tf-bundle")
    statekit.convert(tmp_path / "bundle", tmp_path / "again", to="tf-bundle")
    (index,) = (tmp_path / "again").glob("*.index")
    before = values(model)
    objects = {"Own": type(model.optimizer)} if name == "own" else {}
    whole = keras.saving.load_model(tmp_path / "next.keras", custom_objects=objects)
    by_weights, by_objects = run(name), run(name)
    by_weights.load_weights(tmp_path / "next.weights.h5")
    checkpoint = tf.train.Checkpoint(model=by_objects, optimizer=by_objects.optimizer)
    checkpoint.restore(str(index.with_suffix(""))).assert_existing_objects_matched()
    others = [whole, by_weights, by_objects]
    for other in others:
        assert same(before, values(other))
    whole.save(tmp_path / "saved.keras")
    after = updated(model, 3, 5)
    for other in others:
        assert same(after, updated(other, 3, 5))


def test_its_slots_have_their_own_names_and_its_rule_is_unknown(tmp_path: Path) -> None:
    model = run("RMSprop")
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    source = tmp_path / "model.weights.h5"
    for path in (tmp_path / "model.keras", source):
        with open_state(path) as opened:
            assert opened.state.optimizer.kinds == (("keras_native", "RMSprop"),)
            assert [*opened.slots["a/kernel"]] == ["velocity", "momentum", "average_gradient"]
    made = statekit.plan(source, tmp_path / "out.weights.h5")
    assert made.headline.startswith("BITWISE; unknown: the rule of RMSprop")
    with pytest.raises(UnknownRuleError, match="statekit has no step of RMSprop"):
        cold_start(source)
    with pytest.raises(StatekitError, match="state of RMSprop"):
        statekit.plan(source, tmp_path / "out.pt")


def test_attest_compares_a_live_optimizer_by_its_own_names(tmp_path: Path) -> None:
    import statekit.tensorflow

    model = run("RMSprop")
    model.save(tmp_path / "model.keras")
    result = statekit.tensorflow.attest(model.optimizer, model, tmp_path / "model.keras")
    assert result.passed and "unknown: the rule of RMSprop" in str(result)
    model.optimizer.variables[5].assign(0 * model.optimizer.variables[5])
    result = statekit.tensorflow.attest(model.optimizer, model, tmp_path / "model.keras")
    assert [(one.name, *one.where) for one in result.findings] == [
        ("slot-zero", f"slots/{model.name}/b/bias/velocity")
    ]


@pytest.mark.parametrize("averaged", [False, True])
def test_what_only_a_config_tells_is_said_to_be_assumed(averaged: bool, tmp_path: Path) -> None:
    """One variable of each parameter is SGD's momentum, or an average of the weights."""
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, name="a")])
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9, use_ema=averaged), loss="mse")
    updated(model, 0, 1)
    model.save_weights(tmp_path / "run.weights.h5")
    model.save(tmp_path / "run.keras")
    with open_state(tmp_path / "run.weights.h5") as bare, open_state(tmp_path / "run.keras") as whole:
        assert any("use_ema" in note for note in bare.state.assumptions) != averaged
        assert not any("use_ema" in note for note in whole.state.assumptions)
