"""Parameters of low precision: what today's usual run holds converts and is stepped, rounding as the original does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from living.judging import faults
from living.originals import RUNS, Case

from goldens import COMPACT
from replaying import BACKENDS, marks
from statekit.arrays.backend import backend
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.arrays.promotion import Promoting, promoted
from statekit.errors import UnknownRuleError
from statekit.optim import adafactor_forms, adam_family
from statekit.optim.run import initial, load, mover
from statekit.tensors.tensor import DTYPES, Shape, in_memory
from statekit.testing.layouts import made_state
from statekit.verify.recording import open_recording
from statekit.verify.replay import Subject, replay

PARAMS: Mapping[str, Shape] = {"a/kernel": (6, 8), "b": (8,), "s": ()}
GRADS = tuple(dict.fromkeys(PARAMS, kind) for kind in ("usual", "small", "zeros", "usual"))
ORIGINALS: list[tuple[str, str, dict[str, Any], str]] = [
    ("torch", "adamw", {"lr": 0.02, "weight_decay": 0.1, "amsgrad": True}, "eager"),
    ("torch", "adamw", {"lr": 0.02, "weight_decay": 0.1}, "foreach"),
    ("torch", "adamw", {"lr": 0.02, "weight_decay": 0.1}, "fused"),
    ("torch", "adafactor", {"lr": 0.02, "weight_decay": 0.1}, "eager"),
    ("optax", "adamw", {"learning_rate": 0.02, "weight_decay": 0.1}, "eager"),
    ("optax", "adamw", {"learning_rate": 0.02, "weight_decay": 0.1, "mu_dtype": "float32"}, "compiled"),
    ("optax", "adafactor", {"learning_rate": 0.02, "min_dim_size_to_factor": 4, "momentum": 0.9}, "eager"),
    ("optax", "lamb", {"learning_rate": 0.02, "weight_decay": 0.1}, "eager"),
    ("optax", "lamb", {"learning_rate": 0.02, "weight_decay": 0.1}, "compiled"),
    *(
        ("keras", "adamw", {"learning_rate": 0.02, **arguments}, mode)
        for arguments in ({"beta_2": 0.99}, {"weight_decay": 0.1, "beta_2": 0.98, "amsgrad": True}, {})
        for mode in ("eager", "compiled")
    ),
]


def case(library: str, family: str, arguments: Mapping[str, Any], mode: str, dtype: str) -> Case:
    return Case(library, family, ((arguments, tuple(PARAMS)),), PARAMS, dtype, GRADS, mode, 1)


@pytest.mark.torch
@pytest.mark.jax
@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras on NumPy 2
@pytest.mark.parametrize(
    ("library", "family", "arguments", "mode"), ORIGINALS, ids=lambda value: str(value)[:30]
)
def test_bfloat16_rounds_as_the_original(
    library: str, family: str, arguments: Mapping[str, Any], mode: str
) -> None:
    assert faults(case(library, family, arguments, mode, "bfloat16")) == []


@pytest.mark.torch
@pytest.mark.parametrize("mode", ["eager", "foreach", "fused"])
def test_float16_rounds_as_pytorch(mode: str) -> None:
    arguments = {"lr": 0.02, "weight_decay": 0.1}
    assert faults(case("torch", "adamw", arguments, mode, "float16")) == []


@pytest.mark.jax
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("family", ["adamw", "lamb"])
def test_float16_rounds_as_optax(family: str, mode: str) -> None:
    arguments = {"learning_rate": 0.02, "weight_decay": 0.1}
    assert faults(case("optax", family, arguments, mode, "float16")) == []


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_float16_rounds_as_keras(mode: str) -> None:
    arguments = {"learning_rate": 0.02, "weight_decay": 0.1, "beta_2": 0.99, "epsilon": 1e-3}
    assert faults(case("keras", "adamw", arguments, mode, "float16")) == []


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_bit_is_keras(dtype: str, mode: str) -> None:
    """A bound may hide a rounding that is left out; over eight updates of 2000 elements these don't."""
    arguments = {"learning_rate": 0.02, "weight_decay": 0.1, "beta_2": 0.99, "epsilon": 1e-3}
    shape: Mapping[str, Shape] = {"w": (40, 50)}
    one = Case("keras", "adamw", ((arguments, ("w",)),), shape, dtype, ({"w": "usual"},) * 8, mode, 5)
    run, xp = RUNS["keras"](one), NumpyBackend()
    for update in range(8):
        before, grads = run.state(), one.gradients(update)
        move = mover(xp, before, one.execution)
        run.update(grads)
        ours = move(load(xp, before), {path: xp.asarray(grad) for path, grad in grads.items()}, 0.02)
        theirs = run.state()
        for name, value in {"param": ours.params["w"], **ours.slots["w"]}.items():
            tensor = theirs.params["w"] if name == "param" else theirs.slots["w"][name]
            assert np.array_equal(np.asarray(value), tensor.read()), (update, name)


