"""Readers of binary formats, each from bytes in memory."""

from __future__ import annotations

import contextlib
import json
import re
import struct
from functools import cache
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np

from fuzz import pickles
from fuzz.changing import NAMES, NUMBERS, SHAPES, changed_bytes, changed_tree
from fuzz.documents import json_changed
from fuzz.reader import PLACE, Reader, used
from statekit.files.source import Held
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Record

# Pickles


def _read_pickle(data: bytes) -> object:
    from statekit.converters.formats.pickle.reader import read_pickle

    return used(read_pickle(data, PLACE).value)


def _opcodes_changed(data: bytes, random: Random) -> bytes:
    return pickles.changed_opcodes(_pieces(data), random)


@cache
def _pieces(data: bytes) -> pickles.Opcodes:
    return pickles.opcodes(data)


# msgpack


def _msgpack_samples() -> list[bytes]:
    import msgpack

    array = _flax_array(np.arange(6, dtype=np.float32).reshape(2, 3))
    tree = {
        "params": {"dense": {"kernel": array, "bias": _flax_array(np.zeros(3, np.float16))}},
        "opt_state": {"0": {"count": msgpack.ExtType(3, _packed_array(np.int32(4))), "mu": None}, "1": {}},
        "step": 4,
        "lr": 1e-3,
        "name": "run",
        "flag": True,
        "list": [1, 2],
        "c": msgpack.ExtType(2, msgpack.packb((1.0, 2.0))),
    }
    chunked = {"__msgpack_chunked_array__": True, "shape": {"0": 2, "1": 3}, "chunks": {"0": array}}
    return [msgpack.packb(tree), msgpack.packb({"target": {"w": chunked}, "state": {"step": 1}})]


def _packed_array(array: Any) -> bytes:
    import msgpack

    packed: bytes = msgpack.packb((array.shape, array.dtype.name, array.tobytes()))
    return packed


def _flax_array(array: Any) -> Any:
    import msgpack

    return msgpack.ExtType(1, _packed_array(array))


def _unpacked(data: bytes) -> Any:
    """Returns a msgpack document as a tree, extensions as Records of what they hold."""
    import msgpack

    def extension(code: int, raw: bytes) -> Any:
        return Record(f"ext.{code}", (msgpack.unpackb(raw, ext_hook=extension, strict_map_key=False),))

    return msgpack.unpackb(data, ext_hook=extension, strict_map_key=False)


def _packed(tree: Any) -> bytes:
    """Returns a tree as msgpack; what msgpack lacks is left out."""
    import msgpack

    packer = msgpack.Packer(unicode_errors="surrogatepass")

    def put(node: Any) -> bytes:
        if isinstance(node, dict):
            packed: bytes = packer.pack_map_header(len(node)) + b"".join(
                put(k) + put(v) for k, v in node.items()
            )
            return packed
        if isinstance(node, (list, tuple)):
            packed = packer.pack_array_header(len(node)) + b"".join(map(put, node))
            return packed
        if isinstance(node, Record):
            code = node.name.rpartition(".")[2]
            packed = packer.pack_ext_type(
                int(code) if code.isdecimal() else 9, put(node.args[0] if node.args else None)
            )
            return packed
        if isinstance(node, int) and not -(2**63) <= node < 2**64:
            node = float(f"{node:.3g}") if abs(node) < 10**300 else None
        packed = packer.pack(None if isinstance(node, Tensor) else node)
        return packed

    return put(tree)


def _msgpack_changed(data: bytes, random: Random) -> bytes:
    return _packed(changed_tree(_unpacked(data), random))


def _read_msgpack(data: bytes) -> object:
    from statekit.converters.containers.flax_msgpack import with_tensors
    from statekit.converters.formats.msgpack.reader import parse

    return used(with_tensors(parse(Held(data, PLACE)), (), PLACE))


# TensorFlow


def _string() -> tuple[Any, bytes]:
    """Returns what an index says of a string tensor, and its bytes."""
    from statekit.converters.formats.tensor_bundle.entries import BundleEntry, string_bytes
    from statekit.converters.formats.tensor_bundle.table import masked

    data, crc = string_bytes([b"abc", b""])
    return BundleEntry(7, (2,), 0, 40, len(data), masked(crc)), data


