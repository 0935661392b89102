"""Reads what `torch.save` wrote, a zip archive or a legacy stream, from a file or from a part of one.

The legacy form, before PyTorch 1.6, is pickles one after the other, then the storages: magic number, protocol 1001,
facts about the machine, the object, the list of storage keys; then for each key the number of elements (8 bytes) and
the values, always little-endian.
Source: torch/serialization.py, `_legacy_save` and `_legacy_load`; torch/csrc/serialization.cpp.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from statekit.converters.formats.pickle.names import Call, constructor, kept, shown
from statekit.converters.formats.pickle.reader import TruncatedPickle, Unpickled, read_pickle
from statekit.converters.formats.storage import Storage, window
from statekit.converters.formats.zip_archive import Archive, directory_bytes
from statekit.errors import CorruptError, FormatError, RefusedError, printable, some
from statekit.files.checkpoint import CLASSES, Finding
from statekit.files.checksums import ZIP
from statekit.files.source import Source, bytes_at, record, short
from statekit.tensors.tensor import DTYPES, Array, Cast, DType, Stored, Tensor, dtype_named
from statekit.tensors.tree import Path as Keys
from statekit.tensors.tree import Record, Tree

STORAGE_DTYPES: Mapping[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64", "UntypedStorage": "uint8", "_UntypedStorage": "uint8",
    "QInt8Storage": "int8", "QInt32Storage": "int32", "QUInt8Storage": "uint8", "QUInt4x2Storage": "uint8",
    "QUInt2x4Storage": "uint8",
}  # fmt: skip
"""dtype of the values by storage class; quantized ones as the integers they are stored as.

Source: torch/storage.py, `_dtype_to_storage_type_map`.
"""

StorageId: TypeAlias = tuple[DType, str, int, tuple[Any, ...]]
_DTYPE_NAMES = {"double": "float64", "float": "float32", "half": "float16", "long": "int64", "int": "int32"}


def storage_id(saved: Any, place: str) -> StorageId:
    """Takes a persistent id apart: dtype, key, number of elements, and what follows.

    Source: torch/serialization.py: ("storage", class, key, location, numel); the location says where the values
    lived and doesn't matter here.

    Raises:
        FormatError: It isn't the id of a storage.
    """
    if not isinstance(saved, tuple) or len(saved) < 5 or saved[0] not in ("storage", b"storage"):
        raise RefusedError(
            "A pickle refers to something that isn't a storage.", place=place, found=shown(saved)
        )
    _, kind, key, _, count, *rest = saved
    name = kind.name.rpartition(".")[2] if isinstance(kind, Record) else ""
    if name not in STORAGE_DTYPES or not isinstance(key, (str, int)) or type(count) is not int or count < 0:
        raise FormatError(
            "A storage isn't described as storages are.",
            place=place,
            expected=f"one of {', '.join(STORAGE_DTYPES)}, with a key and a number of elements",
            found=f"{shown(name) or shown(kind)}, key {shown(key)}, {shown(count)} elements",
        )
    return dtype_named(STORAGE_DTYPES[name]), str(key), count, tuple(rest)


def torch_dtype(record: Any) -> DType | None:
    """Returns the dtype of a name such as `torch.float8_e4m3fn`; None if statekit doesn't carry it."""
    name = record.name.removeprefix("torch.") if isinstance(record, Record) else ""
    return DTYPES.get(_DTYPE_NAMES.get(name, name))


def _as_storage(value: Any) -> Storage:
    if not isinstance(value, Storage):
        raise FormatError("A tensor is made of something that isn't a storage.", found=shown(value))
    return value


def _as_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise FormatError("A tensor's wrapper holds something else.", found=shown(value))
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)):
        raise FormatError("The shape of a tensor is not a tuple.", found=shown(value))
    return tuple(value)


def _rebuild(args: tuple[Any, ...]) -> Tensor:
    storage, offset, shape, stride, *rest = args
    source = _as_storage(storage)
    marks = rest[2] if len(rest) > 2 and isinstance(rest[2], dict) else {}
    conjugate, negative = bool(marks.get("conj")), bool(marks.get("neg"))
    return window(source, offset, _sizes(shape), _sizes(stride), source.dtype, conjugate, negative)


def _rebuild_v3(args: tuple[Any, ...]) -> Tensor | Record:
    storage, offset, shape, stride, _, _, kind, *_ = args
    dtype = torch_dtype(kind)
    if dtype is None:
        # Kept with its raw bytes: one tensor of an unknown type is no reason to lose the others.
        return Record("torch._utils._rebuild_tensor_v3", args)
    return window(_as_storage(storage), offset, _sizes(shape), _sizes(stride), dtype)


