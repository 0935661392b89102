"""Small files that ask for much: each is made when a test needs it, by a function that writes it into a folder.

`BOMBS` has them by name. A bomb returns the path that is opened. `verb` says how: `inspect` reads headers, `stats` all
values. `reads` is True for one that isn't refused, but has to be read within the budget all the same.
"""

from __future__ import annotations

import io
import itertools
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import h5py
import numpy as np

from statekit.converters.formats.crc import crc32c

Make: TypeAlias = Callable[[Path], Path]


@dataclass(frozen=True)
class Bomb:
    """A file that asks for much.

    Attributes:
        make: Writes it into a folder; returns the path that is opened.
        verb: How it is opened.
        reads: Whether it is read rather than refused.
        quick: Whether it is among the sample that continuous integration opens.
        options: What else is said on the command line; `{}` is the folder.
    """

    make: Make
    verb: Literal["inspect", "stats", "check"] = "inspect"
    reads: bool = False
    quick: bool = False
    options: tuple[str, ...] = ()


BOMBS: dict[str, Bomb] = {}


def bomb(
    name: str,
    verb: Literal["inspect", "stats", "check"] = "inspect",
    *,
    reads: bool = False,
    quick: bool = False,
    options: tuple[str, ...] = (),
) -> Callable[[Make], Make]:
    """Puts a bomb among the others under a name."""

    def put(make: Make) -> Make:
        assert name not in BOMBS
        BOMBS[name] = Bomb(make, verb, reads, quick, options)
        return make

    return put


# Pickles: of torch.save, of MXNet, of torch.distributed.checkpoint.


def torch_zip(path: Path, pickled: bytes) -> Path:
    """Writes a torch file of this pickle, stored."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (("data.pkl", pickled), ("version", b"3\n")):
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
    return path


def states(path: Path, pickled: bytes) -> Path:
    """Writes a file of MXNet's states: a pickle that names MXNet."""
    path.write_bytes(b"\x80\x04cmxnet\nA\n0" + pickled)
    return path


