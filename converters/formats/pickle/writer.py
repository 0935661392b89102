"""Writes trees as pickles of protocol 4, byte for byte as CPython's `pickle.dumps` would write the objects.

A tensor becomes what the caller says; large ones are streamed. What is one object in the tree (a text, a dict, a list,
a tuple, a Record) is written once, and one again when it is read.
Source: CPython, Modules/_pickle.c, `save`, `_Pickler_OpcodeBoundary`, `_Pickler_write_bytes`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

from statekit.errors import UsageError
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Path, Record, Tree

FRAME_BYTES = 64 * 1024
"""From here on a frame is closed, and bytes are written outside of frames."""
BATCH = 1000
"""Items of a dict or list that one opcode takes."""
MAX_LONG_BYTES = 255

Blocks: TypeAlias = Callable[[], Iterable[bytes | memoryview]]


@dataclass(frozen=True)
class Name:
    """A class or function, by module and name."""

    module: str
    name: str


@dataclass(frozen=True)
class Called:
    """The result of a call, and the state that it is then given; None for none."""

    callee: Name
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True)
class LongBytes:
    """A byte string that is streamed: its size, and what gives its bytes."""

    size: int
    blocks: Blocks


Reduce: TypeAlias = Callable[[Path, Tensor], Called]
"""Says how a tensor, which lies at a path of the tree, is made."""


def write_pickle(tree: Tree, file: BinaryIO, reduce: Reduce) -> None:
    """Writes a tree as a pickle.

    A Record is written as an object made without calling its class: dotted name, arguments, state.

    Raises:
        UsageError: The tree holds something that isn't plain.
    """
    pickler = _Pickler(file, reduce)
    pickler.save((), tree)
    pickler.finish()


class _Pickler:
    """Writes opcodes into frames. One call per level, as CPython's does: trees have at most 512."""

    def __init__(self, file: BinaryIO, reduce: Reduce) -> None:
        self._file, self._reduce = file, reduce
        self._frame = bytearray()
        self._memo: dict[Any, int] = {}
        self._alive: list[Any] = []  # what the memo knows by its id must not be replaced by another object
        file.write(b"\x80\x04")

    def save(self, path: Path, node: Any) -> None:
        """Writes a value, or where it was written before."""
        if len(self._frame) >= FRAME_BYTES:
            self._close()
        key = _key(node)
        if key is not None and key in self._memo:
            self._get(self._memo[key])
        elif isinstance(node, Mapping):
            self._frame += b"}"
            self._remember(node)
            self._items(b"s", b"u", [((*path, k), (k, v)) for k, v in node.items()], len(node) == 1)
        elif isinstance(node, list):
            self._frame += b"]"
            self._remember(node)
            self._items(b"a", b"e", [((*path, i), (v,)) for i, v in enumerate(node)], len(node) == 1)
        elif isinstance(node, tuple):
            self._tuple(path, node)
        elif isinstance(node, Record):
            module, _, name = node.name.rpartition(".")
            self._new(path, node, Name(module, name))
        elif isinstance(node, Tensor):
            self.save(path, self._reduce(path, node))
        elif isinstance(node, Called):
            self._called(path, node)
        elif isinstance(node, Name):
            self.save(path, node.module)
            self.save(path, node.name)
            self._frame += b"\x93"
            self._remember(node)
        else:
            self._leaf(path, node)

    def finish(self) -> None:
        """Ends the pickle."""
        self._frame += b"."
        self._close()

    def _close(self) -> None:
        if len(self._frame) >= 4:
            self._file.write(b"\x95" + struct.pack("<Q", len(self._frame)))
        self._file.write(self._frame)
        self._frame = bytearray()

    def _remember(self, node: Any) -> None:
        self._memo[_key(node)] = len(self._memo)
        self._alive.append(node)
        self._frame += b"\x94"

    def _get(self, index: int) -> None:
        self._frame += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)

    def _items(
        self, single_op: bytes, many: bytes, items: Sequence[tuple[Path, tuple[Any, ...]]], single: bool
    ) -> None:
        starts = range(0, len(items) + (many == b"u"), BATCH) if items else ()
        for start in starts:  # a dict of exactly 1000 items is followed by none, once more
            self._frame += b"" if single else b"("
            for path, parts in items[start : start + BATCH]:
                for part in parts:
                    self.save(path, part)
            self._frame += single_op if single else many
            if single:
                return

    def _tuple(self, path: Path, node: tuple[Any, ...]) -> None:
        if not node:
            self._frame += b")"
            return
        self._frame += b"" if len(node) <= 3 else b"("
        for i, part in enumerate(node):
            self.save((*path, i), part)
        self._frame += {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(node), b"t")
        self._remember(node)

    def _new(self, path: Path, node: Record, cls: Name) -> None:
        self.save(path, cls)
        self.save((*path, "args"), node.args)
        self._frame += b"\x81"
        self._remember(node)
        if node.state is not None:
            self.save((*path, "state"), node.state)
            self._frame += b"b"

    def _called(self, path: Path, node: Called) -> None:
        self.save(path, node.callee)
        self.save(path, node.args)
        self._frame += b"R"
        self._remember(node)
        if node.state is not None:
            self.save(path, node.state)
            self._frame += b"b"

    def _leaf(self, path: Path, node: Any) -> None:
        if node is None:
            self._frame += b"N"
        elif isinstance(node, bool):
            self._frame += b"\x88" if node else b"\x89"
        elif isinstance(node, int):
            self._int(path, node)
        elif isinstance(node, float):
            self._frame += b"G" + struct.pack(">d", node)
        elif isinstance(node, str):
            raw = node.encode("utf-8", "surrogatepass")
            self._long(_sized(b"\x8c", b"X", b"\x8d", len(raw)), len(raw), [raw])
            self._remember(node)
        elif isinstance(node, bytes):
            self._long(_sized(b"C", b"B", b"\x8e", len(node)), len(node), [node])
            self._remember(node)
        elif isinstance(node, LongBytes):
            self._long(_sized(b"C", b"B", b"\x8e", node.size), node.size, node.blocks())
            self._remember(node)
        else:
            raise UsageError(
                "A pickle can't hold this.",
                place="/".join(map(str, path)),
                expected="dicts, lists, tuples, numbers, text, bytes, records and tensors",
                found=type(node).__name__,
            )

    def _long(self, head: bytes, size: int, blocks: Iterable[bytes | memoryview]) -> None:
        if size < FRAME_BYTES:
            self._frame += head
            for block in blocks:
                self._frame += block
            return
        self._close()
        self._file.write(head)
        for block in blocks:
            self._file.write(block)

    def _int(self, path: Path, value: int) -> None:
        if 0 <= value < 2**8:
            self._frame += b"K" + bytes([value])
        elif 0 <= value < 2**16:
            self._frame += b"M" + struct.pack("<H", value)
        elif -(2**31) <= value < 2**31:
            self._frame += b"J" + struct.pack("<i", value)
        else:
            raw = value.to_bytes(
                (value if value >= 0 else ~value).bit_length() // 8 + 1, "little", signed=True
            )
            if len(raw) > MAX_LONG_BYTES:
                place = "/".join(map(str, path))
                raise UsageError("An integer is too large.", place=place, found=f"{value.bit_length()} bits")
            self._frame += b"\x8a" + bytes([len(raw)]) + raw


def _key(node: Any) -> Any:
    """Returns by what the memo knows a value: its identity, names themselves; None for what isn't remembered."""
    if isinstance(node, Name):
        return node
    plain = node is None or isinstance(node, (bool, int, float, Tensor)) or node == ()
    return None if plain else id(node)


def _sized(short: bytes, middle: bytes, long: bytes, size: int) -> bytes:
    if size < 2**8:
        return short + bytes([size])
    return middle + struct.pack("<I", size) if size < 2**32 else long + struct.pack("<Q", size)