@cache
def _entries() -> dict[bytes, bytes]:
    from statekit.converters.formats.tensor_bundle.entries import BundleEntry, entry_bytes, header, slice_key

    halves = (((0, 2), (0, -1)), ((2, 2), (0, -1)))
    entries = {
        b"": header(1),
        b"dense/kernel": entry_bytes(BundleEntry(1, (4, 2), 0, 0, 32, 5, halves)),
        b"step": entry_bytes(BundleEntry(9, (), 0, 32, 8, 7)),
        b"name": entry_bytes(_string()[0]),
    }
    parts = {
        slice_key(b"dense/kernel", extent): BundleEntry(1, (2, 2), 0, 16 * i, 16, 3)
        for i, extent in enumerate(halves)
    }
    return {**entries, **{key: entry_bytes(entry) for key, entry in parts.items()}}


def _index_samples() -> list[bytes]:
    from statekit.converters.formats.tensor_bundle.table import write_table

    return [write_table(_entries())]


def _changed_index(_: Any, random: Random) -> bytes:
    """Changes the keys and values of a table, and its bytes now and then."""
    from statekit.converters.formats.tensor_bundle.table import write_table

    changed = dict(_entries())
    for _ in range(random.choice((1, 1, 2))):
        key, change = random.choice(list(changed)), random.randrange(4)
        if change == 0:
            del changed[key]
        elif change == 1:
            changed[changed_bytes(key, random)] = changed.pop(key)
        else:
            changed[key] = changed_bytes(changed[key], random)
    data = write_table(changed)
    return data if random.randrange(3) else changed_bytes(data, random)


def _read_index(data: bytes) -> object:
    from statekit.converters.formats.tensor_bundle.entries import (
        parse_entry,
        parse_header,
        parse_strings,
        slice_key,
    )
    from statekit.converters.formats.tensor_bundle.table import read_table
    from statekit.tensors.slices import bounds

    entries = read_table(data, PLACE)
    parse_header(entries.pop(b"", b""), PLACE)
    for key, value in entries.items():
        entry = parse_entry(value, PLACE)
        for extent in entry.slices:
            slice_key(key, extent)
            bounds(extent, entry.shape)
        if entry.code == 7:
            parse_strings(_string()[1], entry, PLACE)
    return entries


def _graph_samples() -> list[bytes]:
    from statekit.converters.formats.tensor_bundle.graph_proto import graph_bytes
    from statekit.tensors.object_graph import Node, Slot, Value

    nodes = [
        Node({"model": 1, "optimizer": 2}, (), ()),
        Node({"kernel": 3}, (), ()),
        Node({"step": 4}, (), (Slot(3, "m", 5),)),
        *(Node({}, (Value("VARIABLE_VALUE", f"v{i}", f"k{i}"),), ()) for i in range(3)),
    ]
    return [graph_bytes(nodes)]


def _read_graph(data: bytes) -> object:
    from statekit.converters.formats.tensor_bundle.graph_proto import parse_graph

    return used(parse_graph(data, PLACE).to_record())


# PyTorch


def _torch_zip(pickle: bytes, **members: bytes) -> bytes:
    """Returns a torch file of a pickle and storages."""
    import io

    from statekit.converters.formats.zip_archive import ZipForm, ZipWriter

    file = io.BytesIO()
    writer = ZipWriter(file, ZipForm("archive/", 64, 0, 0))
    for name, data in {"data.pkl": pickle, "byteorder": b"little", **members, "version": b"3\n"}.items():
        writer.add(name, len(data), [data])
    writer.finish()
    return file.getvalue()


def _storage(key: str, count: int, kind: str = "FloatStorage") -> Record:
    return Record(pickles.PERSISTENT, (("storage", Record(f"torch.{kind}"), key, "cpu", count),))


