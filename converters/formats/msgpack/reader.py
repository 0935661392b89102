"""Reads a Flax msgpack file without reading its arrays: one pass that skips their bytes and keeps their places.

Source: msgpack/msgpack spec.md; google/flax flax/serialization.py, `_msgpack_ext_pack`, `_chunk`, `_unchunk`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from statekit.budget import NODE_BYTES, Account
from statekit.converters.formats.storage import checked_shape, dense
from statekit.errors import CorruptError, FormatError, RefusedError
from statekit.files.source import Part, Source, bring_scattered, byte_of, bytes_at, filled, hold, require
from statekit.tensors.tensor import Array, DType, Shape, Stored, dtype_named, in_memory
from statekit.tensors.tree import MAX_DEPTH, MAX_NAME_BYTES

CHUNKED = "__msgpack_chunked_array__"
"""The key that marks an array cut into pieces because msgpack can't hold it at once."""

_WINDOWS = (2**12, 2**18)
_COUNTED = 1024
"""Values that are read before the budget is asked again."""
_ARRAY_NODES = 8
"""Values of a tree that an array counts for, with the tensor that it becomes."""
_MAX_ARRAY_HEADER = 4096
"""Bytes in which shape and dtype of an array stand: 64 axes of 9 each, and a name. Source: NumPy 2, `NPY_MAXDIMS`."""

