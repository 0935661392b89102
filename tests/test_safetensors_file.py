"""The safetensors codec: agrees with the library on good files, and is stricter on bad ones."""

from __future__ import annotations

import io
import itertools
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from statekit.errors import CorruptError, FormatError, NotFoundError, RefusedError, StatekitError
from statekit.files import safetensors as safetensors_file
from statekit.files.safetensors import OpenFile, open_safetensors, save_safetensors
from statekit.tensors.digest import bytes_digest, tensor_bytes
from statekit.tensors.tensor import DTYPES, Array, Filled, Tensor, in_memory

ARRAYS: dict[str, Array] = {
    "odd": np.array([1, 2, 3], np.uint8),
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "bf16": np.array([1.5, -2.25, float("nan")], ml_dtypes.bfloat16),
    "scalar": np.array(-7, np.int64),
    "empty": np.zeros((2, 0, 3), np.float64),
    "mask": np.array([[True], [False]]),
}


def stream(name: str, tensor: Tensor) -> Iterator[memoryview]:
    return tensor_bytes(tensor)


def ours(path: Path, arrays: dict[str, Array]) -> Path:
    with path.open("wb") as output:
        tensors: dict[str, Tensor] = {name: in_memory(array) for name, array in arrays.items()}
        save_safetensors(tensors, output, stream, {"format": "test"})
    return path


def raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def same(opened: OpenFile, arrays: dict[str, Array]) -> None:
    assert opened.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        tensor = opened.tensors[name]
        assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype)
        assert tensor.read().tobytes() == array.tobytes()


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    loaded = load_file(ours(tmp_path / "x.safetensors", ARRAYS))
    assert loaded.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert loaded[name].dtype == array.dtype and loaded[name].tobytes() == array.tobytes()


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "x.safetensors", {"some": "note"})
    opened = open_safetensors(tmp_path / "x.safetensors")
    same(opened, ARRAYS)
    assert opened.metadata == {"some": "note"}
    opened.close()


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "complex128"])
def test_every_dtype_goes_both_ways(tmp_path: Path, dtype: str) -> None:
    array = np.arange(6).astype(DTYPES[dtype]).reshape(2, 3)
    opened = open_safetensors(ours(tmp_path / "ours", {"a": array}))
    same(opened, {"a": array})
    opened.close()
    save_file({"a": array}, tmp_path / "theirs")
    assert (tmp_path / "theirs").read_bytes()[-array.nbytes :] == array.tobytes()
    opened = open_safetensors(tmp_path / "theirs")
    same(opened, {"a": array})
    opened.close()


def test_tensors_are_aligned_to_their_elements(tmp_path: Path) -> None:
    path = ours(tmp_path / "x", ARRAYS)
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert length % 8 == 0
    for name, array in ARRAYS.items():
        assert header[name]["data_offsets"][0] % array.itemsize == 0