def _wrapped(args: tuple[Any, ...]) -> Tensor:
    return _as_tensor(args[0])


def _cast(args: tuple[Any, ...]) -> Tensor | Record:
    data, kind, *_ = args
    dtype = torch_dtype(kind)
    if dtype is None or not isinstance(data, Tensor):
        return Record("torch._utils._rebuild_device_tensor_from_numpy", args)
    return data if data.dtype == dtype else Cast(data, dtype)


def _subclass(note: Callable[[str], None]) -> Call:
    def make(args: tuple[Any, ...]) -> Any:
        function, kind, inner, state = args
        rebuild = _REBUILD.get(function.name) if isinstance(function, Record) else None
        name = kind.name if isinstance(kind, Record) else shown(kind)
        if rebuild is None:
            return Record(name, (function, *inner), state)
        if name not in ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"):
            note(f"a tensor of the subclass {shown(name)} is read as a plain tensor")
        _note_state(state, note)
        return rebuild(inner)

    return make


def _parameter(note: Callable[[str], None]) -> Call:
    def make(args: tuple[Any, ...]) -> Tensor:
        _note_state(args[3], note)
        return _as_tensor(args[0])

    return make


def _note_state(state: Any, note: Callable[[str], None]) -> None:
    for name in list(state)[:8] if isinstance(state, dict) else ["state"] if state else []:
        note(f"attribute {shown(name)} of a tensor has no place in the tree")


def _size(args: tuple[Any, ...]) -> tuple[int, ...]:
    return _sizes(args[0]) if args else ()


_SCHEDULES = "torch.optim.lr_scheduler."
_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    f"{_SCHEDULES}OneCycleLR": ("_annealing_cos", "_annealing_linear"),
    f"{_SCHEDULES}CyclicLR": ("_triangular_scale_fn", "_triangular2_scale_fn", "_exp_range_scale_fn"),
    "torch.optim.swa_utils.SWALR": ("_cosine_anneal", "_linear_anneal"),
}
"""Class -> its functions that a schedule of an older release keeps in its state, some bound to the schedule itself.

Source: pytorch/pytorch torch/optim/lr_scheduler.py and swa_utils.py, up to 2.6.
"""


def _part_of_class(args: tuple[Any, ...]) -> Record:
    """Returns a class or a function within a class of another package, as protocols below 4 name it.

    Nothing is looked up, and a function that a file calls is refused as any other is. PyTorch's own have classes, and
    what its schedules keep: the schedule that such a function is bound to says nothing further.
    """
    owner, name = args
    holder = owner.name if isinstance(owner, Record) else ""
    if name in _FUNCTIONS.get(holder, ()):
        return Record(f"{holder}.{name}")
    is_class = isinstance(owner, Record) and not owner.args and owner.state is None and constructor(holder)
    if is_class and isinstance(name, str) and name.isidentifier():
        part = f"{holder}.{name}"
        if constructor(part) or not part.startswith("torch."):
            return Record(part)
    raise RefusedError(
        "A pickle asks for a part of something that isn't a class of another package; nothing was run.",
        expected="a part of a class, as FSDP1's ShardedTensor and MMEngine's HistoryBuffer have them",
        found=f"{shown(name)} of {shown(owner.name if isinstance(owner, Record) else owner)}",
    )


_REBUILD: dict[str, Call] = {
    "torch._utils._rebuild_tensor": _rebuild,
    "torch._utils._rebuild_tensor_v2": _rebuild,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _wrapped,
    "torch._utils._rebuild_device_tensor_from_numpy": _cast,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _cast,
    "torch._utils._rebuild_xla_tensor": _cast,
}
_KEPT = (
    "torch.device", "torch.serialization._get_layout", "torch._utils._rebuild_sparse_tensor",
    "torch._utils._rebuild_qtensor", "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_meta_tensor_no_storage", "torch._utils._rebuild_wrapper_subclass",
)  # fmt: skip


def torch_calls(note: Callable[[str], None]) -> dict[str, Call]:
    """Returns the inert constructors of PyTorch; `note` is told what has no place in a tree.

    Source: torch/_utils.py and torch/_as_tensor.py, the functions of these names.
    """
    return {
        **_REBUILD,
        **{name: kept(name) for name in _KEPT},
        "torch.Size": _size,
        "builtins.getattr": _part_of_class,
        "torch._utils._rebuild_parameter_with_state": _parameter(note),
        "torch._tensor._rebuild_from_type_v2": _subclass(note),
    }


