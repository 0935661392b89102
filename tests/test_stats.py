"""Statistics equal those of numpy over the whole tensor, however it is cut into blocks."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from statekit.tensors import stats
from statekit.tensors.stats import Stats, measure, total
from statekit.tensors.tensor import Array, in_memory


def test_of_a_known_tensor() -> None:
    stats = measure(in_memory(np.array([[3.0, -4.0], [0.0, np.nan], [np.inf, -np.inf]], np.float32)))
    octaves = ((1, 1), (2, 1))  # 3 in [2, 4) and 4 in [4, 8)
    assert stats == Stats(
        finite=3, squares=25.0, minimum=-4.0, maximum=3.0, zeros=1, nans=1, infs=2, octaves=octaves
    )
    assert stats.norm == 5.0
    assert stats.rms == pytest.approx((25 / 3) ** 0.5)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "uint8", "bool"])
def test_every_numpy_dtype(dtype: str) -> None:
    stats = measure(in_memory(np.array([0, 1, 1, 0], dtype)))
    assert (stats.squares, stats.minimum, stats.maximum, stats.zeros) == (2.0, 0.0, 1.0, 2)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2fnuz])
def test_narrow_dtypes(dtype: type) -> None:
    stats = measure(in_memory(np.array([0.0, -2.0, np.nan], dtype)))
    assert (stats.squares, stats.minimum, stats.maximum, stats.zeros, stats.nans) == (4.0, -2.0, 0.0, 1, 1)


def test_complex_values_count_by_magnitude() -> None:
    assert measure(in_memory(np.array([3 + 4j], np.complex64))).maximum == 5.0


def test_squares_of_float32_do_not_overflow() -> None:
    stats = measure(in_memory(np.array([3e38, 3e38], np.float32)))
    assert stats.norm == pytest.approx(3e38 * 2**0.5, rel=1e-6)


def test_of_nothing() -> None:
    stats = measure(in_memory(np.zeros((0, 3), np.float32)))
    assert stats == Stats()
    assert (stats.norm, stats.rms) == (0.0, None)


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=9), elements=st.floats(width=32)))
def test_blocks_make_no_difference(values: Array) -> None:
    whole = measure(in_memory(values))
    parts = total(measure(in_memory(row)) for row in values.reshape(-1, 1))
    assert parts.squares == pytest.approx(whole.squares)
    assert (parts.finite, parts.zeros, parts.nans, parts.infs) == (
        whole.finite,
        whole.zeros,
        whole.nans,
        whole.infs,
    )
    assert (parts.minimum, parts.maximum) == (whole.minimum, whole.maximum)


def test_a_large_tensor_is_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "BLOCK_BYTES", 64)
    sizes: list[int] = []
    measured = measure(in_memory(np.ones((10, 8), np.float32)), sizes.append)
    assert measured.squares == 80.0
    assert sizes == [64] * 5


@given(
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=2), elements=st.floats(width=32)),
)
def test_every_magnitude_is_in_its_bin(array: Array) -> None:
    measured = measure(in_memory(array))
    good = np.abs(array[np.isfinite(array) & (array != 0)].astype(np.float64))
    exponents = np.frexp(good)[1] - 1
    assert dict(measured.octaves) == {int(n): int(np.sum(exponents == n)) for n in np.unique(exponents)}
    binned = measured.magnitudes()
    if binned is None:
        assert good.size == 0
        return
    assert len(binned["counts"]) <= stats.BINS and sum(binned["counts"]) == good.size
    for i, count in enumerate(binned["counts"]):
        low = binned["from"] + i * binned["octaves"]
        assert count == np.sum((good >= 2.0**low) & (good < 2.0 ** (low + binned["octaves"])))


def test_magnitudes_of_blocks_are_those_of_the_whole() -> None:
    one, other = measure(in_memory(np.array([1.0, 3.0]))), measure(in_memory(np.array([3.5, 0.0, 1e-40])))
    assert total([one, other]).octaves == measure(in_memory(np.array([1.0, 3.0, 3.5, 0.0, 1e-40]))).octaves