def _rebuilt(storage: Record, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Record:
    hooks = Record("collections.OrderedDict", ((),))
    return Record("torch._utils._rebuild_tensor_v2", (storage, offset, shape, stride, False, hooks))


def torch_tree() -> Any:
    """Returns what a training run saves, as the calls that its pickle makes."""
    weight = _rebuilt(_storage("0", 6), (2, 3), (3, 1))
    parameter = Record(
        "torch._utils._rebuild_parameter", (weight, True, Record("collections.OrderedDict", ((),)))
    )
    state = {
        0: {"step": _rebuilt(_storage("1", 1), (), ()), "exp_avg": _rebuilt(_storage("2", 6), (3, 2), (1, 3))}
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0]}
    v3 = Record(
        "torch._utils._rebuild_tensor_v3",
        (
            _storage("3", 4, "UntypedStorage"),
            0,
            (2,),
            (1,),
            False,
            Record("collections.OrderedDict", ((),)),
            Record("torch.bfloat16"),
        ),
    )
    return {
        "model": {"weight": parameter, "bias": v3, "tied": weight},
        "optimizer": {"state": state, "param_groups": [group]},
        "epoch": 1,
        "args": Record("argparse.Namespace", (), {"lr": 0.1}),
        "size": Record("torch.Size", ((1, 2),)),
        "loose": _storage("4", 2, "LongStorage"),
        "device": Record("torch.device", ("cpu",)),
    }


_STORAGES = {"data/0": 24, "data/1": 4, "data/2": 24, "data/3": 4, "data/4": 16}


def torch_files(pickle: bytes) -> bytes:
    """Returns a torch file of this pickle, with the storages of `torch_tree`."""
    return _torch_zip(pickle, **{name: bytes(range(count)) for name, count in _STORAGES.items()})


def _torch_calls_changed(_: Any, random: Random) -> bytes:
    """Changes the tree of calls that a torch file's pickle makes."""
    return torch_files(pickles.pickled(changed_tree(_torch_tree(), random)))


def _torch_opcodes_changed(_: Any, random: Random) -> bytes:
    return torch_files(pickles.changed_opcodes(_pieces(pickles.pickled(_torch_tree())), random))


def _torch_storages_changed(_: Any, random: Random) -> bytes:
    """Changes the members of a torch file."""
    members = {name: bytes(count) for name, count in _STORAGES.items()}
    key, change = random.choice(list(members)), random.randrange(4)
    if change == 0:
        del members[key]
    elif change == 1:
        members[changed_name(key, random)] = members[key]
    else:
        members[key] = changed_bytes(members[key], random)
    return _torch_zip(pickles.pickled(_torch_tree()), **members)


def changed_name(name: str, random: Random) -> str:
    """Changes a name, which stays text that UTF-8 has."""
    return changed_bytes(name.encode(), random).decode("utf-8", "ignore")


_torch_tree = cache(torch_tree)