def recorded_compiled(dtype: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Mapping[str, Any]]:
    """What Keras did, jitted: gradients of each update, parameters before and after it, arguments."""
    folder = COMPACT / "low_precision" / f"keras_adamw_{dtype}_compiled"
    with open_recording(folder) as recording:
        judge = recording.trajectories[0]
        states = [recording.state(step, judge, 1).params for step in range(recording.last + 1)]
        params = [{path: tensor.read() for path, tensor in state.items()} for state in states]
        numbered = [recording.gradients(update + 1) for update in range(recording.last)]
        grads = [{path: tensor.read() for path, tensor in of.items()} for of in numbered]
        (group,) = recording.state(0, judge, 1).optimizer.groups
    known = {name: group.hyperparameters[name] for name in ("beta1", "beta2", "epsilon", "weight_decay_rate")}
    return grads, params, known


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_drop_in_of_torch_makes_every_bit_of_keras(dtype: str) -> None:
    import torch

    import statekit.torch as st

    grads, states, known = recorded_compiled(dtype)
    kind = getattr(torch, dtype)
    params = {
        path: torch.nn.Parameter(torch.tensor(np.asarray(value, np.float32)).to(kind))
        for path, value in states[0].items()
    }
    optimizer = st.AdamW([*params.items()], lr=float(np.float32(0.02)), variant="keras", **known)
    for given, after in zip(grads, states[1:], strict=True):
        for path, param in params.items():
            param.grad = torch.tensor(np.asarray(given[path], np.float32)).to(kind)
        optimizer.step()
        for path, param in params.items():
            assert np.array_equal(param.detach().float().numpy(), np.asarray(after[path], np.float32)), path


@pytest.mark.jax
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_drop_in_of_jax_makes_every_bit_of_keras(dtype: str) -> None:
    import jax
    import jax.numpy as jnp
    import optax

    import statekit.jax as sj

    grads, states, known = recorded_compiled(dtype)
    params = {path: jnp.asarray(value) for path, value in states[0].items()}
    optimizer = sj.adamw(variant="keras", learning_rate=float(np.float32(0.02)), **known)
    state = optimizer.init(params)
    for given, after in zip(grads, states[1:], strict=True):
        updates, state = jax.jit(optimizer.update)(
            {path: jnp.asarray(grad) for path, grad in given.items()}, state, params
        )
        params = optax.apply_updates(params, updates)
        for path, param in params.items():
            assert np.array_equal(np.asarray(param, np.float32), np.asarray(after[path], np.float32)), path


def test_a_rule_that_isnt_followed_in_low_precision_is_named() -> None:
    state = made_state("adamw", "keras")
    low = {path: in_memory(t.read().astype(DTYPES["bfloat16"])) for path, t in state.params.items()}
    (group,) = state.optimizer.groups
    for name, value in {
        "clipnorm": 1.0,
        "global_norm_clip_threshold": 1.0,
        "clipvalue": 0.5,
        "use_ema": True,
    }.items():
        said = {**group.hyperparameters, name: value, "ema_momentum": 0.9}
        other = replace(state.optimizer, groups=(replace(group, hyperparameters=said),))
        with pytest.raises(UnknownRuleError, match=f"(?s)low precision.*{name} beside bfloat16"):
            mover(NumpyBackend(), initial(replace(state, params=low, optimizer=other)))


@pytest.mark.jax
@pytest.mark.parametrize(
    ("mode", "dtype"), [("eager", "float16"), ("compiled", "float16"), ("compiled", "bfloat16")]
)
def test_low_precision_rounds_as_optaxs_adafactor(mode: str, dtype: str) -> None:
    arguments = {"learning_rate": 0.02, "min_dim_size_to_factor": 4, "momentum": 0.9}
    usual = tuple(dict.fromkeys(PARAMS, "usual") for _ in range(2))
    assert faults(replace(case("optax", "adafactor", arguments, mode, dtype), grads=usual)) == []


