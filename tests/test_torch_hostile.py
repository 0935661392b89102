"""Torch files that lie, that carry code, and that were damaged."""

from __future__ import annotations

import pickle
import resource
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from torch_files import legacy_bytes, number, read_all, save, tensor, torch_zip

from statekit.budget import Budget, Limits
from statekit.converters.containers.torch_file import CONTAINER
from statekit.converters.formats import zip_archive
from statekit.converters.formats.crc import crc32
from statekit.converters.formats.pytorch import reader as torch_reader
from statekit.converters.formats.pytorch.reader import LEGACY_MAGIC
from statekit.errors import BudgetError, CorruptError, FormatError, RefusedError, UsageError
from statekit.tensors.tensor import DTYPES, in_memory


def test_the_handmade_file_is_fine(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "a.pt", tensor() + b".", np.arange(4, dtype=np.float32).tobytes())
    with CONTAINER.open(path) as checkpoint:
        assert checkpoint.tree.read().tolist() == [0, 1, 2, 3]
        assert checkpoint.meta == {"generation": "zip", "byteorder": "little", "version": "3", "storages": 1}


LIES = {
    "a storage larger than its member": tensor(count=5),
    "a storage smaller than its member": tensor(count=3, size=(3,)),
    "an absurd storage": tensor(count=2**60, size=(2**60,)),
    "a negative storage": tensor(count=-4),
    "a size beyond the storage": tensor(size=(5,)),
    "an offset beyond the storage": tensor(offset=1),
    "a negative offset": tensor(offset=-1),
    "a negative size": tensor(size=(-4,)),
    "a negative stride": tensor(offset=3, stride=(-1,)),
    "a stride beyond the storage": tensor(size=(2, 2), stride=(3, 1)),
    "a stride bomb": tensor(size=(2**40,), stride=(0,)),
    "a stride bomb of small parts": tensor(size=(2**13, 2**13, 2), stride=(0, 0, 1)),
    "sizes that overflow": tensor(size=(2**61, 2**61), stride=(1, 1)),
    "sizes beyond 64 bits": tensor(size=(2**80, 0), stride=(1, 1)),
    "a stride too few": tensor(size=(2, 2), stride=(1,)),
    "too many axes": tensor(size=(1,) * 65, stride=(1,) * 65),
    "sizes that aren't numbers": tensor().replace(number(4) + b"t(", b"G" + bytes(8) + b"t("),
    "a bool as size": tensor().replace(number(4) + b"t(", b"\x88t("),
    "an unknown storage": tensor().replace(b"FloatStorage", b"DuckStorage"),
    "a missing member": tensor().replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001"),
    "a member elsewhere": tensor().replace(b"X\x01\x00\x00\x000", b"X\x04\x00\x00\x00../0"),
    "another persistent id": tensor().replace(b"storage", b"garages"),
    "a tensor of a dict": b"ctorch._utils\n_rebuild_tensor_v2\n(}K\x00)t)t\x89}tR",
    "no arguments": b"ctorch._utils\n_rebuild_tensor_v2\n)R",
    "a call": b"cos\nsystem\nX\x02\x00\x00\x00id\x85R",
    "a call below a tensor": b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\n)}tR]cos\nf\n)Ra",
    "a second description": b"(" + tensor() + tensor().replace(b"FloatStorage", b"IntStorage") + b"t",
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_lies_are_refused_when_opened(tmp_path: Path, name: str) -> None:
    path = torch_zip(tmp_path / "a.pt", LIES[name] + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError) as caught:
        CONTAINER.open(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
    assert str(path) in str(caught.value.place)


def test_an_expansion_of_ordinary_size_is_read(tmp_path: Path) -> None:
    path = torch_zip(
        tmp_path / "a.pt", tensor(size=(3, 4), stride=(0, 1)) + b".", np.arange(4, dtype="<f4").tobytes()
    )
    with CONTAINER.open(path) as checkpoint:
        assert checkpoint.tree.read().tolist() == [[0, 1, 2, 3]] * 3


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    command = f"touch {canary}".encode()
    payload = b"}X\x01\x00\x00\x00wcos\nsystem\nX" + struct.pack("<I", len(command)) + command + b"\x85Rs."
    legacy = tmp_path / "legacy.pt"
    legacy.write_bytes(
        b"".join(pickle.dumps(x, 2) for x in [LEGACY_MAGIC, 1001, None]) + payload + pickle.dumps([], 2)
    )
    for path in (torch_zip(tmp_path / "a.pt", payload), legacy):
        assert CONTAINER.detect(path) is not None
        with pytest.raises(RefusedError, match=r"os\.system"):
            CONTAINER.open(path)
        assert not canary.exists()


def test_big_endian_values(tmp_path: Path) -> None:
    values = np.arange(4, dtype=">f4")
    path = torch_zip(tmp_path / "a.pt", tensor() + b".", values.tobytes(), byteorder=b"big")
    with CONTAINER.open(path) as checkpoint:
        assert checkpoint.meta["byteorder"] == "big"
        assert checkpoint.tree.read().tolist() == [0, 1, 2, 3]
        assert checkpoint.tree.read().dtype.isnative
    path = torch_zip(tmp_path / "b.pt", tensor() + b".", values.tobytes(), byteorder=b"middle")
    with pytest.raises(FormatError, match="byte order"):
        CONTAINER.open(path)


@pytest.mark.parametrize("kind", ["BFloat16Storage", "ComplexDoubleStorage", "LongStorage", "BoolStorage"])
def test_big_endian_of_every_width(tmp_path: Path, kind: str) -> None:
    names = {
        "BFloat16Storage": "bfloat16",
        "ComplexDoubleStorage": "complex128",
        "LongStorage": "int64",
        "BoolStorage": "bool",
    }
    values = np.arange(4).astype(DTYPES[names[kind]])
    part = values.dtype.itemsize // (2 if values.dtype.kind == "c" else 1)
    swapped = values.view(f"u{part}").byteswap().tobytes()
    path = torch_zip(
        tmp_path / "a.pt", tensor().replace(b"FloatStorage", kind.encode()) + b".", swapped, byteorder=b"big"
    )
    with CONTAINER.open(path) as checkpoint:
        assert checkpoint.tree.read().tobytes() == values.tobytes()


def test_bytes_that_are_no_bool_become_true(tmp_path: Path) -> None:
    path = torch_zip(
        tmp_path / "a.pt", tensor().replace(b"FloatStorage", b"BoolStorage") + b".", bytes([0, 1, 2, 255])
    )
    with CONTAINER.open(path) as checkpoint:
        assert checkpoint.tree.read().view(np.uint8).tolist() == [0, 1, 1, 1]


def zip_attacks(path: Path) -> Iterator[tuple[str, bytes]]:
    good = torch_zip(path, tensor() + b".").read_bytes()
    yield "something before it", b"#!/bin/sh\n" + good
    yield "something behind it", good + b"\n"
    yield "a comment", good[:-2] + b"\x05\x00hello"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", tensor() + b".")
        archive.writestr("a/data/0", bytes(2**20))
    yield "deflated", path.read_bytes()
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", tensor() + b".")
        archive.writestr("a/data/0", bytes(16))
        archive.writestr("a/data/0", bytes(16))
    yield "two of one name", path.read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", tensor() + b".")
        archive.writestr("b/data.pkl", tensor() + b".")
        archive.writestr("a/data/0", bytes(16))
    yield "two roots", path.read_bytes()
    directory = good.index(b"PK\x01\x02")
    second = good.index(b"PK\x01\x02", directory + 1)
    header = struct.unpack_from("<I", good, second + 42)[0]
    yield "overlapping", good[: second + 42] + struct.pack("<I", 0) + good[second + 46 :]
    size = struct.pack("<II", 10**6, 10**6)
    yield "a member beyond the file", good[: second + 20] + size + good[second + 28 :]
    yield "a member over the next", good[: second + 20] + struct.pack("<II", 100, 100) + good[second + 28 :]
    yield "encrypted", good[: second + 8] + b"\x01" + good[second + 9 :]
    yield "another name in its header", good[: header + 30] + b"x" + good[header + 31 :]
    yield "an inflated size", good[: second + 24] + struct.pack("<I", 2**31) + good[second + 28 :]
    end = good.rindex(b"PK\x05\x06")
    yield "too many entries", good[: end + 8] + b"\xff\xff\xff\xff" + good[end + 12 :]
    yield "too few entries", good[: end + 8] + b"\x01\x00\x01\x00" + good[end + 12 :]
    yield "another disk", good[: end + 4] + b"\x01" + good[end + 5 :]
    yield "a directory elsewhere", good[: end + 16] + struct.pack("<I", 7) + good[end + 20 :]
    yield "a size without its zip64 field", good[: second + 24] + b"\xff\xff\xff\xff" + good[second + 28 :]


def test_zip_tricks_are_refused(tmp_path: Path) -> None:
    for name, data in zip_attacks(tmp_path / "a.pt"):
        path = tmp_path / "attack.pt"
        path.write_bytes(data)
        with pytest.raises(FormatError):
            CONTAINER.open(path)
            raise AssertionError(name)


def test_legacy_lies_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(legacy_bytes(["0"], [4]))
    assert read_all(path) == {"": bytes(16)}
    lies = {
        "another count": legacy_bytes(["0"], [5]),
        "a negative count": legacy_bytes(["0"], [-4]),
        "an absurd count": legacy_bytes(["0"], [2**61]),
        "another key": legacy_bytes(["1"], [4]),
        "a key twice": legacy_bytes(["0", "0"], [4, 4]),
        "no keys": legacy_bytes([], []),
        "no data": legacy_bytes(["0"], [4], b""),
        "another protocol": legacy_bytes(["0"], [4]).replace(struct.pack("<H", 1001), struct.pack("<H", 1002), 1),
        "a view beyond": legacy_bytes(["0"], [4], pickled=tensor().replace(b"tQ", b"(U\x01vK\x02K\x03ttQ") + b"."),
    }  # fmt: skip
    for name, data in lies.items():
        path.write_bytes(data)
        with pytest.raises(FormatError):
            CONTAINER.open(path)
            raise AssertionError(name)


def test_legacy_views_and_trailing_bytes(tmp_path: Path) -> None:
    view = tensor(size=(2,)).replace(b"tQ", b"(X\x01\x00\x00\x00vK\x01K\x02ttQ") + b"."
    path = tmp_path / "a.pt"
    path.write_bytes(legacy_bytes(["0"], [4], np.arange(4, dtype="<f4").tobytes(), view) + b"rest")
    with CONTAINER.open(path) as checkpoint:
        assert checkpoint.tree.read().tolist() == [1, 2]
        assert "4 bytes stand behind" in checkpoint.findings[0].what


def test_a_legacy_pickle_beyond_what_may_be_held_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(legacy_bytes(["0"], [4]))
    monkeypatch.setattr(torch_reader, "WINDOW", 10)
    with pytest.raises(BudgetError, match="more than this job may hold"):
        CONTAINER.open(path, budget=Budget(Limits(100)))
    assert read_all(path) == {"": bytes(16)}


@pytest.mark.torch
def test_a_legacy_file_with_a_long_pickle(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "a.pt"
    torch.save(
        {"w": torch.arange(3.0), "long": list(range(500_000))}, path, _use_new_zipfile_serialization=False
    )
    with CONTAINER.open(path) as checkpoint:
        assert checkpoint.tensors["w"].read().tolist() == [0, 1, 2]
        assert len(checkpoint.tree["long"]) == 500_000


@pytest.fixture(params=["zip", "legacy", "ours"])
def sound(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "sound.pt"
    if request.param == "legacy":
        path.write_bytes(legacy_bytes(["0"], [4], np.arange(4, dtype="<f4").tobytes()))
    elif request.param == "zip":
        torch_zip(path, tensor() + b".", np.arange(4, dtype="<f4").tobytes())
    else:
        save(path, {"w": in_memory(np.arange(4.0)), "v": in_memory(np.arange(3, dtype=np.int8)), "lr": 0.1})
    return path


def test_every_truncation_is_noticed(sound: Path, tmp_path: Path) -> None:
    data, path = sound.read_bytes(), tmp_path / "cut.pt"
    for end in sorted({*range(0, len(data), max(1, len(data) // 50)), len(data) - 1}):
        path.write_bytes(data[:end])
        CONTAINER.detect(path)
        with pytest.raises(FormatError):
            CONTAINER.open(path)


def flips(data: bytes, step: int) -> Iterator[bytes]:
    for i in range(0, len(data), step):
        yield data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :]


@pytest.mark.parametrize("kind", ["torch", "ours"])
@pytest.mark.torch
def test_every_flipped_bit_is_noticed_or_harmless(kind: str, tmp_path: Path) -> None:
    import torch

    path = tmp_path / "a.pt"
    if kind == "torch":
        torch.save({"w": torch.arange(40.0), "v": torch.arange(7)}, path)
    else:
        save(path, {"w": in_memory(np.arange(40.0)), "v": in_memory(np.arange(7))})
    expected, data = read_all(path), path.read_bytes()
    noticed = 0
    for broken in flips(data, 1):
        path.write_bytes(broken)
        try:
            assert read_all(path) == expected  # padding, dates, copies of numbers that aren't used
        except FormatError:
            noticed += 1
    assert noticed > len(data) // 3


def test_flips_of_values_are_caught_by_the_checksum(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(64).astype(np.float32).tobytes()
    path = torch_zip(tmp_path / "a.pt", tensor(64, size=(64,)) + b".", values)
    data = path.read_bytes()
    at = data.index(values)
    for i in range(len(values)):
        path.write_bytes(data[: at + i] + bytes([data[at + i] ^ 1 << i % 8]) + data[at + i + 1 :])
        with CONTAINER.open(path) as checkpoint:
            with pytest.raises(CorruptError, match="checksum"):
                checkpoint.tree.read()
            with pytest.raises(CorruptError, match="checksum"):
                checkpoint.tree.read((slice(0, 1),))  # a part is no excuse, nor is a second try


def test_the_checksum_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = torch_zip(tmp_path / "a.pt", tensor() + b".")
    seen: list[int] = []
    real = crc32

    def counting(data: bytes, start: int = 0) -> int:
        seen.append(len(data))
        return real(data, start)

    with CONTAINER.open(path) as checkpoint:
        monkeypatch.setattr(zip_archive, "crc32", counting)
        for _ in range(3):
            checkpoint.tree.read((slice(0, 2),))
    assert seen == [16]


def test_a_huge_pickle_is_refused_by_its_size(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "a.pt", tensor() + b"X" + struct.pack("<I", 10_000) + b"x" * 10_000 + b"0.")
    with CONTAINER.open(path):
        pass
    with pytest.raises(BudgetError, match="The pickle of a torch file is more than"):
        CONTAINER.open(path, budget=Budget(Limits(10_000)))


def test_a_tensor_read_after_closing_says_so(tmp_path: Path) -> None:
    with CONTAINER.open(torch_zip(tmp_path / "a.pt", tensor() + b".")) as checkpoint:
        pass
    with pytest.raises(UsageError, match="closed"):
        checkpoint.tree.read()
