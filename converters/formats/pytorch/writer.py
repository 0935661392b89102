"""Writes torch files: every storage streamed first, then the pickle that describes them with the manifest in it.

The layout is that of PyTorch's own writer byte for byte where PyTorch computes offsets from it instead of reading
them (`torch.utils.serialization.config.load.calculate_storage_offsets`): storages in the pickle's order, each padded
to 64 bytes by the extra field of its header and followed by a data descriptor. The pickle is of protocol 2 and one that
`torch.load(weights_only=True)` reads.
Source: caffe2/serialize/inline_container.cc, `getPadding`; miniz, `mz_zip_writer_add_mem_ex_v2`;
torch/serialization.py, `_load._get_offset`.
"""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from statekit.converters.formats.pytorch.reader import STORAGE_DTYPES, torch_dtype
from statekit.converters.formats.zip_archive import ZipForm, ZipWriter, checked_member
from statekit.errors import Faults, UsageError
from statekit.files.stage import Stage
from statekit.tensors.tensor import DType, Shape, Stored, Tensor, dtype_name, nbytes
from statekit.tensors.tree import Path, Record, Tree, tensor_names

MAX_LONG_BYTES = 255
SUBCLASSES = (
    "torchao.optim.subclass_8bit.OptimState8bit",
    "torchao.optim.subclass_4bit.OptimState4bit",
    "torchao.optim.subclass_fp8.OptimStateFp8",
)
"""Tensors that `torch.load(weights_only=True)` makes once torchao.optim is imported, by `add_safe_globals` there."""
_CLASSES = {dtype: name for name, dtype in STORAGE_DTYPES.items() if name[0] not in "QU_"}


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies in the file: its storage's key, and what it is of it (all, in C order)."""

    key: str
    shape: Shape
    dtype: DType


def pickle_tree(tree: Tree, slots: Mapping[str, Placement], classes: Collection[str] = ()) -> bytes:
    """Pickles a tree; tensors refer to the storages of their slots, by native name.

    Args:
        tree: The tree.
        slots: Where its tensors lie.
        classes: Names of further classes whose objects may be in it: a program loads them without `weights_only`.

    Raises:
        UsageError: Something in the tree is refused by `weights_only`; lists every such place.
    """
    writer = _Writer(slots, classes)
    writer.run(tree)
    writer.faults.check(
        UsageError,
        "A torch file can't hold this",
        expected="dicts, lists, tuples, numbers, text, bytes and tensors",
        remedy="leave these entries out",
    )
    return bytes(writer.out)