@pytest.mark.jax
def test_the_norm_of_one_number_is_its_size_though_its_square_overflows() -> None:
    params: Mapping[str, Shape] = {"s": (), "v": (1,)}
    arguments = {"learning_rate": 0.02, "eps": 1e-6}
    grads = tuple(dict.fromkeys(params, kind) for kind in ("small", "usual"))
    assert (
        faults(Case("optax", "lamb", ((arguments, ("s", "v")),), params, "float16", grads, "eager", 2)) == []
    )


@pytest.mark.torch
@pytest.mark.slow
def test_a_compiled_adamw_takes_its_corrections_in_float32() -> None:
    assert faults(case("torch", "adamw", {"lr": 0.3}, "compiled", "float32")) == []


@pytest.mark.torch
@pytest.mark.jax
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name)) for name in ("torch", "jax", "tensorflow")]
)
def test_every_backend_rounds_alike(name: str) -> None:
    for library, family, arguments, mode in (ORIGINALS[0], ORIGINALS[5]):
        assert faults(case(library, family, arguments, mode, "bfloat16"), backend(name)) == []


RECORDED = sorted((COMPACT / "low_precision").iterdir())


SAMPLED = {"jax": "optax", "tensorflow": "keras"}
"""Whose recordings a backend that compiles sees in `make test`; in `make test-all` it sees the others' too."""


def places() -> Iterator[Any]:
    for name in BACKENDS:
        for folder in RECORDED:
            slow = name in SAMPLED and not folder.name.startswith(SAMPLED[name])
            yield pytest.param(name, folder, marks=marks(name, slow), id=f"{name}-{folder.name}")


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "folder"), [*places()])
def test_what_was_recorded_is_replayed(name: str, folder: Path) -> None:
    with open_recording(folder) as recording:
        assert replay(Subject(recording, "init"), backend(name)).passed


@pytest.mark.jax
@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_a_product_of_momentum_is_rounded_op_by_op_only(
    execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"learning_rate": 0.02, "min_dim_size_to_factor": 4, "momentum": 0.9}
    one = case("optax", "adafactor", {**arguments, "dtype_momentum": "bfloat16"}, execution, "float32")
    assert faults(one) == []
    wrong = {"eager": "float32", "compiled": "rounded"}[execution]
    seen = dict(adafactor_forms.MOMENTUM_PRODUCT)
    monkeypatch.setitem(seen, "rounded_op_by_op", seen[wrong])
    monkeypatch.setattr(adafactor_forms, "MOMENTUM_PRODUCT", seen)
    monkeypatch.setattr(
        Promoting, "_returned", lambda self, value, dtype: _returned(self, value, dtype, wrong)
    )
    assert faults(one)


def _returned(xp: Promoting, value: Any, dtype: str, how: str) -> Any:
    from statekit.arrays.promotion import Typed

    kept = how == "float32" or dtype == "float32"
    return Typed(xp, value if kept else xp.inner.rounded(value, dtype), dtype)


@pytest.mark.torch
def test_a_rounding_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    one = case("torch", "adamw", {"lr": 0.02, "weight_decay": 0.1}, "eager", "bfloat16")
    monkeypatch.setattr(adam_family.AdamSetting, "returned", lambda self, value: value)
    assert faults(one)


@pytest.mark.torch
def test_a_norm_that_isnt_a_number_counts_as_the_limit_in_pytorchs_adafactor() -> None:
    grads = ({"v": "nan"}, {"v": "usual"})
    one = Case("torch", "adafactor", (({"lr": 0.02}, ("v",)),), {"v": (7,)}, "float32", grads, "eager", 3)
    assert faults(one) == []


def test_promotion_is_jaxs() -> None:
    xp = Promoting(NumpyBackend(), op_by_op=True)
    bf16 = xp.widen(np.asarray([1.0, 3.0], DTYPES["bfloat16"]))
    assert promoted("bfloat16", "bfloat16") == (bf16 * bf16).dtype == (bf16 * 0.999).dtype == "bfloat16"
    assert promoted("bfloat16", "float16") == (bf16 * xp.widen(np.float32(2.0))).dtype == "float32"
    assert (bf16 * 0.999).value.tolist() == [1.0, 3.0]  # 0.999 is 1 in bfloat16
    compiled = Promoting(NumpyBackend(), op_by_op=False)
    third = compiled.widen(np.asarray([1.0], DTYPES["bfloat16"])) / 3.0
    rounded, kept = (third * 1.0).value, (third * compiled.widen(np.float32(1.0))).value
    assert rounded != kept and kept == np.float32(1) / np.float32(3)