def named(tree: Tree, path: Keys = ()) -> Tree:
    """Returns a tree whose tensors carry their native names, and whose bare storages are tensors of rank 1.

    One call per level, so that a tree as deep as `statekit.tensors.tree.walk` allows fits Python's recursion limit.
    """
    if isinstance(tree, dict):
        whole = {}
        for key, value in tree.items():
            whole[key] = named(value, (*path, key))
        return whole
    if isinstance(tree, (list, tuple)):
        items = []
        for i, value in enumerate(tree):
            items.append(named(value, (*path, i)))
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, Record):
        return Record(tree.name, named(tree.args, (*path, "args")), named(tree.state, (*path, "state")))
    leaf = tree.whole() if isinstance(tree, Storage) else tree
    return leaf.called("/".join(map(str, path))) if isinstance(leaf, Stored) else leaf


LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_MAGIC_BYTES = LEGACY_MAGIC.to_bytes(10, "little")
LEGACY_PROTOCOL = 1001
WINDOW = 2**20
"""How much of a file is tried first, in bytes, to find the end of its pickles; then 16 times as much, and so on."""
SWAPPED = sys.byteorder == "big"
_LEGACY_PICKLES = "What stands before the storages of a legacy torch file"


@dataclass(frozen=True)
class LegacyFile:
    """What a legacy file holds.

    Attributes:
        tree: The saved object, its tensors over storages.
        notes: What had no place in the tree.
        named: The first names of code in its pickle.
        storages: Number of storages.
        rest: Bytes behind the last storage.
    """

    tree: Any
    notes: tuple[str, ...]
    named: tuple[str, ...]
    storages: int
    rest: int


class _Storages:
    """The storages that a pickle mentions; where each lies is known only after the pickles have been read."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.roots: dict[str, Storage] = {}
        self.starts: dict[str, int] = {}

    def resolve(self, saved: Any) -> Any:
        """Returns the storage of a persistent id, or a part of one."""
        if isinstance(saved, tuple) and len(saved) == 4 and saved[0] in ("module", b"module"):
            return saved[1]  # the class of a module, saved with its source text
        place = self.source.place
        dtype, key, count, rest = storage_id(saved, place)
        fetch, account = partial(self.fetch, key), self.source.account
        root = Storage(
            f"storage {key}", place, dtype, count * dtype.itemsize, fetch, SWAPPED, account=account
        )
        if self.roots.setdefault(key, root) != root:
            raise FormatError("A storage is described in two ways.", place=f"storage {shown(key)} in {place}")
        view = rest[0] if rest else None
        return self.roots[key] if view is None else self._part(root, key, view)

    def _part(self, root: Storage, key: str, view: Any) -> Storage:
        if (
            not isinstance(view, tuple)
            or len(view) != 3
            or not all(type(n) is int and n >= 0 for n in view[1:])
        ):
            raise FormatError(
                "A part of a storage isn't described as such.", place=f"storage {key} in {root.place}"
            )
        name, first, count = f"storage {shown(view[0])}", view[1], view[2]
        start, nbytes = first * root.dtype.itemsize, count * root.dtype.itemsize
        if start + nbytes > root.nbytes:
            raise CorruptError("A part of a storage reaches beyond it.", place=f"{name} in {root.place}")
        fetch = partial(self.fetch, key, shift=start)
        return Storage(name, root.place, root.dtype, nbytes, fetch, SWAPPED, account=root.account)

    def fetch(self, key: str, start: int, count: int, shift: int = 0) -> Array:
        """Reads bytes of a storage."""
        return self.source.read(self.starts[key] + shift + start, count)


def read_legacy(source: Source) -> LegacyFile:
    """Reads the pickles of a legacy file and finds its storages.

    Raises:
        FormatError: The bytes don't follow the format.
        CorruptError: The file is cut off, or sizes disagree.
    """
    size = WINDOW
    while True:
        size, storages = min(size, source.size), _Storages(source)
        try:
            saved, keys = _legacy_pickles(record(source, 0, size, None, _LEGACY_PICKLES), storages)
            break
        except TruncatedPickle:
            if size == source.size:
                raise
            source.account.free(size)
            size *= 16
    end = _locate_storages(storages, keys.value, keys.end)
    return LegacyFile(saved.value, saved.notes, saved.named, len(storages.starts), source.size - end)


def _legacy_pickles(data: bytes, storages: _Storages) -> tuple[Unpickled, Unpickled]:
    """Reads the five pickles; returns the saved object and the list of storage keys."""
    place, account = storages.source.place, storages.source.account
    magic = read_pickle(data, place, account=account)
    version = read_pickle(data, place, start=magic.end, account=account)
    if magic.value != LEGACY_MAGIC or version.value != LEGACY_PROTOCOL:
        raise FormatError(
            "A file isn't a legacy torch file.",
            place=place,
            expected=f"magic number {LEGACY_MAGIC:#x}, protocol {LEGACY_PROTOCOL}",
            found=f"{shown(magic.value)}, {shown(version.value)}",
        )
    machine = read_pickle(data, place, start=version.end, account=account)
    saved = read_pickle(
        data, place, start=machine.end, calls=torch_calls, persistent=storages.resolve, account=account
    )
    return saved, read_pickle(data, place, start=saved.end, account=account)


def _locate_storages(storages: _Storages, keys: Any, at: int) -> int:
    """Walks over the storages in the file's order, comparing their declared sizes; returns where they end."""
    source = storages.source
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages.roots):
        raise FormatError(
            "The list of storages doesn't fit the tensors.",
            place=source.place,
            expected=f"{len(storages.roots)} storages",
            found=f"{len(keys)} keys" if isinstance(keys, list) else shown(keys),
        )
    for key in map(str, keys):
        root = storages.roots[key]
        count = int.from_bytes(bytes_at(source, at, 8), "little", signed=True)
        if count * root.dtype.itemsize != root.nbytes:
            raise CorruptError(
                "The size of a storage isn't the declared one.",
                place=f"{root.name} in {root.place}",
                expected=f"{root.nbytes // root.dtype.itemsize} elements",
                found=f"{count}",
            )
        storages.starts[key] = at + 8
        at += 8 + root.nbytes
        if at > source.size:
            raise short(source, at - root.nbytes, root.nbytes)
    return at


