"""HDF5 files of every libver: what h5py wrote is read to the bit; a file that points at itself is an error, soon."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import statekit
from statekit.converters.formats.hdf5.reader import open_hdf5
from statekit.converters.formats.hdf5.structure import lookup3
from statekit.errors import CorruptError, FormatError, StatekitError
from statekit.files.checkpoint import ATTRIBUTES
from statekit.files.source import Files, Held
from statekit.tensors.tensor import Tensor

LIBVERS = ("earliest", "latest", ("earliest", "v108"), ("v110", "v110"))
RANDOM = np.random.default_rng(0)
GZIP = {"compression": "gzip", "shuffle": True, "fletcher32": True}


def datasets(group: h5py.Group) -> None:
    """Writes data sets of every index of chunks, and of every dtype and order of bytes that is carried."""
    values = RANDOM.standard_normal((300, 70))
    for name, filters in (("plain", {}), ("gzip", GZIP)):
        group.create_dataset(f"fixed {name}", data=values, chunks=(2, 30), **filters)
        group.create_dataset(f"row {name}", data=np.arange(6000.0), chunks=(3,), maxshape=(None,), **filters)
        group.create_dataset(f"tree {name}", data=values, chunks=(3, 20), maxshape=(None, None), **filters)
        group.create_dataset(f"single {name}", data=values, chunks=values.shape, **filters)
    for dtype in ("<f2", ">f4", ">f8", "<c8", ">c16", "?", ">i8", "u1", "<i2"):
        group.create_dataset(dtype, data=(values[:3] * 5).astype(dtype))
    group.create_dataset("empty", (0, 3), "f4")
    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    early.set_chunk((4,))
    early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    compact.set_layout(h5py.h5d.COMPACT)
    for key, plan in ((b"implicit", early), (b"compact", compact)):
        space = h5py.h5s.create_simple((22,))
        created = h5py.h5d.create(group.id, key, h5py.h5t.NATIVE_FLOAT, space, plan)
        h5py.Dataset(created)[...] = np.arange(22)


def attributes(group: h5py.Group, large: bool) -> None:
    """Writes attributes of every kind that is read; many, so that newer formats keep them in a heap."""
    for number in range(20):
        group.attrs[f"a{number}"] = np.arange(number).reshape(1, -1)
    group.attrs.update(
        {"text": "häl lo", "texts": ["a", "bb", ""], "fixed": np.array([b"ab", b"c"]), "true": True}
    )
    group.attrs.update(
        {"none": np.zeros(0), "no texts": np.zeros((0,), h5py.string_dtype()), "long": "x" * 30000}
    )
    if large:
        group.attrs.update({"huge text": "y" * 100_000, "huge": np.zeros(20_000)})


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in tree.items():
        if isinstance(value, Tensor):
            yield f"{above}{key}", value
        elif key != ATTRIBUTES:
            yield from leaves(value, f"{above}{key}/")


@pytest.mark.parametrize("libver", LIBVERS, ids=str)
def test_what_h5py_wrote_is_read_to_the_bit(libver: Any, tmp_path: Path) -> None:
    path, names = tmp_path / "a.h5", [f"name {7 * n % 300}" for n in range(300)]
    with h5py.File(path, "w", libver=libver) as file:
        datasets(file.create_group("data"))
        attributes(file.create_group("attributes"), libver in ("latest", ("v110", "v110")))
        group = file.create_group("many", track_order=libver != "earliest")
        for name in names:
            group[name] = np.float32(1)
    with h5py.File(path) as file, Files() as files:
        tree = open_hdf5(files.source(path), "a.h5")
        for name, tensor in leaves(tree):
            stored = file[name][()]
            assert np.array_equal(tensor.read(), stored) and tensor.dtype == stored.dtype.newbyteorder("="), (
                name
            )
        stored_attributes = {
            key: value.tolist() if isinstance(value, np.generic | np.ndarray) else value
            for key, value in file["attributes"].attrs.items()
        }
        assert tree["attributes"][ATTRIBUTES] == stored_attributes
        assert [*tree["many"]] == names
        chunked = tree["data"]["tree gzip"]
        assert np.array_equal(chunked.read((slice(5, 9), slice(19, 41))), file["data/tree gzip"][5:9, 19:41])


def hostile(libver: str) -> bytearray:
    """Returns a file whose groups and data sets have trees and heaps."""
    path = Path("in memory")
    with h5py.File(path, "w", libver=libver, driver="core", backing_store=False) as file:
        group = file.create_group("layers/dense/vars")
        for number in range(12):
            group.create_dataset(
                str(number), data=np.ones((64, 16), "f4"), chunks=(8, 8), maxshape=(None, 16)
            )
            group.attrs[f"a{number}"] = np.arange(5)
        file.create_dataset("optimizer/vars/0", data=np.int32(3))
        file.flush()
        return bytearray(file.id.get_file_image())


def its_own_child(data: bytearray) -> None:
    at = data.find(b"TREE")
    data[at + 5] = 1
    data[at + 32 : at + 40] = struct.pack("<Q", at)


def its_own_sibling(data: bytearray) -> None:
    """Siblings aren't walked: every node is found from above."""
    at = data.find(b"TREE")
    data[at + 8 : at + 24] = struct.pack("<QQ", at, at)


