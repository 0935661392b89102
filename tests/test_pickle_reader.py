"""Pickles become inert trees; whatever they ask to be run isn't, and absurd ones end early."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import io
import pathlib
import pickle
import sys
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldens import GOLDEN
from statekit.converters.formats.pickle.reader import read_pickle
from statekit.converters.formats.pytorch.reader import torch_calls
from statekit.errors import FormatError
from statekit.tensors.tensor import DTYPES, Tensor
from statekit.tensors.tree import Record, walk

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def read(data: bytes) -> Any:
    return read_pickle(data, "test").value


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**500), 2**500)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=[]))
    | st.binary()
)
keys = st.text() | st.integers(-(2**60), 2**60) | st.tuples(st.integers(0, 9), st.text())
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=30,
)


@given(trees, st.sampled_from(PROTOCOLS))
@settings(max_examples=300)
def test_plain_data_is_read_as_python_reads_it(value: Any, protocol: int) -> None:
    assert read(pickle.dumps(value, protocol)) == value


PUTS = (
    lambda index: b"q" + bytes([index % 256]),
    lambda index: b"r" + index.to_bytes(4, "little"),
    lambda index: b"p%d\n" % index,
    lambda index: b"\x94",
)
GETS = (
    lambda index: b"h" + bytes([index % 256]),
    lambda index: b"j" + index.to_bytes(4, "little"),
    lambda index: b"g%d\n" % index,
)


@given(st.lists(st.tuples(st.sampled_from(PUTS), st.integers(0, 8) | st.integers(254, 300)), max_size=12))
def test_whatever_a_program_numbers_it_remembers_as_python_does(puts: list[tuple[Any, int]]) -> None:
    """Writers count up from 0, Python 2 from 1, and nothing says that one must."""
    begun = b"".join(b"K%c%s0" % (value, put(index)) for value, (put, index) in enumerate(puts))
    for get, index in ((get, index) for get in GETS for index in [*range(12), *range(254, 302)]):
        program = begun + get(index) + b"."
        try:
            expected = pickle.loads(program)
        except (KeyError, pickle.UnpicklingError):
            with pytest.raises(FormatError):
                read(program)
        else:
            assert read(program) == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_large_plain_data(protocol: int) -> None:
    shared = ["x" * 300, b"y" * 70_000, list(range(5000)), tuple(range(2000))]
    value = {"a": shared, "b": shared, "many": [{"k": i} for i in range(3000)], 3: {(1, "b"): 2.5}}
    loaded = read(pickle.dumps(value, protocol))
    assert loaded == value
    assert loaded["a"] is loaded["b"]


def test_python_2_text() -> None:
    assert read(b"\x80\x02}U\x02lrG?\xf0\x00\x00\x00\x00\x00\x00s.") == {"lr": 1.0}
    assert read(b"S'a\\x41\\n'\n.") == "aA\n"
    assert read(b"U\x02\xff\xfe.") == b"\xff\xfe"


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Options:
    rate: float
    inner: Any = None


class Point(collections.namedtuple("Point", "x y")):
    __slots__ = ()


class Names(dict[str, int]):
    pass


class Items(list[int]):
    pass


HERE = __name__


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_become_records(protocol: int) -> None:
    path = pathlib.PurePosixPath("a/b")
    value = {"options": Options(0.5, [1]), "color": Color.RED, "path": path}
    loaded = read(pickle.dumps(value, protocol))
    assert loaded["options"] == Record(f"{HERE}.Options", (), {"rate": 0.5, "inner": [1]})
    assert loaded["color"] == Record(f"{HERE}.Color", ("red",))
    assert loaded["path"].name == "pathlib.PurePosixPath"
    assert loaded["path"].args == (("a/b",) if sys.version_info >= (3, 13) else ("a", "b"))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_subclasses_of_containers_keep_their_items(protocol: int) -> None:
    names, items = Names(a=1, b=2), Items(range(2500))
    names.note = "kept"  # type: ignore[attr-defined]  # a subclass with attributes
    loaded = read(pickle.dumps([names, items, Point(1, 2), collections.deque([1, 2], 5)], protocol))
    assert loaded[0] == Record(f"{HERE}.Names", ({"a": 1, "b": 2},), {"note": "kept"})
    assert loaded[1] == Record(f"{HERE}.Items", (list(range(2500)),))
    assert loaded[2] == Record(f"{HERE}.Point", (1, 2))
    assert loaded[3].args[-1] == [1, 2]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_classes_of_python_become_plain_data(protocol: int) -> None:
    default: collections.defaultdict[str, int] = collections.defaultdict(int, z=1, a=2)
    ordered = collections.OrderedDict([("z", 1), ("a", 2)])
    loaded = read(
        pickle.dumps(
            [ordered, default, collections.Counter("aab"), bytearray(b"\xff\x00"), b"", b"\xfe"], protocol
        )
    )
    assert loaded == [{"z": 1, "a": 2}, {"z": 1, "a": 2}, {"a": 2, "b": 1}, b"\xff\x00", b"", b"\xfe"]
    assert list(loaded[0]) == ["z", "a"]
    rest = read(
        pickle.dumps([{5}, frozenset({6}), 1 + 2j, slice(1, 2), functools.partial(int, "3")], protocol)
    )
    assert rest[:3] == [
        Record("builtins.set", ([5],)),
        Record("builtins.frozenset", ([6],)),
        Record("builtins.complex", (1.0, 2.0)),
    ]
    assert rest[3] == Record("builtins.slice", (1, 2, None))
    assert rest[4].name == "functools.partial"


def test_attributes_without_a_place_are_noted() -> None:
    state = collections.OrderedDict(weight=1)
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as PyTorch's state_dict does
    assert read_pickle(pickle.dumps(state), "test").notes == ()
    state.more = 5  # type: ignore[attr-defined]  # what has no place
    loaded = read_pickle(pickle.dumps(state), "test")
    assert loaded.value == {"weight": 1}
    assert loaded.notes == ("attribute more of a dict has no place in the tree",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_object_that_mentions_itself_is_data_without_a_cycle(protocol: int) -> None:
    child = Options(1.0)
    parent = Options(2.0, child)
    child.inner = parent  # as configuration trees hold their parents
    loaded = read_pickle(pickle.dumps([parent, parent], protocol), "test")
    assert loaded.value[0].state["inner"].state["rate"] == 1.0
    assert loaded.value[0].state["inner"].state["inner"] == Record(f"{HERE}.Options")
    assert loaded.value[1] is loaded.value[0]
    assert "mentions itself" in loaded.notes[0]
    assert len(list(walk(loaded.value))) == 6


def test_keys_that_are_objects_become_hashable() -> None:
    @dataclasses.dataclass(frozen=True)
    class Key:
        name: str

    Key.__qualname__, Key.__module__ = "Key", __name__
    globals()["Key"] = Key
    loaded = read(pickle.dumps({Key("a"): 1, Key("b"): 2, frozenset({1}): 3}, 4))
    assert list(loaded) == [
        Record(f"{HERE}.Key", (), (("name", "a"),)),
        Record(f"{HERE}.Key", (), (("name", "b"),)),
        Record("builtins.frozenset", ((1,),)),
    ]


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    np.arange(5, dtype=">f4"),
    np.array(7, np.uint64),
    np.zeros((0, 3), np.complex64),
    np.array([True, False]),
    np.arange(4).astype(ml_dtypes.bfloat16),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype.str}{a.shape}")
def test_numpy_arrays_become_tensors(array: np.ndarray[Any, Any], protocol: int) -> None:
    loaded = read(pickle.dumps({"a": array, "again": array}, protocol))
    tensor = loaded["a"]
    assert isinstance(tensor, Tensor)
    assert loaded["again"] is tensor
    assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype.newbyteorder("="))
    assert np.array_equal(tensor.read(), array)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy_scalars_become_numbers(protocol: int) -> None:
    values = [np.float32(0.1), np.float64(0.5), np.int8(-3), np.bool_(True), ml_dtypes.bfloat16(1.5)]
    loaded = read(pickle.dumps(values, protocol))
    assert loaded == [float(np.float32(0.1)), 0.5, -3, True, 1.5]
    assert [type(v) for v in loaded] == [float, float, int, bool, float]
    assert read(pickle.dumps(np.complex64(1 + 2j), protocol)) == Record("builtins.complex", (1.0, 2.0))


def test_arrays_that_statekit_does_not_carry_stay_records() -> None:
    for array in (np.array(["a"]), np.array([{}, 1], object), np.zeros(2, "M8[s]")):
        assert read(pickle.dumps(array, 2)).name == "numpy.ndarray"


def test_dtype_codes_are_those_of_numpy() -> None:
    for dtype in DTYPES.values():
        assert read(pickle.dumps(np.zeros(2, dtype), 2)).dtype == dtype


def test_recorded_pickles_of_other_systems_are_data() -> None:
    files = sorted(p for p in GOLDEN.rglob("*") if p.name == ".metadata" or p.suffix == ".states")
    assert files
    for path in files:
        tree = read_pickle(path.read_bytes(), str(path), calls=torch_calls).value
        assert len(list(walk(tree))) > 10, path
        if path.name == ".metadata":
            assert tree.name == "torch.distributed.checkpoint.metadata.Metadata"
            assert any("exp_avg" in name or "row_var" in name for name in tree.state["state_dict_metadata"])


def test_several_pickles_in_a_row() -> None:
    stream = io.BytesIO()
    for value in (1, "two", [3]):
        pickle.dump(value, stream, 2)
    data, start, values = stream.getvalue(), 0, []
    while start < len(data):
        one = read_pickle(data, "test", start=start)
        values.append(one.value)
        start = one.end
    assert values == [1, "two", [3]]


def test_reading_takes_no_more_than_a_few_microseconds_an_opcode() -> None:
    data = pickle.dumps([{"name": f"layer_{i}", "shape": (i, 2 * i), "lr": 0.1} for i in range(30_000)], 2)
    start = time.process_time()
    read(data)
    assert time.process_time() - start < 3