def number(value: int) -> bytes:
    """An integer of at most 64 bits."""
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def text(value: str) -> bytes:
    """A text of up to 2^32 bytes."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


@bomb("pickle: 24 M empty dicts in a list")
def _dicts(folder: Path) -> Path:
    return torch_zip(folder / "a.pt", b"\x80\x02](" + b"}" * 24_000_000 + b"e.")


@bomb("pickle: 6 M memo entries", quick=True)
def _memo(folder: Path) -> Path:
    return torch_zip(folder / "a.pt", b"\x80\x04N" + b"\x94" * 6_000_000 + b".")


@bomb("pickle: 6 M memo entries in .states")
def _memo_states(folder: Path) -> Path:
    return states(folder / "a.states", b"N" + b"\x94" * 6_000_000 + b".")


@bomb("pickle: a tuple of 900 parts as a key 200 000 times", quick=True)
def _wide_key(folder: Path) -> Path:
    key = b"(" + b"K\x01" * 900 + b"tq\x000"
    return torch_zip(folder / "a.pt", b"\x80\x02" + key + b"}" + b"h\x00Ns" * 200_000 + b".")


def colliding(count: int) -> list[tuple[int, int]]:
    """Returns pairs of numbers that have one hash in CPython.

    Source: CPython Objects/tupleobject.c, `tuplehash`: xxHash of the parts' hashes, which are the numbers themselves.
    """
    mask, first, second, third = 2**64 - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    inverse = pow(second, -1, 2**64)
    pairs: list[tuple[int, int]] = []
    left = 1
    while len(pairs) < count:
        left += 1
        lane = (third + left * second) & mask
        lane = ((lane << 31 | lane >> 33) & mask) * first & mask
        right = (12345 - lane) * inverse & mask
        right -= 2**64 if right >= 2**63 else 0
        if abs(right) < 2**61 - 2 and right != -1:
            pairs.append((left, right))
    return pairs


@bomb("pickle: 20 000 keys that collide", quick=True)
def _colliding(folder: Path) -> Path:
    pairs = colliding(20_000)
    keys = b"".join(number(left) + number(right) + b"\x86N" for left, right in pairs)
    return torch_zip(folder / "a.pt", b"\x80\x02}(" + keys + b"u.")


@bomb("pickle: a dict of 100 000 entries copied 100 000 times", quick=True)
def _copies(folder: Path) -> Path:
    entries = b"".join(text(str(i)) + b"N" for i in range(100_000))
    copy = b"h\x01h\x00\x85R0"
    pickled = b"}(" + entries + b"uq\x000ccollections\nOrderedDict\nq\x010" + copy * 100_000 + b"N."
    return torch_zip(folder / "a.pt", b"\x80\x02" + pickled)


@bomb("pickle: 2^60 leaves of 60 shared lists", quick=True)
def _shared(folder: Path) -> Path:
    doubled = b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(60))
    return torch_zip(folder / "a.pt", b"\x80\x02]q\x00" + doubled + b".")


@bomb("pickle: 3 M values of 2 MB of lists shared a thousand times", quick=True)
def _shared_wide(folder: Path) -> Path:
    inner = b"](" + b"N" * 10_000 + b"eq\x000"
    return torch_zip(folder / "a.pt", b"\x80\x02" + inner + b"](" + b"h\x00" * 1000 + b"e.")


@bomb("pickle: 50 000 levels", quick=True)
def _deep(folder: Path) -> Path:
    return torch_zip(folder / "a.pt", b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".")


@bomb("pickle: 40 M opcodes that leave nothing")
def _idle(folder: Path) -> Path:
    return torch_zip(folder / "a.pt", b"\x80\x02" + b"N0" * 20_000_000 + b"N.")


@bomb("pickle: 10 M marks")
def _marks(folder: Path) -> Path:
    return torch_zip(folder / "a.pt", b"\x80\x02" + b"(" * 10_000_000 + b"N.")


@bomb("pickle: names of 100 MB, joined a thousand times")
def _names(folder: Path) -> Path:
    pickled = text("a" * 100_000_000) + b"\x940" + b"h\x00h\x00\x930" * 1000
    return torch_zip(folder / "a.pt", b"\x80\x04" + pickled + b"N.")


@bomb("pickle: 20 MB of text encoded two thousand times", verb="check")
def _encoded(folder: Path) -> Path:
    begin = b"c_codecs\nencode\nq\x00X" + struct.pack("<I", 20_000_000) + b"a" * 20_000_000
    call = b"q\x01X\x06\x00\x00\x00latin1q\x02](" + b"h\x00h\x01h\x02\x86R" * 2000
    return torch_zip(folder / "a.pt", b"\x80\x02" + begin + call + b"e.")


@bomb("pickle: a text of 100 MB with one wide character")
def _wide_text(folder: Path) -> Path:
    return torch_zip(folder / "a.pt", b"\x80\x04" + text("a" * 100_000_000 + chr(0x1F600)) + b".")


@bomb("pickle: 3 M objects, each given a state")
def _objects(folder: Path) -> Path:
    made = b"cmine\nThing\nq\x000](" + b"h\x00)\x81}b" * 3_000_000 + b"e."
    return torch_zip(folder / "a.pt", b"\x80\x02" + made)


@bomb("pickle: 1.5 M tensors over one storage")
def _tensors(folder: Path) -> Path:
    path = folder / "a.pt"
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x08tQ"
    shared = storage + b"q\x000ctorch._utils\n_rebuild_tensor_v2\nq\x010)q\x020}q\x030"
    one = b"".join(b"h\x01(h\x00K%ch\x02h\x02\x89h\x03tR" % (i % 8) for i in range(15_000))
    pickled = b"\x80\x02" + shared + b"](" + one * 100 + b"e."
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (("data.pkl", pickled), ("data/0", bytes(32)), ("version", b"3\n")):
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
    return path


@bomb("pickle: 900 000 tensors of a torch file")
def _many_tensors(folder: Path) -> Path:
    return torch_tensors(folder, 900_000)


def torch_tensors(folder: Path, count: int) -> Path:
    """Writes a torch file of so many tensors."""
    path = folder / "a.pt"
    head = b"(" + text("storage") + b"ctorch\nFloatStorage\n"
    parts = [b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x010)q\x020}q\x030}("]
    for i in range(count):
        key = text(str(i))
        storage = text(str(i % 1000))
        parts.append(key + b"h\x01(" + head + storage + text("cpu") + b"K\x01tQK\x00h\x02h\x02\x89h\x03tR")
    parts.append(b"u.")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), b"".join(parts))
        for i in range(1000):
            archive.writestr(zipfile.ZipInfo(f"archive/data/{i}"), b"\0\0\0\0")
    return path


@bomb("legacy torch file: 24 M empty dicts")
def _legacy(folder: Path) -> Path:
    magic = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
    rest = b"\x80\x02M\xe9\x03.\x80\x02}."
    (folder / "a.pt").write_bytes(magic + rest + b"\x80\x02](" + b"}" * 24_000_000 + b"e.\x80\x02].")
    return folder / "a.pt"


@bomb("torch.distributed.checkpoint: 6 M memo entries in .metadata")
def _dcp(folder: Path) -> Path:
    (folder / "__0_0.distcp").write_bytes(b"")
    (folder / ".metadata").write_bytes(b"\x80\x04N" + b"\x94" * 6_000_000 + b".")
    return folder


# Zip archives.


@bomb("zip: a directory of 3 M members")
def _members(folder: Path) -> Path:
    entry = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0)
    count = 3_000_000
    directory = b"".join(entry + b"%07d" % i for i in range(count))
    first = struct.pack("<IHHHHHIIIHH", 0x04034B50, 0, 0, 0, 0, 0, 0, 0, 0, 12, 0) + b"a/data.pkl/x"
    wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(directory), len(first))
    at = len(first) + len(directory)
    end = struct.pack("<IIQI", 0x07064B50, 0, at, 1)
    end += struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0)
    (folder / "a.pt").write_bytes(first + directory + wide + end)
    return folder / "a.pt"


# JSON: records of trainers, configurations, headers, manifests.


def checkpoint_folder(folder: Path, **files: bytes) -> Path:
    """Writes a folder as Hugging Face's Trainer does, with a small model and these files, by name without suffix."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    (folder / "trainer_state.json").write_bytes(b'{"global_step": 1}')
    torch_zip(
        folder / "optimizer.pt", b"\x80\x02}X\x05\x00\x00\x00state}sX\x0c\x00\x00\x00param_groups](}es."
    )
    for name, data in files.items():
        (folder / f"{name}.json").write_bytes(data)
    return folder


EMPTY = b"[" + b"[]," * 20_000_000 + b"0]"
"""60 MB of empty lists."""


@bomb("JSON: 60 MB of empty lists in trainer_state.json", quick=True)
def _trainer_state(folder: Path) -> Path:
    return checkpoint_folder(folder, trainer_state=b'{"global_step": 1, "log_history": ' + EMPTY + b"}")


@bomb("JSON: 60 MB of empty lists in config.json, which is carried", reads=True, quick=True)
def _config(folder: Path) -> Path:
    return checkpoint_folder(folder, config=b'{"architectures": ' + EMPTY + b"}")


@bomb("JSON: 20 M times a number in trainer_state.json", quick=True)
def _numbers(folder: Path) -> Path:
    return checkpoint_folder(folder, trainer_state=b'{"global_step": 1, "a": [' + b"1," * 20_000_000 + b"1]}")


@bomb("JSON: 100 MB of one text with a wide character")
def _wide_json(folder: Path) -> Path:
    content = b'{"global_step": 1, "a": "' + b"a" * 100_000_000 + "\U0001f600".encode() + b'"}'
    return checkpoint_folder(folder, trainer_state=content)