def _legacy_file(pickle: bytes) -> bytes:
    import pickle as python

    from statekit.converters.formats.pytorch.reader import LEGACY_MAGIC, LEGACY_PROTOCOL

    system = {
        "protocol_version": 1001,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    keys = ["0", "1", "2", "3", "4"]
    counts = {"0": 6, "1": 1, "2": 6, "3": 4, "4": 2}
    head = b"".join(python.dumps(one, 2) for one in (LEGACY_MAGIC, LEGACY_PROTOCOL, system))
    values = b"".join(struct.pack("<q", counts[key]) + bytes(_STORAGES[f"data/{key}"]) for key in keys)
    return head + pickle + python.dumps(keys, 2) + values


def _legacy_tree(tree: Any) -> Any:
    """Returns the tree of calls with ids as the legacy form has them, a sixth part at their end."""
    if isinstance(tree, Record) and tree.name == pickles.PERSISTENT:
        return Record(tree.name, ((*tree.args[0], None),))
    if isinstance(tree, Record):
        return Record(tree.name, tuple(map(_legacy_tree, tree.args)), _legacy_tree(tree.state))
    if isinstance(tree, dict):
        return {key: _legacy_tree(value) for key, value in tree.items()}
    return type(tree)(map(_legacy_tree, tree)) if isinstance(tree, (list, tuple)) else tree


def _legacy_calls_changed(_: Any, random: Random) -> bytes:
    return _legacy_file(pickles.pickled(changed_tree(_legacy_tree(_torch_tree()), random)))


def _legacy_opcodes_changed(data: bytes, random: Random) -> bytes:
    return pickles.changed_opcodes(_pieces(data), random)


def _read_torch(data: bytes) -> object:
    from statekit.converters.formats.pytorch.reader import named, read_object

    return used(named(read_object(Held(data, PLACE)).tree))


# torch.distributed.checkpoint

_DCP = "torch.distributed.checkpoint."


_RATE_KEY = "optimizer.param_groups.0.lr"


def dcp_tree() -> Any:
    """Returns the metadata of a distributed checkpoint, as the objects that its pickle makes."""
    properties = (
        Record("torch.float32"),
        Record("torch.serialization._get_layout", ("torch.strided",)),
        False,
        True,
    )

    def index(key: str, *offsets: int) -> Record:
        at = Record("torch.Size", (offsets,)) if offsets else None
        return Record(f"{_DCP}metadata.MetadataIndex", (), {"fqn": key, "offset": at, "index": None})

    def info(start: int, length: int, file: str = "__0_0.distcp") -> Record:
        fields = {"relative_path": file, "offset": start, "length": length, "transform_descriptors": None}
        return Record(f"{_DCP}filesystem._StorageInfo", (), fields)

    chunks = [
        Record(
            f"{_DCP}metadata.ChunkStorageMetadata",
            (),
            {
                "offsets": Record("torch.Size", ((at, 0),)),
                "sizes": Record("torch.Size", ((2, 3),)),
            },
        )
        for at in (0, 2)
    ]
    tensor = Record(
        f"{_DCP}metadata.TensorStorageMetadata",
        (),
        {
            "properties": Record(f"{_DCP}metadata.TensorProperties", (), properties),
            "size": Record("torch.Size", ((4, 3),)),
            "chunks": chunks,
        },
    )
    stored = (
        (index("model.w", 0, 0), info(0, 500)),
        (index("model.w", 2, 0), info(500, 500, "__1_0.distcp")),
        (index(_RATE_KEY), info(1000, 50)),
    )
    return Record(
        f"{_DCP}metadata.Metadata",
        (),
        {
            "state_dict_metadata": {
                "model.w": tensor,
                _RATE_KEY: Record(f"{_DCP}metadata.BytesStorageMetadata"),
            },
            "planner_data": {
                "model.w": ("model", "w"),
                _RATE_KEY: ("optimizer", "param_groups", 0, "lr"),
            },
            "storage_data": Record(pickles.PAIRS, stored),
            "storage_meta": None,
            "version": "1.0.0",
        },
    )


def _read_dcp(data: bytes) -> object:
    from statekit.converters.formats.dcp.metadata import read_metadata
    from statekit.converters.formats.dcp.tree import tree_of

    contents = read_metadata(data, PLACE)
    return used(tree_of(contents.paths, dict.fromkeys(contents.paths, 0), PLACE))


def _dcp_calls_changed(_: Any, random: Random) -> bytes:
    return pickles.pickled(changed_tree(_dcp(), random))


_dcp = cache(dcp_tree)


# safetensors


def _safetensors_samples() -> list[bytes]:
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
        "mask": {"dtype": "BOOL", "shape": [2], "data_offsets": [26, 28]},
    }
    return [_safetensors(json.dumps(header).encode())]


def _safetensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + bytes(28)


def _safetensors_changed(data: bytes, random: Random) -> bytes:
    return _safetensors(json_changed(data[8:-28], random))


def _read_safetensors(data: bytes) -> object:
    import os
    from pathlib import Path

    from statekit.files.safetensors import open_safetensors

    number = os.memfd_create("sample")
    try:
        os.write(number, data)
        opened = open_safetensors(Path(f"/proc/self/fd/{number}"))
        try:
            return used([dict(opened.tensors), dict(opened.metadata)])
        finally:
            opened.close()
    finally:
        os.close(number)


# MXNet


