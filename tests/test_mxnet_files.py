"""The bytes of MXNet's files: records of all generations, npz, pickles; what is damaged or hostile is refused."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest
from mxnet_files import array_list, attributes, record, states
from test_mxnet import LANS_CLASS, PARAMS, moments, put

from goldens import GOLDEN
from statekit.conversion.contracts import Encoded
from statekit.converters.containers.mxnet import CONTAINER
from statekit.converters.formats.mxnet.params import read_params
from statekit.converters.formats.pickle.extents import KEPT_BYTES, read_thin_pickle
from statekit.converters.formats.pickle.writer import Called, write_pickle
from statekit.errors import CorruptError, FormatError, RefusedError, StatekitError, UsageError
from statekit.files.source import File, Files, Part
from statekit.files.stage import staged
from statekit.tensors.tensor import Array, Tensor, in_memory

Open: TypeAlias = Callable[[Path], File]
FOLDER = GOLDEN / "mxnet_lans" / "fused_bounds_clip_rescale" / "checkpoint"


@pytest.fixture
def source() -> Iterator[Open]:
    """Opens files, and closes them when the test is over."""
    with contextlib.ExitStack() as opened:
        yield opened.enter_context(Files()).source


def pickled(tree: Any) -> bytes:
    def none(path: Any, tensor: Tensor) -> Called:
        raise AssertionError("no tensors here")

    out = io.BytesIO()
    write_pickle(tree, out, none)
    return out.getvalue()


TREES: list[Any] = [
    None, {}, [], (), {"a": 1}, [1], (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {"a": (), "b": []},
    [True, False, None, 1.5, float("inf")],
    [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**63, -(2**39), 2**100, -(2**100)],
    ["text", "é", "x" * 255, "x" * 256, "x" * 70_000, b"", b"x" * 255, b"x" * 256, b"x" * 70_000, "after"],
    *({i: i for i in range(n)} for n in (2, 999, 1000, 1001, 2000, 2500)),
    *(list(range(n)) for n in (2, 999, 1000, 1001, 2000, 2500)),
    [f"name {i}" for i in range(9000)],
    {i: [b"y" * 40_000] for i in range(5)},
]  # fmt: skip


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_pickles_are_cpythons_byte_for_byte(tree: Any) -> None:
    assert pickled(tree) == pickle.dumps(tree, protocol=4)


def test_what_is_one_object_is_written_once() -> None:
    shared, name = {"k": [1]}, "".join(["na", "me"])
    tree = {name: shared, "again": (shared, shared["k"]), "same": [name, "".join(["na", "me"])]}
    assert pickled(tree) == pickle.dumps(tree, protocol=4)
    read = pickle.loads(pickled(tree))
    assert read["again"][0] is read["name"] and read["again"][1] is read["name"]["k"]


def test_what_is_not_plain_is_not_pickled() -> None:
    with pytest.raises(UsageError, match="a/0"):
        pickled({"a": [object()]})


def thin(file: File) -> Any:
    return read_thin_pickle(file, lambda note: {})


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_long_bytes_stay_in_the_file(tmp_path: Path, protocol: int, source: Open) -> None:
    tree = {"short": b"s" * KEPT_BYTES, "long": b"l" * (KEPT_BYTES + 1), "last": [b"z" * 100_000, "end"]}
    data = pickle.dumps(tree, protocol=protocol)
    (tmp_path / "x").write_bytes(data + b"rest")
    thinned = thin(source(tmp_path / "x"))
    assert thinned.end == len(data) and thinned.value["short"] == tree["short"]
    long, (last, end) = thinned.value["long"], thinned.value["last"]
    assert isinstance(long, Part) and isinstance(last, Part) and end == "end"
    assert long.read(0, long.size).tobytes() == tree["long"]
    assert last.read(99_990, 10).tobytes() == b"z" * 10


def test_a_large_file_opens_by_its_small_part(tmp_path: Path, source: Open) -> None:
    """Moments of a gigabyte, as a file with holes: what is read of it is counted."""
    head, tail = _around(8 * 2**27)
    path = put(tmp_path / "big", b"")
    with (path / "x.states").open("wb") as file:
        for part in (head, tail):
            file.write(part)
            file.seek(8 * 2**27, os.SEEK_CUR)
        file.write(b"\x85R.")
    before = _read_bytes()
    data = read_thin_pickle(
        source(path / "x.states"), lambda note: {"builtins.bytearray": lambda args: args[0]}
    )
    assert _read_bytes() - before < 2**20
    assert data.value.size == 8 * 2**27


def _around(size: int) -> tuple[bytes, bytes]:
    """A pickle of two byte strings, the second of which counts: what stands before each."""
    call = b"\x80\x04cbuiltins\nbytearray\n"
    return call + b"\x8e" + struct.pack("<Q", size), b"0cbuiltins\nbytearray\n\x8e" + struct.pack("<Q", size)


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


@pytest.mark.parametrize("generation", [0, 1, 2, 3])
def test_records_of_every_generation_are_read(tmp_path: Path, generation: int, source: Open) -> None:
    path = tmp_path / "net.params"
    path.write_bytes(array_list(PARAMS, generation))
    records = read_params(source(path))
    assert list(records.arrays) == list(PARAMS) and records.generation == generation
    for name, array in PARAMS.items():
        np.testing.assert_array_equal(records.arrays[name].read(), array)
        np.testing.assert_array_equal(
            records.arrays[name].read((slice(1, 2),) * array.ndim), array[(slice(1, 2),) * array.ndim]
        )


def test_an_npz_of_numpy_is_read_too(tmp_path: Path, source: Open) -> None:
    arrays: dict[str, Any] = {
        "a": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "b.c": np.array(3, np.int64),
        "e": np.zeros((0, 3)),
    }
    with (tmp_path / "net.params").open("wb") as file:
        np.savez(file, **arrays)
    records = read_params(source(tmp_path / "net.params"))
    for name, array in arrays.items():
        np.testing.assert_array_equal(records.arrays[name].read(), array)


def write(tree: Any, target: Path) -> Path:
    with staged(target, "folder") as stage:
        CONTAINER.write(Encoded(tree, 0), stage)
        stage.commit(CONTAINER.open)
    return target


DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64", "bfloat16")


@pytest.mark.parametrize("form", ["npz", "list"])
def test_every_dtype_of_mxnet_comes_back(tmp_path: Path, form: str) -> None:
    arrays: dict[str, Any] = {
        name: np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        for name in DTYPES
    }
    arrays["scalar"], arrays["none"] = np.float32(2.5).reshape(()), np.zeros((3, 0), np.float32)
    tree = {
        "params": {name: in_memory(array, name) for name, array in arrays.items()},
        "files": {"params": {"form": form, "generation": 3}},
    }
    with CONTAINER.open(write(tree, tmp_path / "out") / "net.params") as opened:
        assert opened.tree["files"]["params"]["form"] == form
        for name, array in arrays.items():
            values = opened.tree["params"][name].read()
            assert (
                values.dtype == array.dtype and values.shape == array.shape and np.array_equal(values, array)
            )


def test_numpy_reads_what_is_written(tmp_path: Path) -> None:
    arrays: dict[str, Array] = {
        "w.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.ones(5, np.float16),
    }
    write({"params": {n: in_memory(a, n) for n, a in arrays.items()}}, tmp_path / "out")
    with np.load(tmp_path / "out" / "net.params") as read:
        assert list(read) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(read[name], array)


@pytest.mark.parametrize(
    ("array", "form", "match"),
    [
        (np.zeros(3, np.complex64), {}, "dtype"),
        (np.zeros(3, np.complex64), {"form": "list"}, "dtype"),
        (np.zeros((), np.float32), {"form": "list", "generation": 2}, "rank 0"),
        (np.zeros((0, 3), np.float32), {"form": "list", "generation": 2}, "without values"),
        (np.zeros((1000,) + (1,) * 31, np.float32), {}, "so many axes"),
    ],
)
def test_what_mxnet_could_not_read_is_not_written(
    tmp_path: Path, array: Array, form: Any, match: str
) -> None:
    tree = {"params": {"a": in_memory(array, "a")}, "files": {"params": form}}
    with pytest.raises(FormatError, match=match):
        write(tree, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def attacks(canary: Path) -> Iterator[tuple[str, bytes]]:
    command = f"touch {canary}".encode()
    call = b"cos\nsystem\nX" + struct.pack("<I", len(command)) + command + b"\x85R"
    good = states(moments((2, 3), (2, 3), (4,)), (LANS_CLASS, attributes({0: 1, 1: 1, 2: 1})))
    yield "a call for an index", b"\x80\x03}K\x00" + call + b"s."
    yield "a call beside the states", b"\x80\x03}" + call + b"\x86. mxnet"
    handle = b"X\x06\x00\x00\x00handle"
    array = b"cmxnet.ndarray.ndarray\nNDArray\nN\x85R}" + handle
    yield "a call for the bytes", b"\x80\x03}K\x00" + array + call + b"sbs."
    yield "a function of mxnet", b"\x80\x03}K\x00cmxnet.base\ncheck_call\nN\x85Rs."
    yield "a persistent id", b"\x80\x04}K\x00" + array + b"K\x00Qsbs."
    yield "no bytes", b"\x80\x04}K\x00" + array + b"]sbs."
    yield "no states", b"\x80\x04]cmxnet.ndarray.ndarray\nNDArray\na."
    yield "a cycle", b"\x80\x04}\x94K\x00h\x00scmxnet.ndarray.ndarray\nNDArray\n\x86."
    bomb = b"]\x94" + b"".join(b"]\x94(" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(60))
    yield "a bomb", b"\x80\x04}K\x00" + bomb + b"s. mxnet"
    record_of = record(np.zeros(100, np.float32))
    for name, data in {
        "a record that is longer": record_of[:-4],
        "a record that is shorter": record_of + b"more",
        "a huge shape": record_of[:12] + struct.pack("<q", 2**39) + record_of[20:],
        "a negative shape": record_of[:12] + struct.pack("<q", -7) + record_of[20:],
        "a huge rank": record_of[:8] + struct.pack("<i", 2**30) + record_of[12:],
        "an unknown dtype": record_of[:28] + struct.pack("<i", 77) + record_of[32:],
        "a sparse array": record_of[:4] + struct.pack("<i", 1) + record_of[8:],
        "no record": b"",
    }.items():
        raw = b"cbuiltins\nbytearray\nB" + struct.pack("<I", len(data)) + data + b"\x85R"
        yield name, b"\x80\x03}K\x00" + array + raw + b"sbs."
    yield "a huge length", b"\x80\x04}K\x00" + array + b"\x8e" + b"\xff" * 7 + b"\x7f"
    for at in range(0, len(good), max(len(good) // 40, 1)):
        yield f"cut at {at}", good[:at] if b"mxnet" in good[:at] else b"\x80\x04mxnet" + good[2:at]


def test_hostile_states_are_refused_and_nothing_runs(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for name, data in attacks(canary):
        folder = put(tmp_path / "x", data)
        with pytest.raises(StatekitError), CONTAINER.open(folder / "x.states") as opened:
            for tensor in opened.tensors.values():
                tensor.read()
            raise AssertionError(f"{name} was read")
        assert not canary.exists(), name


def _npz(**members: bytes) -> bytes:
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return out.getvalue()


def _npy(head: str, values: bytes = b"\0" * 16) -> bytes:
    raw = head.encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(raw)) + raw + values


def _saved(save: Callable[..., None]) -> bytes:
    out = io.BytesIO()
    save(out, a=np.zeros(1000))
    return out.getvalue()


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }"
BROKEN_PARAMS = {
    "compressed": _saved(np.savez_compressed),
    "another member": _npz(a=_npy(GOOD)).replace(b"a.npy", b"a.exe"),
    "objects": _npz(a=_npy(GOOD.replace("<f4", "|O"))),
    "code": _npz(a=_npy("__import__('os').system('touch canary')")),
    "a deep header": _npz(a=_npy("(" * 60_000)),
    "no shape": _npz(a=_npy("{'descr': '<f4', 'fortran_order': False}")),
    "a negative shape": _npz(a=_npy(GOOD.replace("(4,)", "(-4,)"))),
    "a huge shape": _npz(a=_npy(GOOD.replace("(4,)", "(4000000000,)"))),
    "too few values": _npz(a=_npy(GOOD, b"\0" * 12)),
    "too many values": _npz(a=_npy(GOOD, b"\0" * 20)),
    "big endian": _npz(a=_npy(GOOD.replace("<", ">"))),
    "a cut header": _npz(a=_npy(GOOD)[:40]),
    "no npy": _npz(a=b"nothing at all"),
    "many arrays": struct.pack("<QQQ", 0x112, 0, 2**60),
    "no names": struct.pack("<QQQ", 0x112, 0, 1) + record(np.zeros(3, np.float32)) + struct.pack("<Q", 0),
    "one name twice": array_list({"a": np.zeros(3), "b": np.zeros(3)}).replace(
        b"\1\0\0\0\0\0\0\0b", b"\1\0\0\0\0\0\0\0a"
    ),
    "a long name": array_list({"a": np.zeros(3)})[:-9] + struct.pack("<Q", 2**40) + b"a",
    "a name of other bytes": array_list({"a": np.zeros(3)})[:-1] + b"\xff",
    "more behind": array_list({"a": np.zeros(3)}) + b"x",
}


@pytest.mark.parametrize("name", BROKEN_PARAMS)
def test_broken_parameters_are_refused(tmp_path: Path, name: str, source: Open) -> None:
    path = tmp_path / "net.params"
    path.write_bytes(BROKEN_PARAMS[name])
    with pytest.raises((CorruptError, RefusedError, FormatError)):
        read_params(source(path))


def test_a_flipped_bit_in_an_npz_is_noticed_before_values_are_trusted(tmp_path: Path, source: Open) -> None:
    data = bytearray((FOLDER / "net.params").read_bytes())
    data[30 + len("scale.npy") + 128 + 1] ^= 1
    (tmp_path / "net.params").write_bytes(data)
    records = read_params(source(tmp_path / "net.params"))
    with pytest.raises(CorruptError, match="CRC"):
        records.arrays["scale"].read()


def test_a_file_of_parameters_cut_anywhere_is_refused(tmp_path: Path, source: Open) -> None:
    for whole in ((FOLDER / "net.params").read_bytes(), array_list(PARAMS)):
        for at in range(0, len(whole), 37):
            path = tmp_path / "net.params"
            path.write_bytes(whole[:at])
            with pytest.raises(StatekitError):
                read_params(source(path))


def test_pipes_and_folders_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.states")
    (tmp_path / "y.params").mkdir()
    assert CONTAINER.detect(tmp_path) is None
    assert CONTAINER.detect(tmp_path / "x.states") is None
    with pytest.raises(StatekitError):
        CONTAINER.open(tmp_path / "x.states")