@bomb("JSON: 500 000 keys, the last of them twice", quick=True)
def _twice(folder: Path) -> Path:
    keys = b",".join(b'"%d":0' % i for i in range(500_000))
    return safetensors(folder / "a.safetensors", b"{" + keys + b',"499999":1}')


@bomb("JSON: 500 000 keys in trainer_state.json", reads=True)
def _keys(folder: Path) -> Path:
    keys = b",".join(b'"%d":0' % i for i in range(500_000))
    return checkpoint_folder(folder, trainer_state=b'{"global_step": 1, ' + keys + b"}")


@bomb("JSON: 20 MB of quotes that open no text", quick=True)
def _quotes(folder: Path) -> Path:
    return checkpoint_folder(folder, trainer_state=b'{"global_step": 1, "' + b'\\"' * 10_000_000)


@bomb("JSON: a million levels in trainer_state.json", quick=True)
def _deep_json(folder: Path) -> Path:
    return checkpoint_folder(folder, trainer_state=b"[" * 1_000_000 + b"]" * 1_000_000)


@bomb("JSON: 60 MB of empty lists in the index of a sharded model", quick=True)
def _index(folder: Path) -> Path:
    checkpoint_folder(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(b'{"weight_map": ' + EMPTY + b"}")
    return folder


def safetensors(path: Path, header: bytes, data: int = 0) -> Path:
    """Writes a safetensors file with this header, and so many bytes of data that lie nowhere."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + data)
    return path


@bomb("safetensors: 60 MB of empty lists in the header", quick=True)
def _header(folder: Path) -> Path:
    return safetensors(folder / "a.safetensors", b'{"__metadata__": ' + EMPTY + b"}")


@bomb("safetensors: 3 M keys in the metadata", verb="check")
def _metadata_keys(folder: Path) -> Path:
    keys = b",".join(b'"%x":"x"' % i for i in range(3_000_000))
    return safetensors(folder / "a.safetensors", b'{"__metadata__":{' + keys + b"}}")


@bomb("safetensors: 900 000 keys in the metadata", verb="check", reads=True)
def _fewer_metadata_keys(folder: Path) -> Path:
    keys = b",".join(b'"%x":"x"' % i for i in range(900_000))
    return safetensors(folder / "a.safetensors", b'{"__metadata__":{' + keys + b"}}")


@bomb("safetensors: 1000 names of a shard with a header of 20 MB", verb="check")
def _links(folder: Path) -> Path:
    entries = (
        b'"%s%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}' % (b"n" * 1000, i, i, i + 1)
        for i in range(20_000)
    )
    shard = safetensors(folder / "shard", b"{" + b",".join(entries) + b"}", 20_000)
    names = [f"model-{i:05}-of-01000.safetensors" for i in range(1, 1001)]
    for name in names:
        (folder / name).hardlink_to(shard)
    shard.unlink()
    index = {"weight_map": {f"{'n' * 1000}{i}": names[i] for i in range(1000)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@bomb("safetensors: 900 000 tensors")
def _many(folder: Path) -> Path:
    return safetensors_tensors(folder, 900_000)


def safetensors_tensors(folder: Path, count: int) -> Path:
    """Writes a safetensors file of so many tensors."""
    entries = (
        b'"%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}' % (i, i, i + 1) for i in range(count)
    )
    return safetensors(folder / "a.safetensors", b"{" + b",".join(entries) + b"}", count)


@bomb("safetensors: a header of 90 MB of spaces", reads=True)
def _spaces(folder: Path) -> Path:
    entry = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    return safetensors(folder / "a.safetensors", entry + b" " * 90_000_000, 1)


@bomb("safetensors: 60 MB of text in the metadata", quick=True, reads=True)
def _metadata(folder: Path) -> Path:
    entry = (
        b'{"__metadata__":{"a":"'
        + b"a" * 60_000_000
        + b'"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    )
    return safetensors(folder / "a.safetensors", entry, 1)


@bomb("safetensors: 20 000 shards with a name of 4 kB each", reads=True)
def _shards(folder: Path) -> Path:
    names = [f"{i:04d}{'n' * 4000}" for i in range(20_000)]
    weights = {}
    for i, name in enumerate(names):
        file = f"model-{i + 1:05d}-of-20000.safetensors"
        header = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        safetensors(folder / file, header, 1)
        weights[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return folder


@bomb("manifest: 60 MB of empty lists in statekit.json", quick=True)
def _manifest(folder: Path) -> Path:
    (folder / "tensors-00001-of-00001.safetensors").write_bytes(b"")
    (folder / "statekit.json").write_bytes(b'{"format": "statekit-manifest", "a": ' + EMPTY + b"}")
    return folder


# TensorFlow's index: a table whose keys share what they begin with.


def varint(value: int) -> bytes:
    """A number as protocol buffers write it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def index(folder: Path, block: bytes, listed: int = 1) -> Path:
    """Writes an index of one block of entries, listed in the block of blocks so many times, and its data file."""
    data = bytearray()

    def put(body: bytes) -> bytes:
        at = len(data)
        masked = crc32c(body + b"\0")
        masked = ((masked >> 15 | masked << 17) + 0xA282EAD8) & 0xFFFFFFFF
        data.extend(body + b"\0" + struct.pack("<I", masked))
        return varint(at) + varint(len(body))

    handle, meta = put(block), put(struct.pack("<II", 0, 1))
    entries = b"".join(b"\0" + varint(4) + varint(len(handle)) + b"%04d" % i + handle for i in range(listed))
    footer = meta + put(entries + struct.pack("<II", 0, 1))
    data += footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)
    (folder / "model.ckpt.index").write_bytes(data)
    (folder / "model.ckpt.data-00000-of-00001").write_bytes(b"\0")
    return folder / "model.ckpt.index"


