from __future__ import annotations

import gzip
import json
import math
import os
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr_files import ENCODERS, header, plain_stage, write_array

from statekit.budget import Account, Budget, Limits
from statekit.converters.formats import storage
from statekit.converters.formats.storage import decompressed
from statekit.converters.formats.zarr import array as zarr_array
from statekit.converters.formats.zarr import writer as zarr_writer
from statekit.converters.formats.zarr.array import Header, absent_chunks, open_array
from statekit.converters.formats.zarr.headers import parse_zarray
from statekit.converters.formats.zarr.stores import FolderStore, OcdbtStore, open_store
from statekit.converters.formats.zarr.writer import chunk_shape, encoded_chunks, header_bytes, header_for
from statekit.errors import BudgetError, CorruptError, FormatError, RefusedError, StatekitError, UsageError
from statekit.files.source import Files, Held, bytes_at
from statekit.files.tree import local_path
from statekit.pipeline import job
from statekit.tensors import digest
from statekit.tensors.digest import tensor_bytes
from statekit.tensors.tensor import DTYPES, Array, Stored, begin, chunks, in_memory

RANDOM = np.random.default_rng(3)


def opened(folder: Path, **changes: Any) -> Stored:
    """Opens an array through its own header, some of it changed."""
    store = FolderStore(folder.parent, Files(checkpoint=folder.parent))
    [data] = store.headers([f"{folder.name}/.zarray"])
    assert data is not None
    parsed = parse_zarray(json.dumps(json.loads(data) | changes).encode(), "here")
    return open_array(store, folder.name, parsed, "tensor")


