"""A run with a schedule goes on in Keras by the printed lines, at the schedule's rates and through its next save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import drivers
import keras_schedule_driving
import pytest
from keras_schedule_driving import KINDS, TARGETS, WELL, TorchRun, model, planned_for

from statekit.conversion.resume import of_plan, resume_lines
from statekit.lines.rate_classes import keras_lines, mxnet_lines
from statekit.state.rates import Rates
from statekit.state.schedules.call_text import parse_call
from statekit.state.schedules.called import called_rates

pytestmark = [
    pytest.mark.torch,
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras on NumPy 2
]
FORMS = {
    "optax.linear_schedule(0.1, 0.02, 30)": "PolynomialDecay(",
    "optax.polynomial_schedule(0.1, 0.02, 1.5, 30)": "PolynomialDecay(",
    "optax.cosine_decay_schedule(0.1, 30, alpha=0.1)": "CosineDecay(",
    "optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 30, 0.01)": "CosineDecay(",
    "optax.piecewise_constant_schedule(0.1, {5: 0.5, 11: 0.1})": "PiecewiseConstantDecay(",
    "optax.exponential_decay(0.1, 4, 0.8)": "ExponentialDecay(",
    "optax.exponential_decay(0.1, 4, 0.8, staircase=True)": "ExponentialDecay(",
    "optax.exponential_decay(0.1, 4, 0.8, staircase=True, end_value=0.05)": "Schedule(",
    "optax.warmup_constant_schedule(0.0, 0.1, 9)": "Schedule(",
    "optax.join_schedules([optax.linear_schedule(0.0, 0.1, 7), optax.linear_schedule(0.1, 0.0, 20)], [7])": "Schedule(",
    "create_learning_rate_scheduler(base_learning_rate=0.5, warmup_steps=8)": "Schedule(",
    "create_learning_rate_scheduler('constant * cosine_decay', 0.1, 5, steps_per_cycle=12)": "Schedule(",
    "create_learning_rate_scheduler('constant * decay_every', 0.1, steps_per_decay=6)": "Schedule(",
    "Eden(optimizer, 8.0, 2.0, warmup_batches=5.0, batches_per_epoch=6, base_lr=0.1)": "Schedule(",
    "PolynomialDecay(0.1, 30, power=0.7)": "PolynomialDecay(",
    "CosineDecay(0.0, 20, alpha=0.1, warmup_target=0.1, warmup_steps=6)": "CosineDecay(",
    "PiecewiseConstantDecay([5, 9], [0.1, 0.02, 0.3])": "PiecewiseConstantDecay(",
    "ExponentialDecay(0.1, 7, 0.9, staircase=True)": "ExponentialDecay(",
}
"""What makes a schedule -> what makes it again in Keras."""


def rates_of(call: str) -> Rates:
    rates = called_rates(parse_call(call))
    assert isinstance(rates, Rates), rates
    return rates


@pytest.mark.sampled(7)
@pytest.mark.parametrize("call", FORMS)
def test_the_printed_schedule_of_keras_has_every_rate(call: str) -> None:
    import keras
    import tensorflow as tf

    rates, scope = rates_of(call), dict[str, Any]()
    lines = keras_lines(rates)
    assert lines[-1].endswith("schedule = Schedule()") == (FORMS[call] == "Schedule(") and FORMS[
        call
    ] in "\n".join(lines)
    exec("\n".join(lines), scope)
    compiled = tf.function(scope["schedule"])
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(scope["schedule"]))
    due = [rates.rate(updates) for updates in range(60)]
    for schedule in (scope["schedule"], compiled, again):
        called = [float(schedule(tf.constant(updates, tf.int64))) for updates in range(60)]
        # Keras computes in float32: a rate of a difference is off by its terms' rounding.
        assert called == pytest.approx(due, rel=2e-6, abs=1e-6 * max(due))
    if FORMS[call] != "Schedule(" and not call.startswith(
        "optax"
    ):  # read from Keras, and written for it again
        original = eval(call, vars(keras.optimizers.schedules))
        assert [float(original(i)) for i in range(60)] == pytest.approx(due, rel=2e-6, abs=1e-6 * max(due))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("PolynomialDecay(0.1, 30, cycle=True)", "in cycles that no other schedule has"),
        ("CosineDecay(0.1, 0)", "decay_steps is 0"),
        ("CosineDecay(0.1, 9, warmup_target='x', warmup_steps=3)", "warmup_target is 'x'"),
        ("PiecewiseConstantDecay([9, 5], [1.0, 2.0, 3.0])", "boundaries are [9, 5]"),
        ("PiecewiseConstantDecay([9], [1.0])", "don't go together"),
        ("ExponentialDecay(0.1, 5)", "missing decay_rate"),
        ("TriangularDecay(0.1, 5, 0.5)", "isn't a schedule that is known here"),
    ],
)
def test_what_keras_has_alone_or_nobody_said_is_named(call: str, why: str) -> None:
    rates = called_rates(parse_call(call))
    assert isinstance(rates, str) and why in rates


class LRScheduler:
    """Stands for MXNet's base class: its objects are called with the number of an update."""


@pytest.mark.parametrize("call", FORMS)
def test_the_printed_class_of_mxnet_has_every_rate(call: str) -> None:
    rates = rates_of(call)
    lines = mxnet_lines(rates)
    if lines[0].startswith("schedule = mx.lr_scheduler."):
        assert FORMS[call] == "ExponentialDecay(" or "exponential_decay" in call or "decay_every" in call
        return  # its own class, which MXNet itself ran by hand
    scope: dict[str, Any] = {
        "mx": type("mx", (), {"lr_scheduler": type("module", (), {"LRScheduler": LRScheduler})})
    }
    exec("\n".join(lines), scope)
    assert [scope["schedule"](i + 1) for i in range(60)] == pytest.approx(
        [rates.rate(i) for i in range(60)], rel=1e-12
    )


@pytest.fixture(scope="module")
def came_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns what came of going on in every target, in a program of its own."""
    folder = tmp_path_factory.mktemp("keras")
    done = drivers.run(keras_schedule_driving.__file__, folder, imports=["torch", "tensorflow"])
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, str] = json.loads((folder / "results.json").read_text())
    return results


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_run_of_torch_goes_on_at_its_rates_and_through_the_next_save(
    target: str, kind: str, came_of: dict[str, str]
) -> None:
    assert came_of[f"{target}, {kind}"] == WELL


def test_a_schedule_that_nobody_knows_is_said_and_not_replaced_by_a_rate(tmp_path: Path) -> None:
    import torch

    run = TorchRun(
        tmp_path, lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    )
    model().save_weights(tmp_path / "like.weights.h5")
    like = tmp_path / "like.weights.h5"
    planned = planned_for(run, tmp_path / "out.weights.h5", "keras-h5", "keras", like)
    lines = resume_lines(of_plan(planned), planned.state)
    assert any(
        "follows a schedule that is not made here: a LambdaLR's function is in no file" in line
        for line in lines
    )