def shared_keys(count: int, size: int) -> bytes:
    """A block of entries of one byte each, whose keys have so many bytes and share all but the last four."""
    entry = b"\x08\x04" + b"\x12\x04\x12\x02\x08\x01" + b"\x28\x01"
    first = b"\0\0" + varint(2) + b"\x08\x01"
    parts = [first, b"\0" + varint(size) + varint(len(entry)) + b"k" * (size - 4) + b"0000" + entry]
    for i in range(1, count):
        parts.append(
            varint(size - 4) + b"\4" + varint(len(entry)) + struct.pack(">I", 0x30303030 + i) + entry
        )
    return b"".join(parts) + struct.pack("<II", 0, 1)


@bomb("TensorFlow: 10 000 keys of 200 kB each in an index of 220 kB and more", quick=True)
def _prefixes(folder: Path) -> Path:
    return index(folder, shared_keys(10_000, 200_000))


@bomb("TensorFlow: 200 000 keys of 4 kB each")
def _names_of_4k(folder: Path) -> Path:
    return index(folder, shared_keys(200_000, 4000))


@bomb("TensorFlow: one block of 30 MB without an entry, listed 9000 times")
def _listed(folder: Path) -> Path:
    return index(folder, bytes(30_000_000) + struct.pack("<I", 7_500_000), 9000)


@bomb("TensorFlow: a sparse index of 1 GiB", quick=True)
def _sparse(folder: Path) -> Path:
    path = index(folder, shared_keys(2, 10))
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(2**30)
        file.write(data)
    return path


@bomb("TensorFlow: a name of 50 MB in the text file of a folder", quick=True)
def _newest(folder: Path) -> Path:
    for number in (1, 2):
        (folder / f"model.ckpt-{number}.index").write_bytes(b"")
    (folder / "checkpoint").write_bytes(b'model_checkpoint_path: "' + b"x" * 50_000_000 + b'"')
    return folder


# msgpack: of Flax, T5X and old Orbax.


def msgpack_array(code: int, count: int) -> bytes:
    """The head of a long array (0xDD) or map (0xDF)."""
    return bytes([code]) + struct.pack(">I", count)


@bomb("msgpack: 24 M empty maps")
def _maps(folder: Path) -> Path:
    path = folder / "checkpoint_1"
    path.write_bytes(b"\x81\xa6params" + msgpack_array(0xDD, 24_000_000) + b"\x80" * 24_000_000)
    return path


@bomb("msgpack: 900 000 arrays")
def _arrays(folder: Path) -> Path:
    return flax_tensors(folder, 900_000)


def flax_tensors(folder: Path, count: int) -> Path:
    """Writes a file of Flax of so many arrays."""
    array = b"\x93\x91\x01\xa7float32\xc4\x04\0\0\0\0"
    one = b"\xc7" + bytes([len(array)]) + b"\x01" + array
    entries = b"".join(b"\xa7%07d" % i + one for i in range(count))
    path = folder / "checkpoint_1"
    path.write_bytes(b"\x81\xa6params" + msgpack_array(0xDF, count) + entries)
    return path


@bomb("msgpack: 100 000 levels", quick=True)
def _deep_msgpack(folder: Path) -> Path:
    path = folder / "checkpoint_1"
    path.write_bytes(b"\x81\xa6params" + b"\x91" * 100_000 + b"\xc0")
    return path


@bomb("msgpack: a text of 200 MB", quick=True)
def _text_msgpack(folder: Path) -> Path:
    path = folder / "checkpoint_1"
    path.write_bytes(b"\x81\xa6params\xdb" + struct.pack(">I", 200_000_000) + b"a" * 200_000_000)
    return path


@bomb("msgpack: 40 M numbers in a T5X index")
def _t5x(folder: Path) -> Path:
    head = b"\x82\xa7version\x03\xa9optimizer\x81\xa6target"
    (folder / "checkpoint").write_bytes(head + msgpack_array(0xDD, 40_000_000) + b"\x01" * 40_000_000)
    return folder


# HDF5: chunks and groups.


def keras_file(folder: Path) -> tuple[Path, h5py.File]:
    """Opens a new file of Keras' weights to be filled."""
    path = folder / "a.weights.h5"
    return path, h5py.File(path, "w")


def chunked(
    folder: Path, shape: tuple[int, ...], chunks: tuple[int, ...], stored: bytes, **filters: object
) -> Path:
    """Writes a data set of bytes, each of whose chunks is stored as these bytes."""
    path, file = keras_file(folder)
    with file:
        data = file.create_dataset("layers/dense/vars/0", shape, "u1", chunks=chunks, **filters)
        for at in itertools.product(*(range(0, n, c) for n, c in zip(shape, chunks, strict=True))):
            data.id.write_direct_chunk(at, stored)
    return path


