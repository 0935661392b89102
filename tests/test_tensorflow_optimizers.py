"""Keras optimizers: a run that is saved and restored goes on as if it hadn't been, and what can't be is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statekit
from statekit.errors import StateError, UnknownRuleError, UsageError
from statekit.state.run import run_of

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras on NumPy 2
]
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
from statekit import tensorflow as st

KINDS: dict[str, Callable[..., Any]] = {
    "Adafactor": lambda **k: st.Adafactor(1e-2, beta1=0.9, min_dim_size_to_factor=2, **k),
    "ScaledAdam": lambda **k: st.ScaledAdam(1e-2, clipping_scale=2.0, clipping_update_period=4, **k),
    "LANS": lambda **k: st.LANS(1e-2, wd=0.01, wd_mult={"net/first/bias": 0.0}, **k),
    "LAMB": lambda **k: st.LAMB(1e-2, weight_decay_rate=0.01, exclude_from_weight_decay=["bias"], **k),
    "AdamW": lambda **k: st.AdamW(1e-2, amsgrad=True, **k),
}
X = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
Y = X[:, :2] * 0.5


def model(name: str = "net", dtype: str | None = None) -> Any:
    keras.utils.set_random_seed(1)
    first = keras.layers.Dense(4, activation="tanh", name="first", dtype=dtype)
    layers = [keras.Input((6,)), first, keras.layers.Dense(2, name="last", dtype=dtype)]
    return keras.Sequential(layers, name=name)


def compiled(optimizer: Any, **options: Any) -> Any:
    net = model()
    net.compile(optimizer=optimizer, loss="mse", **{"jit_compile": False, **options})
    return net


def train(net: Any, updates: int = 2) -> None:
    for _ in range(updates):
        net.train_on_batch(X, Y)


def values(net: Any) -> dict[str, Any]:
    """All variables of a model, and of its optimizer without the optimizer's own name."""
    arrays = {
        "/".join(v.path.split("/")[-2:]): v.numpy() for v in net.variables
    }  # Keras may open another scope
    return arrays | {v.path.partition("/")[2]: v.numpy() for v in net.optimizer.variables}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


SLOW = pytest.mark.slow
FEW = [kind if kind in ("Adafactor", "ScaledAdam") else pytest.param(kind, marks=SLOW) for kind in KINDS]
"""The two with the most kinds of slots, for checks of what all classes have from one engine."""


@pytest.fixture(scope="module", params=FEW)
def run(request: Any, tmp_path_factory: Any) -> tuple[str, Path, dict[str, Any], dict[str, Any]]:
    """A run of four updates, saved in every form after two."""
    folder = tmp_path_factory.mktemp(request.param)
    net = compiled(KINDS[request.param]())
    train(net)
    net.save(folder / "net.keras")
    net.save_weights(folder / "net.weights.h5")
    tf.train.Checkpoint(model=net, optimizer=net.optimizer).write(str(folder / "net"))
    halfway = values(net)
    train(net)
    return request.param, folder, halfway, values(net)


def from_keras(kind: str, folder: Path) -> Any:
    return keras.saving.load_model(folder / "net.keras")


def from_weights(kind: str, folder: Path) -> Any:
    net = compiled(KINDS[kind]())
    net.optimizer.build(net.trainable_variables)
    net.load_weights(folder / "net.weights.h5")
    return net


def from_checkpoint(kind: str, folder: Path) -> Any:
    net = compiled(KINDS[kind]())
    net.optimizer.build(net.trainable_variables)
    status = tf.train.Checkpoint(model=net, optimizer=net.optimizer).read(str(folder / "net"))
    status.assert_existing_objects_matched()
    return net


RESTORED = {"keras": from_keras, "weights": from_weights, "checkpoint": from_checkpoint}


@pytest.mark.parametrize("form", ["keras", pytest.param("weights", marks=SLOW), "checkpoint"])
def test_a_restored_run_goes_on_bit_for_bit(run: Any, form: str) -> None:
    kind, folder, halfway, end = run
    net = RESTORED[form](kind, folder)
    assert_same(values(net), halfway)
    assert int(net.optimizer.iterations.numpy()) == 2
    train(net)
    assert_same(values(net), end)


