from __future__ import annotations

import contextlib
import struct
import time
import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from counting import calls
from hypothesis import given
from hypothesis import strategies as st
from t5x_files import packed_array

from statekit.budget import NODE_BYTES, Account, Budget, Limits
from statekit.converters.formats.msgpack.reader import Inline, parse
from statekit.errors import BudgetError, FormatError, RefusedError
from statekit.files.source import Held, filled
from statekit.tensors.tensor import Array, Stored


def value(data: bytes, place: str = "here") -> Held:
    return Held(data, place)


@dataclass(frozen=True)
class Watched:
    """Bytes of which is noted what was read."""

    data: bytes
    spans: list[tuple[int, int]]
    place: str = "here"
    account: Account = field(default_factory=Account)

    @property
    def size(self) -> int:
        return len(self.data)

    def read_into(self, start: int, into: memoryview) -> None:
        self.spans.append((start, len(into)))
        Held(self.data, self.place).read_into(start, into)

    def read(self, start: int, count: int) -> Array:
        return filled(self, start, count)


def parsed(tree: Any) -> Any:
    return parse(value(msgpack.packb(tree)))


def read(leaf: Any) -> Any:
    assert isinstance(leaf, Inline)
    return leaf.tensor("leaf").read()


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
TEXTS = st.text(max_size=40) | st.binary(max_size=300)


@given(
    st.recursive(
        LEAVES | TEXTS,
        lambda inner: (
            st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=20), inner, max_size=20)
        ),
        max_leaves=60,
    )
)
def test_it_reads_what_msgpack_reads(tree: Any) -> None:
    assert parsed(tree) == tree


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65535, 65536])
def test_every_length(count: int) -> None:
    tree = {
        "list": [None] * count,
        "map": {str(i): i for i in range(count)},
        "str": "x" * count,
        "bin": b"x" * count,
    }
    assert parsed(tree) == tree


@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (0, 5), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "bool", "float64", "uint16"])
def test_arrays_are_skipped_and_read_later(shape: tuple[int, ...], dtype: str) -> None:
    array = (np.random.default_rng(1).standard_normal(shape) * 5).astype(np.dtype(dtype))
    data: bytes = msgpack.packb({"a": packed_array(array), "b": {"c": packed_array(array, 3)}, "d": 7})
    spans: list[tuple[int, int]] = []
    tree = parse(Watched(data, spans))
    assert tree["d"] == 7
    spans.clear()
    for leaf in (tree["a"], tree["b"]["c"]):
        loaded = read(leaf)
        assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
        assert loaded.tobytes() == array.tobytes()
    assert sum(count for _, count in spans) == 2 * array.nbytes


def test_parsing_holds_no_array_data() -> None:
    array = np.zeros(2**22, np.float32)
    data: bytes = msgpack.packb({str(i): packed_array(array) for i in range(4)})
    spans: list[tuple[int, int]] = []
    tracemalloc.start()
    tree = parse(Watched(data, spans))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(tree) == 4
    assert peak < 2**20
    assert sum(count for _, count in spans) < 2**20


def test_blocks_of_an_inline_array() -> None:
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    tensor = parsed({"a": packed_array(array)})["a"].tensor("a")
    index = (slice(1, 3), slice(0, 2), slice(2, 5))
    assert np.array_equal(tensor.read(index), array[index])


def chunked(array: Any, cuts: list[int], **changes: Any) -> dict[str, Any]:
    pieces = np.split(array.reshape(-1), cuts)
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(i): n for i, n in enumerate(array.shape)},
        "chunks": {str(i): packed_array(piece) for i, piece in enumerate(pieces)},
        **changes,
    }


def test_a_chunked_array_is_joined() -> None:
    array = np.arange(40, dtype=np.float32).reshape(5, 8).astype(ml_dtypes.bfloat16)
    tensor = parsed({"a": chunked(array, [7, 8, 30])})["a"].tensor("a")
    assert tensor.read().tobytes() == array.tobytes()
    index = (slice(1, 4), slice(3, 5))
    assert tensor.read(index).tobytes() == np.ascontiguousarray(array[index]).tobytes()


ARRAY = np.arange(8, dtype=np.float32)


@pytest.mark.parametrize(
    "node",
    [
        chunked(ARRAY, [4], shape={"0": 9}),
        chunked(ARRAY, [4], shape={"1": 8}),
        chunked(ARRAY, [4], shape=None),
        chunked(ARRAY, [4], chunks={}),
        chunked(ARRAY, [4], chunks={"0": packed_array(ARRAY[:4]), "2": packed_array(ARRAY[4:])}),
        chunked(ARRAY, [4], chunks={"0": packed_array(ARRAY[:4]), "1": 5}),
        chunked(
            ARRAY, [4], chunks={"0": packed_array(ARRAY[:4]), "1": packed_array(ARRAY[4:].astype(np.float64))}
        ),
    ],
)
def test_a_chunked_array_that_does_not_fit(node: Any) -> None:
    with pytest.raises(FormatError):
        parsed({"a": node})