_SCALARS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_SIZED = {
    0xC4: ("bin", ">B"), 0xC5: ("bin", ">H"), 0xC6: ("bin", ">I"),
    0xC7: ("ext", ">B"), 0xC8: ("ext", ">H"), 0xC9: ("ext", ">I"),
    0xD9: ("str", ">B"), 0xDA: ("str", ">H"), 0xDB: ("str", ">I"),
    0xDC: ("array", ">H"), 0xDD: ("array", ">I"), 0xDE: ("map", ">H"), 0xDF: ("map", ">I"),
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


@dataclass(frozen=True, slots=True)
class Inline:
    """An array whose values lie in the file; `scalar` if it was one of NumPy's scalars."""

    shape: Shape
    dtype: DType
    data: Source
    scalar: bool = False

    def tensor(self, name: str) -> Stored:
        """Returns it as a tensor of that name."""
        data = self.data
        return dense(name, data.place, self.dtype, self.shape, data.size, data.read)


@dataclass(frozen=True)
class _Joined:
    """Several sources, one after the other, as one."""

    parts: Sequence[Source]

    @property
    def place(self) -> str:
        return self.parts[0].place

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def read_into(self, start: int, into: memoryview) -> None:
        require(self, start, len(into))
        begin = 0
        for part in self.parts:
            low, high = max(start, begin), min(start + len(into), begin + part.size)
            if low < high:
                part.read_into(low - begin, into[low - start : high - start])
            begin += part.size

    def read(self, start: int, count: int) -> Array:
        return filled(self, start, count)

    @property
    def account(self) -> Account:
        return self.parts[0].account


class _Cursor:
    """Walks over a value's bytes through a window, which is small after a jump and grows while nothing is skipped."""

    def __init__(self, value: Source) -> None:
        self.value, self.position = value, 0
        self._window, self._start, self._size = b"", 0, _WINDOWS[0]

    def take(self, count: int) -> bytes:
        low = self.position - self._start
        if low + count > len(self._window):
            self.need(count)
            self._size = min(2 * self._size, _WINDOWS[1]) if low <= len(self._window) else _WINDOWS[0]
            size = min(max(count, self._size), self.value.size - self.position)
            self._window, self._start, low = bytes_at(self.value, self.position, size), self.position, 0
        self.position += count
        return self._window[low : low + count]

    def skip(self, count: int) -> None:
        self.need(count)
        self.position += count

    def need(self, count: int) -> None:
        require(self.value, self.position, count)


def parse(value: Source) -> Any:
    """Parses a msgpack file into dicts, lists and scalars, with `Inline` where an array lies.

    Raises:
        CorruptError: It ends too early or too late, or an array's bytes don't fit its shape.
        BudgetError: It has more values or text than the job may hold.
        RefusedError: It is too deep.
        FormatError: It isn't what Flax writes.
    """
    bring_scattered(value)
    cursor = _Cursor(value)
    parser = _Parser(cursor)
    tree = parser.tree()
    parser.settle()
    if cursor.position != value.size:
        raise CorruptError(
            "Bytes follow the end of the data.",
            place=value.place,
            expected=f"{cursor.position} bytes",
            found=f"{value.size} bytes",
        )
    return tree


def parse_stream(value: Source) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the records of a stream: the keys of a leaf, and what `flax.serialization.to_bytes` made of it.

    Each record is an array of two, the keys and bytes, and one follows the other to the end of the file.

    Raises:
        As `parse`.

    Source: young-geng/EasyLM EasyLM/checkpoint.py, `StreamingCheckpointer.save_train_state_to_file`.
    """
    bring_scattered(value)
    cursor = _Cursor(value)
    parser = _Parser(cursor)
    while cursor.position < value.size:
        start = cursor.position
        keys = parser.tree() if parser.token() == ("array", 2) else None
        kind, size = parser.head()
        if not isinstance(keys, list) or not keys or kind != "bin":
            raise FormatError(
                "A record of a msgpack stream isn't a leaf's keys and its bytes.",
                place=byte_of(value, start),
                expected="[[key, ...], bytes]",
            )
        cursor.need(size)
        yield tuple(parser.keys(keys)), parse(Part(value, cursor.position, size))
        cursor.skip(size)
    parser.settle()


class _Frame:
    """A map or array that is being filled."""

    def __init__(self, node: dict[Any, Any] | list[Any], left: int) -> None:
        self.node, self.left, self.key = node, left, None


_MISSING = object()


class _Parser:
    def __init__(self, cursor: _Cursor) -> None:
        self._cursor, self._nodes = cursor, 0

    def tree(self) -> Any:
        """Reads one object with everything in it, without recursion."""
        stack: list[_Frame] = []
        while True:
            item = self._item(stack)
            while item is not _MISSING:  # hand a finished item to its parent, which may be finished by that
                if not stack:
                    return item
                frame = stack[-1]
                if not self._put(frame, item):
                    break
                stack.pop()
                item = self._finished(frame.node)

    def _item(self, stack: list[_Frame]) -> Any:
        """Reads a scalar, or opens a map or array and returns `_MISSING`."""
        kind, value = self.token()
        if kind not in ("map", "array"):
            return value
        self._cursor.need(value * (2 if kind == "map" else 1))
        if len(stack) >= MAX_DEPTH:
            raise RefusedError(
                "A msgpack file is too deep to be a checkpoint.",
                place=byte_of(self._cursor.value, self._cursor.position),
                expected=f"at most {MAX_DEPTH} levels",
            )
        if value == 0:
            return {} if kind == "map" else []
        stack.append(_Frame({} if kind == "map" else [], value))
        return _MISSING

    def _put(self, frame: _Frame, item: Any) -> bool:
        """Adds an item; True if that was the last one."""
        if isinstance(frame.node, list):
            frame.node.append(item)
        elif frame.key is None:
            frame.key = self._key(item, frame.node)
            return False
        else:
            frame.node[frame.key], frame.key = item, None
        frame.left -= 1
        return frame.left == 0

    def _key(self, key: Any, node: dict[Any, Any]) -> Any:
        if isinstance(key, bytes):
            key = _text(key, self._cursor)
        if type(key) not in (str, int) or key in node or len(str(key)) > MAX_NAME_BYTES:
            raise FormatError(
                "A map has a key that can't be used.",
                place=byte_of(self._cursor.value, self._cursor.position),
                expected=f"different names of at most {MAX_NAME_BYTES} characters",
                found=repr(key)[:200],
            )
        return key

    def _finished(self, node: dict[Any, Any] | list[Any]) -> Any:
        return (
            _unchunked(node, self._cursor) if isinstance(node, dict) and node.get(CHUNKED) is True else node
        )

    def keys(self, items: list[Any]) -> list[Any]:
        """Returns items as the keys of a tree."""
        return [self._key(item, {}) for item in items]

    def head(self) -> tuple[str, int]:
        """Reads the head of what has bytes, and leaves these where they are."""
        kind, form = _SIZED.get(self._cursor.take(1)[0], ("", "B"))
        return kind, struct.unpack(form, self._cursor.take(struct.calcsize(form)))[0]

    def settle(self) -> None:
        """Asks the budget for the values since last time."""
        value, count = self._cursor.value, self._nodes
        self._nodes = 0
        value.account.nodes(count, "A msgpack file", byte_of(value, self._cursor.position))

    def token(self) -> tuple[str, Any]:
        """Reads one head: a scalar in full, an array skipped, or the length of a map or array."""
        self._nodes += 1
        if self._nodes >= _COUNTED:
            self.settle()
        head = self._cursor.take(1)[0]
        if head < 0x80:
            return "int", head
        if head < 0x90:
            return "map", head & 15
        if head < 0xA0:
            return "array", head & 15
        if head < 0xC0:
            return "str", self._string(head & 31)
        if head >= 0xE0:
            return "int", head - 256
        if head in _CONSTANTS:
            return "constant", _CONSTANTS[head]
        if head in _SCALARS:
            form = _SCALARS[head]
            return "number", struct.unpack(form, self._cursor.take(struct.calcsize(form)))[0]
        if 0xD4 <= head <= 0xD8:
            return "ext", self._extension(1 << (head - 0xD4))
        if head not in _SIZED:
            raise FormatError(
                "A byte isn't msgpack.",
                place=byte_of(self._cursor.value, self._cursor.position - 1),
                found=hex(head),
            )
        kind, form = _SIZED[head]
        size = struct.unpack(form, self._cursor.take(struct.calcsize(form)))[0]
        if kind in ("str", "bin"):
            return kind, self._string(size) if kind == "str" else self._bytes(size)
        return (kind, self._extension(size)) if kind == "ext" else (kind, size)

    def _bytes(self, size: int) -> bytes:
        if size > _WINDOWS[0]:  # twice: as bytes, and as text of up to four bytes for each
            self._cursor.need(size)
            hold(self._cursor.value, self._cursor.position, 5 * size, "A text in a msgpack file")
        else:
            self._nodes += size // NODE_BYTES
        return self._cursor.take(size)

    def _string(self, size: int) -> str:
        return _text(self._bytes(size), self._cursor)

    def _extension(self, size: int) -> Any:
        """Reads an array's head and skips its values."""
        cursor = self._cursor
        code = cursor.take(1)[0]
        start = cursor.position
        cursor.need(size)
        if code not in (1, 2, 3):
            raise FormatError(
                "A msgpack extension is not Flax'.",
                place=byte_of(cursor.value, start),
                expected="1 (array), 2 (complex number), 3 (scalar)",
                found=code,
            )
        if code == 2:
            return _complex(Part(cursor.value, start, size), cursor, size)
        self._nodes += _ARRAY_NODES
        array = _array(Part(cursor.value, start, size))
        cursor.skip(size)
        return replace(array, scalar=code == 3)


def _array(value: Source) -> Inline:
    """Reads `[shape, dtype, bytes]`, which must fill its value."""
    cursor = _Cursor(Part(value, 0, min(value.size, _MAX_ARRAY_HEADER)))
    heads = _Parser(cursor)
    place = value.place
    kind, count = heads.token()
    shape_kind, rank = heads.token()
    if (kind, count) != ("array", 3) or shape_kind != "array" or rank > _MAX_ARRAY_HEADER:
        raise FormatError("An inline array isn't [shape, dtype, bytes].", place=place)
    axes = [heads.token() for _ in range(rank)]
    shape = checked_shape([n if kind in ("int", "number") else kind for kind, n in axes], place)
    _, name = heads.token()
    dtype = dtype_named(_text(name, cursor) if isinstance(name, bytes) else name, place)
    head = cursor.take(1)[0]
    kind, form = _SIZED.get(head, ("", ""))
    if kind != "bin":
        raise FormatError("An inline array has no bytes.", place=place, found=hex(head))
    size = struct.unpack(form, cursor.take(struct.calcsize(form)))[0]
    if cursor.position + size != value.size or size != math.prod(shape) * dtype.itemsize:
        raise CorruptError(
            "An inline array's bytes don't fit its shape.",
            place=place,
            expected=f"{math.prod(shape) * dtype.itemsize} bytes for {dtype} {shape}",
            found=f"{size} bytes in {value.size - cursor.position}",
        )
    return Inline(shape, dtype, Part(value, cursor.position, size))


def _complex(value: Source, cursor: _Cursor, size: int) -> Stored:
    numbers = _Parser(_Cursor(value)).tree()
    cursor.skip(size)
    if (
        not isinstance(numbers, list)
        or len(numbers) != 2
        or not all(type(n) in (int, float) for n in numbers)
    ):
        raise FormatError("An inline complex number isn't two numbers.", place=value.place)
    return in_memory(np.asarray(complex(*numbers)), place=value.place)


def _unchunked(node: dict[Any, Any], cursor: _Cursor) -> Inline:
    """Joins an array that was cut because it is larger than 2^30 bytes."""
    shapes, chunks = node.get("shape"), node.get("chunks")
    place = byte_of(cursor.value, cursor.position)
    if not isinstance(shapes, dict) or not isinstance(chunks, dict) or not chunks:
        raise FormatError("A chunked array has no shape or no chunks.", place=place)
    try:
        shape = checked_shape([shapes[str(i)] for i in range(len(shapes))], place)
        pieces = [chunks[str(i)] for i in range(len(chunks))]
    except KeyError as error:
        raise FormatError("A chunked array misses a piece.", place=place, found=str(error)) from error
    arrays = [piece for piece in pieces if isinstance(piece, Inline)]
    dtypes = {array.dtype for array in arrays}
    if len(arrays) != len(pieces) or len(dtypes) != 1:
        raise FormatError("A chunked array's pieces aren't arrays of one dtype.", place=place)
    dtype, size = dtypes.pop(), sum(array.data.size for array in arrays)
    if size != math.prod(shape) * dtype.itemsize:
        raise CorruptError(
            "A chunked array's pieces don't fit its shape.",
            place=place,
            expected=f"{math.prod(shape) * dtype.itemsize} bytes for {dtype} {shape}",
            found=f"{size} bytes",
        )
    return Inline(shape, dtype, _Joined([array.data for array in arrays]))


def _text(data: bytes, cursor: _Cursor) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(
            "A name isn't UTF-8.", place=byte_of(cursor.value, cursor.position), found=repr(data[:80])
        ) from error
