"""Which calls in a pickle are harmless, and what inert value each becomes.

Nothing here imports or runs what a pickle names. Calls of the names listed become plain values; calls of other
people's classes become `Record`s; calls of functions, and of classes of the standard library that aren't listed,
are refused, because a checkpoint has no need of them and no Record could stand for what they would do.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from statekit.errors import FormatError
from statekit.tensors.tensor import DTYPES, Array, DType, Tensor, in_memory
from statekit.tensors.tree import Record

Call: TypeAlias = Callable[[tuple[Any, ...]], Any]
"""From the arguments of a call to its inert value."""
Build: TypeAlias = Callable[[Record, Any], Any]
"""From an unfinished object and its state to the finished one."""

_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "numpy.core.multiarray": "numpy._core.multiarray",
            "numpy.core.numeric": "numpy._core.numeric", "pathlib._local": "pathlib"}  # fmt: skip
_KEPT_CLASSES = frozenset({
    "argparse.Namespace", "builtins.complex", "builtins.range", "builtins.slice", "builtins.xrange",
    "builtins.object", "collections.deque", "datetime.date", "datetime.datetime", "datetime.time",
    "datetime.timedelta", "datetime.timezone", "decimal.Decimal", "fractions.Fraction", "functools.partial",
    "pathlib.Path", "pathlib.PosixPath", "pathlib.PurePath", "pathlib.PurePosixPath", "pathlib.PureWindowsPath",
    "pathlib.WindowsPath", "random.Random", "signal.Signals", "types.SimpleNamespace", "uuid.UUID",
})  # fmt: skip
_KEPT_FUNCTIONS = frozenset({
    "numpy.dtype",
    "numpy.random._pickle.__bit_generator_ctor", "numpy.random._pickle.__generator_ctor",
    "numpy.random._pickle.__randomstate_ctor",
})  # fmt: skip


def modern_name(module: str, name: str) -> str:
    """Returns the dotted name that Python 3 and NumPy 2 use for what older pickles name."""
    return f"{_MODULES.get(module, module)}.{name}"


def shown(text: object) -> str:
    """Returns text from a file as it may stand in a message: short, and without control characters."""
    if isinstance(text, (str, int, Exception)):
        return re.sub(r"[^ -~]", "?", str(text)[:100])
    return type(text).__name__


def kept(name: str) -> Call:
    """Returns the constructor that keeps a call as a Record."""
    return partial(Record, name)


def constructor(name: str) -> Call | None:
    """Returns how a call of a name that isn't in `CALLS` is kept, or None if it is refused.

    A capital letter distinguishes a class of another package from a function; nothing depends on it but whether the
    file is read, since neither is ever called.
    """
    if name in _KEPT_CLASSES or name in _KEPT_FUNCTIONS:
        return kept(name)
    foreign = name.split(".", 1)[0] not in sys.stdlib_module_names
    return kept(name) if foreign and name.rpartition(".")[2].lstrip("_")[:1].isupper() else None


def _one(args: tuple[Any, ...], kinds: tuple[type, ...], default: Any) -> Any:
    if not args:
        return default
    if len(args) != 1 or not isinstance(args[0], kinds):
        raise FormatError(
            "A call has arguments that don't fit.", found=", ".join(type(a).__name__ for a in args)
        )
    return args[0]


def _ordered_dict(args: tuple[Any, ...]) -> dict[Any, Any]:
    if not args:
        return {}
    pairs = _one(args, (dict, list, tuple), ())
    if isinstance(pairs, dict):
        return dict(pairs)
    if not all(isinstance(p, (list, tuple)) and len(p) == 2 and isinstance(p[0], str) for p in pairs):
        raise FormatError("A dict is made of something that isn't pairs of a name and a value.")
    return dict(pairs)


def _default_dict(args: tuple[Any, ...]) -> dict[Any, Any]:
    return _ordered_dict(args[1:])  # the first is what makes missing values


def _members(name: str) -> Call:
    return lambda args: Record(name, (list(_one(args, (list, tuple), [])),))


def _bytes(args: tuple[Any, ...]) -> bytes:
    if len(args) == 2:
        return _encode(args)
    value: bytes = _one(args, (bytes,), b"")
    return value


def _encode(args: tuple[Any, ...]) -> bytes:
    # How protocols 0 to 2 write bytes: Source: CPython Lib/pickle.py, `save_bytes`.
    text, codec = args
    if not isinstance(text, str) or codec not in ("latin1", "latin-1", "ascii", "utf-8"):
        raise FormatError(
            "Bytes are written in an unknown way.", expected="text as latin1", found=str(codec)[:40]
        )
    return text.encode(codec)


def _reconstructor(args: tuple[Any, ...]) -> Record:
    # How protocols 0 and 1 make an object. Source: CPython Lib/copyreg.py, `_reconstructor`.
    cls, kind, value = args
    return Record(_class_name(cls), () if _class_name(kind) == "builtins.object" else (value,))


def _new(args: tuple[Any, ...]) -> Record:
    return Record(_class_name(args[0]), args[1:])


def _new_with_keywords(args: tuple[Any, ...]) -> Record:
    cls, positional, keywords = args
    return Record(_class_name(cls), (*positional, keywords))


def _class_name(cls: Any) -> str:
    if not isinstance(cls, Record):
        raise FormatError("An object is made of something that isn't a class.", found=type(cls).__name__)
    return cls.name


def _dtype(record: Any) -> tuple[DType, bool] | None:
    """Returns a pickled dtype and whether its bytes are swapped; None if statekit doesn't carry it."""
    if not isinstance(record, Record) or record.name != "numpy.dtype" or not record.args:
        return None
    code, order = record.args[0], "<"
    if isinstance(record.state, tuple) and len(record.state) > 1 and isinstance(record.state[1], str):
        order = record.state[1]
    if isinstance(code, Record):  # an extension dtype is pickled as its class
        dtype = DTYPES.get(code.name.rpartition(".")[2]) if code.name.startswith("ml_dtypes.") else None
    else:
        order = code[0] if isinstance(code, str) and code[:1] in ("<", ">") else order
        dtype = _CODES.get(str(code).lstrip("<>|="))
    return None if dtype is None else (dtype, order == ">")


