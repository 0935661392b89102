"""What a tensor is, however a value is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from statekit.tensors.tensor import Cast, Filled, Shape, Tensor, in_memory
from statekit.tensors.tree import Record

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
