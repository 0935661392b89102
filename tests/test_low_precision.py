"""Parameters of low precision: what today's usual run holds converts and is stepped, rounding as the original does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from living.judging import faults
from living.originals import Case

from goldens import COMPACT
from replaying import BACKENDS, marks
from statekit.arrays.backend import backend
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.arrays.promotion import Promoting, promoted
from statekit.optim import adafactor_forms, adam_family
from statekit.tensors.tensor import DTYPES, Shape
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
]


def case(library: str, family: str, arguments: Mapping[str, Any], mode: str, dtype: str) -> Case:
    return Case(library, family, ((arguments, tuple(PARAMS)),), PARAMS, dtype, GRADS, mode, 1)


@pytest.mark.torch
@pytest.mark.jax
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


@pytest.mark.parametrize("folder", RECORDED, ids=lambda path: path.name)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in BACKENDS])
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