_NODES = 5
"""Values of a tree that a storage counts for, with the tensor over it."""
MAX_RECORD = 64
"""Bytes that are read of the small members, such as `byteorder`; none that is known has more."""
_ROOT_MEMBER = re.compile(
    rb"[^/]+/(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment)"
)
_TAR_MEMBERS = (b"sys_info\0", b"pickle\0", b"storages\0", b"tensors\0")


@dataclass(frozen=True)
class Opened:
    """A saved object.

    Attributes:
        tree: Its tree, whose tensors have no names yet.
        meta: What is known of the file.
        findings: What was odd.
        is_checked: Whether all of its bytes have checksums, as far as its generation has some.
    """

    tree: Tree
    meta: Mapping[str, Any]
    findings: tuple[Finding, ...]
    is_checked: bool = True


def generation(source: Source) -> str | None:
    """Returns `zip`, `legacy` or `tar` by the first bytes and the end of a file; None if it is no torch file."""
    head = bytes_at(source, 0, min(512, source.size))
    if head.startswith(b"PK\3\4"):
        first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        return "zip" if _ROOT_MEMBER.fullmatch(first) or b"/data.pkl" in directory_bytes(source) else None
    if LEGACY_MAGIC_BYTES in head[:64]:
        return "legacy"
    return "tar" if head[257:262] == b"ustar" and head.startswith(_TAR_MEMBERS) else None


def read_object(source: Source) -> Opened:
    """Reads the pickle and the headers of a saved object; values are read when asked for.

    Raises:
        RefusedError: It calls for code, or asks for absurd memory.
        CorruptError: Sizes or checksums disagree with the data.
        FormatError: It isn't what torch.save writes.
    """
    kind = generation(source)
    if kind == "zip":
        return _open_zip(source)
    if kind == "legacy":
        return _open_legacy(source)
    raise _unreadable(source.place, kind)


def _unreadable(place: str, generation: str | None) -> FormatError:
    if generation == "tar":
        return RefusedError(
            "This is a tar archive of torch's first file format, which statekit doesn't read.",
            place=place,
            expected="a file of PyTorch 0.1.10 or newer",
            remedy="load it with the PyTorch that wrote it and save it again",
        )
    return FormatError(
        "This isn't a torch file.",
        place=place,
        expected="a zip archive with a data.pkl, or the magic number of the legacy format",
    )


def _open_legacy(source: Source) -> Opened:
    legacy = read_legacy(source)
    findings = [Finding(note, source.place) for note in legacy.notes]
    if legacy.rest:
        findings.append(Finding(f"{legacy.rest} bytes stand behind the last storage", source.place))
    meta = {
        "generation": "legacy",
        "byteorder": "little",
        "version": "1001",
        "storages": legacy.storages,
        **_refused_meta(legacy.named),
    }
    return Opened(legacy.tree, meta, tuple(findings))


