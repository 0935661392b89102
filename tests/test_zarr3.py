"""Zarr arrays of format 3: headers, shards and their indexes, written here without the code under test."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr_files import header3, shard_bytes, sharding, write_sharded

from statekit.converters.formats.zarr.array import absent_chunks, open_array
from statekit.converters.formats.zarr.headers import parse_zarr_json
from statekit.converters.formats.zarr.stores import FolderStore
from statekit.errors import CorruptError, FormatError, RefusedError
from statekit.files.source import Files
from statekit.tensors.tensor import DTYPES, Array, Stored

BYTES = {"configuration": {"endian": "little"}, "name": "bytes"}
ZSTD = {"configuration": {"checksum": False, "level": 3}, "name": "zstd"}


def opened(folder: Path, **changes: Any) -> Stored:
    """Opens an array through its own header, some of it changed."""
    data = json.loads((folder / "zarr.json").read_text()) | changes
    header = parse_zarr_json(json.dumps(data).encode(), "here")
    return open_array(FolderStore(folder.parent, Files()), folder.name, header, "tensor")


def array(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("compressor", ["zstd", "gzip", None])
@pytest.mark.parametrize("where", ["end", "start"])
@pytest.mark.parametrize(
    ("shape", "shard", "chunks"),
    [
        ((), (), ()),
        ((7,), (4,), (2,)),
        ((9, 10), (4, 10), (2, 5)),
        ((3, 4, 5), (2, 2, 6), (1, 2, 3)),
        ((0, 3), (1, 3), (1, 1)),
    ],
)
def test_shards_and_edges(
    tmp_path: Path, compressor: str, where: str, shape: Any, shard: Any, chunks: Any
) -> None:
    values = array(*shape)
    tensor = opened(write_sharded(tmp_path / "a", values, shard, chunks, compressor, where))
    assert tensor.shape == shape
    assert np.array_equal(tensor.read(), values)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_block_in_any_order(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    chunks = tuple(data.draw(st.integers(1, n)) for n in shape)
    shard = tuple(c * data.draw(st.integers(1, 3)) for c in chunks)
    values = array(*shape)
    tensor = opened(write_sharded(tmp_path_factory.mktemp("z") / "a", values, shard, chunks))
    for _ in range(3):
        bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        index = tuple(slice(low, high) for low, high in bounds)
        assert np.array_equal(tensor.read(index), values[index])


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(tmp_path: Path, name: str) -> None:
    values = (array(4, 3) * 3).astype(DTYPES[name])
    assert opened(write_sharded(tmp_path / "a", values, (4, 3), (2, 3))).read().tobytes() == values.tobytes()


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_what_tensorstore_writes(tmp_path: Path, sharded: bool, dtype: str) -> None:
    import tensorstore as ts

    values = (array(20, 30) * 5).astype(DTYPES[dtype])
    inner = [BYTES if dtype != "bool" else {"name": "bytes"}, ZSTD]
    index = {"chunk_shape": [5, 10], "codecs": inner, "index_codecs": [BYTES, {"name": "crc32c"}]}
    codecs = [{"name": "sharding_indexed", "configuration": index}] if sharded else inner
    grid = {"name": "regular", "configuration": {"chunk_shape": [10, 10]}}
    metadata = {"shape": [20, 30], "chunk_grid": grid, "codecs": codecs, "data_type": dtype}
    store = {"driver": "file", "path": f"{tmp_path}/a/"}
    spec = {"driver": "zarr3", "kvstore": store, "metadata": metadata, "store_data_equal_to_fill_value": True}
    ts.open(spec, create=True).result().write(values).result()
    tensor = opened(tmp_path / "a")
    assert tensor.read().tobytes() == values.tobytes()
    assert tensor.grain == ((5, 10) if sharded else (10, 10))


def test_keys_as_format_2_has_them(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "a", array(4, 4), (4, 4), (2, 2))
    (folder / "c" / "0" / "0").rename(folder / "0.0")
    assert opened(folder, chunk_key_encoding={"name": "v2"}).read().tobytes() == array(4, 4).tobytes()


def nested(**changes: Any) -> list[Any]:
    codec = sharding((2, 2))
    return [codec | {"configuration": codec["configuration"] | changes}]


@pytest.mark.parametrize(
    "change",
    [
        {"zarr_format": 2}, {"node_type": "group"}, {"shape": [4]}, {"shape": [4, -1]}, {"shape": "4"},
        {"data_type": "float33"}, {"data_type": {"name": "struct"}}, {"data_type": "r16"}, {"fill_value": "x"},
        {"fill_value": None}, {"chunk_grid": {"name": "rectangular"}}, {"chunk_grid": None}, {"codecs": []},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 4]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 4]}}},
        {"chunk_key_encoding": {"name": "hashed"}},
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": ":"}}},
        {"storage_transformers": [{"name": "x"}]}, {"extension": {"name": "x"}}, {"codecs": "bytes"},
        {"codecs": [BYTES, {"name": "blosc"}]}, {"codecs": [ZSTD]}, {"codecs": [{"name": "transpose"}, BYTES]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]}, {"codecs": [BYTES, ZSTD, ZSTD]},
        {"codecs": nested(chunk_shape=[3, 2])}, {"codecs": nested(chunk_shape=[0, 2])},
        {"codecs": nested(chunk_shape=[2])},
        {"codecs": nested(codecs=nested())}, {"codecs": nested(index_codecs=[BYTES, ZSTD])},
        {"codecs": nested(index_location="middle")}, {"codecs": nested(index_codecs=None)}, {"codecs": [None]},
    ],
)  # fmt: skip
def test_headers_that_are_not_read(change: dict[str, Any]) -> None:
    stated = header3((4, 4), (4, 4), [sharding((2, 2))])
    parse_zarr_json(json.dumps(stated).encode(), "here")
    with pytest.raises(FormatError):
        parse_zarr_json(json.dumps(stated | change).encode(), "here")


def test_what_need_not_be_understood_is_passed_over() -> None:
    stated = header3((4, 4), (4, 4), [BYTES]) | {
        "extension": {"must_understand": False},
        "attributes": {"a": 1},
    }
    assert parse_zarr_json(json.dumps(stated).encode(), "here").chunks == (4, 4)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 30000, b'{"a": 1, "a": 2}'])
def test_headers_that_are_not_json_objects(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_zarr_json(data, "here")


def test_an_absent_chunk_is_damage_or_told(tmp_path: Path) -> None:
    values = array(4, 4)
    folder = write_sharded(tmp_path / "a", values, (2, 4), (2, 2), absent=(1,))
    filled = values.copy()
    filled[:, 2:] = 0
    assert np.array_equal(opened(folder).read(), filled)
    header = parse_zarr_json((folder / "zarr.json").read_bytes(), "here")
    store = FolderStore(tmp_path, Files())
    assert absent_chunks(store, "a", header) == ["c/0/0[0,1]", "c/1/0[0,1]"]
    (folder / "c" / "1" / "0").unlink()
    assert absent_chunks(store, "a", header) == ["c/0/0[0,1]", "c/1/0[0,0]", "c/1/0[0,1]"]


def test_every_flipped_bit_of_an_index_is_seen(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "a", array(4, 4), (4, 4), (2, 4))
    shard = folder / "c" / "0" / "0"
    good = shard.read_bytes()
    for position in range(8 * (len(good) - 36), 8 * len(good)):
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        shard.write_bytes(bad)
        with pytest.raises(CorruptError):
            opened(folder).read()


@pytest.mark.parametrize("size", [0, 3, 35, 36, -1])
def test_a_truncated_shard(tmp_path: Path, size: int) -> None:
    folder = write_sharded(tmp_path / "a", array(4, 4), (4, 4), (2, 4))
    shard = folder / "c" / "0" / "0"
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(CorruptError):
        opened(folder).read()


@pytest.mark.parametrize("place", [(0, 10**6), (10**6, 4), (2**64 - 2, 4), (4, 2**64 - 2), (2**63, 2**63)])
def test_chunks_outside_their_shard(tmp_path: Path, place: tuple[int, int]) -> None:
    import struct

    import google_crc32c

    folder = write_sharded(tmp_path / "a", array(4, 4), (4, 4), (4, 4), None)
    index = struct.pack("<QQ", *place)
    body = array(4, 4).tobytes() + index + struct.pack("<I", google_crc32c.value(index))
    (folder / "c" / "0" / "0").write_bytes(body)
    with pytest.raises(CorruptError, match="outside"):
        opened(folder).read()


def test_lying_sizes_allocate_nothing(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "a", array(4), (4,), (4,))
    huge = {"name": "regular", "configuration": {"chunk_shape": [2**50]}}
    tracemalloc.start()
    for chunk in (1, 2**10, 2**50):
        changed = {"shape": [2**50], "chunk_grid": huge, "codecs": [sharding((chunk,))]}
        with pytest.raises(FormatError):
            opened(folder, **changed).read()
    with pytest.raises(RefusedError):
        opened(folder, shape=[2**61])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22


def test_absurd_fill_is_refused(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "a", array(4), (4,), (4,))
    (folder / "c" / "0").unlink()
    for shape, shard, chunk in (([2**40], [2**20], 1), ([2**40], [2**40], 2**40), ([2**40], [4], 4)):
        stated = header3(tuple(shape), tuple(shard), [sharding((chunk,))])
        header = parse_zarr_json(json.dumps(stated).encode(), "here")
        with pytest.raises(FormatError):
            absent_chunks(FolderStore(folder.parent, Files()), "a", header)


def test_the_shards_of_these_tests_are_those_of_tensorstore(tmp_path: Path) -> None:
    import tensorstore as ts

    values = array(6, 6).astype(ml_dtypes.bfloat16)
    folder = write_sharded(tmp_path / "a", values, (4, 6), (2, 3))
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    assert ts.open(spec).result().read().result().tobytes() == values.tobytes()
    assert len(shard_bytes([b"x", None])) == 1 + 36