def test_a_run_moves_and_its_slots_are_named(run: Any) -> None:
    kind, _, halfway, end = run
    assert not np.array_equal(halfway["first/kernel"], end["first/kernel"])
    slots = {name for name in end if name.startswith("net/first/kernel/")}
    expected = {
        "Adafactor": {"v_row", "v_col", "m"},
        "ScaledAdam": {"delta", "exp_avg_sq", "param_rms", "scale_exp_avg_sq", "scale_grads"},
        "LANS": {"m", "v"},
        "LAMB": {"m", "v"},
        "AdamW": {"m", "v", "v_max"},
    }[kind]
    assert slots == {f"net/first/kernel/{slot}" for slot in expected}
    shared = {name for name in end if name.startswith("groups/")}
    group = {"groups/0/model_norms", "groups/0/model_norm_threshold", "groups/0/num_clipped"}
    assert shared == (group if kind == "ScaledAdam" else set())


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_is_complete_and_plain(kind: str) -> None:
    optimizer = KINDS[kind](clipnorm=1.0, use_ema=True, gradient_accumulation_steps=2, name="mine")
    saved = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    again = keras.optimizers.deserialize(saved)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
    assert again.spec == optimizer.spec


@pytest.mark.parametrize("kind", ["AdamW", pytest.param("ScaledAdam", marks=pytest.mark.slow)])
def test_xla_and_eager_agree_with_the_graph(kind: str) -> None:
    ends = []
    for options in ({}, {"jit_compile": True}, {"run_eagerly": True}):
        net = compiled(KINDS[kind](jit_compile="run_eagerly" in options), **options)
        train(net)
        ends.append(net.get_weights())
    for other in ends[1:]:
        for one, two in zip(ends[0], other, strict=True):
            np.testing.assert_allclose(one, two, rtol=2e-5, atol=1e-6)


def gradients(net: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((net(X) - Y) ** 2)
    return list(tape.gradient(loss, net.trainable_variables))


def applied(optimizer: Any, *batches: list[Any]) -> list[Any]:
    net = model()
    for grads in batches:
        optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
    return [v.numpy() for v in net.trainable_variables]


def test_keras_own_options_do_what_they_do_for_keras_own_optimizers() -> None:
    """The same rule in Keras and here: what the base class adds to it must be the same too."""
    grads = gradients(model())
    other = [g * 3.0 - 0.1 for g in grads]
    for options in (
        {"clipnorm": 0.01},
        {"global_clipnorm": 0.01},
        {"clipvalue": 0.003},
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        {"loss_scale_factor": 8.0},
    ):
        theirs = applied(keras.optimizers.AdamW(1e-2, epsilon=1e-3, **options), grads, other)
        ours = applied(st.AdamW(1e-2, epsilon=1e-3, **options), grads, other)
        for one, two in zip(theirs, ours, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7, err_msg=str(options))


def test_a_loss_scale_finds_its_way_to_the_inner_optimizer() -> None:
    grads = gradients(model())
    plain = applied(st.AdamW(1e-2), grads)
    scaled = keras.optimizers.LossScaleOptimizer(st.AdamW(1e-2), initial_scale=16.0)
    broken = [grads[0] * np.inf, *grads[1:]]
    after = applied(scaled, broken, [g * 8.0 for g in grads])
    for one, two in zip(plain, after, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)
    assert int(scaled.inner_optimizer.iterations.numpy()) == 1


def test_mixed_precision_trains_in_fit() -> None:
    net = model(dtype="mixed_float16")
    net.compile(optimizer=st.Adafactor(1e-2), loss="mse", jit_compile=False)
    before = net.evaluate(X, Y, verbose=0)
    net.compile(
        optimizer=keras.optimizers.LossScaleOptimizer(st.Adafactor(5e-2)), loss="mse", jit_compile=False
    )
    net.fit(X, Y, epochs=4, batch_size=16, verbose=0)
    assert net.evaluate(X, Y, verbose=0) < before
    assert {v.dtype for v in net.optimizer.inner_optimizer.slots()["net/first/kernel"].values()} == {
        tf.float32
    }


def test_rates_may_be_schedules_callables_and_come_late() -> None:
    grads = gradients(model())
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1e-2, 1e-3])
    rates = iter([1e-2, 1e-3])
    late = st.AdamW(variant="optax")
    with pytest.raises(UnknownRuleError, match="no learning rate"):
        applied(late, grads)
    assert late.get_config()["learning_rate"] is None
    late = st.AdamW(variant="optax")
    late.learning_rate = 1e-2
    constant = applied(st.AdamW(1e-2, variant="optax"), grads)
    np.testing.assert_array_equal(constant[0], applied(late, grads)[0])
    one = applied(st.AdamW(schedule), grads, grads)
    other = applied(st.AdamW(lambda: next(rates)), grads, grads)
    np.testing.assert_array_equal(one[0], other[0])
    assert not np.array_equal(one[0], applied(st.AdamW(1e-2), grads, grads)[0])