def test_complex_numbers_are_scalars() -> None:
    leaf = parsed({"a": msgpack.ExtType(2, msgpack.packb([1.5, -2.0]))})["a"]
    assert isinstance(leaf, Stored)
    assert leaf.read() == 1.5 - 2j
    with pytest.raises(FormatError):
        parsed({"a": msgpack.ExtType(2, msgpack.packb([1.5]))})


def ext(*parts: Any) -> msgpack.ExtType:
    return msgpack.ExtType(1, msgpack.packb(list(parts)))


@pytest.mark.parametrize(
    "leaf",
    [
        ext([2], "float32", b"1234567"),
        ext([2], "float32", b"123456789"),
        ext([2**40], "float32", b"12345678"),
        ext([2**40, 2**40], "float32", b""),
        ext([-2], "float32", b""),
        ext([2.0], "float32", b"12345678"),
        ext([{}], "float32", b""),
        ext("2", "float32", b"12345678"),
        ext([2], "object", b"12345678"),
        ext([2], 5, b"12345678"),
        ext([2], "float32", "12345678"),
        ext([2], "float32", 5),
        ext([2], "float32"),
        ext([2], "float32", b"12345678", 1),
        ext(*[[1]] * 3),
        msgpack.ExtType(1, b""),
        msgpack.ExtType(1, msgpack.packb([[2], "float32", b"12345678"]) + b"x"),
        msgpack.ExtType(7, b"12345678"),
        msgpack.ExtType(1, b"\x93\xdd\xff\xff\xff\xff"),
    ],
)
def test_arrays_that_lie(leaf: msgpack.ExtType) -> None:
    with pytest.raises(FormatError):
        parsed({"a": leaf})


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x81\xa1a" * 600 + b"\xc0",
        b"\x91" * 100_000 + b"\xc0",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xdd\x00\x00\x00\x02" + (b"\xc6\x02\x00\x00\x01" + b"x" * 0x2000001) * 2,
        b"\x81\xda\x20\x00" + b"k" * 0x2000 + b"\xc0",
        b"\xc1",
        b"\x82\xa1a\x01\xa1a\x02",
        b"\x81\xc0\x01",
        b"\x81\x91\x01\x01",
        b"\x81\xa1\xff\x01",
        b"\x01\x02",
        b"",
    ],
)
def test_bombs_and_nonsense(bomb: bytes) -> None:
    begun = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(FormatError):
        parse(Held(bomb, "here", Account(Budget(Limits(2**26)))))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * 2**20
    assert time.perf_counter() - begun < 20


def test_the_budgets_are_named() -> None:
    with pytest.raises(RefusedError, match="at most 512 levels"):
        parse(value(b"\x91" * 600 + b"\xc0"))


def test_too_many_values() -> None:
    small = Account(Budget(Limits(10_000 * NODE_BYTES)))
    with pytest.raises(BudgetError, match=rf"at most {10_000 * NODE_BYTES} bytes held"):
        parse(Held(b"\xdd\x00\x00\x30\x00" + b"\xc0" * 0x3000, "here", small))


def sample() -> bytes:
    tree = {
        "version": 3,
        "optimizer": {"a": packed_array(ARRAY), "b": [1.5, None, "text"], "c": chunked(ARRAY, [3])},
    }
    return bytes(msgpack.packb(tree))


def test_every_truncation_is_seen() -> None:
    data = sample()
    for end in range(len(data)):
        with pytest.raises(FormatError):
            parse(value(data[:end]))


def test_every_flipped_byte_is_survived() -> None:
    data = sample()
    for position in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            bad = bytearray(data)
            bad[position] ^= flip
            try:
                parse(value(bytes(bad)))
            except FormatError:
                continue


@given(st.binary(max_size=200))
def test_random_bytes_are_survived(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        parse(value(data))


def test_parsing_grows_with_the_number_of_specs_only() -> None:
    leaf = {"driver": "zarr", "kvstore": {"driver": "file", "path": "a"}, "metadata": {"shape": [4, 4]}}

    def parsing(specs: int) -> int:
        data: bytes = msgpack.packb({str(i): leaf for i in range(specs)})

        def parsed() -> None:
            assert len(parse(value(data))) == specs

        return calls(parsed)

    assert parsing(10_000) < 11 * parsing(1_000)


def test_floats_and_integers_keep_their_bits() -> None:
    data = (
        b"\x93\xca"
        + struct.pack(">f", 0.1)
        + b"\xcb"
        + struct.pack(">d", 0.1)
        + b"\xd3"
        + struct.pack(">q", -(2**63))
    )
    assert parse(value(data)) == [np.float32(0.1), 0.1, -(2**63)]
