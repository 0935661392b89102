"""The inert constructors of PyTorch's own pickles: storages, tensors and what wraps them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from statekit.converters.formats.pickle.names import Call, kept, shown
from statekit.converters.formats.pytorch.storage import Storage, window
from statekit.errors import FormatError, RefusedError
from statekit.tensors.tensor import DTYPES, Cast, DType, Stored, Tensor, dtype_named
from statekit.tensors.tree import Path, Record, Tree

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


def _storage(value: Any) -> Storage:
    if not isinstance(value, Storage):
        raise FormatError("A tensor is made of something that isn't a storage.", found=shown(value))
    return value


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise FormatError("Something is wrapped as a tensor that isn't one.", found=shown(value))
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)):
        raise FormatError("The shape of a tensor is no tuple.", found=shown(value))
    return tuple(value)


def _rebuild(args: tuple[Any, ...]) -> Tensor:
    storage, offset, shape, stride, *rest = args
    source = _storage(storage)
    marks = rest[2] if len(rest) > 2 and isinstance(rest[2], dict) else {}
    conjugate, negative = bool(marks.get("conj")), bool(marks.get("neg"))
    return window(source, offset, _sizes(shape), _sizes(stride), source.dtype, conjugate, negative)


def _rebuild_v3(args: tuple[Any, ...]) -> Tensor | Record:
    storage, offset, shape, stride, _, _, kind, *_ = args
    dtype = torch_dtype(kind)
    if dtype is None:
        # Kept with its raw bytes: one tensor of an unknown type is no reason to lose the others.
        return Record("torch._utils._rebuild_tensor_v3", args)
    return window(_storage(storage), offset, _sizes(shape), _sizes(stride), dtype)


def _wrapped(args: tuple[Any, ...]) -> Tensor:
    return _tensor(args[0])


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
        return _tensor(args[0])

    return make


def _note_state(state: Any, note: Callable[[str], None]) -> None:
    for name in list(state)[:8] if isinstance(state, dict) else ["state"] if state else []:
        note(f"attribute {shown(name)} of a tensor has no place in the tree")


def _size(args: tuple[Any, ...]) -> tuple[int, ...]:
    return _sizes(args[0]) if args else ()


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

    Source: torch/_utils.py and torch/_tensor.py, the functions of these names.
    """
    return {
        **_REBUILD,
        **{name: kept(name) for name in _KEPT},
        "torch.Size": _size,
        "torch._utils._rebuild_parameter_with_state": _parameter(note),
        "torch._tensor._rebuild_from_type_v2": _subclass(note),
    }


def named(tree: Tree, path: Path = ()) -> Tree:
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
    return dataclasses.replace(leaf, name="/".join(map(str, path))) if isinstance(leaf, Stored) else leaf
