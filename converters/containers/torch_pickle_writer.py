"""Writes trees as pickles of protocol 2 that `torch.load(weights_only=True)` reads."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.converters.containers.torch_names import STORAGE_DTYPES
from statekit.errors import UsageError, fault_list
from statekit.tensor import DType, Shape, Tensor
from statekit.tree import Path, Record, Tree

MAX_LONG_BYTES = 255
_CLASSES = {dtype: name for name, dtype in STORAGE_DTYPES.items() if name[0] not in "QU_"}


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in the file: its storage's key, and what it is of it (all, in C order)."""

    key: str
    shape: Shape
    dtype: DType


def pickle_tree(tree: Tree, slots: Mapping[str, Slot]) -> bytes:
    """Pickles a tree; tensors refer to the storages of their slots, by native name.

    Raises:
        UsageError: Something in the tree is refused by `weights_only`; lists every such place.
    """
    writer = _Writer(slots)
    writer.run(tree)
    if writer.faults:
        raise UsageError(
            "A torch file can't hold this." + fault_list(writer.faults),
            expected="dicts, lists, tuples, numbers, text, bytes and tensors",
            remedy="leave these entries out",
        )
    return bytes(writer.out)


class _Writer:
    """Emits opcodes without recursion; a piece of bytes on the stack of work is emitted as it is."""

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self.slots = slots
        self.out = bytearray(b"\x80\x02")
        self.memo: dict[bytes, bytes] = {}
        self.faults: list[tuple[str, str]] = []

    def run(self, tree: Tree) -> None:
        """Emits a whole tree."""
        work: list[tuple[Path, Any, bool]] = [((), tree, False), ((), b".", True)]
        work.reverse()
        while work:
            path, node, ready = work.pop()
            if ready:
                self.out += node
            else:
                work.extend(reversed(self._emit(path, node)))

    def _emit(self, path: Path, node: Any) -> list[tuple[Path, Any, bool]]:
        """Emits a leaf, or the opening of a container; returns what is left to emit of it."""
        if isinstance(node, Mapping):
            return self._mapping(path, node)
        if isinstance(node, (list, tuple)):
            close = b"e" if isinstance(node, list) else b"t"
            self.out += b"](" if isinstance(node, list) else b"("
            return [*(((*path, i), item, False) for i, item in enumerate(node)), (path, close, True)]
        self._leaf(path, node)
        return []

    def _mapping(self, path: Path, node: Mapping[Any, Any]) -> list[tuple[Path, Any, bool]]:
        if isinstance(node, OrderedDict):
            self._name("collections", "OrderedDict")
            self.out += b")R("
        else:
            self.out += b"}("
        left: list[tuple[Path, Any, bool]] = []
        for key, value in node.items():
            left += [((*path, key), key, False), ((*path, key), value, False)]
        return [*left, (path, b"u", True)]

    def _leaf(self, path: Path, node: Any) -> None:
        if node is None:
            self.out += b"N"
        elif isinstance(node, (bool, np.bool_)):
            self.out += b"\x88" if node else b"\x89"
        elif isinstance(node, (int, np.integer)):
            self._int(path, int(node))
        elif isinstance(node, (float, np.floating)):
            self.out += b"G" + struct.pack(">d", float(node))
        elif isinstance(node, str):
            self._text(node)
        elif isinstance(node, bytes):
            # Source: CPython Lib/pickle.py, `save_bytes`: protocol 2 has no bytes.
            self._name("_codecs", "encode")
            self._text(node.decode("latin1"))
            self._text("latin1")
            self.out += b"\x86R"
        elif isinstance(node, Tensor):
            self._tensor(self.slots["/".join(map(str, path))])
        else:
            what = f"an object of {node.name}" if isinstance(node, Record) else type(node).__name__
            self.faults.append((what, "/".join(map(str, path))))

    def _int(self, path: Path, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K" + bytes([value])
        elif -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            size = value.bit_length() // 8 + 1
            if size > MAX_LONG_BYTES:
                self.faults.append((f"an integer of {value.bit_length()} bits", "/".join(map(str, path))))
                return
            self.out += b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)

    def _text(self, text: str) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        self._once(b"X" + struct.pack("<I", len(raw)) + raw)

    def _name(self, module: str, name: str) -> None:
        self._once(f"c{module}\n{name}\n".encode())

    def _once(self, opcodes: bytes) -> None:
        """Emits a text or name, or where it is in the memo if it was emitted before."""
        known = self.memo.get(opcodes)
        if known is None:
            index = len(self.memo)
            get, put = (b"h", b"q") if index < 256 else (b"j", b"r")
            number = struct.pack("<B" if index < 256 else "<I", index)
            self.memo[opcodes] = get + number
            self.out += opcodes + put + number
        else:
            self.out += known

    def _ints(self, values: Shape) -> None:
        self.out += b"("
        for value in values:
            self._int((), value)
        self.out += b"t"

    def _tensor(self, slot: Slot) -> None:
        # Source: torch/_tensor.py, `_reduce_ex_internal`: types without a storage class of their own are windows of
        # untyped storages.
        kind = _CLASSES.get(slot.dtype.name)
        self._name("torch._utils", "_rebuild_tensor_v2" if kind else "_rebuild_tensor_v3")
        self.out += b"(("
        self._text("storage")
        self._name(*(("torch", kind) if kind else ("torch.storage", "UntypedStorage")))
        self._text(slot.key)
        self._text("cpu")
        count = math.prod(slot.shape)
        self._int((), count if kind else count * slot.dtype.itemsize)
        self.out += b"tQK\x00"
        self._ints(slot.shape)
        self._ints(_strides(slot.shape))
        self.out += b"\x89"
        self._name("collections", "OrderedDict")
        self.out += b")R"
        if not kind:
            self._name("torch", slot.dtype.name)
        self.out += b"tR"


def _strides(shape: Shape) -> Shape:
    """Returns the strides of a contiguous tensor, in elements; a size of 0 counts as 1, as in PyTorch."""
    steps = [1]
    for n in reversed(shape[1:]):
        steps.append(steps[-1] * max(n, 1))
    return tuple(reversed(steps))[: len(shape)]