def its_own_continuation(data: bytearray) -> None:
    at = data.find(struct.pack("<HH", 0x10, 16), 96)
    data[at + 8 : at + 16] = struct.pack("<Q", at - at % 8)


@pytest.mark.parametrize("make", [its_own_child, its_own_continuation])
def test_a_node_that_is_its_own_ends_the_walk(make: Callable[[bytearray], None]) -> None:
    data = hostile("earliest")
    make(data)
    with pytest.raises(CorruptError):
        open_hdf5(Held(bytes(data), "a.h5"), "a.h5")


def test_a_sibling_is_never_followed() -> None:
    data = hostile("earliest")
    its_own_sibling(data)
    assert len([*leaves(open_hdf5(Held(bytes(data), "a.h5"), "a.h5"))]) == 13


def test_exchanged_pointers_of_newer_files_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums of what points fit: whoever exchanges pointers makes them anew."""
    whole, random = hostile("latest"), np.random.default_rng(0)
    marks = (b"FRHP", b"FHDB", b"BTHD", b"BTLF", b"OCHK", b"OHDR", b"EAHD", b"EAIB", b"EADB")
    starts = [at for mark in marks for at in range(len(whole)) if whole[at : at + 4] == mark]
    words = [at for at in range(len(whole) - 8) if struct.unpack_from("<Q", whole, at)[0] in starts]
    monkeypatch.setattr("statekit.converters.formats.hdf5.structure.Structure.compare", lambda *_: None)
    refused = 0
    for _ in range(60):
        data, at = bytearray(whole), random.choice(words)
        data[at : at + 8] = struct.pack("<Q", random.choice(starts))
        try:
            for _, tensor in leaves(open_hdf5(Held(bytes(data), "a.h5"), "a.h5")):
                tensor.read()
        except StatekitError:
            refused += 1
    assert refused > 20


def test_a_checksum_of_structure_is_compared() -> None:
    """Source: Bob Jenkins, lookup3.c, `driver5`."""
    assert (lookup3(b""), lookup3(b"Four score and seven years ago")) == (0xDEADBEEF, 0x17770551)
    data = hostile("latest")
    at = data.find(b"BTHD")
    data[at + 6] ^= 1
    with pytest.raises(CorruptError, match="checksum"):
        open_hdf5(Held(bytes(data), "a.h5"), "a.h5")


def test_a_data_set_where_keras_has_a_group_is_an_error_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "d.weights.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("optimizer/vars", data=np.ones(3, "f4"))
        file.create_dataset("layers/dense/vars/0", data=np.ones(3, "f4"))
    with pytest.raises(StatekitError):
        statekit.open(path).close()
    with h5py.File(path, "w") as file:
        file.create_dataset("optimizer", data=np.ones(3, "f4"))
        file.create_dataset("layers/dense/vars/0", data=np.ones(3, "f4"))
    with pytest.raises(StatekitError):
        statekit.open(path).close()


def test_a_shape_that_no_array_can_have_is_damage_though_an_axis_is_0(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", (0, 2**40, 2**40), "f4", chunks=(1, 4, 4), maxshape=(None, None, None))
    with Files() as files, pytest.raises(CorruptError, match="a shape of"):
        open_hdf5(files.source(tmp_path / "a.h5"), "a.h5")


def test_a_compound_is_refused_by_its_name(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.zeros(3, [("x", "f4"), ("y", "i4")])
    with Files() as files, pytest.raises(FormatError, match="compound"):
        open_hdf5(files.source(tmp_path / "a.h5"), "a.h5")