class Opcodes:
    """Collects the opcodes of a pickle of protocol 2. Texts and names stand once, then in the memo."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self._memo: dict[bytes, bytes] = {}

    def integer(self, value: int) -> bool:
        """Emits an integer; False if it is too large."""
        if 0 <= value < 256:
            self.out += b"K" + bytes([value])
        elif -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            size = value.bit_length() // 8 + 1
            if size > MAX_LONG_BYTES:
                return False
            self.out += b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        return True

    def integers(self, values: Shape) -> None:
        """Emits a tuple of integers."""
        self.out += b"("
        for value in values:
            self.integer(value)
        self.out += b"t"

    def text(self, text: str) -> None:
        """Emits a text."""
        raw = text.encode("utf-8", "surrogatepass")
        self._once(b"X" + struct.pack("<I", len(raw)) + raw)

    def name(self, module: str, name: str) -> None:
        """Emits the name of a class or function."""
        self._once(_name_opcodes(f"{module}.{name}"))

    def _once(self, opcodes: bytes) -> None:
        memo_number = self._memo.get(opcodes)
        if memo_number is None:
            index = len(self._memo)
            get, put = (b"h", b"q") if index < 256 else (b"j", b"r")
            number = struct.pack("<B" if index < 256 else "<I", index)
            self._memo[opcodes] = get + number
            self.out += opcodes + put + number
        else:
            self.out += memo_number


class _Writer(Opcodes):
    """Emits opcodes without recursion; a piece of bytes on the stack of work is emitted as it is."""

    def __init__(self, slots: Mapping[str, Placement], classes: Collection[str] = ()) -> None:
        super().__init__()
        self.slots = slots
        self.classes = classes
        self.faults = Faults()

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
        if isinstance(node, Record) and node.name in SUBCLASSES and len(node.args) > 1:
            return self._subclass(path, node)
        if isinstance(node, Record) and node.name in self.classes and not node.args:
            # Source: CPython Lib/copyreg.py, `__reduce_ex__`: an object is made without arguments, then gets its state.
            self._once(_name_opcodes(node.name))
            self.out += b")\x81"
            return [((*path, "state"), node.state, False), (path, b"b", True)]
        if isinstance(node, (list, tuple)):
            close = b"e" if isinstance(node, list) else b"t"
            self.out += b"](" if isinstance(node, list) else b"("
            return [*(((*path, i), item, False) for i, item in enumerate(node)), (path, close, True)]
        self._leaf(path, node)
        return []

    def _mapping(self, path: Path, node: Mapping[Any, Any]) -> list[tuple[Path, Any, bool]]:
        if isinstance(node, OrderedDict):
            self.name("collections", "OrderedDict")
            self.out += b")R("
        else:
            self.out += b"}("
        left: list[tuple[Path, Any, bool]] = []
        for key, value in node.items():
            left += [((*path, key), key, False), ((*path, key), value, False)]
        return [*left, (path, b"u", True)]

    def _subclass(self, path: Path, node: Record) -> list[tuple[Path, Any, bool]]:
        """Emits the opening of a tensor of a subclass, whose arguments and parts are left to emit.

        Source: torch/_tensor.py, `Tensor._reduce_ex_internal` and `_rebuild_from_type_v2`.
        """
        function, *arguments = node.args
        self.name("torch._tensor", "_rebuild_from_type_v2")
        self.out += b"("
        self.record(function)
        self._once(_name_opcodes(node.name))
        self.out += b"("
        for argument in arguments:
            if isinstance(argument, Record):
                self.record(argument)
            elif isinstance(argument, tuple):
                self.integers(argument)
            else:
                self._leaf(path, argument)
        self.out += b"t"
        return [((*path, "state"), node.state, False), (path, b"tR", True)]

    def record(self, node: Record) -> None:
        """Emits the name of a class or function, or its call with a text."""
        self._once(_name_opcodes(node.name))
        for argument in node.args:
            self.text(argument)
            self.out += b"\x85R"

    def _leaf(self, path: Path, node: Any) -> None:
        if node is None:
            self.out += b"N"
        elif isinstance(node, (bool, np.bool_)):
            self.out += b"\x88" if node else b"\x89"
        elif isinstance(node, (int, np.integer)):
            if not self.integer(int(node)):
                self.faults.add(f"an integer of {int(node).bit_length()} bits", "/".join(map(str, path)))
        elif isinstance(node, (float, np.floating)):
            self.out += b"G" + struct.pack(">d", float(node))
        elif isinstance(node, str):
            self.text(node)
        elif isinstance(node, bytes):
            # Source: CPython Lib/pickle.py, `save_bytes`: protocol 2 has no bytes.
            self.name("_codecs", "encode")
            self.text(node.decode("latin1"))
            self.text("latin1")
            self.out += b"\x86R"
        elif isinstance(node, Tensor):
            self._tensor(self.slots["/".join(map(str, path))])
        elif is_dtype(node):
            self._once(_name_opcodes(node.name))
        else:
            subject = f"an object of {node.name}" if isinstance(node, Record) else type(node).__name__
            self.faults.add(subject, "/".join(map(str, path)))

    def _tensor(self, slot: Placement) -> None:
        # Source: torch/_tensor.py, `_reduce_ex_internal`: types without a storage class of their own are windows of
        # untyped storages.
        kind = _CLASSES.get(dtype_name(slot.dtype))
        self.name("torch._utils", "_rebuild_tensor_v2" if kind else "_rebuild_tensor_v3")
        self.out += b"(("
        self.text("storage")
        self.name(*(("torch", kind) if kind else ("torch.storage", "UntypedStorage")))
        self.text(slot.key)
        self.text("cpu")
        count = math.prod(slot.shape)
        self.integer(count if kind else count * slot.dtype.itemsize)
        self.out += b"tQK\x00"
        self.integers(slot.shape)
        self.integers(_strides(slot.shape))
        self.out += b"\x89"
        self.name("collections", "OrderedDict")
        self.out += b")R"
        if not kind:
            self.name("torch", dtype_name(slot.dtype))
        self.out += b"tR"


def is_dtype(node: Any) -> bool:
    """Tells whether a record is a type of values of PyTorch, which `weights_only` takes."""
    is_name = isinstance(node, Record) and not node.args and node.state is None
    return is_name and node.name.startswith("torch.") and torch_dtype(node) is not None


def _name_opcodes(dotted: str) -> bytes:
    module, _, name = dotted.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def _strides(shape: Shape) -> Shape:
    """Returns the strides of a contiguous tensor, in elements; a size of 0 counts as 1, as in PyTorch."""
    steps = [1]
    for n in reversed(shape[1:]):
        steps.append(steps[-1] * max(n, 1))
    return tuple(reversed(steps))[: len(shape)]


MANIFEST_KEY = "statekit"
"""Key of the manifest in a top-level dict."""
ROOT = "archive"
ALIGNMENT = 64
_DATE = 1 << 5 | 1  # 1 January 1980: equal trees give equal bytes
_FORM = ZipForm(f"{ROOT}/", ALIGNMENT, 20, _DATE)


def write_torch(tree: Tree, stage: Stage) -> None:
    """Writes a tree as a torch file; the manifest goes into a top-level dict under `statekit`.

    Raises:
        UsageError: The tree holds what `torch.load(weights_only=True)` refuses, or a `statekit` of its own.
        CommitError: A tensor streams other bytes than its shape says.
    """
    if isinstance(tree, dict) and MANIFEST_KEY in tree:
        raise UsageError("The name of the manifest is taken.", place=MANIFEST_KEY, remedy="rename this key")

    manifest: dict[str, Any] = {}

    def finished() -> Tree:
        manifest.update(stage.manifest(apart=3))
        return {**tree, MANIFEST_KEY: _text(manifest)} if isinstance(tree, dict) else tree

    has_manifest = isinstance(tree, dict)
    with stage.file(synced=not has_manifest) as file:
        write_archive(tree, file, stage.stream, finished)
    if has_manifest:
        stage.complete(manifest, lambda record: _text(record).encode("ascii"), checked_member)


def _text(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, sort_keys=True)


def write_archive(
    tree: Tree,
    file: BinaryIO,
    stream: Callable[[str, Tensor], Iterable[memoryview]],
    finished: Callable[[], Tree] | None = None,
    classes: Collection[str] = (),
) -> None:
    """Writes a tree into an open file as `torch.save` would.

    Args:
        tree: What to write, Tensors at the leaves.
        file: The new file.
        stream: Gives a tensor's bytes by its name in the tree: little-endian, C order.
        finished: Gives the tree with what is known only when all tensors have been written; no further tensors.
        classes: Names of further classes whose objects may be in the tree.

    Raises:
        UsageError: The tree holds what `torch.load(weights_only=True)` refuses.
        CommitError: A tensor streams other bytes than its shape says.
    """
    tensors = tensor_names(tree)
    slots = _slots(tensors)
    pickle_tree(tree, slots, classes)  # whatever can't be written is said before gigabytes are
    writer = ZipWriter(file, _FORM)
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
    pickled = pickle_tree(tree if finished is None else finished(), slots, classes)
    writer.add("data.pkl", len(pickled), [pickled])
    writer.finish()


def _slots(tensors: dict[str, Tensor]) -> dict[str, Placement]:
    """Numbers the storages in order; tensors that read the same bytes share one, as tied weights do."""
    keys: dict[Any, str] = {}
    slots = {}
    for name, tensor in tensors.items():
        source = (tensor.fetch if isinstance(tensor, Stored) else id(tensor), tensor.shape, tensor.dtype)
        slots[name] = Placement(keys.setdefault(source, str(len(keys))), tensor.shape, tensor.dtype)
    return slots