def _params_samples() -> list[bytes]:
    from statekit.converters.formats.mxnet.params import LIST_MAGIC
    from statekit.converters.formats.mxnet.records import record_header

    arrays: dict[str, Any] = {"weight": np.zeros((2, 3), np.float32), "bias": np.zeros(3, np.float16)}
    made = []
    for generation in (2, 3):
        records = [
            record_header(generation, (1, 0), a.shape, a.dtype, n) + a.tobytes() for n, a in arrays.items()
        ]
        names = [struct.pack("<Q", len(name)) + name.encode() for name in arrays]
        made.append(
            LIST_MAGIC + struct.pack("<Q", 2) + b"".join(records) + struct.pack("<Q", 2) + b"".join(names)
        )
    return [*made, _npz({f"{name}.npy": array for name, array in arrays.items()})]


def _npz(arrays: dict[str, Any]) -> bytes:
    import io

    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{name.removesuffix(".npy"): array for name, array in arrays.items()})
    return file.getvalue()


_NPY = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"


def _npy_changed(_: Any, random: Random) -> bytes:
    """Changes the header of an array in an npz, whose checksum fits."""
    tree = changed_tree({"descr": "<f4", "fortran_order": False, "shape": (2, 3)}, random)
    text = repr(tree) if random.randrange(2) else changed_bytes(_NPY.encode(), random).decode("latin1")
    return npz_of(text[:60_000].encode("latin1", "replace"))


def npz_of(head: bytes) -> bytes:
    """Returns an npz with one array of 24 bytes, which this header describes."""
    import io

    from statekit.converters.formats.zip_archive import ZipForm, ZipWriter

    member = b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + bytes(24)
    file = io.BytesIO()
    writer = ZipWriter(file, ZipForm("", 0, 20, 0))
    writer.add("weight.npy", len(member), [member])
    writer.finish()
    return file.getvalue()


def _read_params(data: bytes) -> object:
    from statekit.converters.formats.mxnet.params import read_params

    return used(dict(read_params(Held(data, PLACE)).arrays))


def _ndarray(array: Any) -> Record:
    from statekit.converters.formats.mxnet.records import record_header

    raw = record_header(3, (1, 0), array.shape, array.dtype, "") + array.tobytes()
    return Record("mxnet.ndarray.ndarray.NDArray", (None,), {"handle": Record("builtins.bytearray", (raw,))})


@cache
def _states() -> Any:
    small, large = _ndarray(np.zeros((2, 3), np.float32)), _ndarray(np.zeros((10, 10), np.float32))
    optimizer = Record(
        "mxnet.optimizer.lans.LANS",
        (),
        {"lr": 0.1, "beta1": 0.9, "wd": 0.0, "param_dict": {}, "_index_update_count": {0: 4}},
    )
    return {0: (small, small), 1: (large, (large, small)), "n": None}, optimizer


def _states_changed(_: Any, random: Random) -> bytes:
    data = pickles.pickled(changed_tree(_states(), random))
    return data.replace(b"\x80\x02", b"\x80\x04", 1) if random.randrange(2) else data


def _states_opcodes_changed(_: Any, random: Random) -> bytes:
    data = pickles.changed_opcodes(_pieces(pickles.pickled(_states())), random)
    return data.replace(b"\x80\x02", b"\x80\x04", 1) if random.randrange(2) else data


def _read_states(data: bytes) -> object:
    from statekit.converters.formats.mxnet.states import read_states

    states = read_states(Held(data, PLACE))
    return used([dict(states.states), states.optimizer])


# HDF5


@cache
def _hdf5_samples() -> list[bytes]:
    return [_hdf5_sample("earliest", 0), _hdf5_sample("earliest", 12), _hdf5_sample("latest", 12)]


def _hdf5_sample(libver: str, more: int) -> bytes:
    """Returns a file; with `more` members and attributes it has trees and heaps of several nodes."""
    import io

    import h5py

    file = io.BytesIO()
    with h5py.File(file, "w", libver=libver) as h5:
        h5.attrs["config.json"] = json.dumps({"name": "model"})
        group = h5.create_group("layers/dense/vars")
        group.attrs["name"] = "dense"
        group.create_dataset("0", data=np.zeros((2, 3), np.float32))
        group.create_dataset("1", data=np.zeros(3, np.float16), chunks=(3,), compression="gzip")
        h5.create_group("optimizer/vars").create_dataset("0", data=np.int64(4))
        for number in range(more):
            group.attrs[f"a{number}"] = [f"{number}"] if number % 2 else np.arange(5)
            axes = (None, 16) if number % 2 else (None, None)
            filters = {"compression": "gzip"} if number % 3 else {}
            values = np.ones((8, 16), np.float32)
            group.create_dataset(f"{number + 2}", data=values, chunks=(2, 8), maxshape=axes, **filters)
    return file.getvalue()