_CODES = {dtype.str.lstrip("<>|="): dtype for dtype in DTYPES.values() if dtype.kind != "V"}


def _array(raw: Any, dtype: tuple[DType, bool], shape: Any, fortran: bool) -> Array:
    kind, swapped = dtype
    if (
        not isinstance(raw, bytes)
        or not isinstance(shape, tuple)
        or not all(type(n) is int and n >= 0 for n in shape)
        or len(raw) != math.prod(shape) * kind.itemsize
    ):
        raise FormatError(
            "A pickled array doesn't fit its shape.", found=f"{type(raw).__name__} for {str(shape)[:80]}"
        )
    stored = kind.newbyteorder(">") if swapped and kind.isbuiltin == 1 else kind
    flat = np.frombuffer(raw, stored).astype(kind)
    return flat.reshape(shape, order="F" if fortran else "C")


def _tensor(array: Array) -> Tensor:
    return in_memory(np.ascontiguousarray(array).reshape(array.shape), "array", "a pickle")


def built_array(state: Any) -> Any:
    """Returns an array of NumPy from what its pickle says of it; a record of that if statekit doesn't carry it."""
    return _build_array(Record("numpy.ndarray"), state)


def _build_array(record: Record, state: Any) -> Any:
    # Source: numpy/_core/src/multiarray/methods.c, `array_reduce`: (version, shape, dtype, Fortran order, bytes).
    if not isinstance(state, tuple) or len(state) != 5 or (dtype := _dtype(state[2])) is None:
        return Record(record.name, record.args, state)
    return _tensor(_array(state[4], dtype, state[1], bool(state[3])))


def _from_buffer(args: tuple[Any, ...]) -> Any:
    raw, record, shape, order = args[:4]
    dtype = _dtype(record)
    return (
        Record("numpy.ndarray", args) if dtype is None else _tensor(_array(raw, dtype, shape, order == "F"))
    )


def _scalar(args: tuple[Any, ...]) -> Any:
    dtype = _dtype(args[0])
    if dtype is None or len(args) != 2:
        return Record("numpy.scalar", args)
    value = _array(args[1], dtype, (), False)[()].item()
    return Record("builtins.complex", (value.real, value.imag)) if isinstance(value, complex) else value


def _empty_array(_: tuple[Any, ...]) -> Record:
    return Record("numpy.ndarray")


CALLS: Mapping[str, Call] = {
    "collections.OrderedDict": _ordered_dict,
    "collections.Counter": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "builtins.dict": _ordered_dict,
    "builtins.set": _members("builtins.set"),
    "builtins.frozenset": _members("builtins.frozenset"),
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _reconstructor,
    "copyreg.__newobj__": _new,
    "copyreg.__newobj_ex__": _new_with_keywords,
    "numpy._core.multiarray._reconstruct": _empty_array,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _from_buffer,
}
"""Calls whose value is plain data, by dotted name."""

BUILDS: Mapping[str, Build] = {"numpy.ndarray": _build_array}
"""Objects that their state turns into something plainer than a Record."""
