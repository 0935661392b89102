"""Chunks of HDF5 data sets: what the library's filters made is read to the bit, and each chunk decoded once."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from counting import calls

from statekit.budget import Budget, Limits
from statekit.converters.formats.hdf5 import chunks as hdf5_chunks
from statekit.converters.formats.hdf5.reader import open_hdf5
from statekit.errors import BudgetError, CorruptError
from statekit.files.source import Files
from statekit.tensors.tensor import chunks

PIPELINES: list[dict[str, Any]] = [
    {"compression": "gzip"},
    {"shuffle": True},
    {"fletcher32": True},
    {"compression": "gzip", "fletcher32": True},
    {"compression": "gzip", "shuffle": True, "fletcher32": True},
]
DTYPES = ("<f4", ">f4", "<f2", ">i8", "<i2", "u1", "?", "<c8")


@pytest.mark.parametrize("filters", PIPELINES, ids=["+".join(one) for one in PIPELINES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_filtered_chunks_are_read_to_the_bit(tmp_path: Path, filters: Mapping[str, Any], dtype: str) -> None:
    random, arrays = np.random.default_rng(0), []
    for shape, cut, scale in (((30, 41), (7, 8), 50), ((5,), (3,), 50), ((300, 701), (64, 100), 0)):
        arrays.append((cut, (random.standard_normal(shape) * scale).astype(dtype)))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for i, (cut, array) in enumerate(arrays):
            file.create_dataset(f"{i}", data=array, chunks=cut, **filters)
    with Files() as files:
        tree = open_hdf5(files.source(tmp_path / "a.h5"), "a.h5")
        for i, (_, array) in enumerate(arrays):
            tensor = tree[f"{i}"]
            assert np.array_equal(tensor.read(), array)
            for _ in range(3):
                index = tuple(slice(*map(int, sorted(random.integers(0, n + 1, 2)))) for n in array.shape)
                assert np.array_equal(tensor.read(index), array[index])
    assert files.account.budget.held == 0


def pipeline(*codes: Callable[[h5py.h5p.PropDCID], object]) -> h5py.h5p.PropDCID:
    """A data set's creation list with filters in an order that h5py's own words don't give."""
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk((64,))
    for code in codes:
        code(plan)
    return plan


def test_a_checksum_below_the_compression_is_compared(tmp_path: Path) -> None:
    plan = pipeline(lambda p: p.set_shuffle(), lambda p: p.set_fletcher32(), lambda p: p.set_deflate(4))
    values = np.arange(256, dtype="<i4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((256,))
        h5py.Dataset(h5py.h5d.create(file.id, b"a", h5py.h5t.NATIVE_INT32, space, plan))[...] = values
    with Files() as files:
        tree = open_hdf5(files.source(tmp_path / "a.h5"), "a.h5")
        assert np.array_equal(tree["a"].read(), values)


def stored(path: Path, data: bytes, **filters: Any) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("a", (256,), "u1", chunks=(256,), **filters).id.write_direct_chunk((0,), data)


@pytest.mark.parametrize(
    ("data", "filters", "fault"),
    [
        (zlib.compress(bytes(257)), {"compression": "gzip"}, "longer than declared"),
        (zlib.compress(bytes(255)), {"compression": "gzip"}, "wrong size"),
        (zlib.compress(bytes(256))[:-1], {"compression": "gzip"}, "damaged"),
        (zlib.compress(bytes(256)) + b"x", {"compression": "gzip"}, "damaged"),
        (b"no stream of deflate", {"compression": "gzip"}, "damaged"),
        (b"\x88\x1c" + zlib.compress(bytes(256))[2:], {"compression": "gzip"}, "invalid window size"),
        (bytes(range(256)) + bytes(4), {"fletcher32": True}, "checksum"),
        (bytes(259), {"fletcher32": True}, "wrong size"),
    ],
)
def test_a_chunk_of_another_size_or_with_a_fault_is_damage(
    tmp_path: Path, data: bytes, filters: Mapping[str, Any], fault: str
) -> None:
    stored(tmp_path / "a.h5", data, **filters)
    with Files() as files:
        tree = open_hdf5(files.source(tmp_path / "a.h5"), "a.h5")
        with pytest.raises(CorruptError, match=fault):
            tree["a"].read()


@pytest.mark.parametrize(("allowed", "decoded"), [(2**26, 6), (2**23, 96)])
def test_streaming_decodes_a_chunk_once_while_the_budget_has_room_for_a_row_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int, decoded: int
) -> None:
    values = np.random.default_rng(0).integers(0, 9, (512, 3 * 2**12), np.int32)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", data=values, chunks=(256, 2**12), compression="gzip")  # of 4 MiB
    count = 0
    inflated = hdf5_chunks._inflated

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return inflated(*arguments)

    monkeypatch.setattr(hdf5_chunks, "_inflated", counted)
    with Files(Budget(Limits(allowed))) as files:
        tree = open_hdf5(files.source(tmp_path / "a.h5"), "a.h5")
        blocks = list(chunks(tree["a"], 16 * values.nbytes // 512))
        assert np.array_equal(np.concatenate(blocks), values)
    assert (len(blocks), count) == (32, decoded)


def test_chunks_are_listed_once_though_blocks_are_read_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", data=np.arange(64), chunks=(8,), compression="gzip")
    inflated, listed, inner = hdf5_chunks._inflated, 0, list[Any]()

    def meanwhile(*arguments: Any) -> Any:
        if not inner:
            inner.append(None)
            inner.append(one.read((slice(32, 64),)))
        return inflated(*arguments)

    def list_chunks() -> Iterator[hdf5_chunks.StoredChunk]:
        nonlocal listed
        listed += 1
        yield from chunks.listed()

    monkeypatch.setattr(hdf5_chunks, "_inflated", meanwhile)
    with Files() as files:
        tree = open_hdf5(files.source(tmp_path / "a.h5"), "a.h5")
        chunks = tree["a"].fetch.__self__.stored
        one = replace(chunks, listed=list_chunks)
        assert np.array_equal(one.read((slice(0, 32),)), np.arange(32))
        assert np.array_equal(inner[1], np.arange(32, 64))
    assert (listed, files.account.budget.held) == (1, 0)


def test_a_chunk_larger_than_the_budget_is_refused_by_its_place(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", (2**20,), "f4", chunks=(2**20,), compression="gzip")[0] = 1
        place = file["a"].id.get_chunk_info(0).byte_offset
    with Files(Budget(Limits(2**21))) as files:
        tree = open_hdf5(files.source(tmp_path / "a.h5"), "a.h5")
        with pytest.raises(BudgetError, match="A chunk is more") as caught:
            tree["a"].read((slice(0, 1),))
        assert f"byte {place} of " in str(caught.value)
        assert "`held`" in str(caught.value)
        assert "--budget" in str(caught.value)


def test_an_empty_group_takes_little_work(tmp_path: Path) -> None:
    """Half of it was a look at the names of what it holds, and another at those of the file's writer."""

    def work(groups: int) -> int:
        path = tmp_path / f"{groups}.h5"
        with h5py.File(path, "w") as file:
            for number in range(groups):
                file.create_group(f"layers/{number}")

        def opened() -> None:
            with Files() as files:
                open_hdf5(files.source(path), "file")

        opened()
        return calls(opened)

    few, many = work(100), work(300)
    assert (many - few) / 200 < 400
    assert many < 3.2 * few  # and no more with their number