@pytest.mark.parametrize("kind", FEW)
def test_stacked_parameters_move_as_each_by_itself(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from statekit.tensorflow import step

    rng = np.random.default_rng(3)
    start = [rng.normal(size=(3, 5)).astype(np.float32) for _ in range(6)]
    grads = [tf.constant(rng.normal(size=(3, 5)).astype(np.float32)) for _ in range(6)]

    def moved() -> list[Any]:
        variables = [keras.Variable(value, name=f"w{i}") for i, value in enumerate(start)]
        optimizer = KINDS[kind]() if kind != "LANS" else st.LANS(1e-2)
        for _ in range(2):
            optimizer.apply(grads, variables)
        return [v.numpy() for v in variables] + [v.numpy() for v in optimizer.variables]

    monkeypatch.setattr(step, "STACK", 45)
    together = moved()
    monkeypatch.setattr(step, "ALONE", 0)
    for one, two in zip(together, moved(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


def test_groups_have_their_own_hyperparameters_and_rates() -> None:
    grads = gradients(model())
    apart = [{"paths": ["net/first/bias"], "weight_decay_rate": 0.0, "learning_rate_factor": 0.5}]
    after = applied(st.AdamW(1e-2, weight_decay_rate=0.5, groups=apart), grads)
    whole = applied(st.AdamW(1e-2, weight_decay_rate=0.5), grads)
    half = applied(st.AdamW(5e-3, weight_decay_rate=0.0), grads)
    np.testing.assert_array_equal(after[0], whole[0])
    np.testing.assert_allclose(after[1], half[1], rtol=1e-6)
    with pytest.raises(UsageError, match="stands in two groups"):
        applied(st.AdamW(1e-2, groups=apart * 2), grads)
    with pytest.raises(UsageError, match="not among the variables"):
        applied(st.AdamW(1e-2, groups=[{"paths": ["nothing"]}]), grads)
    half_of_its_own = [{"paths": ["net/first/bias"], "learning_rate_factor": 0.5}]
    with pytest.raises(UsageError, match="none is given"):
        applied(st.Adafactor(None, variant="hf", groups=half_of_its_own), grads)


def test_groups_multiply_the_rate_of_a_schedule_in_files_too(tmp_path: Path) -> None:
    """No group has a number of its own that says it: the next update, a file again, and PyTorch's rates have it."""
    slow = [{"paths": ["net/first/bias"], "learning_rate_factor": 0.125}]
    schedule = keras.optimizers.schedules.CosineDecay(0.5, 20)
    net = model()
    net.build((None, 6))
    net.compile(st.AdamW(schedule, variant="torch", groups=slow))
    grads = gradients(net)
    net.optimizer.apply(grads, net.trainable_variables)
    net.save(tmp_path / "run.keras")
    statekit.convert(tmp_path / "run.keras", tmp_path / "neutral", to="statekit")
    statekit.convert(tmp_path / "neutral", tmp_path / "again.keras", layout="statekit-keras")
    after = []
    for file in ("run.keras", "neutral", "again.keras"):
        after.append(model())
        after[-1].build((None, 6))
        after[-1].set_weights(net.get_weights())
        optimizer = st.load_optimizer(tmp_path / file, after[-1], schedule)
        optimizer.apply(grads, after[-1].trainable_variables)
    net.optimizer.apply(grads, net.trainable_variables)
    for resumed in after:
        for mine, right in zip(resumed.get_weights(), net.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, right)
    with statekit.open(tmp_path / "run.keras") as run:
        rates = run_of(run.state.extra).schedules[0].rates
    assert [paced.rate(0) for paced in rates if not isinstance(paced, str)] == [0.0625, 0.5]


def test_a_group_without_a_gradient_moves_where_the_rule_moves_what_has_none() -> None:
    """As ScaledAdam does: by its momentum."""
    after = []
    for groups in ((), [{"paths": ["net/last/kernel", "net/last/bias"]}]):
        net = model()
        net.build((None, 6))
        optimizer, variables = st.ScaledAdam(1e-2, groups=groups), net.trainable_variables
        grads = gradients(net)
        optimizer.apply(grads, variables)
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            optimizer.apply([*grads[:2], None, None], variables)
        after.append([variable.numpy() for variable in variables])
    for one, two in zip(*after, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.torch
def test_a_run_of_torch_goes_on_that_has_a_rate_of_zero_and_a_parameter_without_an_update(
    tmp_path: Path,
) -> None:
    import torch

    named = {name: torch.nn.Parameter(torch.ones(3)) for name in ("still", "used", "idle")}
    groups: list[dict[str, Any]] = [
        {"params": [("still", named["still"])], "lr": 0.0},
        {"params": [(name, named[name]) for name in ("used", "idle")], "lr": 1e-2},
    ]
    original = torch.optim.AdamW(groups)
    named["still"].grad = named["used"].grad = torch.full((3,), 0.5)
    original.step()
    model_part = {name: param.detach() for name, param in named.items()}
    torch.save({"model": model_part, "optimizer": original.state_dict()}, tmp_path / "run.pt")
    variables = [keras.Variable(param.detach().numpy(), name=name) for name, param in named.items()]
    optimizer = st.load_optimizer(tmp_path / "run.pt", variables)
    for update in (1.0, 2.0):
        for param in named.values():
            param.grad = torch.full((3,), update)
        original.step()
        optimizer.apply([tf.fill((3,), update) for _ in variables], variables)
    for variable, param in zip(variables, named.values(), strict=True):
        np.testing.assert_allclose(variable.numpy(), param.detach().numpy(), rtol=1e-6)


def test_the_rate_of_a_scheduled_run_is_asked_for_and_never_the_usual_one(tmp_path: Path) -> None:
    """Seen red: the variant's default, 0.001, moved the weights of a run whose schedule stood at 0.05."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 100)
    model.compile(optimizer=keras.optimizers.AdamW(schedule), loss="mse")
    model.fit(np.ones((8, 4), np.float32), np.zeros((8, 3), np.float32), verbose=0)
    model.save(tmp_path / "run.keras")
    grads = [tf.ones_like(variable.value) for variable in model.trainable_variables]
    loaded = st.load_optimizer(tmp_path / "run.keras", model)
    again = type(loaded).from_config(loaded.get_config())
    for optimizer in (loaded, again):
        with pytest.raises(UnknownRuleError, match="no learning rate"):
            optimizer.apply(grads, model.trainable_variables)
    loaded.learning_rate = 0.05
    loaded.apply(grads, model.trainable_variables)
    assert float(type(loaded).from_config(loaded.get_config()).learning_rate) == pytest.approx(0.05)
    assert float(st.AdamW(variant="keras").learning_rate) == pytest.approx(
        0.001
    )  # what its class has by itself


def test_what_cannot_be_is_refused_with_every_fault() -> None:
    with pytest.raises(
        UsageError, match=r"another optimizer's name for beta1 @ b1(.|\n)*did you mean amsgrad"
    ):
        st.AdamW(1e-2, b1=0.9, amsgrid=True)  # type: ignore[call-arg]  # the fault
    with pytest.raises(UsageError) as raised:
        st.Adafactor(1e-2, **{"weight_decay": 0.1, "decay_rate": "fast", "clip": 2})  # type: ignore[arg-type]  # the faults
    assert all(name in str(raised.value) for name in ("weight_decay_rate", "decay_rate", "clip"))
    with pytest.raises(StateError, match="can't step"):
        st.AdamW(1e-2, variant="tf1")
    with pytest.raises(UsageError, match="are an option here"):
        st.AdamW(1e-2).exclude_from_weight_decay(var_names=["bias"])
    deep = keras.Variable(np.zeros((2, 3, 4), np.float32), name="deep")
    with pytest.raises(UsageError, match="no factor rule"):
        st.Adafactor(1e-2).build([deep])
    twins = [keras.Variable(np.zeros(2, np.float32), name="twin") for _ in range(2)]
    with pytest.raises(UsageError, match="the name of several"):
        st.AdamW(1e-2).build(twins)
    one, two = (keras.Variable(np.zeros(2, np.float32), name=name) for name in ("one", "two"))
    hf = st.Adafactor(1e-2, variant="hf", relative_step=False)
    hf.build([one, two])
    with pytest.raises(UsageError, match="two"):
        hf.apply([tf.ones(2)], [one])
    assert int(hf.iterations.numpy()) == 0


def test_a_saved_state_is_loaded_by_name_or_not_at_all(tmp_path: Path) -> None:
    net = compiled(st.Adafactor(1e-2, min_dim_size_to_factor=2))
    train(net, 1)
    variables: dict[str, Any] = {}
    net.optimizer.save_own_variables(variables)
    assert "net:first:kernel:v_row" in variables
    turned = dict(reversed(variables.items()))
    fresh = st.Adafactor(1e-2, min_dim_size_to_factor=2)
    fresh.build(net.trainable_variables)
    fresh.load_own_variables(turned)
    assert_same(
        {str(i): v.numpy() for i, v in enumerate(fresh.variables)},
        {str(i): v.numpy() for i, v in enumerate(net.optimizer.variables)},
    )
    swapped = {**variables, "net:first:kernel:v_row": variables["net:first:kernel:v_col"]}
    with pytest.raises(StateError, match="has shape"):
        fresh.load_own_variables(swapped)
    with pytest.raises(StateError, match="isn't in the file"):
        fresh.load_own_variables({name: v for name, v in variables.items() if "bias" not in name})
    unbuilt = st.Adafactor(1e-2)
    with pytest.warns(UserWarning, match="hasn't been built"):
        unbuilt.load_own_variables(variables)
