"""Every optimizer of Keras 3, in each of its files: recognised, or carried and refused by its name."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zoo import answer, answers

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
FORMS = ("run.keras", "run.weights.h5", "checkpoint")
NAMES = {
    "SGD": "SGD", "SGD with momentum": "SGD", "scheduled SGD": "SGD", "RMSprop": "RMSprop",
    "centered RMSprop": "RMSprop", "Adadelta": "Adadelta", "Adagrad": "Adagrad", "Adamax": "Adamax",
    "Nadam": "Nadam", "Ftrl": "Ftrl", "Lion": "Lion", "ScheduleFreeAdamW": "ScheduleFreeAdamW",
}  # fmt: skip
"""What no schema describes, each with what it is called."""
GOES_ON = {
    "Adam": "adamw", "AMSGrad": "adamw", "AdamW": "adamw", "Adafactor": "adafactor", "Lamb": "lamb",
    "averaged Adam": "adamw", "Muon": "muon",
}  # fmt: skip
MORE = {"accumulating Adam", "scaled Adam", "MultiOptimizer"}
ASKED = {("accumulating Adam", "run.weights.h5"): "gradient_accumulation_steps"}
"""Files that tell accumulated gradients from averages by nothing, each with the option that is asked for."""
CI_DRAWS = 2


def zoo() -> list[str]:
    return sorted({*NAMES, *GOES_ON, *MORE})


def made(name: str) -> Any:
    """Returns an optimizer with a rate and its own defaults."""
    import keras

    kinds = keras.optimizers
    others: dict[str, Callable[[], Any]] = {
        "SGD with momentum": lambda: kinds.SGD(0.01, momentum=0.9, nesterov=True),
        "scheduled SGD": lambda: kinds.SGD(kinds.schedules.CosineDecay(0.01, 100), momentum=0.9),
        "centered RMSprop": lambda: kinds.RMSprop(0.01, centered=True, momentum=0.9),
        "AMSGrad": lambda: kinds.Adam(0.01, amsgrad=True),
        "averaged Adam": lambda: kinds.Adam(0.01, use_ema=True),
        "accumulating Adam": lambda: kinds.Adam(0.01, gradient_accumulation_steps=2),
        "MultiOptimizer": lambda: kinds.MultiOptimizer(
            kinds.OptimizerMap(kinds.SGD(0.01), {".*a/.*": kinds.Adam(0.01)})
        ),
        "scaled Adam": lambda: kinds.LossScaleOptimizer(kinds.Adam(0.01)),
    }
    return others[name]() if name in others else getattr(kinds, name)(0.01)


def saved(name: str, form: str, folder: Path) -> Path:
    """Trains for three updates, and saves."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(6, name="a"), keras.layers.Dense(4, name="b")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(made(name), loss="mse", run_eagerly=True)
    inputs = np.random.RandomState(0).randn(12, 8).astype(np.float32)
    model.fit(inputs, inputs[:, :4], epochs=1, batch_size=4, verbose=0)
    path = folder / form
    if form == "run.keras":
        model.save(path)
    elif form == "run.weights.h5":
        model.save_weights(path)
    else:
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(path / "ckpt"))
    return path


def check(name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sends a state through every verb."""
    path = saved(name, form, tmp_path)
    if option := ASKED.get((name, form)):
        done = answer(capsys, "convert", path, tmp_path / "asked.pt")
        assert done.code == 3 and option in done.text
        done = answer(capsys, "convert", path, tmp_path / "asked.pt", "--hparams", f"{option}=2")
        assert done.code == 0, done.text
        return
    if name == "MultiOptimizer":  # it has a state for each of its optimizers
        done = answer(capsys, "convert", path, tmp_path / "out.pt")
        assert done.code == 3 and re.search("Multi_?Optimizer", done.text, re.IGNORECASE), done.text
        assert answer(capsys, "convert", path, tmp_path / "weights.pt", "--params-only").code == 0
        return
    given = answers(path, {"out.pt": [], "neutral": ["--to", "statekit"]}, tmp_path, capsys)
    abroad = given.converted["out.pt"]
    if name in NAMES:
        assert NAMES[name] in given.shown
        assert abroad.code in (2, 3) and NAMES[name] in abroad.text, abroad.text
    else:
        assert abroad.code == 0, abroad.text
        assert given.verified["out.pt"].code == 0, given.verified["out.pt"].text
    if name in GOES_ON:
        assert GOES_ON[name] in given.shown
    assert given.converted["neutral"].code == 0, given.converted["neutral"].text
    assert answer(capsys, "resume", path).code == 0


@pytest.mark.parametrize(("name", "form"), random.Random(5).sample(
    [(name, form) for name in zoo() for form in FORMS], CI_DRAWS
))  # fmt: skip
def test_a_drawn_optimizer_is_recognised_or_refused_by_its_name(
    name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(name, form, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", zoo())
def test_each_optimizer_is_recognised_or_refused_by_its_name(
    name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(name, form, tmp_path, capsys)


def test_the_zoo_has_every_optimizer_of_keras() -> None:
    import keras

    kinds = {name for name, kind in vars(keras.optimizers).items() if isinstance(kind, type)}
    no_optimizers = {"Optimizer", "OptimizerMap"}
    assert kinds - no_optimizers - {"LossScaleOptimizer"} <= {*zoo()}  # which is scaled Adam's
