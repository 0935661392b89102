"""OCDBT databases are walked before tensorstore reads them: honest ones pass, and lies end in a typed error."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
import tensorstore
import zstandard

from statekit.budget import Budget, Limits
from statekit.converters.formats.crc import crc32c
from statekit.converters.formats.tensor_bundle.table import to_varint
from statekit.converters.formats.zarr.ocdbt import check_database
from statekit.converters.formats.zarr.stores import OcdbtStore
from statekit.errors import BudgetError, CorruptError, FormatError, RefusedError, StatekitError
from statekit.files.source import opening

FILE = b"d/0"
MANIFEST, NODE = b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde"
LEAF = b"\x00" + b"\x00" + b"\x00"


def checked(folder: Path, limit: int = 2**22) -> None:
    budget = Budget(Limits(limit))
    with opening(folder, budget) as files:
        check_database(folder, files)
        files.close()


def record(magic: bytes, payload: bytes, compressed: bool = False) -> bytes:
    if compressed:
        payload = zstandard.ZstdCompressor().compress(payload)
    data = magic + struct.pack("<Q", len(payload) + 18) + bytes((0, compressed)) + payload
    return data + struct.pack("<I", crc32c(data))


def columns(*numbers: int) -> bytes:
    return b"".join(map(to_varint, numbers))


def manifest(length: int, height: int = 0, file: bytes = FILE) -> bytes:
    """Returns the payload of a manifest with one version, whose root is at the start of a file."""
    config = bytes(16) + columns(0, 100, 2**23) + b"\x04" + columns(0)
    files = columns(1, len(file), 0) + file
    return config + files + columns(1, 7) + bytes([height]) + columns(0, 0, length)


def interior(height: int, *children: tuple[int, int]) -> bytes:
    """Returns the payload of a node with children at these places of the file."""
    files = columns(1, len(FILE), 0) + FILE
    count = len(children)
    keys = columns(count, *[0] * (count - 1), *[1] * count, *[0] * count) + b"abcdefgh"[:count]
    places = columns(*[0] * count, *(start for start, _ in children), *(size for _, size in children))
    return bytes([height]) + files + keys + places


def database(folder: Path, root: bytes, node: bytes) -> Path:
    (folder / "d").mkdir(parents=True)
    (folder / "manifest.ocdbt").write_bytes(root)
    (folder / "d" / "0").write_bytes(node)
    return folder


@pytest.mark.parametrize("compression", [None, {"id": "zstd"}])
def test_databases_of_tensorstore_pass(compression: object, tmp_path: Path) -> None:
    config = {"compression": compression, "max_inline_value_bytes": 4, "max_decoded_node_bytes": 300}
    base = {"driver": "file", "path": f"{tmp_path}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base, "config": config}).result()
    for number in range(60):
        store.write(f"params.layers.{number}/.zarray", b"0123456789" * number).result()
    checked(tmp_path)
    nodes = [file for file in (tmp_path / "d").iterdir() if NODE in file.read_bytes()]
    newest = max(nodes, key=lambda file: file.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(StatekitError):
        checked(tmp_path)


def test_a_tree_that_leads_back_to_itself_ends(tmp_path: Path) -> None:
    leaf = record(NODE, LEAF)
    size = len(record(NODE, interior(1, (0, 99), (0, 99))))
    node = record(NODE, interior(1, (size, len(leaf)), (size, len(leaf))))
    checked(database(tmp_path / "a", record(MANIFEST, manifest(size, 1)), node + leaf))
    loop = record(NODE, interior(1, (0, size), (0, size)))
    with pytest.raises(FormatError, match="another height"):
        checked(database(tmp_path / "b", record(MANIFEST, manifest(size, 1)), loop))


@pytest.mark.parametrize("of", ["manifest", "node"])
def test_a_small_record_that_becomes_large_takes_no_memory(of: str, tmp_path: Path) -> None:
    """It took 6 GB and more; tensorstore ended the process."""
    lists = columns(2**28) + bytes(2**23)
    if of == "manifest":
        bomb = record(MANIFEST, bytes(16) + columns(0, 100, 2**23) + b"\x04\x00" + lists, True)
        folder = database(tmp_path / "a", bomb, b"")
    else:
        bomb = record(NODE, b"\x00" + lists, True)
        folder = database(tmp_path / "a", record(MANIFEST, manifest(len(bomb))), bomb)
    assert len(bomb) < 2000
    with pytest.raises(BudgetError, match="more than this job may hold"):
        checked(folder)
    with pytest.raises(FormatError, match="lists more files than it has bytes"):
        checked(folder, 2**26)


@pytest.mark.parametrize("name", [b"../0", b"d/../../0", b"/d/0", b"", b"d\\0", b"d/\x000"])
def test_a_file_outside_the_database_is_refused(name: bytes, tmp_path: Path) -> None:
    root = record(MANIFEST, manifest(len(record(NODE, LEAF)), file=name))
    with pytest.raises(RefusedError, match="outside its own folder"):
        checked(database(tmp_path / "a", root, record(NODE, LEAF)))
    with opening(tmp_path / "a", None) as files, pytest.raises(RefusedError, match="outside its own folder"):
        OcdbtStore.of(tmp_path / "a", files)


def test_damage_is_typed(tmp_path: Path) -> None:
    root, leaf = record(MANIFEST, manifest(len(record(NODE, LEAF)))), record(NODE, LEAF)
    folder = database(tmp_path / "a", root, leaf)
    checked(folder)
    for place, good in ((folder / "manifest.ocdbt", root), (folder / "d" / "0", leaf)):
        for at in range(len(good)):
            place.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with pytest.raises(CorruptError):
                checked(folder)
            body = good[14:-4]
            if 0 <= at - 14 < len(body):
                place.write_bytes(record(good[:4], body[: at - 14] + b"\xff" + body[at - 13 :]))
                with contextlib.suppress(StatekitError):
                    checked(folder)
        place.write_bytes(good)
    checked(folder)