@cache
def _hdf5_pieces() -> list[bytes]:
    """Returns files of one or two kilobytes, each with few kinds of structure: most of what is changed is read."""
    chunked, values = {"chunks": (2, 2)}, np.ones((4, 4), np.float32)
    return [
        *(_hdf5_piece(libver, {"data": values}) for libver in ("earliest", "latest")),
        *(
            _hdf5_piece(libver, {"data": values, **chunked, "compression": "gzip"})
            for libver in ("earliest", "latest")
        ),
        *(
            _hdf5_piece("latest", {"data": values, **chunked, "maxshape": axes})
            for axes in ((None, 4), (None, None))
        ),
        *(_hdf5_piece(libver, {"data": values}, attributes=10) for libver in ("earliest", "latest")),
        *(_hdf5_piece(libver, {"data": np.int64(4)}, members=10) for libver in ("earliest", "latest")),
    ]


def _hdf5_piece(libver: str, stored: dict[str, Any], members: int = 1, attributes: int = 1) -> bytes:
    import io

    import h5py

    file = io.BytesIO()
    with h5py.File(file, "w", libver=libver) as h5:
        group = h5.create_group("g") if members == 1 else h5
        for number in range(members):
            group.create_dataset(f"{number}", **stored)
        for number in range(attributes):
            group.attrs[f"a{number}"] = ["x"] if number % 2 else np.arange(2)
    return file.getvalue()


_STRUCTURE = (
    b"TREE",
    b"SNOD",
    b"HEAP",
    b"GCOL",
    b"OHDR",
    b"OCHK",
    b"FRHP",
    b"FHDB",
    b"FHIB",
    b"BTHD",
    b"BTIN",
    b"BTLF",
)
_INDICES = (b"FAHD", b"FADB", b"EAHD", b"EAIB", b"EASB", b"EADB")