def test_the_headers_digest_covers_all_before_the_data(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as output:
        digest = save_safetensors({"a": in_memory(np.zeros(2))}, output, stream, {})
    assert digest == bytes_digest(path.read_bytes()[:-16])
    opened = open_safetensors(path)
    assert opened.header_digest == digest
    opened.close()


def test_every_block_is_read_by_itself(tmp_path: Path) -> None:
    array = np.arange(2 * 3 * 4, dtype=np.int32).reshape(2, 3, 4)
    opened = open_safetensors(ours(tmp_path / "x", {"first": np.zeros(5), "a": array}))
    cuts = [[slice(i, j) for i in range(n + 1) for j in range(i, n + 1)] for n in array.shape]
    for index in itertools.product(*cuts):
        assert np.array_equal(opened.tensors["a"].read(index), array[index])
    opened.close()


def test_a_block_costs_no_more_than_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_safetensors(ours(tmp_path / "x", {"a": np.zeros((1000, 8), np.float32)}))
    read: list[int] = []
    real = os.preadv

    def counting(file: int, buffers: list[memoryview], offset: int) -> int:
        read.append(real(file, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counting)
    opened.tensors["a"].read((slice(10, 20), slice(0, 8)))
    assert read == [10 * 8 * 4]
    opened.close()


def test_a_closed_file_isnt_read(tmp_path: Path) -> None:
    opened = open_safetensors(ours(tmp_path / "x", ARRAYS))
    opened.close()
    with (tmp_path / "x").open("rb"), pytest.raises(ValueError, match="closed"):
        opened.tensors["matrix"].read()


def test_a_file_that_shrinks_while_open_is_an_error(tmp_path: Path) -> None:
    opened = open_safetensors(ours(tmp_path / "x", ARRAYS))
    os.truncate(tmp_path / "x", 200)
    with pytest.raises(CorruptError, match="ends before"):
        [tensor.read() for tensor in opened.tensors.values()]
    opened.close()


BAD: dict[str, tuple[Any, bytes, str]] = {
    "not an object": ([], b"", "JSON object"),
    "not JSON": (b"{}x", b"", "valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "valid JSON"),
    "UTF-16": (json.dumps({"a": entry()}).encode("utf-16"), bytes(4), "valid JSON"),
    "duplicate key": (
        b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2),
        bytes(4),
        "occurs twice",
    ),
    "duplicate field": (
        b'{"a": {"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
        "twice",
    ),
    "NaN": (b'{"a": NaN}', b"", "isn't JSON"),
    "hole": ({"a": entry(), "b": entry(offsets=(8, 12))}, bytes(12), "hole"),
    "hole at the start": ({"a": entry(offsets=(4, 8))}, bytes(8), "hole"),
    "overlap": ({"a": entry(shape=(2,), offsets=(0, 8)), "b": entry(offsets=(4, 8))}, bytes(8), "overlap"),
    "same bytes twice": ({"a": entry(), "b": entry()}, bytes(4), "overlap"),
    "bytes left over": ({"a": entry()}, bytes(8), "the data at 8"),
    "too few bytes": ({"a": entry()}, bytes(3), "the data at 3"),
    "lying shape": ({"a": entry(shape=(2,))}, bytes(4), "needs 8 bytes"),
    "negative shape": ({"a": entry(shape=(-1,))}, bytes(4), "natural numbers"),
    "bool shape": ({"a": entry(shape=(True,))}, bytes(4), "natural numbers"),
    "float shape": ({"a": entry(shape=(1.0,))}, bytes(4), "natural numbers"),
    "absurd shape": ({"a": entry(shape=(0, 2**62), offsets=(0, 0))}, b"", "absurd"),
    "absurd rank": ({"a": entry(shape=(1,) * 65)}, bytes(4), "natural numbers"),
    "overflowing shape": ({"a": entry(shape=(2**32, 2**32), offsets=(0, 0))}, b"", "absurd"),
    "three offsets": ({"a": entry(offsets=(0, 4, 8))}, bytes(4), "natural numbers"),
    "backward offsets": ({"a": entry(offsets=(4, 0))}, bytes(4), "needs 4 bytes"),
    "unknown dtype": ({"a": entry(dtype="F31")}, bytes(4), "F31"),
    "list as dtype": ({"a": entry(dtype=["F32"])}, bytes(4), "has dtype"),  # type: ignore[arg-type]  # the fault
    "more fields": ({"a": entry(path="/etc/passwd")}, bytes(4), "exactly"),
    "not an entry": ({"a": 4}, bytes(4), "exactly"),
    "control in name": ({"a\nb": entry()}, bytes(4), "unusable name"),
    "NUL in name": ({"a\0": entry()}, bytes(4), "unusable name"),
    "surrogate in name": (b'{"\\ud800": %s}' % json.dumps(entry()).encode(), bytes(4), "isn't Unicode"),
    "long name": ({"a" * 4097: entry()}, bytes(4), "4097 bytes"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "deep nesting": (b'{"a":' * 5000 + b"1" + b"}" * 5000, b"", "valid JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_header_that_breaks_the_format_is_refused(tmp_path: Path, case: str) -> None:
    header, data, what = BAD[case]
    with pytest.raises(FormatError, match=what):
        open_safetensors(raw(tmp_path / "x", header, data))


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    path = raw(tmp_path / "x", {"a": entry("F31"), "b": entry(shape=(3,)), "c\n": entry()}, bytes(4))
    with pytest.raises(FormatError, match="3 faults") as caught:
        open_safetensors(path)
    assert str(path) in str(caught.value)


def test_what_isnt_a_file_of_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        open_safetensors(tmp_path / "none")
    with pytest.raises(CorruptError, match="ends before"):
        open_safetensors(raw(tmp_path / "x", {}, length=2**63))
    (tmp_path / "y").write_bytes(b"short")
    with pytest.raises(CorruptError, match="ends before"):
        open_safetensors(tmp_path / "y")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(RefusedError, match="regular file"):
        open_safetensors(tmp_path / "fifo")


def test_a_header_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = raw(tmp_path / "x", {}, length=200_000_000)
    os.truncate(path, 2**40)  # sparse
    with pytest.raises(RefusedError, match="too large"):
        open_safetensors(path)


def test_our_rules_are_at_least_the_librarys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = set()
    for case, (header, data, _) in BAD.items():
        try:
            with safetensors.safe_open(raw(tmp_path / case, header, data), framework="np"):
                pass
        except safetensors.SafetensorError:
            refused.add(case)
    assert {"hole", "overlap", "lying shape"} <= refused < BAD.keys()  # the rest are rules of ours alone
    monkeypatch.setattr(safetensors_file, "_parsed", lambda *_: ({}, {}))
    with pytest.raises(FormatError, match="library refuses"):
        open_safetensors(tmp_path / "overlap")


def test_a_bool_that_is_neither_is_corrupt(tmp_path: Path) -> None:
    opened = open_safetensors(raw(tmp_path / "x", {"a": entry("BOOL", (2,), (0, 2))}, b"\1\2"))
    with pytest.raises(CorruptError, match="neither 0 nor 1"):
        opened.tensors["a"].read()
    opened.close()


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": in_memory(np.zeros(1, np.complex128))},
        {"a\n": in_memory(np.zeros(1))},
        {"\udc80": in_memory(np.zeros(1))},
        {"__metadata__": in_memory(np.zeros(1))},
    ],
    ids=["dtype", "control", "surrogate", "reserved"],
)
def test_what_the_format_cant_hold_is_refused_before_writing(tensors: dict[str, Tensor]) -> None:
    output = io.BytesIO()
    with pytest.raises(FormatError, match="can't hold"):
        save_safetensors(tensors, output, stream, {})
    assert output.getvalue() == b""


def test_every_truncation_and_many_flips_of_a_header_are_typed_errors_or_harmless(tmp_path: Path) -> None:
    good = ours(tmp_path / "good", ARRAYS).read_bytes()
    start = 8 + struct.unpack("<Q", good[:8])[0]
    path = tmp_path / "bad"
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(StatekitError):
            open_safetensors(path)
    digest = bytes_digest(good[:start])
    for bit in range(0, start * 8, 5):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        try:
            opened = open_safetensors(path)
        except StatekitError:
            continue
        assert opened.header_digest != digest  # what is still valid differs in its digest
        opened.close()


def test_a_huge_tensor_is_written_in_blocks() -> None:
    sizes = []

    class Sink(io.BytesIO):
        def write(self, data: Any, /) -> int:
            sizes.append(len(data))
            return len(data)

    save_safetensors({"a": Filled((2**28,), np.dtype(np.float32))}, Sink(), stream, {})
    assert sum(sizes[1:]) == 2**30 and max(sizes) <= 8 * 2**20