def zeros(count: int, kind: Literal["zlib", "gzip", "raw"] = "zlib") -> bytes:
    """Deflates so many zeros, a multiple of 1 MiB."""
    encoder = zlib.compressobj(9, wbits=-15)
    piece = encoder.compress(bytes(2**20)) + encoder.flush(zlib.Z_FULL_FLUSH)
    body = piece * (count // 2**20) + b"\3\0"
    if kind == "raw":
        return body
    if kind == "zlib":
        return b"\x78\xda" + body + (count % 65521 << 16 | 1).to_bytes(4, "big")  # Adler-32
    crc = 0
    for _ in range(count // 2**20):
        crc = zlib.crc32(bytes(2**20), crc)
    return b"\x1f\x8b\x08" + bytes(7) + body + struct.pack("<II", crc, count % 2**32)


@bomb("HDF5: a chunk of 1 GiB", "stats", quick=True)
def _h5_chunk(folder: Path) -> Path:
    return chunked(folder, (2**15, 2**15), (2**15, 2**15), zeros(2**30), compression="gzip")


@bomb("HDF5: a chunk of 400 MiB, which many blocks touch", "stats", reads=True)
def _h5_touched(folder: Path) -> Path:
    return chunked(folder, (400, 2**20), (400, 2**20), zeros(400 * 2**20), compression="gzip")


@bomb("HDF5: 64 chunks of 64 MiB across", "stats")
def _h5_across(folder: Path) -> Path:
    return chunked(folder, (2**13, 2**19), (2**13, 2**13), zeros(2**26), compression="gzip")


@bomb("HDF5: a chunk of 4 kB that inflates to 1 GiB", "stats", quick=True)
def _h5_inflates(folder: Path) -> Path:
    return chunked(folder, (4096,), (4096,), zeros(2**30), compression="gzip")


@bomb("HDF5: 16 GiB of zeros in chunks of 1 MiB", "stats")
def _h5_zeros(folder: Path) -> Path:
    return chunked(folder, (2**34,), (2**20,), zeros(2**20), compression="gzip")


@bomb("HDF5: 60 000 groups", reads=True)
def _h5_groups(folder: Path) -> Path:
    path, file = keras_file(folder)
    with file:
        for i in range(60_000):
            file.create_group(f"layers/{i}")
    return path


@bomb("HDF5: 2000 groups in one another", quick=True)
def _h5_deep(folder: Path) -> Path:
    path, file = keras_file(folder)
    with file:
        group = file
        for _ in range(2000):
            group = group.create_group("g")
    return path


@bomb("HDF5: an attribute of 4000 texts, each the same 16 MiB", quick=True)
def _h5_texts(folder: Path) -> Path:
    path, file = keras_file(folder)
    with file:
        file.attrs.create("texts", ["x" * 2**24, *("y" * 4000)], dtype=h5py.string_dtype())
    data = path.read_bytes()
    first = struct.pack("<I", 2**24)  # each: length, address of a heap, number in it
    at = next(i for i in _places(data, first) if data[i + 16 : i + 20] == struct.pack("<I", 1))
    path.write_bytes(data[:at] + data[at : at + 16] * 4001 + data[at + 16 * 4001 :])
    return path


def _places(data: bytes, mark: bytes) -> Iterator[int]:
    at = data.find(mark)
    while at >= 0:
        yield at
        at = data.find(mark, at + 1)


@bomb("HDF5: 900 attributes of 60 000 bytes at each of 100 groups", reads=True)
def _h5_attributes(folder: Path) -> Path:
    path, file = keras_file(folder)
    with file:
        for i in range(100):
            group = file.create_group(f"layers/{i}")
            for n in range(900):
                group.attrs[f"{n}"] = b"x" * (60_000 if n < 10 else 10)
    return path


@bomb("HDF5: 100 000 deflated chunks of a value", "stats", reads=True)
def _h5_small(folder: Path) -> Path:
    path, file = keras_file(folder)
    with file:
        values = np.random.default_rng(0).standard_normal(100_000, np.float32)
        file.create_dataset("layers/dense/vars/0", data=values, chunks=(1,), compression="gzip")
    return path


@bomb("HDF5: 500 data sets over the same 8000 chunks of a byte", "stats")
def _h5_shared(folder: Path) -> Path:
    path, file = keras_file(folder)
    with file:
        for i in range(500):
            file.create_dataset(f"layers/{i:04d}/vars/0", (8000,), "u1", chunks=(1,), shuffle=True)
        file["layers/0000/vars/0"][:] = 1
    data = path.read_bytes()
    nowhere, layout = b"\xff" * 8, b"\x03\x02\x02"  # version, chunked, two axes; then the address of a tree
    (where,) = {data[at + 3 : at + 11] for at in _places(data, layout)} - {nowhere}
    path.write_bytes(data.replace(layout + nowhere, layout + where))
    return path


# zarr: chunks of T5X, shards of Orbax, its database.


def zarr_of(
    folder: Path,
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    stored: bytes | None,
    codec: str = "zstd",
    dtype: str = "uint8",
) -> Path:
    """Writes a checkpoint of Orbax with one array of format 3; its chunks all have these bytes, or are absent."""
    item = folder / "1" / "default"
    array = item / "params.w"
    array.mkdir(parents=True)
    key = [{"key": "params", "key_type": 2}, {"key": "w", "key_type": 2}]
    leaf = {"key_metadata": key, "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False}}
    tree = {"('params', 'w')": leaf}
    document: dict[str, object] = {"tree_metadata": tree, "use_zarr3": True, "use_ocdbt": False}
    document["store_array_data_equal_to_fill_value"] = stored is not None
    (item / "_METADATA").write_text(json.dumps(document))
    codecs: list[object] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    codecs += [{"name": codec, "configuration": {"level": 1}}] if codec else []
    (array / "zarr.json").write_text(json.dumps(zarr_header(shape, chunks, codecs, dtype)))
    if stored is None:
        return folder / "1"
    for position in itertools.product(*(range(-(-n // c)) for n, c in zip(shape, chunks, strict=True))):
        path = array.joinpath("c", *map(str, position))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stored)
    return folder / "1"


def zarr_header(
    shape: tuple[int, ...], chunks: tuple[int, ...], codecs: list[object], dtype: str
) -> dict[str, object]:
    """Returns the header of an array of format 3."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": codecs,
        "data_type": dtype,
        "fill_value": 0,
    }


def zstd_zeros(count: int, window_log: int = 25) -> bytes:
    """Compresses so many zeros, a multiple of 128 KiB, in blocks that repeat a byte; Source: RFC 8878, 3.1.1."""
    block = struct.pack("<I", 2**17 << 3 | 1 << 1)[:3] + b"\0"
    last = struct.pack("<I", 2**17 << 3 | 1 << 1 | 1)[:3] + b"\0"
    return b"\x28\xb5\x2f\xfd\0" + bytes([window_log - 10 << 3]) + block * (count // 2**17 - 1) + last


@bomb("zarr: a zstd chunk of 1 GiB, window 2^25", "stats", reads=True)
def _zarr_zstd(folder: Path) -> Path:
    return zarr_of(folder, (2**15, 2**13), (2**15, 2**13), zstd_zeros(2**30), dtype="float32")


@bomb("zarr: a gzip chunk of 1 GiB", "stats", reads=True)
def _zarr_gzip(folder: Path) -> Path:
    return zarr_of(folder, (2**15, 2**13), (2**15, 2**13), zeros(2**30, "gzip"), "gzip", "float32")


@bomb("zarr: a zstd chunk with a window of 1 GiB", "stats", quick=True)
def _zarr_window(folder: Path) -> Path:
    return zarr_of(folder, (2**15, 2**13), (2**15, 2**13), zstd_zeros(2**30, 30), dtype="float32")


@bomb("zarr: a chunk of 4 kB that becomes 4 GiB", "stats", quick=True)
def _zarr_longer(folder: Path) -> Path:
    return zarr_of(folder, (4096,), (4096,), zstd_zeros(2**32))


@bomb("zarr: 64 chunks of 16 MiB across", "stats", reads=True)
def _zarr_across(folder: Path) -> Path:
    return zarr_of(folder, (2**9, 2**19), (2**9, 2**13), zstd_zeros(2**24, 20), dtype="float32")


@bomb("zarr: 128 chunks of 8 MiB across, which no budget holds", "stats")
def _zarr_thrash(folder: Path) -> Path:
    return zarr_of(folder, (2**10, 2**18), (2**10, 2**11), zstd_zeros(2**23, 20), dtype="float32")


@bomb("zarr: 3 GiB of one array that isn't stored", "stats", quick=True)
def _zarr_absent(folder: Path) -> Path:
    return zarr_of(folder, (3, 2**28), (1, 2**28), None, dtype="float32")


@bomb("zarr: 2^40 chunks that aren't stored", quick=True)
def _zarr_looked_for(folder: Path) -> Path:
    return zarr_of(folder, (2**40,), (1,), None)


@bomb("zarr: a chunk of 1 EiB", "stats", quick=True)
def _zarr_huge(folder: Path) -> Path:
    return zarr_of(folder, (2**60,), (2**60,), zstd_zeros(2**30))


@bomb("zarr: a codec that isn't read", quick=True)
def _zarr_blosc(folder: Path) -> Path:
    return zarr_of(folder, (2**20,), (2**20,), b"\2\1\0\0" + bytes(12), "blosc")


@bomb("zarr: a header of 60 MB", quick=True)
def _zarr_header(folder: Path) -> Path:
    path = zarr_of(folder, (4,), (4,), None)
    (path / "default" / "params.w" / "zarr.json").write_bytes(EMPTY)
    return path


@bomb("zarr: 4 M chunks of a byte in a shard", "stats")
def _zarr_shard(folder: Path) -> Path:
    count = 2**22
    path = zarr_of(folder, (count,), (count,), None)
    array = path / "default" / "params.w"
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {"chunk_shape": [1], "codecs": [little], "index_codecs": [little]}
    header = zarr_header(
        (count,), (count,), [{"name": "sharding_indexed", "configuration": sharding}], "uint8"
    )
    (array / "zarr.json").write_text(json.dumps(header))
    (array / "c").mkdir()
    (array / "c" / "0").write_bytes(b"\0" + struct.pack("<QQ", 0, 1) * count)
    return path


@bomb("OCDBT: 100 000 keys without a tree", reads=True)
def _ocdbt_keys(folder: Path) -> Path:
    return orbax_database(folder, {f"{i:06d}": b"x" for i in range(100_000)}, {})


@bomb("OCDBT: 100 000 chunks of a value", "stats", reads=True)
def _ocdbt_small(folder: Path) -> Path:
    header: dict[str, object] = {
        "zarr_format": 2,
        "shape": [100_000],
        "chunks": [1],
        "dtype": "<f4",
        "order": "C",
    }
    header |= {"compressor": None, "fill_value": None, "filters": None, "dimension_separator": "."}
    values = np.random.default_rng(0).standard_normal(100_000, np.float32)
    stored = {f"params.w/{i}": value.tobytes() for i, value in enumerate(values)}
    stored["params.w/.zarray"] = json.dumps(header).encode()
    key = [{"key": "params", "key_type": 2}, {"key": "w", "key_type": 2}]
    leaf = {"value_type": "jax.Array", "skip_deserialize": False}
    return orbax_database(folder, stored, {"('params', 'w')": {"key_metadata": key, "value_metadata": leaf}})


@bomb("OCDBT: 300 chunks of 4 values, each the same 8 MB", "stats", quick=True)
def _ocdbt_shared(folder: Path) -> Path:
    header: dict[str, object] = {
        "zarr_format": 2,
        "shape": [1200],
        "chunks": [4],
        "dtype": "<f4",
        "order": "C",
    }
    header |= {"compressor": {"id": "zstd", "level": 1}, "fill_value": None, "filters": None}
    header["dimension_separator"] = "."
    skipped = struct.pack("<II", 0x184D2A50, 8_000_000) + bytes(8_000_000)  # a frame that holds nothing
    values = {"params.w/.zarray": json.dumps(header).encode(), "x": skipped}
    key = [{"key": "params", "key_type": 2}, {"key": "w", "key_type": 2}]
    leaf = {"value_type": "jax.Array", "skip_deserialize": False}
    path = orbax_database(folder, values, {"('params', 'w')": {"key_metadata": key, "value_metadata": leaf}})
    database = _database(path / "default")
    for i in range(300):
        (database / "x").experimental_copy_range_to(database / f"params.w/{i}").result()
    return path


@bomb("OCDBT: a manifest of 65 kB that says 2^28 files", quick=True)
def _ocdbt_files(folder: Path) -> Path:
    import zstandard

    path = orbax_tensors(folder, 1)
    packed = zstandard.ZstdCompressor().compressobj()
    payload = packed.compress(bytes(16) + b"\0\x64\x80\x80\x80\x04\x04\0" + b"\xff\xff\xff\x7f")
    payload += b"".join(packed.compress(bytes(2**24)) for _ in range(128)) + packed.flush()
    data = b"\x0c\xdb\x3a\x2a" + struct.pack("<Q", len(payload) + 18) + b"\0\1" + payload
    (path / "default" / "manifest.ocdbt").write_bytes(data + struct.pack("<I", crc32c(data)))
    return path


@bomb("OCDBT: 700 arrays, each with the same header of 1 MB")
def _ocdbt_headers(folder: Path) -> Path:
    path = orbax_tensors(folder, 700)
    database = _database(path / "default")
    database["x"] = b"{" + b" " * 1_000_000
    for i in range(700):
        (database / "x").experimental_copy_range_to(database / f"params.{i}/.zarray").result()
    return path


def orbax_tensors(folder: Path, count: int) -> Path:
    """Writes a checkpoint of Orbax with so many arrays in a database."""
    header: dict[str, object] = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "<f4", "order": "C"}
    header |= {"compressor": None, "fill_value": None, "filters": None, "dimension_separator": "."}
    values, tree = dict[str, bytes](), dict[str, object]()
    for i in range(count):
        values |= {f"params.{i}/.zarray": json.dumps(header).encode(), f"params.{i}/0": bytes(4)}
        key = [{"key": "params", "key_type": 2}, {"key": f"{i}", "key_type": 2}]
        leaf = {"value_type": "jax.Array", "skip_deserialize": False}
        tree[f"('params', '{i}')"] = {"key_metadata": key, "value_metadata": leaf}
    return orbax_database(folder, values, tree)


def orbax_database(folder: Path, values: Mapping[str, bytes], tree: Mapping[str, object]) -> Path:
    """Writes a checkpoint of Orbax whose database has these values."""
    import tensorstore

    item = folder / "1" / "default"
    item.mkdir(parents=True)
    database = _database(item)
    with tensorstore.Transaction() as transaction:
        opened = database.with_transaction(transaction)
        for key, value in values.items():
            opened[key] = value
    document = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": False}
    (item / "_METADATA").write_text(json.dumps(document))
    return folder / "1"


def _database(item: Path) -> Any:
    import tensorstore

    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}}
    return tensorstore.KvStore.open(spec).result()


# The rest: deflated archives, npz, MXNet's lists, parts of distributed checkpoints, hyperparameters.


def deflated(path: Path, members: dict[str, tuple[bytes, int | None]]) -> Path:
    """Writes a zip archive; a member whose size is given is deflated already."""
    body, directory = b"", b""
    for name, (data, size) in members.items():
        crc = zlib.crc32(data) if size is None else 0
        method, whole = (0, len(data)) if size is None else (8, size)
        head = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 33, crc, len(data), whole, len(name), 0)
        entry = struct.pack("<I", 0x02014B50) + struct.pack("<H", 20) + head
        directory += entry + struct.pack("<HHHII", 0, 0, 0, 0, len(body)) + name.encode()
        body += struct.pack("<I", 0x04034B50) + head + name.encode() + data
    count = len(members)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(directory), len(body), 0)
    path.write_bytes(body + directory + end)
    return path


@bomb("Keras: weights deflated to 1 MB that become 1 GiB", quick=True)
def _keras_deflated(folder: Path) -> Path:
    weights = zeros(2**30, "raw")
    members = {"config.json": (b"{}", None), "model.weights.h5": (weights, 2**30)}
    return deflated(folder / "a.keras", members)


@bomb("Keras: weights that say 4 kB and become 1 GiB", quick=True)
def _keras_lies(folder: Path) -> Path:
    members = {"config.json": (b"{}", None), "model.weights.h5": (zeros(2**30, "raw"), 2**22)}
    return deflated(folder / "a.keras", members)


@bomb("Keras: a config deflated to 400 kB that becomes 400 MiB")
def _keras_config(folder: Path) -> Path:
    config = zeros(400 * 2**20, "raw")
    members: dict[str, tuple[bytes, int | None]] = {"config.json": (config, 400 * 2**20)}
    members["model.weights.h5"] = (b"\x89HDF\r\n\x1a\n", None)
    return deflated(folder / "a.keras", members)


@bomb("zip: a deflated data.pkl in a torch file", quick=True)
def _torch_deflated(folder: Path) -> Path:
    return deflated(folder / "a.pt", {"archive/data.pkl": (zeros(2**30, "raw"), 2**30)})


@bomb("npz: an array of 64 TiB", quick=True)
def _npz(folder: Path) -> Path:
    head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (17592186044416,), }".ljust(117) + b"\n"
    array = b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head
    return deflated(folder / "a.params", {"w.npy": (array, None)})


@bomb("npz: 1500 deflated arrays of a MiB of zeros", "check")
def _npz_deflated(folder: Path) -> Path:
    data = io.BytesIO()
    np.save(data, np.zeros(2**18, np.float32))
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(1500):
            archive.writestr(f"params/{number}.npy", data.getvalue())
    return folder / "a.npz"


@bomb("npz: a header of 60 MB", quick=True)
def _npz_header(folder: Path) -> Path:
    head = b"[" * 60_000_000
    array = b"\x93NUMPY\2\0" + struct.pack("<I", len(head)) + head
    return deflated(folder / "a.params", {"w.npy": (array, None)})


@bomb("MXNet: a list that says 2^40 arrays", quick=True)
def _list(folder: Path) -> Path:
    path = folder / "a.params"
    path.write_bytes(struct.pack("<QQQ", 0x112, 0, 2**40) + bytes(64))
    return path


@bomb("MXNet: a list of 1.5 M arrays of nothing")
def _many_arrays(folder: Path) -> Path:
    path, count = folder / "a.params", 1_500_000
    array = struct.pack("<IiIqiii", 0xF993FAC9, 0, 1, 0, 1, 0, 0)
    names = b"".join(struct.pack("<Q", 7) + b"%07d" % i for i in range(count))
    path.write_bytes(struct.pack("<QQQ", 0x112, 0, count) + array * count + struct.pack("<Q", count) + names)
    return path


@bomb("MXNet: states with 300 MB of text")
def _states_text(folder: Path) -> Path:
    return states(folder / "a.states", text("a" * 300_000_000) + b"0N.")


@bomb("MXNet: states of 40 M opcodes")
def _states_idle(folder: Path) -> Path:
    return states(folder / "a.states", b"N0" * 20_000_000 + b"N.")


@bomb("MXNet: states of protocol 2 of 1 GiB, sparse", quick=True)
def _states_whole(folder: Path) -> Path:
    path = folder / "a.states"
    path.write_bytes(b"\x80\x02cmxnet\nA\n0")
    with path.open("r+b") as file:
        file.truncate(2**30)
    return path


@bomb("legacy torch file: 6 M memo entries")
def _legacy_memo(folder: Path) -> Path:
    magic = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
    rest = b"\x80\x02M\xe9\x03.\x80\x02}."
    (folder / "a.pt").write_bytes(magic + rest + b"\x80\x04N" + b"\x94" * 6_000_000 + b".\x80\x02].")
    return folder / "a.pt"


@bomb("torch: 1000 tensors over one storage of 64 MiB", "stats", quick=True)
def _over_one_storage(folder: Path) -> Path:
    count = 2**24
    key = text("0")
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + key + text("cpu") + number(count) + b"tQ"
    size = b"J" + count.to_bytes(4, "little") + b"\x85"
    made = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + size + b"K\1\x85\x89}tR"
    entries = b"".join(text(f"w{i}") + made for i in range(1000))
    path = folder / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (("data.pkl", b"\x80\x02}(" + entries + b"u."), ("data/0", bytes(4 * count))):
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
    return path


@bomb("torch: a tensor of 2^27 elements over one number", quick=True)
def _expanded(folder: Path) -> Path:
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ"
    size = b"J" + (2**27).to_bytes(4, "little") + b"\x85"
    made = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + size + b"K\0\x85\x89}tR"
    path = folder / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (("data.pkl", b"\x80\x02}" + text("w") + made + b"s."), ("data/0", bytes(4))):
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
    return path


@bomb("manifest: 900 000 files in statekit.json")
def _manifest_files(folder: Path) -> Path:
    files = b",".join(b'"f%d":{"size":0,"blake3":""}' % i for i in range(900_000))
    (folder / "tensors-00001-of-00001.safetensors").write_bytes(b"")
    (folder / "statekit.json").write_bytes(b'{"format": "statekit-manifest", "files": {' + files + b"}}")
    return folder


@bomb("FSDP1: 4000 ranks, each of 6 M memo entries", quick=True)
def _ranks(folder: Path) -> Path:
    first = torch_zip(folder / "rank0.pt", b"\x80\x04N" + b"\x94" * 6_000_000 + b".")
    for i in range(1, 4000):
        (folder / f"rank{i}.pt").hardlink_to(first)
    return folder


@bomb("gin: 60 MB of macros", options=("--hparams", "{}/config.gin"), quick=True)
def _gin(folder: Path) -> Path:
    (folder / "config.gin").write_bytes(b"a = %a\n" * 8_000_000)
    return safetensors(folder / "a.safetensors", b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1)


@bomb("gin: macros that double 60 times", options=("--hparams", "{}/config.gin"), reads=True, quick=True)
def _gin_doubles(folder: Path) -> Path:
    lines = ["a0 = 1"] + [f"a{i} = [%a{i - 1}, %a{i - 1}]" for i in range(1, 61)]
    text_of = "\n".join([*lines, "adafactor.Adafactor.decay_rate = %a60"])
    (folder / "config.gin").write_text(text_of)
    return safetensors(folder / "a.safetensors", b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1)


@bomb("gin: 30 000 values of a macro of 64 kB", options=("--hparams", "{}/config.gin"), quick=True)
def _gin_values(folder: Path) -> Path:
    lines = ["a0 = @f"] + [f"a{i} = [%a{i - 1}, %a{i - 1}]" for i in range(1, 15)]
    lines += [f"adafactor.Adafactor.p{i} = %a14" for i in range(30_000)]
    (folder / "config.gin").write_text("\n".join(lines))
    return safetensors(folder / "a.safetensors", b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1)


@bomb("torch.distributed.checkpoint: a list with a part at 2^40", quick=True)
def _dcp_list(folder: Path) -> Path:
    return distributed(folder, b"(" + text("a") + number(2**40) + b"t")


@bomb("torch.distributed.checkpoint: a part 100 000 levels deep", quick=True)
def _dcp_deep(folder: Path) -> Path:
    return distributed(folder, b"(" + b"K\1" * 100_000 + b"t")


def distributed(folder: Path, path: bytes) -> Path:
    """Writes a folder of torch.distributed.checkpoint with one object, at a path in the tree."""
    size = torch_zip(folder / "__0_0.distcp", b"\x80\2N.").stat().st_size
    metadata = b"ctorch.distributed.checkpoint.metadata\n"
    key = text("a.b")
    entry = metadata + b"BytesStorageMetadata\n)\x81"
    index = (
        metadata
        + b"MetadataIndex\n)\x81}("
        + text("fqn")
        + key
        + text("offset")
        + b"N"
        + text("index")
        + b"Nub"
    )
    info = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}(" + text("relative_path")
    info += text("__0_0.distcp") + text("offset") + b"K\0" + text("length") + number(size) + b"ub"
    fields = text("state_dict_metadata") + b"}" + key + entry + b"s"
    fields += text("planner_data") + b"}" + key + path + b"s"
    fields += text("storage_data") + b"}" + index + info + b"s"
    (folder / ".metadata").write_bytes(b"\x80\2" + metadata + b"Metadata\n)\x81}(" + fields + b"ub.")
    return folder
