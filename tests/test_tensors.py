"""What a tensor is, however a value is asked, and how its values are copied into another order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statekit.tensors.tensor import (
    DTYPES,
    Cast,
    Filled,
    Index,
    Shape,
    Stored,
    Tensor,
    chunks,
    dtype_named,
    fill,
    in_memory,
    rounded,
    row_major,
)
from statekit.tensors.tree import Record
from statekit.tensors.views import Permuted, Stack

_VALUES: tuple[Any, ...] = (
    None,
    True,
    3,
    0.5,
    "text",
    b"bytes",
    (),
    [],
    {},
    Record("a.B"),
    np.zeros(3),
    np.dtype("f4"),
    Filled,
)


@pytest.mark.parametrize("value", _VALUES, ids=lambda value: type(value).__name__)
def test_what_cannot_be_read_is_no_tensor(value: Any) -> None:
    assert not isinstance(value, Tensor)


def test_every_class_with_the_members_of_a_tensor_is_one() -> None:
    one = in_memory(np.zeros((2, 3), np.float32))
    for tensor in (one, Cast(one, np.dtype("f8")), Filled((2,), np.dtype("f4"))):
        assert isinstance(tensor, Tensor)


class _Half:
    """Has the methods of a tensor; what it holds comes with each value."""

    def __init__(self, **members: Any) -> None:
        self.__dict__ |= members

    def read(self, index: Any = None) -> Any:
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError


def test_a_value_that_lacks_a_member_says_nothing_of_others_of_its_class() -> None:
    shape: Shape = (2,)
    assert not isinstance(_Half(shape=shape), Tensor)
    assert isinstance(_Half(shape=shape, dtype=np.dtype("f4"), grain=shape), Tensor)


def test_what_holds_functions_under_the_names_of_methods_is_no_tensor() -> None:
    value = SimpleNamespace(
        shape=(), dtype=np.dtype("f4"), grain=(), read=lambda index=None: None, to_json=dict
    )
    assert not isinstance(value, Tensor)


_DTYPES = ("bool", "bfloat16", "float8_e4m3fn", "float32", "float64", "complex128")


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(_DTYPES),
    shape=st.lists(st.sampled_from((1, 2, 17, 40, 129, 200)), min_size=0, max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_a_copy_in_tiles_has_the_bits_of_numpys(dtype: str, shape: list[int], order: Any) -> None:
    while np.prod(shape) > 300_000:
        shape = shape[:-1]
    bits = np.random.default_rng(0).integers(0, 256, int(np.prod(shape)) * DTYPES[dtype].itemsize, np.uint8)
    array = (bits & 1 if dtype == "bool" else bits).view(dtype=DTYPES[dtype]).reshape(shape)
    axes = list(range(len(shape)))
    order.shuffle(axes)
    for view in (array.transpose(axes), array[tuple(slice(n // 3, n) for n in shape)].transpose(axes)):
        assert row_major(view).flags.c_contiguous
        assert row_major(view).tobytes() == view.tobytes()


@pytest.mark.parametrize("axis", (0, 1, 2))
def test_tensors_are_stacked_along_any_axis_as_numpy_stacks_them(axis: int) -> None:
    parts = [np.arange(130 * 150, dtype=np.float32).reshape(130, 150) + i for i in range(20)]
    stack = Stack([in_memory(part) for part in parts], axis)
    assert np.array_equal(stack.read(), np.stack(parts, axis))


def test_numbers_are_stacked_too() -> None:
    numbers = tuple(in_memory(np.array(value)) for value in (3.0, 5.0))
    assert Stack(numbers, 0).read().tolist() == [3.0, 5.0]


def test_values_are_copied_into_a_part_of_an_array_and_nowhere_else() -> None:
    around = np.zeros((300, 400), np.uint16)
    values = np.arange(150 * 140, dtype=np.uint16).reshape(140, 150).T
    fill(around[70:220, 100:240], values)
    assert np.array_equal(around[70:220, 100:240], values)
    around[70:220, 100:240] = 0
    assert not around.any()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_values_are_rounded_once(name: str) -> None:
    dtype = dtype_named(name)
    bits = np.arange(2 ** (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        every = bits.view(dtype).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    low, high = every[:-1], every[1:]
    middle = (low + high) / 2  # exact: float64 has digits to spare
    for shift in (-(2.0**-26), 2.0**-26):
        beside = middle + (high - low) * shift
        assert (rounded(beside, dtype).astype(np.float64) == (low if shift < 0 else high)).all()
    assert (
        rounded(middle, dtype) == middle.astype(np.float32).astype(dtype)
    ).all()  # float32 holds them: ties
    assert np.isnan(rounded(np.array([np.nan]), dtype).astype(np.float64)).all()


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize(("slab", "reads"), [(2**20, 1), (2**14, 6)])
def test_a_tensor_in_another_order_of_axes_is_read_in_few_and_long_runs(
    order: tuple[int, ...], slab: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(24 * 28 * 30, dtype=np.float32).reshape(24, 28, 30)
    asked = list[int]()

    def fetch(index: Index) -> Any:
        asked.append(values[index].size)
        return values[index].copy()

    monkeypatch.setattr("statekit.tensors.tensor.SLAB_BYTES", slab)
    turned = Permuted(Stored(values.shape, values.dtype, fetch, "x", "memory"), order)
    pieces = list(chunks(turned, 2**11))
    assert all(piece.flags.c_contiguous and piece.nbytes <= 2**11 for piece in pieces)
    joined = np.concatenate([piece.reshape(-1) for piece in pieces])
    assert np.array_equal(joined, values.transpose(order).reshape(-1))
    assert sum(asked) == values.size and len(asked) <= reads
