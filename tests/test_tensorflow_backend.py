"""TensorFlow's namespace where TensorFlow and XLA have their own mind: rounding, NaN, order, compiling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from statekit.arrays.backend import Backend, backend
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.tensors.tensor import DTYPES, Array

pytestmark = pytest.mark.tensorflow
NAN = float("nan")


@pytest.fixture(scope="module")
def xp() -> Backend:
    return backend("tensorflow")


def both(xp: Backend, run: Any, *arrays: Array) -> list[Array]:
    values = [xp.asarray(array) for array in arrays]
    return [xp.numpy(run(*values)), xp.numpy(xp.compile(run)(*values))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_to_nearest_even_and_survives_the_compiler(xp: Backend, dtype: str) -> None:
    rng = np.random.default_rng(0)
    ties = np.array(
        [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, 3.3895314e38], np.float32
    )
    small = np.array([2**-25, 3 * 2**-25, 2**-14 * (1 - 2**-12), 1e-7, 5e-6], np.float32)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, NAN], np.float32)
    wide = rng.normal(size=999) * 10.0 ** rng.uniform(-9, 9, 999)
    x = np.concatenate([ties, -ties, small, -small, edges, wide]).astype(np.float32)
    with np.errstate(over="ignore"):
        want = x.astype(DTYPES[dtype])
    assert (want.astype(np.float32) != x).sum() > 900
    for got in both(xp, lambda v: xp.rounded(v, dtype), x):
        np.testing.assert_array_equal(got, want.astype(np.float32))
    for got in both(xp, lambda v: xp.narrow(v, dtype), x):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_a_nan_wins_from_either_side(xp: Backend, name: str) -> None:
    left, right = np.array([1, NAN, 1, 2, NAN], np.float32), np.array([NAN, 1, 2, 1, NAN], np.float32)
    want = getattr(np, name)(left, right)
    for got in both(xp, getattr(xp, name), left, right):
        np.testing.assert_array_equal(got, want)


def test_a_nan_shows_in_the_largest_value_and_in_the_norm(xp: Backend) -> None:
    x = np.arange(48, dtype=np.float32).reshape(3, 16)
    x[1, 5], x[2, 5] = NAN, np.inf
    for got in both(xp, lambda v: xp.largest(v, 1), x):
        np.testing.assert_array_equal(got, np.max(x, axis=1, keepdims=True))
    for row, want in ((x[:1], NumpyBackend().norm(x[:1])), (x[:2], NAN), (x[2:], np.inf), (x[:, :0], 0.0)):
        for got in both(xp, xp.norm, row):
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_nan_stands_last_in_order(xp: Backend) -> None:
    x = np.array([3, NAN, 1, np.inf, NAN, 2], np.float32)
    for place, want in enumerate(np.sort(x)):
        for got in both(xp, lambda v, place=place: xp.order_statistic(v, place), x):
            np.testing.assert_array_equal(got, want)


def test_a_step_is_compiled_once_for_all_counts_and_rates(xp: Backend) -> None:
    traced = []

    def step(state: dict[str, Any], rates: tuple[Any, ...], count: Any) -> dict[str, Any]:
        traced.append(count)
        return {"b": {"x": state["b"]["x"] * rates[0] + xp.widen(count)}, "a": (rates[1],)}

    run = xp.compile(step)
    for count in range(5):
        after = run({"b": {"x": xp.asarray(np.ones((), np.float32))}}, (0.5 * count, 2.0), count)
        assert float(xp.numpy(after["b"]["x"])) == 1.5 * count
    assert len(traced) == 1