def _open_zip(source: Source) -> Opened:
    archive = Archive(source)
    root = _root(archive, source.place)
    pickled = f"{root}/data.pkl"
    raw = archive.record(pickled, "The pickle of a torch file")
    order = _record(archive, f"{root}/byteorder", "little")
    if order not in ("little", "big"):
        raise FormatError("The byte order of a torch file is unknown.", place=source.place, found=order)
    storages: dict[str, Storage] = {}
    pickled_tree = read_pickle(
        raw,
        f"{pickled} in {source.place}",
        calls=torch_calls,
        persistent=partial(_storage, archive, root, order != sys.byteorder, storages),
        account=source.account,
    )
    source.account.nodes(_NODES * len(storages), "The storages of a torch file", source.place)
    findings = [Finding(note, source.place) for note in pickled_tree.notes]
    bare = sum(1 for member in archive.members.values() if member.size and not member.crc)
    if bare:
        findings.append(
            Finding(f"{bare} members carry no checksum; their values can't be checked", source.place)
        )
    meta = {
        "generation": "zip",
        "byteorder": order,
        "version": _record(archive, f"{root}/version", ""),
        "storages": len(storages),
        **_refused_meta(pickled_tree.named),
    }
    return Opened(pickled_tree.value, meta, tuple(findings), not bare)


_LOADED = frozenset(
    {
        "builtins.bytearray", "builtins.complex", "builtins.set", "collections.Counter", "collections.OrderedDict",
        "_codecs.encode",
    }
)  # fmt: skip
_LOADED_OF_TORCH = re.compile(
    r"torch\.(\w+|_utils\.\w+|_tensor\.\w+|storage\.\w+|nn\.parameter\.\w+|serialization\._get_layout"
    r"|distributed\.tensor\..+|distributed\._tensor\..+)"
)


def _refused_meta(named: Iterable[str]) -> dict[str, str]:
    """Returns what a file has that `torch.load(weights_only=True)` refuses; nothing where it takes the file.

    Source: pytorch/pytorch torch/_weights_only_unpickler.py, `_get_allowed_globals`.
    """
    refused = [name for name in named if name not in _LOADED and not _LOADED_OF_TORCH.fullmatch(name)]
    # Tensors that ranks share stand first: lines that load them go by their class.
    refused.sort(key=lambda name: not name.startswith("torch.distributed."))
    return {CLASSES: some([printable(name) for name in refused])} if refused else {}


def _root(archive: Archive, place: str) -> str:
    roots = {name.partition("/")[0] for name in archive.members}
    root = next(iter(roots), "")
    if len(roots) != 1 or f"{root}/data.pkl" not in archive.members:
        raise FormatError(
            "A zip archive isn't laid out as torch files are.",
            place=place,
            expected="one top folder with a data.pkl",
            found=f"{len(roots)} top folders",
        )
    if f"{root}/constants.pkl" in archive.members:
        raise RefusedError(
            "This is a TorchScript program, not a checkpoint.",
            place=place,
            remedy="load it with torch.jit.load and save its state_dict()",
        )
    return root


def _record(archive: Archive, name: str, missing: str) -> str:
    if name not in archive.members:
        return missing
    size = archive.members[name].size
    if size <= MAX_RECORD:
        raw = archive.record(name, "A record of a torch file")
    else:
        raw = archive.read(name, 0, MAX_RECORD).tobytes()
    return raw.decode("ascii", "replace").strip()


def _storage(archive: Archive, root: str, swapped: bool, storages: dict[str, Storage], saved: Any) -> Storage:
    place = archive.source.place
    dtype, key, count, _ = storage_id(saved, place)
    name = f"{root}/data/{key}"
    member = archive.members.get(name)
    if member is None:
        raise CorruptError("A torch file lacks the data of a tensor.", place=place, expected=name)
    size = member.size
    if count != size // dtype.itemsize:
        raise CorruptError(
            "The size of a storage isn't the declared one.",
            place=f"{name} in {place}",
            expected=f"{count} elements of {dtype}",
            found=f"{size} bytes",
        )
    storage = storages.get(key)
    if storage is None:
        fetch = partial(archive.read, name)
        checksum = ZIP if member.crc else ""
        account = archive.source.account
        crc = member.crc or None
        storage = Storage(f"data/{key}", place, dtype, size, fetch, swapped, checksum, account, crc)
        storages[key] = storage
    elif storage.dtype != dtype:
        raise FormatError("A storage is described in two ways.", place=f"{name} in {place}")
    return storage
