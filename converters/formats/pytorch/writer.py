"""Writes torch files: every storage streamed first, then the pickle that describes them with the manifest in it.

The layout is that of PyTorch's own writer byte for byte where PyTorch computes offsets from it instead of reading
them (`torch.utils.serialization.config.load.calculate_storage_offsets`): storages in the pickle's order, each padded
to 64 bytes by the extra field of its header and followed by a data descriptor.
Source: caffe2/serialize/inline_container.cc, `getPadding`; miniz, `mz_zip_writer_add_mem_ex_v2`;
torch/serialization.py, `_load._get_offset`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

from statekit.converters.formats.pytorch.archive import (
    CENTRAL,
    CENTRAL_MAGIC,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    FULL16,
    FULL32,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR,
    LOCATOR_MAGIC,
)
from statekit.converters.formats.pytorch.pickling import Slot, pickle_tree
from statekit.errors import CommitError, UsageError
from statekit.files.stage import Stage
from statekit.tensors.tensor import Stored, Tensor, nbytes
from statekit.tensors.tree import Tree, tensor_names

MANIFEST_KEY = "statekit"
"""Key of the manifest in a top-level dict."""
ROOT = "archive"
ALIGNMENT = 64
WIDE_FROM = FULL32
"""Sizes and offsets from here on are written in 64 bits."""
GATHERED = 2**20
"""Bytes that are gathered before they are written."""
_DESCRIPTOR_MAGIC = 0x08074B50
_DATE = 1 << 5 | 1  # 1 January 1980: equal trees give equal bytes
_UTF8, _DESCRIPTOR = 0x0800, 0x0008


def write_torch(tree: Tree, stage: Stage) -> None:
    """Writes a tree as a torch file; the manifest goes into a top-level dict under `statekit`.

    Raises:
        UsageError: The tree holds what `torch.load(weights_only=True)` refuses, or a `statekit` of its own.
        CommitError: A tensor streams other bytes than its shape says.
    """
    if isinstance(tree, dict) and MANIFEST_KEY in tree:
        raise UsageError("The name of the manifest is taken.", place=MANIFEST_KEY, remedy="rename this key")

    def finished() -> Tree:
        manifest = json.dumps(stage.manifest(), sort_keys=True)
        return {**tree, MANIFEST_KEY: manifest} if isinstance(tree, dict) else tree

    with stage.file() as file:
        write_archive(tree, file, stage.stream, finished)


def write_archive(
    tree: Tree,
    file: BinaryIO,
    stream: Callable[[str, Tensor], Iterable[memoryview]],
    finished: Callable[[], Tree] | None = None,
) -> None:
    """Writes a tree into an open file as `torch.save` would.

    Args:
        tree: What to write, Tensors at the leaves.
        file: The new file.
        stream: Gives a tensor's bytes by its name in the tree: little-endian, C order.
        finished: Gives the tree with what is known only when all tensors have been written; no further tensors.

    Raises:
        UsageError: The tree holds what `torch.load(weights_only=True)` refuses.
        CommitError: A tensor streams other bytes than its shape says.
    """
    tensors = tensor_names(tree)
    slots = _slots(tensors)
    pickle_tree(tree, slots)  # whatever can't be written is said before gigabytes are
    writer = ZipWriter(file)
    for name, text in (("version", "3\n"), ("byteorder", "little"), (".format_version", "1")):
        writer.add(name, len(text), [text.encode()])
    writer.add(".storage_alignment", 2, [b"64"])
    written: set[str] = set()
    for name, tensor in tensors.items():
        blocks = stream(name, tensor)
        key = slots[name].key
        if key in written:  # a shared storage: streamed for its digest only
            for _ in blocks:
                pass
        else:
            writer.add(f"data/{key}", nbytes(tensor), blocks)
            written.add(key)
    pickled = pickle_tree(tree if finished is None else finished(), slots)
    writer.add("data.pkl", len(pickled), [pickled])
    writer.finish()


def _slots(tensors: dict[str, Tensor]) -> dict[str, Slot]:
    """Numbers the storages in order; tensors that read the same bytes share one, as tied weights do."""
    keys: dict[Any, str] = {}
    slots = {}
    for name, tensor in tensors.items():
        source = (tensor.fetch if isinstance(tensor, Stored) else id(tensor), tensor.shape, tensor.dtype)
        slots[name] = Slot(keys.setdefault(source, str(len(keys))), tensor.shape, tensor.dtype)
    return slots


@dataclass(frozen=True)
class ZipForm:
    """What programs that store the same members in a zip archive do differently.

    Attributes:
        root: What stands before every name.
        alignment: Bytes that members are padded to; 0 for none.
        version: The version said to be needed, where 64-bit fields aren't.
        date: The date, as a zip archive has it.
    """

    root: str
    alignment: int
    version: int
    date: int


TORCH = ZipForm(f"{ROOT}/", ALIGNMENT, 20, _DATE)


class ZipWriter:
    """Writes members one after the other without going back, so that nothing is held but a block."""

    def __init__(self, file: BinaryIO, form: ZipForm = TORCH) -> None:
        self._file, self._form = file, form
        self._pending = bytearray()
        self._at = 0
        self._directory = bytearray()
        self._count = 0

    def add(self, name: str, size: int, blocks: Iterable[bytes | memoryview]) -> None:
        """Writes one member of known size."""
        form = self._form
        raw = f"{form.root}{name}".encode()
        header_at = self._at
        wide = _wide(size, size, header_at)
        flags = _UTF8 | (_DESCRIPTOR if size else 0)
        body_at = header_at + LOCAL.size + len(raw) + len(wide)
        extra = wide + (_padding(body_at, form.alignment) if form.alignment else b"")
        version = 45 if wide else form.version
        head = LOCAL.pack(LOCAL_MAGIC, version, flags, 0, 0, form.date, 0, 0, 0, len(raw), len(extra))
        self._put(head + raw + extra)
        data_at, crc = self._at, 0
        for block in blocks:
            crc = zlib.crc32(block, crc)
            self._put(block)
        if self._at - data_at != size:
            raise CommitError(
                "A tensor gave other bytes than its shape says.",
                place=name,
                expected=f"{size} bytes",
                found=f"{self._at - data_at} bytes",
            )
        if size:
            self._put(struct.pack("<IIQQ" if wide else "<IIII", _DESCRIPTOR_MAGIC, crc, size, size))
        self._directory += CENTRAL.pack(
            CENTRAL_MAGIC, version, version, flags, 0, 0, form.date, crc, _narrow(size), _narrow(size),
            len(raw), len(wide), 0, 0, 0, 0, _narrow(header_at),
        )  # fmt: skip
        self._directory += raw + wide
        self._count += 1

    def finish(self) -> None:
        """Writes the directory, with 64-bit records where they are needed."""
        at, size = self._at, len(self._directory)
        self._put(self._directory)
        if self._count >= FULL16 or size >= WIDE_FROM or at >= WIDE_FROM:
            end_at = self._at
            self._put(
                END64.pack(END64_MAGIC, END64.size - 12, 45, 45, 0, 0, self._count, self._count, size, at)
            )
            self._put(LOCATOR.pack(LOCATOR_MAGIC, 0, end_at, 1))
        count = min(self._count, FULL16)
        self._put(END.pack(END_MAGIC, 0, 0, count, count, _narrow(size), _narrow(at), 0))
        self._file.write(self._pending)

    def _put(self, data: bytes | bytearray | memoryview) -> None:
        self._at += len(data)
        if len(self._pending) + len(data) < GATHERED:  # each write of a stage's file is a system call
            self._pending += data
        else:
            self._file.write(self._pending)
            self._file.write(data)
            self._pending = bytearray()


def _narrow(number: int) -> int:
    return FULL32 if number >= WIDE_FROM else number


def _wide(*numbers: int) -> bytes:
    """Returns the zip64 field of a header: its sizes and offset that don't fit 32 bits."""
    large = [n for n in numbers if n >= WIDE_FROM]
    return struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""


def _padding(at: int, alignment: int) -> bytes:
    count = -(at + 4) % alignment
    return struct.pack("<2sH", b"FB", count) + b"Z" * count