def array(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every chunk a large one, so that blocks are cut out of streams."""
    monkeypatch.setattr(zarr_array, "SLAB", 64)
    monkeypatch.setattr(zarr_array, "PIECE", 100)
    monkeypatch.setattr(storage, "PIECE", 100)


@pytest.mark.parametrize("compressor", ENCODERS)
@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        ((), ()),
        ((1,), (1,)),
        ((7,), (3,)),
        ((9, 10), (4, 10)),
        ((9, 10), (4, 3)),
        ((3, 4, 5), (2, 2, 2)),
        ((0, 3), (1, 3)),
    ],
)
def test_whole_arrays_and_edges(
    tmp_path: Path, compressor: str | None, shape: tuple[int, ...], chunk: tuple[int, ...]
) -> None:
    values = array(*shape)
    tensor = opened(write_array(tmp_path / "a", values, chunk, compressor))
    assert tensor.shape == shape
    assert np.array_equal(tensor.read(), values)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("compressor", ["gzip", "zstd", None])
def test_any_block_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, small_slabs: None, compressor: str | None, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    chunk = tuple(data.draw(st.integers(1, n)) for n in shape)
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    folder = write_array(tmp_path_factory.mktemp("z") / "a", values, chunk, compressor)
    tensor = opened(folder)
    for _ in range(4):
        bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        index = tuple(slice(low, high) for low, high in bounds)
        assert np.array_equal(tensor.read(index), values[index])


def test_streaming_decodes_a_large_chunk_once(
    tmp_path: Path, small_slabs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = array(64, 32)
    tensor = opened(write_array(tmp_path / "a", values, (64, 32)))
    opens: list[object] = []
    open_stream = zarr_array.open_stream

    def counted(*arguments: Any) -> Any:
        opens.append(arguments)
        return open_stream(*arguments)

    monkeypatch.setattr(zarr_array, "open_stream", counted)
    blocks = list(chunks(tensor, 256))
    assert np.array_equal(np.concatenate(blocks), values)
    assert (len(blocks), len(opens)) == (32, 1)


def test_a_tensor_that_was_begun_is_decoded_once(tmp_path: Path) -> None:
    values = np.arange(3 * 2**20, dtype=np.float32).reshape(3, -1)
    write_array(tmp_path / "a", values, values.shape, "gzip")
    stated = parse_zarray((tmp_path / "a" / ".zarray").read_bytes(), "a")
    with Files(Budget(), tmp_path) as files, job(2):
        tensor = open_array(FolderStore(tmp_path, files), "a", stated, "a")
        begin(tensor)
        assert files.account.budget.held
        assert b"".join(map(bytes, tensor_bytes(tensor))) == values.tobytes()
        assert files.account.budget._decoded == values.nbytes


def test_chunks_that_are_decoded_ahead_are_those_that_come_next(
    tmp_path: Path, small_slabs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "BLOCK_BYTES", 512)
    begun: list[tuple[int, ...]] = []
    start = zarr_array._Reader._start

    def noted(reader: Any, position: tuple[int, ...], compressor: str) -> None:
        begun.append(position)
        start(reader, position, compressor)

    monkeypatch.setattr(zarr_array._Reader, "_start", noted)
    values = array(40, 32)
    write_array(tmp_path / "a", values, (8, 32), "gzip")
    stated = parse_zarray((tmp_path / "a" / ".zarray").read_bytes(), "a")
    with Files(Budget(), tmp_path) as files, job(2):
        tensor = open_array(FolderStore(tmp_path, files), "a", stated, "a")
        assert b"".join(map(bytes, tensor_bytes(tensor))) == values.tobytes()
        assert files.account.budget._decoded == values.nbytes
    assert {(1, 0), (2, 0), (3, 0), (4, 0)} == {*begun}


def test_a_block_of_a_large_chunk_needs_little_memory(tmp_path: Path) -> None:
    values = np.zeros((4096, 4096), np.float32)  # one chunk of 64 MiB
    folder = write_array(tmp_path / "a", values, (4096, 4096))
    tensor = opened(folder)
    del values
    tracemalloc.start()
    for index in ((slice(0, 64), slice(0, 4096)), (slice(0, 4096), slice(100, 110))):
        tensor.read(index)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 * 2**20


@pytest.mark.parametrize(
    "name", [n for n in DTYPES if n.startswith(("bf", "int", "uint", "float", "bool", "comp"))]
)
def test_dtypes_round_trip(tmp_path: Path, name: str) -> None:
    values = (RANDOM.standard_normal((5, 3)) * 3).astype(DTYPES[name])
    tensor = in_memory(values)
    stated = header_for(tensor, "zstd", tensor.shape)
    again = parse_zarray(header_bytes(stated), "here")
    assert (again.dtype, again.shape) == (values.dtype, (5, 3))
    stage = plain_stage(tmp_path)
    for key, pieces in encoded_chunks(stage, "t", tensor, stated):
        with stage.file(f"a/{key}") as output:
            output.writelines(pieces)
    back = open_array(FolderStore(tmp_path, Files()), "a", again, "t").read()
    assert back.dtype == values.dtype
    assert back.tobytes() == values.tobytes() == stage.streamed["t"]


def test_separator_and_missing_separator(tmp_path: Path) -> None:
    values = array(4, 4)
    assert np.array_equal(opened(write_array(tmp_path / "a", values, (2, 2), separator="/")).read(), values)
    document = header((4, 4), (2, 2))
    del document["dimension_separator"]
    assert parse_zarray(json.dumps(document).encode(), "here").separator == "."


@pytest.mark.parametrize(
    "change",
    [
        {"zarr_format": 3}, {"order": "F"}, {"filters": [{"id": "delta"}]}, {"compressor": {"id": "blosc"}},
        {"compressor": "gzip"}, {"dtype": ">f4"}, {"dtype": "|O"}, {"dtype": [["a", "<f4"]]}, {"dtype": None},
        {"shape": [4, -1]}, {"shape": [4, 4.0]}, {"shape": [True, 4]}, {"shape": "44"}, {"shape": [4]},
        {"chunks": [0, 4]}, {"chunks": [4]}, {"chunks": None}, {"dimension_separator": ""}, {"fill_value": "x"},
        {"shape": [1] * 65, "chunks": [1] * 65},
    ],
)  # fmt: skip
def test_headers_that_are_not_read(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        parse_zarray(json.dumps(header((4, 4), (4, 4)) | change).encode(), "here")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 30000])
def test_headers_that_are_not_json_objects(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_zarray(data, "here")


def test_a_header_of_absurd_size_is_refused(tmp_path: Path) -> None:
    folder = write_array(tmp_path / "a", array(2), (2,))
    (folder / ".zarray").write_bytes(b" " * 2**17)
    with pytest.raises(RefusedError, match="header"):
        FolderStore(tmp_path, Files(Budget(Limits(2**16)))).headers(["a/.zarray"])


@pytest.mark.parametrize("shape", [[2**40, 2**40], [2**61]])
def test_a_shape_beyond_any_array_is_refused(shape: list[int]) -> None:
    with pytest.raises(RefusedError):
        parse_zarray(json.dumps(header((), ()) | {"shape": shape, "chunks": shape}).encode(), "here")


@pytest.mark.parametrize("compressor", ["gzip", "zlib", "zstd", None])
@pytest.mark.parametrize(
    ("shape", "chunk"), [((2**40,), (2**40,)), ((2**40,), (4,)), ((2**20, 2**20), (2**20, 4))]
)
def test_a_lying_shape_allocates_nothing(
    tmp_path: Path, compressor: str | None, shape: tuple[int, ...], chunk: tuple[int, ...]
) -> None:
    folder = write_array(tmp_path / "a", array(4), (4,), compressor)
    (folder / "0").rename(folder / ".".join("0" * len(shape)))
    tensor = opened(folder, shape=list(shape), chunks=list(chunk))
    tracemalloc.start()
    with pytest.raises(FormatError):
        tensor.read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize("compressor", ["gzip", "zlib", "zstd", None])
@pytest.mark.parametrize("bytes_off", [1, 5, 60])
def test_a_truncated_chunk(tmp_path: Path, compressor: str | None, bytes_off: int) -> None:
    folder = write_array(tmp_path / "a", array(8, 8), (8, 8), compressor)
    chunk = folder / "0.0"
    chunk.write_bytes(chunk.read_bytes()[:-bytes_off])
    with pytest.raises(CorruptError):
        opened(folder).read()


@pytest.mark.parametrize("compressor", ["gzip", "zlib", "zstd", None])
def test_a_chunk_with_bytes_behind_it(tmp_path: Path, compressor: str | None) -> None:
    folder = write_array(tmp_path / "a", array(8, 8), (8, 8), compressor)
    chunk = folder / "0.0"
    chunk.write_bytes(chunk.read_bytes() + b"more")
    with pytest.raises(CorruptError):
        opened(folder).read()


@pytest.mark.parametrize("compressor", ["gzip", "zlib", "zstd"])
@pytest.mark.parametrize("level", [1, 19])
@pytest.mark.parametrize("checked", [False, True])
def test_data_that_is_cut_off_or_goes_on_is_damaged(compressor: str, level: int, checked: bool) -> None:
    values = array(64, 1024).tobytes() + bytes(2**20)
    if compressor == "zstd":
        packed = zstandard.ZstdCompressor(level=level, write_checksum=checked).compress(values)
    else:
        packed = (gzip.compress if compressor == "gzip" else zlib.compress)(values, min(level, 9))

    def read(data: bytes) -> bytes:
        return b"".join(decompressed(Held(data, "a", Account()), compressor, "A chunk"))

    assert read(packed) == values
    for bad in (packed[:-1], packed[:-5], packed[: len(packed) // 2], packed[:8], packed + b"a", packed * 2):
        with pytest.raises(CorruptError, match="damaged"):
            read(bad)


@pytest.mark.parametrize("absent", [False, True])
def test_zeros_are_explained_by_what_is_stored_whatever_is_read_first(tmp_path: Path, absent: bool) -> None:
    zeros = np.zeros((2**15, 2**10), np.float32)  # 128 MiB, where 16 MiB may be held
    write_array(tmp_path / "m", zeros, (2**8, 2**10), "zstd")
    header = json.loads((tmp_path / "m" / ".zarray").read_text())
    if absent:
        for chunk in (tmp_path / "m").glob("[0-9]*"):
            chunk.unlink()
        (tmp_path / "m" / ".zarray").write_text(json.dumps(header | {"fill_value": 0.0}))

    def read() -> None:
        with Files(Budget(Limits(2**24)), tmp_path) as files:
            store = FolderStore(tmp_path, files)
            stated = parse_zarray((tmp_path / "m" / ".zarray").read_bytes(), "m")
            absent_chunks(store, "m", stated)
            for start in range(0, 2**15, 2**8):
                rows = slice(start, start + 2**8)
                assert not open_array(store, "m", stated, "m").read((rows, slice(0, 2**10))).any()

    with pytest.raises(BudgetError, match="more than its bytes explain"):
        read()
    (tmp_path / "params").write_bytes(RANDOM.bytes(2**22))
    read()
    with (tmp_path / "params").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(BudgetError, match="more than its bytes explain"):
        read()


@pytest.mark.parametrize("compressor", ["gzip", "zlib"])
def test_every_flipped_bit_of_a_checksummed_chunk_is_seen(tmp_path: Path, compressor: str) -> None:
    values = array(4, 4)
    folder = write_array(tmp_path / "a", values, (4, 4), compressor)
    chunk, seen = folder / "0.0", 0
    good = chunk.read_bytes()
    for position in range(8 * len(good)):
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        chunk.write_bytes(bad)
        try:
            read = opened(folder).read()
        except CorruptError:
            seen += 1
        else:  # some bits mean nothing: the time and system in gzip's header, padding
            assert np.array_equal(read, values)
    assert seen > 0.9 * 8 * (len(good) - 10)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("cut", [(16, 4), (10, 4), (10, 3)])
def test_the_checksum_of_a_large_chunk_at_the_edge_is_compared(tmp_path: Path, cut: tuple[int, int]) -> None:
    folder = write_array(tmp_path / "a", array(24, 4), cut)  # the last chunk has more than the array
    last = max(folder.glob("[0-9]*"))
    assert opened(folder).read().shape == (24, 4)
    damaged = bytearray(last.read_bytes())
    damaged[-6] ^= 1  # in the checksum
    last.write_bytes(damaged)
    with pytest.raises(CorruptError):
        list(chunks(opened(folder), 64))


@pytest.mark.parametrize("bit", [5, 6, 7])
def test_reserved_flags_of_gzip_are_refused_by_whatever_inflates(tmp_path: Path, bit: int) -> None:
    folder = write_array(tmp_path / "a", array(4, 4), (4, 4), "gzip")
    chunk = bytearray((folder / "0.0").read_bytes())
    chunk[3] |= 1 << bit
    (folder / "0.0").write_bytes(chunk)
    with pytest.raises(CorruptError, match="header flags"):
        opened(folder).read()


@pytest.mark.parametrize("size", [40, 1000])
def test_a_chunk_of_another_size_than_declared(tmp_path: Path, size: int) -> None:
    folder = write_array(tmp_path / "a", array(100), (100,))
    with pytest.raises(CorruptError):
        opened(folder, shape=[size], chunks=[size]).read()


def test_a_gzip_bomb_is_refused_before_it_goes_off(tmp_path: Path) -> None:
    folder = write_array(tmp_path / "a", np.zeros(4, np.float32), (4,))
    encoder = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(encoder.compress(bytes(2**20)) for _ in range(64)) + encoder.flush()
    (folder / "0").write_bytes(bomb)
    tracemalloc.start()
    with pytest.raises(CorruptError, match="longer"):
        opened(folder).read()
    with pytest.raises(RefusedError, match="more values than its bytes can hold"):
        opened(folder, shape=[2**30], chunks=[2**30]).read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**23


def test_an_absent_chunk_without_fill_is_damage(tmp_path: Path) -> None:
    folder = write_array(tmp_path / "a", array(4, 4), (2, 4))
    (folder / "1.0").unlink()
    tensor = opened(folder)
    with pytest.raises(CorruptError, match="absent"):
        tensor.read()
    assert tensor.read((slice(0, 2), slice(0, 4))).shape == (2, 4)


def test_an_absent_chunk_with_fill_is_told(tmp_path: Path) -> None:
    values = array(4, 4)
    folder = write_array(tmp_path / "a", values, (2, 4))
    (folder / "1.0").unlink()
    tensor = opened(folder, fill_value=2.5)
    assert np.array_equal(tensor.read(), np.concatenate([values[:2], np.full((2, 4), 2.5, np.float32)]))
    stated = parse_zarray(json.dumps(header((4, 4), (2, 4)) | {"fill_value": 2.5}).encode(), "here")
    assert absent_chunks(FolderStore(tmp_path, Files()), "a", stated) == ["1.0"]
    nan = parse_zarray(json.dumps(header((4, 4), (2, 4)) | {"fill_value": "NaN"}).encode(), "here")
    assert nan.fill is not None
    assert math.isnan(nan.fill)


@pytest.mark.parametrize(("shape", "chunk"), [((2**30,), (1,)), ((2**30,), (2**30,))])
def test_absurd_fill_is_refused(tmp_path: Path, shape: tuple[int, ...], chunk: tuple[int, ...]) -> None:
    stated = Header(shape, chunk, DTYPES["float32"], "gzip", fill=0.0)
    with pytest.raises(RefusedError):
        absent_chunks(FolderStore(tmp_path, Files()), "a", stated)


def test_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    outside = write_array(tmp_path / "outside" / "a", array(4), (4,))
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    (inside / "folder").symlink_to(outside, target_is_directory=True)
    entry = write_array(inside / "own", array(4), (4,))
    (entry / "0").unlink()
    (entry / "0").symlink_to(outside / "0")
    store = FolderStore(inside, Files(checkpoint=inside))
    for key in ("folder/.zarray", "folder/0", "own/0"):
        with pytest.raises(RefusedError, match="leads out"):
            store.value(key)
    with pytest.raises(RefusedError, match="leads out"):
        opened(entry).read()


def test_links_that_stay_inside_are_followed(tmp_path: Path) -> None:
    values = array(4)
    folder = write_array(tmp_path / "a", values, (4,))
    (folder / "0").rename(tmp_path / "blob")
    (folder / "0").symlink_to("../blob")
    (tmp_path / "run").symlink_to(".", target_is_directory=True)
    assert np.array_equal(opened(folder).read(), values)
    assert FolderStore(tmp_path / "run", Files()).value("a/0") is not None


@pytest.mark.parametrize(
    "key", ["../a", "/etc/passwd", "a/../../b", "a//b", "", "a/.", "a\0b", "..\\a", "x" * 5000]
)
def test_keys_that_leave_the_store(tmp_path: Path, key: str) -> None:
    with pytest.raises(RefusedError):
        FolderStore(tmp_path, Files()).value(key)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefusedError):
        FolderStore(tmp_path, Files()).value("pipe")
    assert FolderStore(tmp_path, Files()).value("gone/0") is None


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    folder = write_array(tmp_path / "a", array(4), (4,), None)
    value = FolderStore(tmp_path, Files()).value("a/0")
    assert value is not None
    (folder / "0").write_bytes(b"")
    with pytest.raises(CorruptError, match="ends before"):
        bytes_at(value, 0, 16)


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((512, 512), 4, (512, 512)),
        ((32128, 1024), 4, (16064, 1024)),
        ((1024, 24, 2816), 4, (512, 24, 704)),
        ((8192, 8192), 4, (4096, 4096)),
        ((3, 2**26), 2, (3, 2**23)),
        ((2**26 + 3,), 1, (9586981,)),
        ((), 4, ()),
        ((0, 5), 4, (1, 5)),
    ],
)
def test_chunks_as_t5x_cuts_them(shape: tuple[int, ...], itemsize: int, expected: tuple[int, ...]) -> None:
    chunks = chunk_shape(shape, itemsize)
    assert math.prod(chunks) * itemsize <= 64 * 2**20
    assert all(n % c == 0 for n, c in zip(shape, chunks, strict=True))
    assert chunks == expected


@pytest.mark.parametrize("limit", [8, 24, 64, 200, 1000])
@pytest.mark.parametrize("shape", [(12, 10), (2, 3, 8), (30,), (7, 5), ()])
@pytest.mark.parametrize("compressor", ["gzip", "zstd"])
def test_chunked_writing_is_read_by_tensorstore(
    tmp_path: Path, shape: tuple[int, ...], limit: int, compressor: str
) -> None:
    import tensorstore as ts

    values = RANDOM.standard_normal(shape).astype(ml_dtypes.bfloat16)
    stated = Header(shape, chunk_shape(shape, 2, limit), values.dtype, compressor)
    stage = plain_stage(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".zarray").write_bytes(header_bytes(stated))
    for key, pieces in encoded_chunks(stage, "t", in_memory(values), stated):
        (tmp_path / "a" / key).write_bytes(b"".join(pieces))
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/a/"}}
    theirs = ts.open(spec).result().read().result()
    assert stage.streamed["t"] == values.tobytes()
    assert theirs.tobytes() == values.tobytes()
    assert open_array(FolderStore(tmp_path, Files()), "a", stated, "t").read().tobytes() == values.tobytes()


def test_a_part_of_a_small_chunk_is_checked_to_its_end(tmp_path: Path) -> None:
    folder = write_array(tmp_path / "a", array(8, 8), (8, 8))
    chunk = bytearray((folder / "0.0").read_bytes())
    chunk[-6] ^= 1  # in the checksum
    (folder / "0.0").write_bytes(chunk)
    with pytest.raises(CorruptError):
        opened(folder).read((slice(0, 1), slice(0, 1)))


@pytest.mark.parametrize("with_isal", [True, False], ids=["isal", "zlib"])
def test_gzip_streams_of_either_compressor_hold_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_isal: bool
) -> None:
    if with_isal:
        pytest.importorskip("isal")
    else:
        monkeypatch.setattr(zarr_writer, "find_spec", lambda name: None)
    tensor = in_memory(array(200, 300))
    stated = header_for(tensor, "gzip", chunk_shape(tensor.shape, 4, 70_000))
    for number in range(2):
        stage = plain_stage(tmp_path / f"{number}")
        for key, pieces in encoded_chunks(stage, "t", tensor, stated):
            stream = b"".join(pieces)
            (tmp_path / f"{number}" / key).write_bytes(stream)
            assert gzip.decompress(stream)
            assert (tmp_path / "0" / key).read_bytes() == stream
        assert stage.streamed["t"] == tensor.read().tobytes()
    store = FolderStore(tmp_path, Files())
    assert open_array(store, "0", stated, "t").read().tobytes() == tensor.read().tobytes()


def test_writing_is_deterministic(tmp_path: Path) -> None:
    tensor = in_memory(array(20, 20))
    stated = header_for(tensor, "gzip", tensor.shape)
    first, second = (
        [b"".join(pieces) for _, pieces in encoded_chunks(plain_stage(tmp_path / n), "t", tensor, stated)]
        for n in "ab"
    )
    assert first == second
    assert first[0][:8] == b"\x1f\x8b\x08\x00\x00\x00\x00\x00"  # no name, no time


def ocdbt(folder: Path, values: dict[str, bytes]) -> Path:
    import tensorstore as ts

    folder.mkdir()
    database = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}).result()
    for key, value in values.items():
        database.write(key, value).result()
    return folder


def test_an_ocdbt_database_gives_values_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statekit.converters.formats.zarr.stores._PROBE", 1000)
    values = {f"a/{n}": RANDOM.bytes(n) for n in (1, 2, 999, 1000, 1001, 1999, 2000, 2001, 70_001)}
    store = open_store(ocdbt(tmp_path / "db", values), Files())
    assert isinstance(store, OcdbtStore)
    assert store.value("a/none") is None
    assert store.headers(["a/none", "a/1"]) == [None, values["a/1"]]
    for key, data in values.items():
        value = store.value(key)
        assert value is not None
        assert (value.size, bytes_at(value, 0, len(data))) == (len(data), data)
        assert bytes_at(value, len(data) // 3, len(data) // 2) == data[len(data) // 3 :][: len(data) // 2]


def test_headers_of_a_database_are_read_within_the_budget(tmp_path: Path) -> None:
    folder = ocdbt(tmp_path / "a", {f"{i}/.zarray": bytes(2**17) for i in range(64)})
    read = list[str]()

    class Counted:
        def read(self, key: str, **options: Any) -> Any:
            read.extend([key] if not options else [])
            return store.database.read(key, **options)

    with Files(Budget(Limits(2**20)), folder) as files:
        store = OcdbtStore.of(folder, files)
        keys = [f"{i}/.zarray" for i in range(64)]
        assert store.headers([keys[0], "none", keys[1]]) == [bytes(2**17), None, bytes(2**17)]
        with pytest.raises(BudgetError, match="A header is more"):
            replace(store, database=Counted()).headers(keys)
    assert len(read) == 7  # with those before, one more than a MiB holds


def damaged_manifest(folder: Path) -> None:
    (folder / "manifest.ocdbt").write_bytes(b"\x0c\xdb")


def absent_data(folder: Path) -> None:
    for path in (folder / "d").iterdir():
        path.unlink()


@pytest.mark.parametrize("harm", [damaged_manifest, absent_data])
def test_a_damaged_database(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    folder = ocdbt(tmp_path / "db", {f"a/{i}": bytes(2000) for i in range(5)})
    harm(folder)
    with pytest.raises(CorruptError):
        OcdbtStore.of(folder, Files()).value("a/1")
    with pytest.raises(CorruptError):
        OcdbtStore.of(folder, Files()).headers(["a/1"])


def test_a_database_with_links_out_is_refused(tmp_path: Path) -> None:
    folder = ocdbt(tmp_path / "db", {"a": bytes(2000)})
    [data] = (folder / "d").iterdir()
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="leads out"):
        open_store(folder, Files(checkpoint=folder))


def test_addresses_are_refused_with_a_remedy() -> None:
    assert local_path("run/checkpoint_5") == Path("run/checkpoint_5")
    assert local_path("file:///tmp/run") == Path("/tmp/run")
    with pytest.raises(UsageError, match="gcloud storage cp -r gs://bucket/run"):
        local_path("gs://bucket/run")
    with pytest.raises(UsageError, match="aws s3 cp --recursive s3://bucket/run"):
        local_path("s3://bucket/run")
    with pytest.raises(StatekitError):
        local_path("https://example.org/run")