def _hdf5_structure_changed(data: bytes, random: Random) -> bytes:
    """Exchanges addresses, and changes counts and sizes behind the marks of structure."""
    raw = bytearray(data)
    places, known, words = _hdf5_addresses(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        if random.random() < 0.6 and words:
            at = random.choice(words)
            raw[at : at + 8] = random.choice(known).to_bytes(8, "little")
        else:
            at = random.choice(places) + random.randrange(4, 48)
            raw[at : at + 1] = bytes([random.choice((0, 1, 2, 5, 16, 64, 127, 255))])
    return bytes(raw)


@cache
def _hdf5_addresses(data: bytes) -> tuple[list[int], list[int], list[int]]:
    """Returns where structure stands, which addresses there are, and where such stand."""
    places = [m.start() for mark in (*_STRUCTURE, *_INDICES) for m in re.finditer(mark, data)]
    known = {*places, 0, 96, 2**64 - 1}
    words = [
        at
        for at in range(0, len(data) - 8)
        if int.from_bytes(data[at : at + 8], "little") in known and any(data[at : at + 8])
    ]
    return places, sorted(known), words


def _hdf5_changed(data: bytes, random: Random) -> bytes:
    """Changes members and attributes of a file through the library."""
    import io

    import h5py

    file = io.BytesIO(data)
    with h5py.File(file, "r+") as h5:
        for _ in range(random.choice((1, 1, 2))):
            names: list[str] = []
            h5.visit(names.append)
            if not names:
                break
            name = random.choice(names)
            with contextlib.suppress(
                OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError, UnicodeError
            ):
                _change_member(h5, name, random)
    return file.getvalue()


def _change_member(h5: Any, name: str, random: Random) -> None:
    import h5py

    member, change = h5[name], random.randrange(10)
    if change == 0:
        del h5[name]
    elif change == 1:
        h5[random.choice(NAMES)] = member
    elif change == 2:
        h5[f"{name}x"] = h5py.SoftLink(random.choice(("/", name, "/nothing")))
    elif change == 3:
        h5[f"{name}x"] = h5py.ExternalLink("/etc/hostname", "/")
    elif change == 4:
        h5[f"{name}x"] = np.dtype("<f4")
    elif change == 5:
        member.attrs[random.choice((*NAMES, "dtype", "name"))] = random.choice(NAMES)
    elif change == 6:
        odd = random.choice(
            (*NUMBERS, b"a", np.zeros(3), h5py.Empty("f"), np.zeros((2, 2), bool), [b"a", b"b"], h5[name].ref)
        )
        member.attrs[random.choice(("dtype", "name", "x"))] = odd
    elif change == 7:
        kind = random.choice(
            (
                "f8",
                "i2",
                "S5",
                "c8",
                "V2",
                "f2",
                "u8",
                [("a", "f4")],
                h5py.string_dtype(),
                h5py.vlen_dtype("i4"),
            )
        )
        h5.create_dataset(f"{name}x", random.choice(SHAPES), kind)
    elif change == 8:
        h5.create_dataset(f"{name}x", (10, 10), "f4", chunks=(5, 5), shuffle=True, fletcher32=True)[...] = 1
    else:
        moved = name.rpartition("/")[0] + "/" + random.choice(("00", "-1", "vars", "@", "x y"))
        h5.move(name, moved)


def _read_hdf5(data: bytes) -> object:
    from statekit.converters.formats.hdf5.reader import open_hdf5
    from statekit.converters.formats.hdf5.structure import Structure

    # A checksum of structure fits a changed one: whoever wants to harm makes it anew.
    with patch.object(Structure, "compare", lambda *_: None):
        return used(open_hdf5(Held(data, PLACE), PLACE))


READERS = (
    Reader(
        "pickle", cache(pickles.samples), _read_pickle, (_opcodes_changed, _opcodes_changed, changed_bytes)
    ),
    Reader(
        "msgpack", cache(_msgpack_samples), _read_msgpack, (_msgpack_changed, _msgpack_changed, changed_bytes)
    ),
    Reader("tf index", cache(_index_samples), _read_index, (_changed_index,)),
    Reader("tf object graph", cache(_graph_samples), _read_graph),
    Reader(
        "torch zip",
        cache(lambda: [torch_files(pickles.pickled(_torch_tree()))]),
        _read_torch,
        (
            _torch_calls_changed,
            _torch_calls_changed,
            _torch_opcodes_changed,
            _torch_storages_changed,
            changed_bytes,
        ),
    ),
    Reader(
        "torch legacy",
        cache(lambda: [_legacy_file(pickles.pickled(_legacy_tree(_torch_tree())))]),
        _read_torch,
        (_legacy_calls_changed, _legacy_opcodes_changed, changed_bytes),
    ),
    Reader(
        "dcp metadata",
        cache(lambda: [pickles.pickled(_dcp())]),
        _read_dcp,
        (_dcp_calls_changed, _opcodes_changed, changed_bytes),
    ),
    Reader(
        "safetensors",
        cache(_safetensors_samples),
        _read_safetensors,
        (_safetensors_changed, _safetensors_changed, changed_bytes),
    ),
    Reader(
        "mxnet params", cache(_params_samples), _read_params, (_npy_changed, changed_bytes, changed_bytes)
    ),
    Reader(
        "mxnet states",
        cache(lambda: [pickles.pickled(_states())]),
        _read_states,
        (_states_changed, _states_opcodes_changed, changed_bytes),
    ),
    Reader(
        "hdf5",
        _hdf5_samples,
        _read_hdf5,
        (_hdf5_changed, _hdf5_structure_changed, _hdf5_structure_changed, changed_bytes),
    ),
    Reader(
        "hdf5 pieces",
        _hdf5_pieces,
        _read_hdf5,
        (_hdf5_structure_changed, _hdf5_structure_changed, changed_bytes),
    ),
)
